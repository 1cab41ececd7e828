"""What clients see of a server whose processes die: requests of every kind at once, and each one's answer in full."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests import plain_http
from tests.e2e.live_server import LiveServer, process_titles

STREAMS = 8
STAGES = ("tokenizer", "scheduler", "gpu", "detokenizer")
WAIT_SECONDS = 240.0  # for whatever has to come: starts take a minute where many share a core


@dataclass
class Story:
    """One answer: its text and ids, and how it ended (the finish reason, or what went wrong)."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    end: str = ""


def body(i: int, model: str, **changes: Any) -> dict[str, Any]:
    """Greedy and seeded; streamed and whole; one with a stop string and one with a long prompt among them."""
    request: dict[str, Any] = {
        "model": model,
        "prompt": f"Story number {i}: once upon a time there was " + ("a very " * (40 if i == 3 else 1)) + "old",
        "max_tokens": 48,
        "temperature": 0 if i % 2 == 0 else 0.9,
        "seed": 70 + i,
        "ignore_eos": True,
        "stream": i % 4 != 1,
        "return_token_ids": True,
    }
    return request | ({"stop": [" the"]} if i == 5 else {}) | changes


def tell(server: LiveServer, request: dict[str, Any], story: Story | None = None) -> Story:
    """Ask, and write down what comes, into `story` if there is one."""
    story = story or Story()
    try:
        if not request["stream"]:
            answer = plain_http.post(server.url + "/v1/completions", json=request, timeout=WAIT_SECONDS)
            if answer.status_code != 200:
                story.end = f"{answer.status_code}: {answer.json()['error']['message']}"
                return story
            choice = answer.json()["choices"][0]
            story.text, story.ids, story.end = choice["text"], choice["token_ids"], choice["finish_reason"]
            return story
        with plain_http.stream("POST", server.url + "/v1/completions", json=request, timeout=WAIT_SECONDS) as answer:
            if answer.status_code != 200:
                story.end = f"{answer.status_code}: {json.loads(answer.read())['error']['message']}"
                return story
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    assert not story.end, "nothing comes behind an end"
                    story.end = f"event: {event['error']['message']}"
                    continue
                choice = event["choices"][0]
                story.text += choice["text"]
                story.ids += choice.get("token_ids") or []
                story.end = choice["finish_reason"] or story.end
    except httpx.HTTPError as error:
        story.end = f"broken: {error!r}"
    return story


class Telling:
    """Requests that are being answered, each in a thread of its own."""

    def __init__(self, server: LiveServer, requests: list[dict[str, Any]]) -> None:
        self._server = server
        self.stories = [Story() for _ in requests]
        self._pool = ThreadPoolExecutor(len(requests))
        self._told = [self._pool.submit(tell, server, *pair) for pair in zip(requests, self.stories, strict=True)]

    def wait_tokens(self, tokens: int) -> None:
        """Returns once somebody has so many tokens and everybody has been let in."""
        wait_for(lambda: any(len(story.ids) >= tokens for story in self.stories), "tokens")
        waiting = lambda: sum(not story.end for story in self.stories)  # noqa: E731
        wait_for(lambda: self._server.metrics()["stepahead_open_rows"] >= waiting(), "rows for all")

    def end(self) -> list[Story]:
        stories = [told.result(WAIT_SECONDS) for told in self._told]
        self._pool.shutdown()
        return stories


def all_at_once(server: LiveServer, model: str, streams: int = STREAMS, **changes: Any) -> Telling:
    return Telling(server, [body(i, model, **changes) for i in range(streams)])


def ask(server: LiveServer, ids: list[int]) -> tuple[int, Any]:
    """Put the question what text `ids` are: status, and the text or the error."""
    answer = plain_http.post(server.url + "/detokenize", json={"tokens": ids}, timeout=WAIT_SECONDS)
    told = answer.json()
    return answer.status_code, told["prompt"] if answer.status_code == 200 else told["error"]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} after {seconds} s"
        time.sleep(0.02)


def pid_of(server: LiveServer, stage: str) -> int:
    """Of the process that runs now, once one does."""
    found: list[int] = []

    def is_there() -> bool:
        pid = process_titles(server.process.pid).get(stage)  # one look: it may be gone in the next moment
        found[:] = [] if pid is None else [pid]
        return bool(found)

    wait_for(is_there, stage)
    return found[0]


def kill(server: LiveServer, stage: str, how: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a stage; its pid."""
    pid = pid_of(server, stage)
    os.kill(pid, how)
    return pid


def exhaust(server: LiveServer, stage: str, seconds: float = WAIT_SECONDS) -> float:
    """Kill a stage, and whoever takes its place, until the server gives up; the moment of the last kill."""
    end, last_s, before = time.monotonic() + seconds, 0.0, 0
    while server.process.poll() is None:
        assert time.monotonic() < end, server.text()
        pid = process_titles(server.process.pid).get(stage, before)
        if pid != before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            last_s, before = time.monotonic(), pid
        time.sleep(0.02)
    return last_s


def health(server: LiveServer) -> dict[str, Any]:
    """What /health says of every stage."""
    end = time.monotonic() + WAIT_SECONDS
    while True:  # the frontend may die of any request, this one included
        try:
            answer = plain_http.get(server.url + "/health", timeout=30)
            if answer.status_code == 200:
                return dict(answer.json()["stages"])
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end, server.text()
        time.sleep(0.05)


def wait_whole(server: LiveServer, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
    """Returns what /health says once every stage serves."""
    wait_for(lambda: all(stage["state"] == "serving" for stage in health(server).values()), "whole server", seconds)
    return health(server)
