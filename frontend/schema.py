"""Request bodies: from untrusted bytes to checked, frozen work for the engine, or to an error that names the field.

Owns every limit and rule that needs no tokenizer. May never ignore a field in silence, raise anything but ApiError on
any input, or let an unchecked value through to another process.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from frontend import unserved
from frontend.errors import ApiError, bad_request
from shm.config import ServerConfig
from shm.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

PROMPTS_MAX = 64
MESSAGES_MAX = 4096
COMPLETION_TOKENS_DEFAULT = 16
INT32_MAX = 2**31 - 1
U64_MASK = 2**64 - 1

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _stop(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(s, str) for s in found):
        raise ValueError("must be a string or an array of strings")
    if len(found) > MAX_STOP_STRINGS:
        raise ValueError(f"may hold at most {MAX_STOP_STRINGS} strings")
    if not all(found):
        raise ValueError("may not hold an empty string")
    if any(len(s) > MAX_STOP_CHARS for s in found):
        raise ValueError(f"a stop string may have at most {MAX_STOP_CHARS} characters")
    return found


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ValueError("must be an array of token ids")
    if value and not (min(value) >= 0 and max(value) <= INT32_MAX):
        raise ValueError("holds a token id that is out of range")
    return value


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, always as a list of prompts: OpenAI allows text, ids, and an array of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, an array of token ids, or an array of either")
    if not value:
        raise ValueError("may not be empty")
    if type(value[0]) is int:
        return [_ids(value)]
    if len(value) > PROMPTS_MAX:
        raise ValueError(f"may hold at most {PROMPTS_MAX} prompts")
    return [p if isinstance(p, str) else _ids(p) for p in value]


Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Stop = Annotated[
    list[str],
    BeforeValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Ids = Annotated[list[int], BeforeValidator(_ids)]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    include_usage: bool | None = None


class Message(_Body):
    role: str
    content: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
    ] = None
    name: Annotated[str, Field(max_length=256)] | None = None


class _Sampling(_Body):
    model: str | None = None
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatBody(_Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)]


class CompletionBody(_Sampling):
    """POST /v1/completions"""

    prompt: Prompts


class TokenizeBody(_Body):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(_Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Ids


BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)


@dataclass(frozen=True)
class Work:
    """One checked request for text: what the tokenizer is told, once for each prompt, and how the answer looks."""

    kind: Literal["chat", "text"]
    prompts: tuple[dict[str, Any], ...]  # {"kind", "messages" | "prompt"} as in the message to the tokenizer
    params: dict[str, Any]
    default_max_tokens: int | None
    stream: bool
    include_usage: bool
    return_token_ids: bool


AnyBody = TypeVar("AnyBody", bound=_Body)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError 400; lone surrogates, NaN and infinities are no JSON."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return value


def chat_work(raw: bytes, config: ServerConfig) -> Work:
    """POST /v1/chat/completions: checks all of the body. Raises ApiError."""
    body = _validate(ChatBody, raw, unserved.CHAT, config)
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    prompts = ({"kind": "chat", "messages": messages},)
    return _work("chat", prompts, body, None, config)


def completion_work(raw: bytes, config: ServerConfig) -> Work:
    """POST /v1/completions: checks all of the body. Raises ApiError."""
    body = _validate(CompletionBody, raw, unserved.COMPLETION, config)
    prompts = tuple(_prompt(p, config) for p in body.prompt)
    return _work("text", prompts, body, COMPLETION_TOKENS_DEFAULT, config)


def tokenize_request(raw: bytes, config: ServerConfig) -> dict[str, Any]:
    """POST /tokenize: the message to the tokenizer, without its id. Raises ApiError."""
    body = _validate(TokenizeBody, raw, unserved.TOKENIZE, config)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    request: dict[str, Any] = {"op": "tokenize"}
    if body.messages is None:
        request["prompt"] = body.prompt
    else:
        request["messages"] = [_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    # As vLLM: a template brings its own special tokens, plain text does not.
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    request["add_special_tokens"] = special
    request["add_generation_prompt"] = body.add_generation_prompt is not False
    return request


def detokenize_request(raw: bytes, config: ServerConfig) -> dict[str, Any]:
    """POST /detokenize: the message to the tokenizer, without its id. Raises ApiError."""
    body = _validate(DetokenizeBody, raw, unserved.DETOKENIZE, config)
    _refuse_ids_outside(body.tokens, config, "tokens")
    return {"op": "detokenize", "tokens": body.tokens}


def _validate(kind: type[AnyBody], raw: bytes, table: dict[str, tuple[Any, ...]], config: ServerConfig) -> AnyBody:
    try:
        body = kind.model_validate(parse_json(raw))
    except ValidationError as error:
        raise _first_of(error) from None
    unserved.refuse_unserved(body.model_extra or {}, table)
    model = getattr(body, "model", None)
    if model is not None and model != config.served_model_name:
        raise model_not_found(model)
    return body


def model_not_found(model: str) -> ApiError:
    shown = model if len(model) <= 100 else model[:100] + "..."
    return ApiError(404, f"the model `{shown}` does not exist", "model", "model_not_found")


def _first_of(error: ValidationError) -> ApiError:
    """The first complaint, its place written as in messages[0].role."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    text = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{param}: {text[:1].lower()}{text[1:]}", param, "invalid_value")


def _work(
    kind: Literal["chat", "text"],
    prompts: tuple[dict[str, Any], ...],
    body: _Sampling,
    default_max_tokens: int | None,
    config: ServerConfig,
) -> Work:
    options = body.stream_options
    if options is not None:
        if not body.stream:
            raise bad_request("stream_options is only allowed with stream: true", "stream_options", "invalid_value")
        unserved.refuse_unserved(options.model_extra or {}, unserved.STREAM_OPTIONS, "stream_options")
    _refuse_ids_outside(body.stop_token_ids or [], config, "stop_token_ids")
    seed = random.getrandbits(63) if body.seed is None else body.seed
    params = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": max(body.top_k or 0, 0),
        "min_p": body.min_p or 0.0,
        "seed": seed & U64_MASK,
        "max_tokens": _max_tokens(body.max_tokens, body.max_completion_tokens, config),
        "stop": body.stop or [],
        "stop_token_ids": body.stop_token_ids or [],
        "ignore_eos": bool(body.ignore_eos),
    }
    return Work(
        kind=kind,
        prompts=prompts,
        params=params,
        default_max_tokens=default_max_tokens,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )


def _max_tokens(old: int | None, new: int | None, config: ServerConfig) -> int | None:
    if old is not None and new is not None and old != new:
        raise bad_request("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    limit = new if old is None else old
    if limit is not None and limit >= config.max_len:
        param = "max_completion_tokens" if old is None else "max_tokens"
        message = f"{param} is {limit}, but prompt and answer together may have at most {config.max_len} tokens"
        raise bad_request(message, param, "context_length_exceeded")
    return limit


def _prompt(prompt: str | list[int], config: ServerConfig) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"kind": "text", "prompt": prompt}
    if not prompt:
        raise bad_request("prompt: holds no token", "prompt", "invalid_value")
    if len(prompt) >= config.max_len:
        message = f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {config.max_len}"
        raise bad_request(message, "prompt", "context_length_exceeded")
    _refuse_ids_outside(prompt, config, "prompt")
    return {"kind": "ids", "prompt": prompt}


def _refuse_ids_outside(ids: list[int], config: ServerConfig, param: str) -> None:
    if ids and max(ids) >= config.model.vocab_size:
        message = f"{param}: token id {max(ids)} is outside the vocabulary of {config.model.vocab_size} tokens"
        raise bad_request(message, param, "invalid_value")


def _message(message: Message, where: str) -> dict[str, str]:
    unserved.refuse_unserved(message.model_extra or {}, unserved.MESSAGE, where)
    role = ROLES.get(message.role)
    if role is None:
        served = ", ".join(ROLES)
        raise bad_request(f"{where}.role: this role is not served, only {served}", f"{where}.role", "invalid_value")
    checked = {"role": role, "content": _content(message.content, f"{where}.content")}
    if message.name is not None:
        checked["name"] = message.name
    return checked


def _content(content: Any, where: str) -> str:
    """The text of a message; the parts of an array are joined by a newline, as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: must be a string or an array of text parts", where, "invalid_value")
    texts: list[str] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise bad_request(f'{place}: must be {{"type": "text", "text": ...}}', place, "invalid_value")
        if kind != "text":
            raise bad_request(f"{place}.type: only text parts are served", f"{place}.type", "unsupported_value")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise bad_request(f"{place}.text: a text part holds a string and nothing else", f"{place}.text")
        texts.append(part["text"])
    return "\n".join(texts)
