"""The grammar of a stream, checked byte by byte: every stream of every test goes through `parse_stream`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Choice:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    pieces: int = 0
    finish: str | None = None
    role: str | None = None


@dataclass
class Stream:
    chunks: list[dict[str, Any]] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


def parse_stream(raw: bytes, include_usage: bool = False) -> Stream:
    """Parses a whole stream and asserts everything that holds for all of them."""
    assert raw.endswith(b"\n\n")
    events = raw[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events), events
    data = [event[6:] for event in events]
    assert data.count(b"[DONE]") == 1 and data[-1] == b"[DONE]", data[-3:]
    stream = Stream()
    for payload in data[:-1]:
        chunk = json.loads(payload)
        assert stream.error is None, "an error is the last event before [DONE]"
        assert stream.usage is None, "usage is the last chunk"
        if "error" in chunk:
            assert set(chunk["error"]) == {"message", "type", "param", "code"}
            stream.error = chunk["error"]
            continue
        stream.chunks.append(chunk)
        if not chunk["choices"]:
            assert include_usage, "a usage chunk that nobody asked for"
            stream.usage = chunk["usage"]
            continue
        assert ("usage" in chunk) == include_usage and chunk.get("usage") is None
        take(stream, chunk)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in stream.chunks}) <= 1
    if stream.error is None:
        assert all(choice.finish is not None for choice in stream.choices.values())
        assert (stream.usage is not None) == include_usage
    return stream


def take(stream: Stream, chunk: dict[str, Any]) -> None:
    assert len(chunk["choices"]) == 1
    part = chunk["choices"][0]
    choice = stream.choices.setdefault(part["index"], Choice())
    assert choice.finish is None, "something follows a finish_reason"
    if chunk["object"] == "chat.completion.chunk":
        assert set(part["delta"]) <= {"role", "content"}
        assert ("role" in part["delta"]) == (choice.role is None), "the role comes once, first"
        choice.role = choice.role or part["delta"]["role"]
        text = part["delta"].get("content", "")
        opening = "role" in part["delta"]
    else:
        text = part["text"]
        opening = False
    assert text or opening or part["finish_reason"] is not None, "an empty piece"
    choice.text += text
    choice.pieces += bool(text)
    choice.ids += part.get("token_ids", [])
    choice.finish = part["finish_reason"]
    prompt_ids = part.get("prompt_token_ids", chunk.get("prompt_token_ids"))
    if prompt_ids is not None:
        assert choice.prompt_ids is None
        choice.prompt_ids = prompt_ids
