"""Any stage may be killed while requests run: every answer is the one that it would have been, piece by piece."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.live_server import LiveServer, live_server, process_titles

pytestmark = pytest.mark.model
STREAMS = 8
STAGES = ("tokenizer", "scheduler", "gpu", "detokenizer")


@dataclass
class Story:
    """What one client has seen, event by event."""

    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    end: str = ""  # the finish reason, or what went wrong


def body(i: int) -> dict[str, Any]:
    """Greedy and seeded; streamed and whole; one with a stop string and one with a long prompt among them."""
    request: dict[str, Any] = {
        "model": "smollm2-135m-instruct",
        "prompt": f"Story number {i}: once upon a time there was " + ("a very " * (40 if i == 3 else 1)) + "old",
        "max_tokens": 48,
        "temperature": 0 if i % 2 == 0 else 0.9,
        "seed": 70 + i,
        "ignore_eos": True,
        "stream": i % 4 != 1,
        "return_token_ids": True,
    }
    return request | ({"stop": [" the"]} if i == 5 else {})


def tell(server: LiveServer, i: int) -> Story:
    """Ask, and write down what comes."""
    story, request = Story(), body(i)
    try:
        if not request["stream"]:
            answer = httpx.post(server.url + "/v1/completions", json=request, timeout=90)
            choice = answer.json()["choices"][0]
            return Story([choice["text"]], choice["token_ids"], choice["finish_reason"])
        with httpx.stream("POST", server.url + "/v1/completions", json=request, timeout=90) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    story.end = str(event["error"])
                    continue
                choice = event["choices"][0]
                story.pieces.append(choice["text"])
                story.ids += choice.get("token_ids") or []
                story.end = choice["finish_reason"] or story.end
    except (httpx.HTTPError, KeyError) as error:
        story.end = repr(error)
    return story


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--max-len", "512") as made:
        yield made


@pytest.fixture(scope="module")
def wanted(server: LiveServer) -> list[Story]:
    return all_at_once(server)


def all_at_once(server: LiveServer) -> list[Story]:
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda i: tell(server, i), range(STREAMS)))


def joined(stories: list[Story]) -> list[tuple[str, list[int], str]]:
    return [("".join(story.pieces), story.ids, story.end) for story in stories]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_death_is_a_pause(server: LiveServer, wanted: list[Story], stage: str, how: signal.Signals) -> None:
    before = process_titles(server.process.pid)[stage]
    killer = threading.Timer(0.6, lambda: os.kill(before, how))
    killer.start()
    found = all_at_once(server)
    killer.join()
    assert joined(found) == joined(wanted)
    end = time.monotonic() + 20
    while process_titles(server.process.pid).get(stage) in (before, None):
        assert time.monotonic() < end, server.text()
        time.sleep(0.05)
    server.wait_idle()
    assert joined(all_at_once(server)) == joined(wanted), "and afterwards all is as before"
