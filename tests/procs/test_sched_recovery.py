"""A scheduler dies, at whatever point, and a fresh one goes on from the ledger: nobody can tell from the answers."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procs import batch_state, pages, prefix_cache, sched_adoption, sched_recovery, sched_rows, sched_steps
from procs.batch_state import BatchState
from procs.sched_recovery import recover
from procs.sched_rows import Rows
from procs.sched_steps import Steps
from shm.ledger import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Ledger
from shm.segment import Segment
from shm.stats import Stats
from tests.procs.simulated_device import EOS, tiny_config
from tests.procs.simulated_server import Request, SimulatedServer, new_ledger


class Killed(Exception):
    pass


def dies(method: Callable[..., Any], after: int, before: bool) -> Callable[..., Any]:
    """`method`, dying at its call number `after`, before or after it does its work."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after and before:
            raise Killed
        result = method(*args, **kwargs)
        if calls == after:
            raise Killed
        return result

    return wrapped


def requests() -> list[Request]:
    return [
        Request([1] * 9, 7, arrival=0),
        Request([1, 2], 12, arrival=0, seed=1, ignore_eos=False),
        Request([2] * 5, 3, arrival=2, text_stop=2),
        Request([1] * 10, 9, arrival=3, abort_after=5),
        Request([0], 5, arrival=4, stop_ids=(7, 9, 20, 21, 22)),
    ]


POINTS = ["enqueue", "admit", "top_up", "write_tokens", "keep_prefix", "end", "report", "_release", "_retract"]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(POINTS),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(["0", "1", "10"]),
    st.sampled_from([32, 64]),
)
def test_any_death_is_survived(point: str, after: int, before: bool, lazy: str, kv_tokens: int) -> None:
    server = SimulatedServer(tiny_config(kv_tokens=kv_tokens, max_len=24), requests(), lazy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, point, dies(getattr(Rows, point), after, before))
        try:
            server.run()
        except Killed:
            patch.undo()
            server.restart_scheduler()
            server.run()


class Countdown:
    """In place of `fault`: the scheduler dies at each of the given passes, one after the other."""

    def __init__(self, *passes: int) -> None:
        self.passes = list(passes)
        self.seen = 0

    def __call__(self, _name: str, _values: Any = None) -> None:
        self.seen += 1
        if self.passes and self.seen == self.passes[0]:
            self.passes.pop(0)
            self.seen = 0
            raise Killed


def run_with(countdown: Countdown, lazy: str, at_work: bool = True, **more: Any) -> None:
    """Serve everything, with a new scheduler whenever one dies, be it while it takes over. at_work: see `recover`."""
    server = SimulatedServer(tiny_config(kv_tokens=64, max_len=24, **more), requests(), lazy)
    again = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sched_rows, "fault", countdown)
        while True:
            try:
                if again:
                    server.restart_scheduler(at_work)
                again = False
                server.run()
                return
            except Killed:
                again = True


@pytest.mark.parametrize("more", [{}, {"window": 3}], ids=["plain", "window"])
@pytest.mark.parametrize("lazy", ["0", "1"])
def test_a_death_behind_every_single_store(lazy: str, more: dict[str, Any]) -> None:
    count = Countdown()
    run_with(count, lazy, **more)
    assert count.seen > 25
    for at in range(1, count.seen + 1):
        run_with(Countdown(at), lazy, **more)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=6), st.sampled_from(["0", "1", "10"]))
def test_deaths_again_and_again(passes: list[int], lazy: str) -> None:
    """However soon after each other, be it while the one before is still taken over from; of no row's doing, since
    who is in hand at three deaths without getting on is taken for their cause.
    """
    run_with(Countdown(*passes), lazy, at_work=False)


@pytest.mark.parametrize("more", [{"window": 3}, {"page_size": 1}], ids=["window", "small pages"])
def test_a_death_at_any_line(more: dict[str, Any]) -> None:
    """Of what keeps books, at the first and a later time that it is run: what is adopted holds what its tokens say (the
    server's audit), whatever the steps that are still queued write.
    """
    assert die_everywhere(more) > 300


def believe_uncounted(rows: Rows, entry: int) -> None:
    rows.state.tables.counted[entry] = 10**9
    KEEP(rows, entry)


def end_as_it_was(self: BatchState, entry: int) -> None:
    counted = int(self.counted[entry])
    END(self, entry)
    self.counted[entry] = counted


def begin_as_it_was(self: BatchState, row: int, generation: int, order: int) -> int:
    entry = self._free_entries[0]
    counted, self.counted[entry] = int(self.counted[entry]), 0
    BEGIN(self, row, generation, order)
    self.counted[entry] = counted
    return entry


def count_what_is_queued(self: Steps, view: Any, step: int) -> Any:
    flight = PLAN(self, view, step)
    if flight is not None:
        self.state.counted[flight.chunk_entries] = flight.chunk_ends
    return flight


KEEP, END, BEGIN, PLAN = sched_adoption._keep, BatchState.end, BatchState.begin, Steps.plan
BROKEN: dict[str, dict[tuple[Any, str], Any]] = {
    "believe uncounted pages": {(sched_adoption, "_keep"): believe_uncounted},
    "begin with what was counted before": {(BatchState, "end"): end_as_it_was, (BatchState, "begin"): begin_as_it_was},
    "count what is only queued": {(Steps, "plan"): count_what_is_queued},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_shows_at_some_line(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for (owner, name), broken in BROKEN[rule].items():
        monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        die_everywhere({"window": 3})


def die_everywhere(more: dict[str, Any]) -> int:
    """Serve again and again, with a death at another line each time. Returns how many pages were adopted in all."""
    seen: dict[Line, int] = {}
    adopted = run_until(more, lambda line: bool(seen.update({line: seen.get(line, 0) + 1})))
    assert adopted == 0 and len(seen) > 150
    for line, times in seen.items():
        for at in sorted({1, times - times // 3}):
            adopted += run_until(more, lambda other, line=line, left=[at]: other == line and countdown(left))  # type: ignore[misc]
    return adopted


Line = tuple[str, int]
BOOKS = {
    made.__file__: made.__name__
    for made in (sched_rows, batch_state, sched_steps, sched_adoption, sched_recovery, prefix_cache, pages)
}


def countdown(left: list[int]) -> bool:
    left[0] -= 1
    return left[0] == 0


def run_until(more: dict[str, Any], dies_at: Callable[[Line], bool]) -> int:
    """Serve everything, with a new scheduler when one dies in front of a line. Returns how many pages were adopted."""
    others = [Request([0, 1] * 5, 6, arrival=4, seed=3), Request([2, 0] * 5, 4, arrival=5, seed=4)]
    crowd = [*requests()[:3], Request([3] * 10, 9, arrival=3, abort_after=5), *others]
    server = SimulatedServer(tiny_config(kv_tokens=64, max_len=24, **more), crowd, "1")

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        name = BOOKS.get(frame.f_code.co_filename)
        if name is not None and event == "line" and dies_at((name, frame.f_lineno)):
            raise Killed
        return trace if name else None

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        server.run()
    except Killed:
        sys.settrace(before)
        server.restart_scheduler()
        server.run()
    finally:
        sys.settrace(before)
    return int(server.total("adopted_pages_total"))


@pytest.fixture
def ledger() -> Ledger:
    return new_ledger(tiny_config())


def fresh(ledger: Ledger) -> Rows:
    return Rows(tiny_config(), ledger, Stats(Segment.create("stats", Stats.size())).writer("scheduler"))


def test_rows_come_back_oldest_first_and_only_live_ones(ledger: Ledger) -> None:
    for row, arrival in ((0, 30), (1, 10), (2, 20), (3, 5), (4, 1)):
        Request([1, 2], 4).write(ledger, row)
        ledger.arrival_ns[row] = arrival
    ledger.done[3] = 1
    ledger.ready[4] = 0  # the tokenizer is still at it
    rows = fresh(ledger)
    assert recover(rows, 0) == 3
    assert list(rows.waiting) == [1, 2, 0]
    rows.enqueue(1, 1)  # the intake record of before comes again
    rows.enqueue(3, 1)
    assert list(rows.waiting) == [1, 2, 0]


@pytest.mark.parametrize(
    ("outputs", "stored", "due"),
    [
        ([9, 9], FINISH_NONE, FINISH_NONE),
        ([9, EOS], FINISH_NONE, FINISH_STOP),
        ([9, 9, 9, 9], FINISH_NONE, FINISH_LENGTH),
        ([9, 9], FINISH_STOP, FINISH_STOP),
        ([], FINISH_NONE, FINISH_NONE),
    ],
)
def test_a_row_ends_as_its_newest_token_says(ledger: Ledger, outputs: list[int], stored: int, due: int) -> None:
    Request([1, 2], 4, ignore_eos=False).write(ledger, 0)
    ledger.begun[0] = 1
    ledger.tokens[0, 2 : 2 + len(outputs)] = outputs
    ledger.count[0] = len(outputs)
    ledger.finish[0] = stored
    rows = fresh(ledger)
    recover(rows, 0)
    assert ledger.finish[0] == due
    assert (ledger.done[0] == 1) == (due != FINISH_NONE) == (not rows.waiting)
    reports = np.concatenate(rows.outbox, axis=1).T.tolist() if rows.outbox else []
    assert reports == ([[0, 1, len(outputs), due]] if outputs else [])
