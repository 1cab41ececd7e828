"""One run of a benchmark: a server of its own, a load of checked requests, and what was seen of the server meanwhile.

Owns the server that it starts (as a subprocess, never imported) and the requests: prompts of token ids from a seed,
with the answer that each has to get. A client of one thread asks them over so many connections, closed loop; answers
are looked at after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from tools.bench_serve import BenchError, Server, start, stop
from tools.bench_watch import Seen, Watch, WatchError
from tools.openai_stream import Answer, Lane

PATH = "/v1/completions"
TIMEOUT_S = 120.0  # of one request


@dataclass(frozen=True)
class Ask:
    """One request: token ids, how many tokens it shall get, and which, where that is known."""

    prompt: list[int]
    count: int
    wanted: list[int] | None = None


@dataclass(frozen=True)
class Load:
    """What clients saw: all answers, and from the first request to the last answer. wrong: answers with other tokens
    than wanted; failed: requests that got none; ids: of each request's answer, in the order of the requests.
    """

    requests: int
    tokens: int
    seconds: float
    client_cpu_s: float
    wrong: int
    failed: int
    ids: tuple[tuple[int, ...], ...]
    error: str | None
    ttft_ms: float | None = None  # mean, where the client could tell

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Bench(Protocol):
    """A server that runs, with whoever asks it."""

    def run(
        self, asks: Sequence[Ask], at_once: int, *, stream: bool = False, advance: Callable[[], None] = lambda: None
    ) -> tuple[Load, Seen]:
        """Ask everything, `at_once` at any time."""


@dataclass(frozen=True)
class HttpBench:
    """See `Bench`: over HTTP, one thread with a connection for each request at a time."""

    server: Server
    watch: Watch

    def run(
        self, asks: Sequence[Ask], at_once: int, *, stream: bool = False, advance: Callable[[], None] = lambda: None
    ) -> tuple[Load, Seen]:
        """See `Bench`."""
        with self.watch.run() as seen:
            load = asyncio.run(self._ask(asks, at_once, stream, advance))
        return load, seen

    async def _ask(self, asks: Sequence[Ask], at_once: int, stream: bool, advance: Callable[[], None]) -> Load:
        source = iter([(number, _body(self.server.model, one, stream)) for number, one in enumerate(asks)])
        answers: dict[int, Answer] = {}
        lanes = [Lane(self.server.url) for _ in range(min(at_once, len(asks)))]

        async def drive(lane: Lane) -> None:
            for number, body in source:
                answers[number] = await lane.ask(PATH, body, TIMEOUT_S)
                advance()

        began, cpu_began = time.perf_counter(), time.process_time()
        await asyncio.gather(*(drive(lane) for lane in lanes))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        for lane in lanes:
            lane.close()
        return judged(asks, [read(answers[number], stream) for number in range(len(asks))], seconds, cpu_s)


@contextmanager
def serving(model: Path, arguments: str) -> Iterator[Bench]:
    """Start `stepahead serve MODEL ARGUMENTS`; it ends with the block. Raises BenchError, with its last words."""
    with tempfile.TemporaryFile() as said:
        server: Server | None = None
        try:
            server = start(f"{model} {arguments}".strip(), None, said)
            assert server.process is not None
            yield HttpBench(server, Watch.below(server.process.pid))
        except (BenchError, WatchError) as error:
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
            raise BenchError(f"{error}; its last line: {words[-1] if words else 'none'}") from error
        finally:
            if server is not None and server.process is not None:
                stop(server.process)


def prompts(seed: str, number: int, length: int, vocabulary: int) -> list[list[int]]:
    """Token ids of `number` prompts: the same for a seed, and no two that begin alike (the cache of prefixes shall gain
    nothing)."""
    choose = random.Random(seed)
    return [[choose.randrange(vocabulary) for _ in range(length)] for _ in range(number)]


def _body(model: str, ask: Ask, stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


def judged(
    asks: Sequence[Ask],
    said: Sequence[tuple[tuple[int, ...], str | None]],
    seconds: float,
    cpu_s: float,
    ttft_ms: float | None = None,
) -> Load:
    """Compare what was answered with what was wanted. said: for each request token ids, and what went wrong."""
    right = [ask.wanted is None or list(ids) == ask.wanted for ask, (ids, _) in zip(asks, said, strict=True)]
    short = [len(ids) != ask.count for ask, (ids, _) in zip(asks, said, strict=True)]
    failed = [error is not None for _, error in said]
    wrong = [not bad and (not fine or few) for bad, fine, few in zip(failed, right, short, strict=True)]
    return Load(
        requests=len(asks),
        tokens=sum(len(ids) for ids, _ in said),
        seconds=seconds,
        client_cpu_s=cpu_s,
        wrong=sum(wrong),
        failed=sum(failed),
        ids=tuple(ids for ids, _ in said),
        error=next((error for _, error in said if error), None),
        ttft_ms=ttft_ms,
    )


def read(answer: Answer, stream: bool) -> tuple[tuple[int, ...], str | None]:
    """The token ids of an answer, and what went wrong with it."""
    if answer.error or answer.status != 200:
        return (), answer.error or f"status {answer.status}: {answer.rest[:200].decode(errors='replace')}"
    try:
        if not stream:
            return tuple(orjson.loads(answer.rest)["choices"][0]["token_ids"]), None
        ids: list[int] = []
        for event in answer.events:
            data = event.removeprefix(b"data:").strip()
            if data != b"[DONE]":
                message = orjson.loads(data)
                if "error" in message:
                    return (), str(message["error"])
                for choice in message["choices"]:
                    ids += choice.get("token_ids") or []
        return tuple(ids), None
    except (ValueError, LookupError, TypeError) as error:
        return (), f"{type(error).__name__}: {error} in {answer.rest[:200].decode(errors='replace')}"
