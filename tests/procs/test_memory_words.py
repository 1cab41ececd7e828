"""`Control.memory` is stored before the epoch that it goes with and read behind it, so that no epoch is ever taken
together with the memory of an earlier one: whoever looks between any two stores, whatever is stored between two reads.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement
from types import SimpleNamespace
from typing import Any

import pytest

from procs import scheduler as scheduler_module
from procs.scheduler import Scheduler
from procs.server_memory import ServerMemory
from procs.supervisor import Supervisor
from tests.procs.fake_server import config, spec
from tests.procs.mortal import Life
from tests.procs.mortal_memory import Memory, Seat
from tests.procs.simulated_device import tiny_config


class Words:
    """Shared memory as words, in which somebody has a turn before each read and behind each store."""

    def __init__(self, words: Any, turn: Callable[[], None]) -> None:
        self._words = words
        self._turn = turn

    def __getitem__(self, index: int) -> int:
        self._turn()
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value
        self._turn()


# ------------------------------------------------------------------ the supervisor stores


@pytest.fixture
def memory() -> Iterator[ServerMemory]:
    made = ServerMemory(config())
    yield made
    made.close()


@pytest.mark.parametrize("from_standby", [False, True])
@pytest.mark.parametrize("sound", [False, True])
def test_whoever_sees_an_epoch_sees_the_memory_that_goes_with_it(
    memory: ServerMemory, monkeypatch: pytest.MonkeyPatch, sound: bool, from_standby: bool
) -> None:
    plain, seen = memory.control, list[tuple[int, int]]()

    def look() -> None:
        seen.append((plain.epoch("gpu"), plain.memory("gpu")))

    control = copy.copy(plain)
    control.words = Words(plain.words, look)  # type: ignore[assignment]

    def runs(*_: object) -> Any:
        assert (plain.epoch("gpu"), plain.memory("gpu")) == (2, 1 if sound else 2), "it looks at both at once"
        return child

    child = SimpleNamespace(pid=1, watch=lambda *_: None, take_over=runs)
    plain.set_memory("gpu", 1)
    plain.set_epoch("gpu", 1)
    supervisor = Supervisor(config(), socket.socket(), [spec("gpu", "serve")])
    supervisor._listener.close()
    parts = {
        "_memory": SimpleNamespace(control=control),
        "_standbys": SimpleNamespace(take=lambda _stage: child if from_standby else None),
        "_verdicts": SimpleNamespace(watch=lambda *_: None),
        "_selector": None,
        "_spawn": runs,
        "_sound": {"gpu"} if sound else set(),
    }
    for name, part in parts.items():
        monkeypatch.setattr(supervisor, name, part, raising=False)
    assert supervisor._start(spec("gpu", "serve")) is child
    assert {memory for epoch, memory in seen if epoch == 2} == {1 if sound else 2}, seen


# ------------------------------------------------------------------ the scheduler reads

READS = 5  # more than there are in a meeting


class Started(Exception):
    """The scheduler has looked at everything that it looks at when it starts."""


class Others:
    """A supervisor that starts the next gpu process, with new memory, while the scheduler reads: its first store comes
    before one read, its second before the same one or a later one.
    """

    def __init__(self, memory: Memory, first: int, second: int) -> None:
        self._stores = {first: [], second: []}
        epoch = memory.control.epoch("gpu") + 1
        self._stores[first].append(lambda: memory.control.set_memory("gpu", epoch))
        self._stores[second].append(lambda: memory.control.set_epoch("gpu", epoch))
        self._reads = 0

    def turn(self) -> None:
        for store in self._stores.get(self._reads, ()):
            store()
        self._reads += 1


MOMENTS = list(combinations_with_replacement(range(READS), 2))


def seat_of(memory: Memory) -> Seat:
    memory.seat("gpu", Life())
    return memory.seat("scheduler", Life())


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("is_new", [False, True], ids=["nobody has died", "one has died already"])
def test_a_scheduler_that_meets_a_gpu_process_knows_its_memory(moments: tuple[int, int], is_new: bool) -> None:
    memory = Memory(tiny_config(kv_tokens=64, max_len=24))
    seat = seat_of(memory)
    scheduler, known = Scheduler(seat), [1]  # type: ignore[arg-type]
    scheduler.steps.lose_device = lambda epoch, _: known.append(epoch)  # type: ignore[method-assign]
    if is_new:
        memory.seat("gpu", Life())
    control = memory.control
    seat.control.words = Words(control.words, Others(memory, *moments).turn)  # type: ignore[assignment]
    for _ in range(READS):
        scheduler._meet_new_gpu()
        # That of a later one may be known, since the one for which steps are planned then runs none of them.
        assert known[-1] >= scheduler._gpu_epoch
    assert known[-1] == scheduler._gpu_epoch == control.epoch("gpu") == control.memory("gpu") == 2 + is_new


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_scheduler_that_starts_knows_the_memory_of_the_gpu_process_that_it_plans_for(
    monkeypatch: pytest.MonkeyPatch, moments: tuple[int, int]
) -> None:
    memory = Memory(tiny_config(kv_tokens=64, max_len=24))
    seat, known = seat_of(memory), list[int]()

    def adopt(_rows: object, memory_now: int, _is_known: bool) -> None:
        known.append(memory_now)
        raise Started

    monkeypatch.setattr(scheduler_module, "adopt", adopt)
    control = memory.control
    seat.control.words = Words(control.words, Others(memory, *moments).turn)  # type: ignore[assignment]
    scheduler = Scheduler(seat)  # type: ignore[arg-type]
    with pytest.raises(Started):
        scheduler.run()
    assert known[-1] >= scheduler._gpu_epoch
