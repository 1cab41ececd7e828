"""The order checker against a second opinion: random programs, and the reachability of their operations in a graph.

The oracle knows no clocks. It draws an edge for every rule of the protocol and asks, pair by pair, whether a path leads
from one conflicting access to the other. Both have to find the same first race, or none.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gpu.device.buffers import ArrayBuffer
from gpu.device.order import OrderChecker
from gpu.device.protocol import Region

STREAMS, EVENTS, ROWS = 3, 4, 12


class Named:
    """A stream, an event or a completion: what the checker knows of them is a name."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass
class Oracle:
    """Nodes in the order of the calls; `behind[n]` is the set, as bits, of all nodes that come before node n."""

    behind: list[int] = field(default_factory=list)
    accesses: list[tuple[int, tuple[Region, ...], tuple[Region, ...]]] = field(default_factory=list)
    host: int | None = None  # last node of each kind
    call: int | None = None
    streams: dict[Any, int] = field(default_factory=dict)
    called: dict[Any, int] = field(default_factory=dict)
    records: dict[Any, int] = field(default_factory=dict)
    completions: dict[Any, int] = field(default_factory=dict)

    def node(self, *before: int | None) -> int:
        """A new node behind others."""
        bits = 0
        for other in before:
            if other is not None:
                bits |= self.behind[other] | 1 << other
        self.behind.append(bits)
        return len(self.behind) - 1

    def races(self, node: int, reads: tuple[Region, ...], writes: tuple[Region, ...]) -> bool:
        """Whether the accesses of `node` conflict with any that no path orders before it."""
        found = any(
            not self.behind[node] >> other & 1
            and (overlap(writes, theirs_read) or overlap(writes, theirs_write) or overlap(reads, theirs_write))
            for other, theirs_read, theirs_write in self.accesses
        )
        self.accesses.append((node, reads, writes))
        return found


def overlap(some: tuple[Region, ...], others: tuple[Region, ...]) -> bool:
    return any(a.overlaps(b) for a in some for b in others)


class Program:
    """One random program, told to both."""

    def __init__(self, seed: int, checker: OrderChecker) -> None:
        self.chance, self.checker, self.oracle = random.Random(seed), checker, Oracle()
        self.streams = [Named(f"stream {i}") for i in range(STREAMS)]
        self.events = [Named(f"event {i}") for i in range(EVENTS)]
        self.waited: set[Any] = set()  # events with a wait since their latest record
        self.buffers = [ArrayBuffer(name, np.zeros(ROWS, np.int32)) for name in "xy"]
        self.completions: list[Any] = []

    def regions(self) -> tuple[Region, ...]:
        found = []
        for _ in range(self.chance.choice((0, 1, 1, 2))):
            low = self.chance.randrange(ROWS)
            found.append(self.chance.choice(self.buffers).rows(low, min(ROWS, low + self.chance.choice((1, 1, 2, 5)))))
        return tuple(found)

    def step(self) -> bool:
        """Do one thing; whether the oracle sees a race in it."""
        oracle, checker, stream = self.oracle, self.checker, self.chance.choice(self.streams)
        what = self.chance.choices(("launch", "edge", "call", "saw", "host", "wait host"), (4, 16, 1, 3, 1, 3))[0]
        if what == "launch":
            reads, writes = self.regions(), self.regions()
            checker.launch(stream, "launch", reads, writes)
            oracle.streams[stream] = oracle.node(oracle.streams.get(stream), oracle.host)
            return oracle.races(oracle.streams[stream], reads, writes)
        if what == "edge":
            self.edge(stream)
        elif what == "call":
            reads, writes, completion = self.regions(), self.regions(), Named("call")
            checker.call(stream, completion, reads, writes)
            oracle.call = oracle.node(oracle.streams.get(stream), oracle.call, oracle.host)
            oracle.completions[completion] = oracle.called[stream] = oracle.call
            self.completions.append(completion)
            return oracle.races(oracle.call, reads, writes)
        elif what == "saw" and self.completions:
            completion = self.chance.choice(self.completions)
            checker.host_saw(completion)
            oracle.host = oracle.node(oracle.host, oracle.completions[completion])
        elif what == "host":
            reads, writes = self.regions(), self.regions()
            checker.host_access("host", reads, writes)
            oracle.host = oracle.node(oracle.host)
            return oracle.races(oracle.host, reads, writes)
        elif what == "wait host":
            event = self.chance.choice(self.events)
            if self.chance.random() < 0.5:
                checker.host_wait(event, None)
                oracle.host = oracle.node(oracle.host, oracle.records.get(event))
            else:
                checker.host_wait(None, stream)
                oracle.host = oracle.node(oracle.host, oracle.streams.get(stream), oracle.called.get(stream))
        return False

    def edge(self, stream: Any) -> None:
        """A record, or a wait. No event is recorded again while a wait for it may be pending: that is another rule."""
        oracle, checker, event = self.oracle, self.checker, self.chance.choice(self.events)
        if self.chance.random() < 0.5:
            if event in self.waited:
                self.events[self.events.index(event)] = event = Named(event.name)
            checker.record(stream, event)
            oracle.records[event] = oracle.node(oracle.streams.get(stream), oracle.host)
        else:
            checker.wait(stream, event)
            if event in oracle.records:
                self.waited.add(event)
                before = oracle.streams.get(stream), oracle.host, oracle.records[event]
                oracle.streams[stream] = oracle.node(*before)


def first_races(seed: int, steps: int, checker: OrderChecker) -> tuple[int | None, int | None]:
    """The step of the first race, as the checker and as the oracle see it."""
    program = Program(seed, checker)
    for number in range(steps):
        raced = program.step()
        if raced or checker.violations:
            return (number if checker.violations else None), (number if raced else None)
    return None, None


def test_the_checker_finds_the_first_race_of_every_program_and_no_other() -> None:
    found = [first_races(seed, 150, OrderChecker(collect=True)) for seed in range(3000)]
    assert [seed for seed, (checker, oracle) in enumerate(found) if checker != oracle] == []
    places = [oracle for _, oracle in found if oracle is not None]
    assert len(places) > 1000 and max(places) > 60, "programs have races, early and late"


class Forgetful(OrderChecker):
    def host_saw(self, completion: Any) -> None:
        """Nothing is learnt."""


class Strong(OrderChecker):
    def call(self, stream: Any, completion: Any, reads: Any, writes: Any) -> None:
        """A host function that holds its stream back."""
        super().launch(stream, "call", reads, writes)
        super().call(stream, completion, (), ())


class Near(OrderChecker):
    def wait(self, stream: Any, event: Any) -> None:
        """Of all that the record comes behind, only its own stream counts."""
        self._agent(stream)  # first: clocks grow with it
        kept, latest = self._records.get(event), self._agents.get(getattr(event, "on", None))
        if kept is not None and latest is not None:
            self._records[event] = [time if agent == latest else 0 for agent, time in enumerate(kept)]
        super().wait(stream, event)
        if kept is not None:
            self._records[event] = kept

    def record(self, stream: Any, event: Any) -> None:
        event.on = stream
        super().record(stream, event)


@pytest.mark.parametrize("kind", [Forgetful, Strong, Near])
def test_the_oracle_disagrees_with_a_checker_that_is_wrong(kind: type[OrderChecker]) -> None:
    found = [first_races(seed, 150, kind(collect=True)) for seed in range(300)]
    assert any(checker != oracle for checker, oracle in found)
