"""The order checker: proves, while a program is queued, that events order every pair of conflicting accesses.

Owns vector clocks in the manner of FastTrack (Flanagan and Freund, 2009): one for every stream, one for the launching
thread, one for the host functions. It hears of operations when they are queued and never of when they run, so what it
finds does not depend on timing, and it finds it the first time the program takes that path. It never touches memory.

An operation comes behind what its stream did before, behind what the launching thread knew when it queued it, and
behind the records that its stream has waited for. A host function comes behind its stream's past and the host functions
before it; nothing but the launching thread, once it has seen the completion, comes behind a host function.
"""

from dataclasses import dataclass
from typing import Any

from gpu.device.protocol import Completion, DeviceError, Event, Graph, Region, Regions, Stream

HOST, CALLS = 0, 1  # agents; streams are counted from 2 on
READ, WRITE = "read", "write"
Clock = list[int]


@dataclass(frozen=True)
class Access:
    """The latest access of one agent to one region of a buffer."""

    agent: int
    epoch: int
    lo: int
    hi: int
    name: str


@dataclass(frozen=True)
class Violation:
    """Two things that nothing orders. `str` names both, where they run, what they share, and the missing edge."""

    first: str
    first_on: str
    second: str
    second_on: str
    what: str

    def __str__(self) -> str:
        first, second = f"'{self.first}' on {self.first_on}", f"'{self.second}' on {self.second_on}"
        edge = f"nothing that {self.second_on} has waited for comes behind {first}"
        return f"{second} is not ordered behind {first}: {self.what}; {edge}"


class OrderViolation(DeviceError):
    """The program has a race."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class _Accesses:
    """What is remembered of one buffer: reads and writes, newest of each agent and region."""

    __slots__ = ("buffer", "reads", "writes")

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer  # kept, so that its id is never given to another one
        self.reads: list[Access] = []
        self.writes: list[Access] = []


class OrderChecker:
    """An observer of a device, see `protocol.Observer`. Calls come from the launching thread."""

    def __init__(self, *, collect: bool = False) -> None:
        """collect: keep violations in `violations` instead of raising OrderViolation at the first."""
        self.violations: list[Violation] = []
        self._collect = collect
        self._names = ["the launching thread", "the host functions"]
        self._agents: dict[Any, int] = {}
        self._clocks: list[Clock] = [[1, 0], [0, 0]]
        self._records: dict[Any, Clock] = {}  # by event: what its latest record comes behind
        self._waiting: dict[Any, dict[int, int]] = {}  # by event: epoch of each agent's wait for the latest record
        self._unseen: dict[Any, Clock] = {}  # by completion, in the order of the calls
        self._buffers: dict[int, _Accesses] = {}

    # ------------------------------------------------------------------ what the observer hears

    def launch(self, stream: Stream, name: str, reads: Regions, writes: Regions) -> None:
        """An operation with the regions it touches."""
        self._touch(self._advance(self._agent(stream)), name, reads, writes)

    def call(self, stream: Stream, completion: Completion, reads: Regions, writes: Regions) -> None:
        """A host function: behind the stream's past, ahead of nothing on the stream."""
        agent = self._agent(stream)
        self._join(agent, self._clocks[HOST])
        self._join(CALLS, self._clocks[agent])
        self._clocks[CALLS][CALLS] += 1
        self._touch(CALLS, completion.name, reads, writes)
        self._unseen[completion] = self._clocks[CALLS].copy()

    def record(self, stream: Stream, event: Event) -> None:
        """A record of `event`."""
        agent = self._advance(self._agent(stream))
        clock = self._clocks[agent]
        for waiter, epoch in self._waiting.pop(event, {}).items():
            if waiter != agent and clock[waiter] < epoch:
                what = f"event {event.name} is recorded again while a wait for its earlier record may be pending"
                wait, record = f"wait for {event.name}", f"record of {event.name}"
                self._report(Violation(wait, self._names[waiter], record, self._names[agent], what))
        self._records[event] = clock.copy()

    def wait(self, stream: Stream, event: Event) -> None:
        """A wait for the latest record of `event` reported so far (none: it does not block)."""
        awaited = self._records.get(event)
        if awaited is not None:
            agent = self._advance(self._agent(stream))
            self._waiting.setdefault(event, {})[agent] = self._clocks[agent][agent]
            self._join(agent, awaited)

    def graph_launch(self, stream: Stream, graph: Graph) -> None:
        """What follows comes from one replay of `graph`; it is reported operation by operation."""

    def graph_end(self, stream: Stream, graph: Graph) -> None:
        """The replay has been reported in full."""

    def host_wait(self, event: Event | None, stream: Stream | None) -> None:
        """The launching thread knows that the latest record of `event`, or all of `stream`, was reached."""
        if event is not None:
            known = self._records.get(event)
            if known is not None:
                self._join(HOST, known)
        if stream is not None:
            self._join(HOST, self._clocks[self._agent(stream)])

    def host_saw(self, completion: Completion) -> None:
        """The launching thread knows that this host function, and with it all before it, has run."""
        known = self._unseen.get(completion)
        if known is None:
            return
        self._join(HOST, known)
        for earlier in list(self._unseen):
            del self._unseen[earlier]
            if earlier is completion:
                break

    def host_access(self, name: str, reads: Regions, writes: Regions) -> None:
        """The launching thread touches pinned memory, or knows that another process did so before this moment."""
        self._clocks[HOST][HOST] += 1
        self._touch(HOST, name, reads, writes)

    # ------------------------------------------------------------------ clocks

    def _agent(self, stream: Stream) -> int:
        agent = self._agents.get(stream)
        if agent is None:
            agent = self._agents[stream] = len(self._clocks)
            self._names.append(f"stream {stream.name}")
            for clock in (*self._clocks, *self._records.values(), *self._unseen.values()):
                clock.append(0)
            self._clocks.append([0] * (agent + 1))
        return agent

    def _advance(self, agent: int) -> int:
        """Begin another operation of `agent`: behind all that the launching thread knows."""
        self._join(agent, self._clocks[HOST])
        self._clocks[agent][agent] += 1
        return agent

    def _join(self, agent: int, known: Clock) -> None:
        clock = self._clocks[agent]
        clock[:] = map(max, clock, known)

    # ------------------------------------------------------------------ accesses

    def _touch(self, agent: int, name: str, reads: Regions, writes: Regions) -> None:
        clock = self._clocks[agent]
        for region in reads:
            seen = self._accesses(region)
            self._compare(agent, name, READ, region, seen.writes, WRITE)
            _remember(seen.reads, Access(agent, clock[agent], region.lo, region.hi, name))
        for region in writes:
            seen = self._accesses(region)
            self._compare(agent, name, WRITE, region, seen.writes, WRITE)
            self._compare(agent, name, WRITE, region, seen.reads, READ)
            _remember(seen.writes, Access(agent, clock[agent], region.lo, region.hi, name))

    def _accesses(self, region: Region) -> _Accesses:
        seen = self._buffers.get(id(region.buffer))
        if seen is None:
            seen = self._buffers[id(region.buffer)] = _Accesses(region.buffer)
        return seen

    def _compare(self, agent: int, name: str, kind: str, region: Region, seen: list[Access], seen_kind: str) -> None:
        clock = self._clocks[agent]
        for other in seen:
            if (
                clock[other.agent] < other.epoch
                and other.agent != agent
                and region.lo < other.hi
                and other.lo < region.hi
            ):
                lo, hi = max(region.lo, other.lo), min(region.hi, other.hi)
                what = f"{kind} after {seen_kind} of {region.buffer.name}[{lo}:{hi}] bytes"
                self._report(Violation(other.name, self._names[other.agent], name, self._names[agent], what))

    def _report(self, violation: Violation) -> None:
        self.violations.append(violation)
        if not self._collect:
            raise OrderViolation(violation)


def _remember(seen: list[Access], access: Access) -> None:
    """Add an access. Earlier ones of the same agent that it covers go: who comes behind the new one is behind them."""
    kept = [old for old in seen if old.agent != access.agent or old.lo < access.lo or old.hi > access.hi]
    kept.append(access)
    seen[:] = kept
