"""Sends the requests of one run to a server, and keeps what comes back.

Closed loop: lanes that each send the next request as soon as their last answer is complete. Open loop: every request
leaves at its own time, however many are under way, so a server that is too slow is not spared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.openai_stream import Answer, Lane

Body = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Where requests go. path: behind the server's URL; timeout_s: for one answer."""

    url: str
    path: str
    api_key: str | None
    timeout_s: float


@dataclass
class Sent:
    """What came of the requests. late_s: how long after their time they left; at_once: the most under way."""

    answers: list[Answer]
    late_s: list[float]
    at_once: int = 0


async def closed_loop(target: Target, bodies: Sequence[Body], lanes: int, advance: Callable[[], None]) -> Sent:
    """Send all of them over so many lanes. `advance()` is called after each answer."""
    waiting = iter(bodies)
    sent = Sent([], [], lanes)
    connections = [Lane(target.url, target.api_key) for _ in range(lanes)]

    async def drive(lane: Lane) -> None:
        for body in waiting:
            sent.answers.append(await lane.ask(target.path, body, target.timeout_s))
            advance()

    await asyncio.gather(*(drive(lane) for lane in connections))
    for lane in connections:
        lane.close()
    return sent


async def open_loop(target: Target, bodies: Sequence[Body], at_s: Sequence[float], advance: Callable[[], None]) -> Sent:
    """Send each at its time, in seconds from now, over a connection that is free or a new one."""
    sent = Sent([], [])
    free: list[Lane] = []
    under_way = 0

    async def one(body: Body) -> None:
        nonlocal under_way
        lane = free.pop() if free else Lane(target.url, target.api_key)
        under_way += 1
        sent.at_once = max(sent.at_once, under_way)
        sent.answers.append(await lane.ask(target.path, body, target.timeout_s))
        under_way -= 1
        free.append(lane)
        advance()

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for body, due_s in zip(bodies, at_s, strict=True):
            await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            sent.late_s.append(time.perf_counter() - began_s - due_s)
            tasks.create_task(one(body))
    for lane in free:
        lane.close()
    return sent
