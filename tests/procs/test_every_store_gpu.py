"""The gpu process, and the scheduler beside it, die behind every single store of a small run: no answer differs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procs import executor, quarantine, scheduler
from procs.executor import Results
from shm.records import RESULT_DROPPED
from shm.ring import RingConsumer
from tests.procs.mortal import headers_counted
from tests.procs.mortal_engine import Engine
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import Request

pytestmark = pytest.mark.unordered  # the device is plain code in this thread


@pytest.fixture(autouse=True, scope="module")
def counted() -> Iterator[None]:
    with headers_counted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "gc", SimpleNamespace(freeze=lambda: None))
        patch.setattr(quarantine, "DEATHS_MAX", 99)  # these deaths are nobody's doing, however often one was alone
        yield


def requests() -> list[Request]:
    return [
        Request([1] * 9, 4, arrival=0),
        Request([1, 2], 6, arrival=0, seed=1, ignore_eos=False),
        Request([2] * 5, 9, arrival=2, text_stop=2),
        Request([1] * 10, 9, arrival=3, abort_after=3),
        Request([5, 7], 2, arrival=4, seed=3),
    ]


Outcome = list[tuple[Any, ...]]


def serve(
    gpu: tuple[int, ...] = (),
    scheduler: tuple[int, ...] = (),
    fine: bool = True,
    count: int = 5,
    keeps: bool = False,
) -> tuple[Outcome, Engine]:
    """The first `count` requests. keeps: pages outlive their gpu process."""
    engine = Engine(tiny_config(kv_tokens=64, max_len=24), requests()[:count], gpu, scheduler, fine, keeps)
    return engine.run(), engine


@pytest.fixture(scope="module")
def wanted(counted: None) -> Outcome:
    return serve()[0]


KEEPS = pytest.mark.parametrize("keeps", [False, True], ids=["pages are lost", "pages are kept"])


@KEEPS
def test_a_gpu_process_that_dies_behind_any_store(wanted: Outcome, keeps: bool) -> None:
    number = serve()[1].gpu_deaths.lives[0].stores
    assert number > 100
    for at in range(1, number + 1):
        found, engine = serve((at,), keeps=keeps)
        assert found == wanted, at
        assert len(engine.gpu_deaths.lives) == 2


def test_a_scheduler_that_dies_behind_any_store(wanted: Outcome) -> None:
    """But those into a descriptor that nobody sees."""
    number = serve(fine=False)[1].scheduler_deaths.lives[0].stores
    assert number > 100
    for at in range(1, number + 1):
        found, engine = serve(scheduler=(at,), fine=False)
        assert found == wanted, at
        assert len(engine.scheduler_deaths.lives) == 2


FEW = 2  # requests, where two deaths are combined
RECOVERY = 12  # stores of a gpu process until it has attached and has answered what was meant for the one before


def pairs() -> Iterator[tuple[int, int]]:
    number = serve(fine=False, count=FEW)[1].gpu_deaths.lives[0].stores
    assert number > 15
    return ((first, second) for first in range(1, number + 1) for second in range(1 + first % 2, RECOVERY + 1, 2))


def test_one_that_dies_again_while_it_takes_over(wanted: Outcome) -> None:
    for deaths in pairs():
        assert serve(deaths, fine=False, count=FEW)[0] == wanted[:FEW], deaths


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=3), st.lists(st.integers(1, 150), max_size=3), st.booleans())
def test_both_of_them(wanted: Outcome, gpu: list[int], scheduler: list[int], keeps: bool) -> None:
    assert serve(tuple(gpu), tuple(scheduler), fine=False, keeps=keeps)[0] == wanted


# ------------------------------------------------------------------ rules that are broken on purpose


def gives_back_before_it_answers(self: Results, slot: Any, seq: int, _pushed_ns: int, _decode_rows: int) -> None:
    self._steps.release()
    self._results.publish(slot.buffer.nbytes, source_seq=seq)


def gives_back_before_it_drops(self: Results, slot: Any, seq: int, step: int) -> None:
    slot.view.n_rows, slot.view.window, slot.view.step = 0, 1, step
    self._steps.release()
    self._results.publish(slot.buffer.nbytes, RESULT_DROPPED, source_seq=seq)


def forgets_what_was_answered(_self: RingConsumer, _source_seq: int | None) -> None:
    pass


def runs_what_was_meant_for_another(_name: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (Results, "complete", gives_back_before_it_answers),
        (Results, "drop", gives_back_before_it_drops),
        (RingConsumer, "resume_after", forgets_what_was_answered),
        (executor, "wrong", runs_what_was_meant_for_another),
    ],
)
def test_a_wrong_order_is_found(
    wanted: Outcome, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert serve()[0] == wanted, "nobody sees it as long as nobody dies"
    for deaths in pairs():
        try:
            if serve(deaths, fine=False, count=FEW)[0] != wanted[:FEW]:
                return
        except AssertionError:
            return
    raise AssertionError("nobody noticed")
