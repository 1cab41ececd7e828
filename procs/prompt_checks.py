"""What a request may ask for: pure checks of prompts, limits, stop conditions and sampling parameters.

Owns the rules and the words of every refusal. May never touch shared memory, a socket or a tokenizer: it sees plain
values and either returns them in the form the ledger keeps, or raises BadRequest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shm.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

U64_MASK = (1 << 64) - 1
# Below these a float32 computation overflows, and the outcome has long been that of the best token alone.
TEMPERATURE_MIN = 1e-5
TOP_P_MIN = 1e-6
TEMPERATURE_MAX = 100.0
TOO_LONG = "context_length_exceeded"


class BadRequest(Exception):
    """A request that the client has to change: HTTP status, message, the parameter's name, a short code."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters in the ledger's form: temperature 0 = greedy, top_k 0 = off, seed an unsigned 64-bit int."""

    temperature: float
    top_p: float
    min_p: float
    top_k: int
    seed: int
    ignore_eos: bool


@dataclass(frozen=True)
class Stops:
    """Stop strings (none of them empty) and stop token ids, both in the client's order without repeats."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]


def is_id(value: object) -> bool:
    """Whether `value` is an integer and not a boolean (JSON's true is Python's 1)."""
    return type(value) is int


def check_text(text: object, param: str) -> str:
    """Returns `text`. Raises BadRequest if it is no string, or holds half of a surrogate pair, which no UTF-8 can
    carry.
    """
    if not isinstance(text, str):
        raise BadRequest(f"{param} must be a string.", param, "invalid_type")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{param} is not valid Unicode: a lone surrogate at character {error.start}.", param, "invalid_unicode"
        ) from error
    return text


def check_ids(ids: object, vocab_size: int, param: str, longest: int | None = None) -> list[int]:
    """Returns `ids` (a list of token ids, 0 <= id < vocab_size).

    The count is looked at first, so that millions of ids cost nothing; None = any count. Raises BadRequest.
    """
    if not isinstance(ids, list):
        raise BadRequest(f"{param} must be an array of token ids.", param, "invalid_type")
    if longest is not None and len(ids) > longest:
        raise prompt_too_long(len(ids), longest + 1, param)
    if not all(map(is_id, ids)):
        raise BadRequest(f"{param} must hold whole numbers only.", param, "invalid_type")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise BadRequest(
            f"Token id {bad} in {param} is out of range: the vocabulary has ids 0 to {vocab_size - 1}.", param
        )
    return ids


def check_length(prompt_len: int, max_len: int, param: str) -> None:
    """Raises BadRequest for a prompt of no tokens, or one that leaves no room for an output token."""
    if prompt_len == 0:
        raise BadRequest(f"{param} is empty: it has no tokens.", param, "empty_prompt")
    if prompt_len >= max_len:
        raise prompt_too_long(prompt_len, max_len, param)


def check_text_length(chars: int, longest_token: int, max_len: int, param: str) -> None:
    """Raises BadRequest for a text of `chars` characters that cannot fit, whatever its tokens are, before it is
    encoded.

    longest_token: characters of the longest token; a text is at least chars / longest_token tokens.
    """
    least = -(-chars // longest_token)
    if least >= max_len:
        raise prompt_too_long(least, max_len, param, "at least ")


def prompt_too_long(prompt_len: int, max_len: int, param: str, qualifier: str = "") -> BadRequest:
    """The refusal of a prompt that leaves no room for an output token."""
    return BadRequest(
        f"This server's longest sequence is {max_len} tokens, prompt and output together; "
        f"{param} has {qualifier}{prompt_len} tokens and leaves no room for an output token.",
        param,
        TOO_LONG,
    )


def output_limit(prompt_len: int, max_tokens: object, default: int | None, max_len: int) -> int:
    """Returns how many tokens may be generated: at least 1, prompt_len + limit <= max_len.

    max_tokens None = `default`, cut to what fits; default None = all that fits. A given max_tokens is never cut: one
    that does not fit raises BadRequest. prompt_len < max_len has been checked.
    """
    room = max_len - prompt_len
    if max_tokens is None:
        return room if default is None else min(default, room)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise BadRequest("max_tokens must be a whole number.", "max_tokens", "invalid_type")
    if max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    if max_tokens > room:
        raise BadRequest(
            f"This server's longest sequence is {max_len} tokens, prompt and output together; the request asks for "
            f"{prompt_len + max_tokens} ({prompt_len} in the prompt, {max_tokens} in the output).",
            "max_tokens",
            TOO_LONG,
        )
    return max_tokens


def check_stops(stop: object, stop_token_ids: object, vocab_size: int) -> Stops:
    """Returns the stop conditions. `stop`: None, a string or a list of strings; `stop_token_ids`: None or a list.
    Raises BadRequest.
    """
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list):
        raise BadRequest("stop must be a string or an array of strings.", "stop", "invalid_type")
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}.", "stop")
    for string in strings:
        if not check_text(string, "stop"):
            raise BadRequest("stop must not hold an empty string.", "stop")
        if len(string) > MAX_STOP_CHARS:
            raise BadRequest(f"A stop string may have at most {MAX_STOP_CHARS} characters, got {len(string)}.", "stop")
    ids = [] if stop_token_ids is None else stop_token_ids
    if isinstance(ids, list) and len(ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}.", "stop_token_ids")
    checked = check_ids(ids, vocab_size, "stop_token_ids")
    return Stops(tuple(dict.fromkeys(strings)), tuple(dict.fromkeys(checked)))


def check_sampling(params: Mapping[str, Any], vocab_size: int) -> Sampling:
    """Returns the sampling parameters; a missing one has the API's default (temperature 1, nothing cut off). Raises
    BadRequest.
    """
    top_k = _integer(params, "top_k", 0)
    if top_k < -1:
        raise BadRequest(f"top_k must be 0 or -1 (off), or at least 1, got {top_k}.", "top_k")
    temperature = _number(params, "temperature", 1.0, 0.0, TEMPERATURE_MAX)
    return Sampling(
        temperature=temperature if temperature >= TEMPERATURE_MIN else 0.0,
        top_p=max(_number(params, "top_p", 1.0, 0.0, 1.0, open_low=True), TOP_P_MIN),
        min_p=_number(params, "min_p", 0.0, 0.0, 1.0),
        top_k=min(max(top_k, 0), vocab_size),
        seed=_integer(params, "seed", 0) & U64_MASK,
        ignore_eos=bool(params.get("ignore_eos")),
    )


def _number(
    params: Mapping[str, Any], name: str, default: float, low: float, high: float, open_low: bool = False
) -> float:
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number.", name, "invalid_type")
    if not low <= value <= high or (open_low and value == low):  # NaN is not in there either
        raise BadRequest(
            f"{name} must be {'more than' if open_low else 'at least'} {low:g} and at most {high:g}.", name
        )
    return float(value)


def _integer(params: Mapping[str, Any], name: str, default: int) -> int:
    value = params.get(name)
    if value is None:
        return default
    if not is_id(value):
        raise BadRequest(f"{name} must be a whole number.", name, "invalid_type")
    return int(value)
