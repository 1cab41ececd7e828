"""Histories of requests: everything that came for one request, event by event, read from the bytes of its answer.

Owns the form in which answers are compared, the same for chat and text, streamed and whole. Pure: no clock, no socket,
no file. It judges nothing; that is `chaos_check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

# done: the answer was complete; left: the client went away; cut: the connection ended; late: it took too long;
# refused: a status other than 200.
End = Literal["done", "left", "cut", "late", "refused"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one event said of one choice, or of the whole answer (usage, error, done). at_ns: perf_counter."""

    at_ns: int = 0
    choice: int = 0
    answer: str = ""  # the id that the server gave the answer
    role: str | None = None
    text: str = ""
    ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    finish: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    done: bool = False


@dataclass(frozen=True)
class History:
    """All events of one request in the order in which they came. `told`: what the client saw instead of an end."""

    events: tuple[Event, ...]
    end: End = "done"
    end_ns: int = 0  # perf_counter
    told: str = ""


def read_stream(events: Sequence[bytes], times_ns: Sequence[int]) -> Iterator[Event]:
    """The events of a stream, from raw server-sent events and when each came. Raises ValueError for what is no JSON."""
    for raw, at_ns in zip(events, times_ns, strict=True):
        data = raw.removeprefix(b"data:").strip()
        if raw.startswith(b"data:"):
            yield from [Event(at_ns=at_ns, done=True)] if data == b"[DONE]" else _read(orjson.loads(data), at_ns)


def read_whole(body: bytes, at_ns: int) -> Iterator[Event]:
    """The same events of an answer that came at once. Raises ValueError for a body that is no JSON."""
    yield from _read(orjson.loads(body), at_ns)
    yield Event(at_ns=at_ns, done=True)


def _read(message: Mapping[str, Any], at_ns: int) -> Iterator[Event]:
    answer = str(message.get("id", ""))
    for choice in message.get("choices", ()):
        said = choice.get("delta") or choice.get("message") or choice
        prompt_ids = choice.get("prompt_token_ids", message.get("prompt_token_ids"))
        yield Event(
            at_ns=at_ns,
            choice=choice["index"],
            answer=answer,
            role=said.get("role") if "delta" in choice else None,  # a whole answer names it beside the text
            text=said.get("content") or said.get("text") or "",
            ids=tuple(choice.get("token_ids") or ()),
            prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
            finish=choice.get("finish_reason"),
        )
    if message.get("usage"):
        yield Event(at_ns=at_ns, answer=answer, usage=message["usage"])
    if "error" in message:
        yield Event(at_ns=at_ns, answer=answer, error=str(message["error"]))
