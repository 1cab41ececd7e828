"""The load of a run under faults: a constant number of clients, each with its next request as soon as it has an answer.

Owns the connections, the manners of the clients (some leave, some read slowly) and the time stamps. It reads no answer
while the load runs, and it knows the server by its URL only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tools.chaos_history import End, Event, History, read_stream, read_whole
from tools.chaos_requests import Request
from tools.openai_stream import Answer, Lane

ABANDONED_S = 5.0  # for connections that were closed to have told so
AFTER_FAULT_S = 0.05  # between a request that failed and the lane's next: a server that is gone is not asked in a loop
LOOK_UP_S = 0.01  # for the loop to read what has come


@dataclass
class Told:
    """One request that was sent, and what came. Times: perf_counter nanoseconds, 0 = not yet."""

    request: Request
    lane: int
    sent_ns: int
    answer: Answer = field(default_factory=Answer)
    ended_ns: int = 0
    left: bool = False

    @property
    def end(self) -> End:
        """How it ended, as the client saw it."""
        error = self.answer.error
        if self.left:
            return "left"
        if error is not None:
            return "late" if error.startswith("TimeoutError") else "cut"
        return "done" if self.answer.status == 200 else "refused"

    def history(self) -> History:
        """Read what came. Bytes that cannot be read make the answer one that was cut."""
        answer, end = self.answer, self.end
        told = answer.error or answer.rest[:300].decode(errors="replace")
        events: list[Event] = []
        try:
            if end != "refused" and self.request.streams:
                events += read_stream(answer.events, answer.times_ns)
            elif end == "done":
                events += read_whole(answer.rest, self.ended_ns)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            end, told = "refused", f"unreadable ({error}): {told}"
        return History(tuple(events), end, self.ended_ns, told)

    def moments_ns(self) -> list[int]:
        """When the client had news: from the request over all events to the end."""
        ended = [self.ended_ns] if self.ended_ns else []
        return [self.sent_ns, *self.answer.times_ns, *ended]


class Client(Lane):
    """One connection of a client that may leave in the middle of an answer, or not read for a while."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key)
        self._request: Request | None = None
        self._told: Told | None = None

    async def put(self, request: Request, lane: int, timeout_s: float, when_sent: Callable[[Told], None]) -> Told:
        """Ask; `when_sent` is called before anything is awaited. Faults end up in what is returned."""
        self._request, self._told = request, Told(request, lane, time.perf_counter_ns())
        told = self._told
        when_sent(told)
        told.answer = await self.ask(request.path, dict(request.body), timeout_s)
        told.ended_ns = time.perf_counter_ns()
        if request.read_pause_s and self._transport is not None:
            # A connection that ended while it did not read has to be seen as such before its next request.
            self._read_on(self._transport)
            await asyncio.sleep(LOOK_UP_S)
        return told

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        request, told = self._request, self._told
        if request is None or told is None:
            return
        if request.leave_after and len(self._answer.events) >= request.leave_after and not told.left:
            told.left = True
            self.close()
        elif request.read_pause_s and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(request.read_pause_s, self._read_on, self._transport)

    def _read_on(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            transport.resume_reading()


class Load:
    """So many clients at once, until it is stopped or there are no more requests."""

    def __init__(self, url: str, api_key: str | None, source: Iterator[Request], lanes: int, timeout_s: float) -> None:
        self.told: list[Told] = []  # in the order of the requests
        self._url = url
        self._api_key = api_key
        self._source = source
        self._timeout_s = timeout_s
        self._stopping = False
        self._abandoned_ns = 0  # 0 = not
        self._clients = [Client(url, api_key) for _ in range(lanes)]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a client has still something to ask or to read."""
        return not all(task.done() for task in self._tasks)

    def start(self, when_answered: Callable[[], None] = lambda: None) -> None:
        """Begin, in the running loop. `when_answered()` is called after each answer."""
        self._tasks = [
            asyncio.create_task(self._drive(number, client, when_answered))
            for number, client in enumerate(self._clients)
        ]

    def stop(self) -> None:
        """Send no more requests; those that run are read to their end."""
        self._stopping = True

    def abandon(self) -> None:
        """Close all connections: nothing more will come."""
        self._stopping = True
        self._abandoned_ns = self._abandoned_ns or time.perf_counter_ns()
        for client in self._clients:
            client.close()

    async def finish(self) -> list[Told]:
        """Wait until all that were sent have ended; returns them. Those that are abandoned end soon."""
        try:
            await asyncio.wait(self._tasks, timeout=ABANDONED_S if self._abandoned_ns else None)
        finally:
            for task in self._tasks:
                task.cancel()
            for client in self._clients:
                client.close()
        for told in self.told:
            if not told.ended_ns or (told.answer.error and 0 < self._abandoned_ns <= told.ended_ns):
                told.answer.error = "TimeoutError: nothing more came"
                told.ended_ns = told.ended_ns or time.perf_counter_ns()
        for task in self._tasks:
            if not task.cancelled() and task.done() and (error := task.exception()):
                raise error
        return self.told

    async def probe(self, request: Request, timeout_s: float) -> Told:
        """One request more, on a connection of its own."""
        client = Client(self._url, self._api_key)
        try:
            return await client.put(request, -1, timeout_s, self.told.append)
        finally:
            client.close()

    async def _drive(self, number: int, client: Client, when_answered: Callable[[], None]) -> None:
        for request in self._source:
            if self._stopping:
                break
            told = await client.put(request, number, self._timeout_s, self.told.append)
            when_answered()
            if told.end in ("cut", "late", "refused"):
                await asyncio.sleep(AFTER_FAULT_S)
