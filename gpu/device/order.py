"""The order checker: proves, while a program is queued, that events order every pair of conflicting accesses.

Owns vector clocks in the manner of FastTrack (Flanagan and Freund, 2009): one for every stream, one for the launching
thread, one for the host functions. It hears of operations when they are queued and never of when they run, so what it
finds does not depend on timing, and it finds it the first time the program takes that path. It never touches memory,
and it keeps no more of the past than the program has streams, events and boundaries between regions.

An operation comes behind what its stream did before, behind what the launching thread knew when it queued it, and
behind the records that its stream has waited for. A host function comes behind its stream's past and the host functions
before it; nothing but the launching thread, once it has seen the completion, comes behind a host function.

Two buffers are taken to share no byte: whoever registers the same memory twice is not found out here.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any
from weakref import ref

from gpu.device.protocol import Buffer, Completion, DeviceError, Event, Graph, Region, Regions, Stream

HOST, CALLS = 0, 1  # agents; streams are counted from 2 on
READ, WRITE = "read", "write"
UNSEEN_MAX = 1024  # host functions that nobody has asked for yet; of those before them the launching thread knows less
Clock = list[int]


@dataclass(frozen=True)
class Violation:
    """Two things that nothing orders. `str` names both, where they run, what they share, and the missing edge."""

    first: str
    first_on: str
    second: str
    second_on: str
    what: str
    edge: str

    def __str__(self) -> str:
        first, second = f"'{self.first}' on {self.first_on}", f"'{self.second}' on {self.second_on}"
        return f"nothing orders {second} behind {first}: {self.what}; {self.edge}"


class OrderViolation(DeviceError):
    """The program has a race."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class _Operation:
    """What later operations have to come behind: the `epoch`th item of an agent."""

    __slots__ = ("agent", "epoch", "name", "on")

    def __init__(self, agent: int, epoch: int, name: str, on: str) -> None:
        self.agent = agent
        self.epoch = epoch
        self.name = name
        self.on = on


_BEGINNING = _Operation(HOST, 0, "", "")  # of all memory: everything comes behind it


class _Segment:
    """Bytes that have always been accessed together: their last write, and the last read since then by each agent.

    What came before the last write is not kept: it is ordered before it, so who comes behind the write comes behind
    that too, and who does not is found out by the write.
    """

    __slots__ = ("reads", "write")

    def __init__(self, write: _Operation, reads: dict[int, _Operation]) -> None:
        self.write = write
        self.reads = reads


class _Shadow:
    """The segments of one buffer, end to end: segment i is bytes [starts[i], starts[i + 1])."""

    __slots__ = ("buffer", "nbytes", "segments", "starts")

    def __init__(self, buffer: Buffer, gone: Any) -> None:
        """gone: called once the buffer has gone, so that its id can be given to another one."""
        self.buffer = ref(buffer, gone)
        self.nbytes = buffer.nbytes
        self.starts = [0, buffer.nbytes]
        self.segments = [_Segment(_BEGINNING, {})]

    def cut(self, lo: int, hi: int) -> list[_Segment]:
        """The segments that make up bytes [lo, hi)."""
        return self.segments[self._split(lo) : self._split(hi)]

    def _split(self, at: int) -> int:
        i = bisect_left(self.starts, at)
        if self.starts[i] != at:
            old = self.segments[i - 1]
            self.starts.insert(i, at)
            self.segments.insert(i, _Segment(old.write, old.reads.copy()))
        return i

    def join(self, lo: int, hi: int) -> None:
        """Make one segment of those of [lo, hi), which are alike."""
        i, j = bisect_left(self.starts, lo), bisect_left(self.starts, hi)
        del self.starts[i + 1 : j], self.segments[i + 1 : j]


class OrderChecker:
    """An observer of a device, see `protocol.Observer`. Calls come from the launching thread."""

    def __init__(self, *, collect: bool = False) -> None:
        """collect: keep violations in `violations` instead of raising OrderViolation at the first."""
        self.violations: list[Violation] = []
        self._collect = collect
        self._names = ["the launching thread", "the host functions"]
        self._agents: dict[Stream, int] = {}
        self._clocks: list[Clock] = [[0, 0], [0, 0]]
        self._host_changes = 0
        self._host_known = [0, 0]  # by agent: how many of those changes its clock holds
        self._records: dict[Event, Clock] = {}  # what the latest record comes behind
        self._waiting: dict[Event, dict[int, int]] = {}  # epoch of each agent's wait for the latest record
        self._unseen: dict[Completion, Clock] = {}  # in the order of the calls
        self._called: dict[int, Clock] = {}  # by agent: what its latest host function comes behind, and itself
        self._shadows: dict[int, _Shadow] = {}  # by id of the buffer

    @property
    def remembered(self) -> int:
        """Segments, reads in them, records and completions that it keeps."""
        segments = [segment for shadow in self._shadows.values() for segment in shadow.segments]
        return sum(1 + len(segment.reads) for segment in segments) + len(self._records) + len(self._unseen)

    # ------------------------------------------------------------------ what the observer hears

    def launch(self, stream: Stream, name: str, reads: Regions, writes: Regions) -> None:
        """An operation with the regions it touches. Raises OrderViolation."""
        agent = self._advance(stream)
        self._touch(_Operation(agent, self._clocks[agent][agent], name, self._names[agent]), reads, writes)

    def call(self, stream: Stream, completion: Completion, reads: Regions, writes: Regions) -> None:
        """A host function: behind the stream's past, ahead of nothing on the stream. Raises OrderViolation."""
        agent = self._agent(stream)
        clock = self._clocks[CALLS]
        _join(clock, self._clocks[agent])
        clock[CALLS] += 1
        on = f"the host functions of {self._names[agent]}"
        self._unseen[completion] = self._called[agent] = clock.copy()
        if len(self._unseen) > UNSEEN_MAX:
            del self._unseen[next(iter(self._unseen))]
        self._touch(_Operation(CALLS, clock[CALLS], completion.name, on), reads, writes)

    def record(self, stream: Stream, event: Event) -> None:
        """A record of `event`. Raises OrderViolation if a stream may still be waiting for the one before."""
        agent = self._agent(stream)
        clock = self._clocks[agent]
        waiting = self._waiting.pop(event, None)
        self._records[event] = clock.copy()
        if waiting:
            for waiter, epoch in waiting.items():
                if clock[waiter] < epoch:
                    self._report_recorded_again(event, waiter, agent)

    def wait(self, stream: Stream, event: Event) -> None:
        """A wait for the latest record of `event` reported so far (none: it does not block)."""
        awaited = self._records.get(event)
        if awaited is not None:
            agent = self._advance(stream)
            clock = self._clocks[agent]
            self._waiting.setdefault(event, {})[agent] = clock[agent]
            _join(clock, awaited)

    def graph_launch(self, stream: Stream, graph: Graph) -> None:
        """What follows comes from one replay of `graph`; it is reported operation by operation."""

    def graph_end(self, stream: Stream, graph: Graph) -> None:
        """The replay has been reported in full."""

    def host_wait(self, event: Event | None, stream: Stream | None) -> None:
        """The launching thread knows that the latest record of `event`, or all of `stream`, was reached."""
        if event is not None and event in self._records:
            self._teach_host(self._records[event])
        if stream is not None:
            agent = self._agent(stream)
            self._teach_host(self._clocks[agent])
            if agent in self._called:
                self._teach_host(self._called[agent])

    def host_saw(self, completion: Completion) -> None:
        """The launching thread knows that this host function, and with it all before it, has run."""
        known = self._unseen.get(completion)
        if known is None:
            return
        self._teach_host(known)
        for earlier in list(self._unseen):
            del self._unseen[earlier]
            if earlier is completion:
                break

    def host_access(self, name: str, reads: Regions, writes: Regions) -> None:
        """The launching thread touches pinned memory, or knows that another process did. Raises OrderViolation."""
        clock = self._clocks[HOST]
        clock[HOST] += 1
        self._host_changes += 1
        self._touch(_Operation(HOST, clock[HOST], name, self._names[HOST]), reads, writes)

    # ------------------------------------------------------------------ clocks

    def _agent(self, stream: Stream) -> int:
        """The agent of a stream, behind all that the launching thread knows."""
        agent = self._agents.get(stream)
        if agent is None:
            agent = self._agents[stream] = len(self._clocks)
            self._names.append(f"stream {stream.name}")
            kept = (self._clocks, self._records.values(), self._unseen.values(), self._called.values())
            for clock in {id(clock): clock for clocks in kept for clock in clocks}.values():
                clock.append(0)
            self._clocks.append([0] * (agent + 1))
            self._host_known.append(-1)
        if self._host_known[agent] != self._host_changes:
            self._host_known[agent] = self._host_changes
            _join(self._clocks[agent], self._clocks[HOST])
        return agent

    def _advance(self, stream: Stream) -> int:
        """Begin another item of the stream."""
        agent = self._agent(stream)
        self._clocks[agent][agent] += 1
        return agent

    def _teach_host(self, known: Clock) -> None:
        _join(self._clocks[HOST], known)
        self._host_changes += 1

    # ------------------------------------------------------------------ accesses

    def _touch(self, operation: _Operation, reads: Regions, writes: Regions) -> None:
        agent, shadows = operation.agent, self._shadows
        clock = self._clocks[agent]
        for region in reads:
            buffer, lo, hi = region
            shadow = shadows.get(id(buffer)) or self._shadow(buffer)
            for segment in shadow.segments if hi - lo == shadow.nbytes else shadow.cut(lo, hi):
                last = segment.write
                if clock[last.agent] < last.epoch:
                    self._report(last, WRITE, operation, READ, region, segment)
                segment.reads[agent] = operation
        for region in writes:
            buffer, lo, hi = region
            shadow = shadows.get(id(buffer)) or self._shadow(buffer)
            segments = shadow.segments if hi - lo == shadow.nbytes else shadow.cut(lo, hi)
            for segment in segments:
                last = segment.write
                if clock[last.agent] < last.epoch:
                    self._report(last, WRITE, operation, WRITE, region, segment)
                segment.write = operation
                if segment.reads:
                    for last in segment.reads.values():
                        if clock[last.agent] < last.epoch:
                            self._report(last, READ, operation, WRITE, region, segment)
                    segment.reads.clear()
            if len(segments) > 1:
                shadow.join(lo, hi)

    def _shadow(self, buffer: Buffer) -> _Shadow:
        """A new one."""
        key, shadows = id(buffer), self._shadows
        return shadows.setdefault(key, _Shadow(buffer, lambda _: shadows.pop(key, None)))

    # ------------------------------------------------------------------ violations

    def _report(self, last: _Operation, kind: str, new: _Operation, new_kind: str, at: Region, part: _Segment) -> None:
        first, second = f"'{last.name}'", f"'{new.name}'"
        if last.agent == CALLS:
            edge = f"let the launching thread see that {first} has run before it goes on to {second}"
        elif new.agent == HOST:
            edge = f"let the launching thread see a host function that is queued behind {first} before {second}"
        else:
            edge = f"record an event on {last.on} behind {first} and let {new.on} wait for it"
        shadow = self._shadows[id(at.buffer)]
        i = shadow.segments.index(part)
        lo, hi = shadow.starts[i], shadow.starts[i + 1]
        what = f"{new_kind} after {kind} of bytes [{lo}, {hi}) of {at.buffer.name}"
        self._keep(Violation(last.name, last.on, new.name, new.on, what, edge))

    def _report_recorded_again(self, event: Event, waiter: int, recorder: int) -> None:
        first, second = self._names[waiter], self._names[recorder]
        what = f"event {event.name} is recorded again while the wait for its earlier record may be pending"
        edge = f"let {second} wait for something behind the wait on {first}, or take another event"
        self._keep(Violation(f"wait for {event.name}", first, f"record of {event.name}", second, what, edge))

    def _keep(self, violation: Violation) -> None:
        self.violations.append(violation)
        if not self._collect:
            raise OrderViolation(violation)


def _join(clock: Clock, known: Clock) -> None:
    clock[:] = map(max, clock, known)
