"""Drafts as a client sees them: the same text, piece by piece, in fewer steps, and what the server says of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from procs.drafter_files import SHIPPED
from tests import plain_http
from tests.e2e.live_server import ALONE, LiveServer, complete, ids_of, live_server, spawn, sse_events
from tests.model_factory import TinyLlama

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
SONG = "red green blue yellow " * 6


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(
        "--speculate",
        "ngram",
        "--draft-tokens",
        "4",
        "--draft-when",
        "always",
        "--max-len",
        "512",
        "--log-seconds",
        "0.5",
        *ALONE,
    ) as s:
        yield s


def body(**changes: Any) -> dict[str, Any]:
    request = {"model": MODEL, "prompt": SONG, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return request | {"return_token_ids": True} | changes


def ask(server: LiveServer, **changes: Any) -> dict[str, Any]:
    (answer,) = complete(server, [body(**changes)])
    return answer


@pytest.fixture(scope="module")
def whole(server: LiveServer) -> dict[str, Any]:
    return ask(server)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def test_the_answer_says_what_drafts_brought(whole: dict[str, Any]) -> None:
    usage = whole["usage"]
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert accepted > 5 and (accepted + rejected) % 4 == 0
    steps = (accepted + rejected) // 4
    assert details["accept_length"] == pytest.approx(1 + accepted / steps, abs=1e-3)
    assert 1 + steps + accepted == usage["completion_tokens"] == len(ids_of(whole)), "the first token has no step"


def test_so_do_the_metrics(server: LiveServer, whole: dict[str, Any]) -> None:
    before = windows(server)
    details = ask(server)["usage"]["completion_tokens_details"]
    gained = [after - b for after, b in zip(windows(server), before, strict=True)]
    # A window that was queued before the end was seen counts here, and in no answer.
    accepted = sum(drafts * rows for drafts, rows in enumerate(gained))
    assert details["accepted_prediction_tokens"] <= accepted <= details["accepted_prediction_tokens"] + 8
    assert sum(gained[5:]) == 0 < gained[0]


def test_so_does_the_log(server: LiveServer, whole: dict[str, Any]) -> None:
    """Once per interval, here of half a second."""
    ask(server)
    end = time.monotonic() + 5
    while "accept length" not in server.text():
        assert time.monotonic() < end, server.text()
        time.sleep(0.1)
    line = next(line for line in server.text().splitlines() if "accept length" in line)
    assert re.fullmatch(r"stepahead: running \d+, queued 0, .* accept length \d\.\d\d, cache .*", line), line


def windows(server: LiveServer) -> list[int]:
    lines = plain_http.get(server.url + "/metrics", timeout=10).text.splitlines()
    return [int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("stepahead_windows_total{")]


def test_a_stream_gives_the_same_text_and_never_breaks_off_inside_a_character(
    server: LiveServer, whole: dict[str, Any]
) -> None:
    with plain_http.stream("POST", server.url + "/v1/completions", json=body(stream=True), timeout=60) as answer:
        events = list(sse_events(answer.iter_lines()))
    assert events.pop() == "[DONE]"
    pieces = [event["choices"][0]["text"] for event in events if isinstance(event, dict)]
    assert "".join(pieces) == text_of(whole) and "\ufffd" not in "".join(pieces)
    assert len(pieces) < len(ids_of(whole)), "some pieces have the tokens of a whole window"


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_limit_inside_of_a_window(server: LiveServer, whole: dict[str, Any], limit: int) -> None:
    answer = ask(server, max_tokens=limit)
    assert ids_of(answer) == ids_of(whole)[:limit]
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("place", range(8, 40, 4))
def test_a_stop_string_inside_of_a_window(server: LiveServer, whole: dict[str, Any], place: int) -> None:
    text = text_of(whole)
    stop = text[place : place + 3]
    answer = ask(server, stop=[stop])
    assert text_of(answer) == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("place", (3, 4, 5, 6, 20, 21))
def test_a_stop_token_inside_of_a_window(server: LiveServer, whole: dict[str, Any], place: int) -> None:
    ids = ids_of(whole)
    answer = ask(server, stop_token_ids=[ids[place]])
    assert ids_of(answer) == ids[: ids.index(ids[place]) + 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--speculate", "nothing-known"), "nothing-known"),
        (("--speculate", "ngram", "--draft-tokens", "0"), "--draft-tokens: must be 1 to 15, got 0"),
        (("--speculate", "ngram", "--draft-tokens", "16"), "--draft-tokens: must be 1 to 15, got 16"),
        (("{tiny}", "--speculate", "mtp"), "no mtp drafter is shipped for tiny"),
        (
            ("{tiny}", "--speculate", "{shipped}"),
            "it is the drafter of another model than tiny: its token_in",
        ),
        (("--ngram-shared",), "--ngram-shared: needs --speculate ngram"),
    ],
)
def test_options_that_cannot_be_are_refused(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    named = {"{tiny}": str(tmp_path / "tiny"), "{shipped}": str(SHIPPED / MODEL / "mtp")}
    if "{tiny}" in options:
        TinyLlama().write_hf(tmp_path / "tiny")
    refused = spawn(*(named.get(option, option) for option in options))
    assert refused.process.wait(60) != 0
    assert says in refused.text() and "Traceback" not in refused.text()
