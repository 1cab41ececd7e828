"""The model's chat template: messages in, prompt text out.

Owns the sandboxed jinja environment and the plain form of messages. May never compile a template that came with a
request: the source is the model's own, messages are data to it, and whatever goes wrong while it renders is the
client's BadRequest, named `messages`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from procs.prompt_checks import BadRequest, check_text
from shm.limits import BODY_BYTES_MAX

# A template adds a few words to each message; one that makes much more of them is not doing what it is for.
RENDERED_CHARS_MAX = 2 * BODY_BYTES_MAX

# All that an expression of a template can raise when the messages are not of the form it expects.
RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateBroken(ValueError):
    """The model's chat template cannot be compiled."""


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, by which templates mark what the model wrote; here the body and nothing
    else.
    """

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled chat template. `special_tokens`: the names a template may use for them, such as bos_token and
    eos_token.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateBroken, with the line, if `source` is not a template."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], autoescape=False
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateBroken(
                f"the model's chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: object, add_generation_prompt: bool = True) -> str:
        """Returns the prompt text of a conversation (a list of messages as in the chat API). Raises BadRequest."""
        plain = plain_messages(messages)
        pieces: list[str] = []
        room = RENDERED_CHARS_MAX
        try:
            for piece in self._template.generate(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            ):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise BadRequest("The chat template makes too much text of these messages.", "messages", "too_long")
        except RENDER_ERRORS as error:
            text = str(error) or type(error).__name__
            raise BadRequest(
                f"The model's chat template cannot render these messages: {text}", "messages", "chat_template"
            ) from error
        return check_text("".join(pieces), "messages")


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Returns messages whose content is a string: arrays of text parts are joined by newlines, an absent content is
    empty.

    All other members of a message are handed to the template as they are. Raises BadRequest.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be an array of at least one message.", "messages", "invalid_type")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must be an object with a role and a content.", "messages", "invalid_type")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    elif content is None and message["role"] == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise BadRequest(f"{where}.content must be a string or an array of text parts.", "messages", "invalid_type")
    return {**message, "content": content}


def _text_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadRequest(f'{where} must be of the form {{"type": "text", "text": "..."}}.', "messages", "invalid_type")
    text: str = part["text"]
    return text


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
