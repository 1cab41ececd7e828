"""What the scheduler tells of steps with drafts: the policy, the counters and a request's usage get the truth."""

from dataclasses import dataclass, field

import numpy as np

from procs.sched_steps import Flight
from shm.records import ResultLayout, StepLayout
from shm.stats import accepted_runs
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import Request, SimulatedServer

CONFIG = tiny_config(window=4, max_len=64, kv_tokens=256, prefill_chunk=16, max_running=3)


@dataclass
class Spy:
    """In the policy's place: drafts as it is told to, and writes down what it hears."""

    next_drafts: int = 3
    asked: list[tuple[int, bool]] = field(default_factory=list)
    gains: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, bool, int]] = field(default_factory=list)

    def drafts(self, rows: int, mixed: bool) -> int:
        self.asked.append((rows, mixed))
        return self.next_drafts

    def gained(self, rows: int, tokens: int) -> None:
        self.gains.append((rows, tokens))

    def took(self, rows: int, drafted: bool, ns: int) -> None:
        self.times.append((rows, drafted, ns))


class Script:
    """A scheduler between which and the device somebody stands and makes up the results."""

    def __init__(self) -> None:
        self.server = SimulatedServer(CONFIG, [])
        self.spy = Spy()
        self.server.steps.drafting = self.spy  # type: ignore[assignment]
        self.view = StepLayout(CONFIG).view(np.zeros(StepLayout(CONFIG).nbytes // 4, dtype=np.int32))
        self.result = ResultLayout(CONFIG).view(np.zeros(ResultLayout(CONFIG).nbytes // 4, dtype=np.int32))
        self.step = 0

    def enqueue(self, row: int, limit: int, **more: object) -> Request:
        request = Request([1] * (4 + row), limit, **more)  # type: ignore[arg-type]
        request.write(self.server.ledger, row)
        self.server.rows.enqueue(row, request.generation)
        return request

    def plan(self) -> Flight:
        flight = self.server.steps.plan(self.view, self.step)
        assert flight is not None
        self.step += 1
        return flight

    def result_is(self, counts: list[int], *, window: int = 4, ns: int = 4000) -> None:
        self.result.n_rows, self.result.window = len(counts), window
        self.result.counts[: len(counts)] = counts
        self.result.tokens[:window, : len(counts)] = 9
        self.result.begin_ns, self.result.end_ns = 10**9, 10**9 + ns
        self.server.steps.apply(self.result)

    def runs(self) -> list[int]:
        return [int(self.server.total(accepted_runs(drafts))) for drafts in range(4)]


def two_rows() -> Script:
    """Rows of 3 and 40 tokens, of which each has its first."""
    script = Script()
    script.enqueue(0, 3)
    script.enqueue(1, 40)
    script.plan()
    script.result_is([1, 1])
    return script


def test_a_step_of_chunks_alone_tells_nothing() -> None:
    script = two_rows()
    assert script.spy.asked == [(0, True)]
    assert script.spy.gains == script.spy.times == [] and script.runs() == [0, 0, 0, 0]


def test_the_policy_hears_gains_and_times_of_steps_that_decode() -> None:
    script = two_rows()
    script.plan()
    script.result_is([4, 2], ns=4000)
    assert script.spy.asked[1:] == [(2, False)]
    assert script.spy.gains == [(2, 6)] and script.spy.times == [(2, True, 4000)]
    script.spy.next_drafts = 0
    script.plan()
    script.result_is([1], window=1, ns=1500)
    assert script.spy.gains == [(2, 6)], "without drafts nothing can be gained"
    assert script.spy.times == [(2, True, 4000), (1, False, 1500)]


def test_rows_that_have_ended_meanwhile_gain_nothing_but_took_their_time() -> None:
    script = two_rows()
    script.plan()
    script.plan()  # ahead of the result that ends the first row
    script.result_is([4, 3])
    script.result_is([4, 2], ns=5000)
    assert script.spy.gains == [(2, 7), (1, 2)]
    assert script.spy.times == [(2, True, 4000), (2, True, 5000)]
    assert script.runs() == [0, 1, 1, 1] and script.server.total("drafted_tokens_total") == 9


def test_rows_that_were_aborted_gain_nothing() -> None:
    script = two_rows()
    script.plan()
    script.server.ledger.abort[0] = script.server.ledger.generation[0]
    script.server.rows.observe()
    script.result_is([4, 2])
    assert script.spy.gains == [(1, 2)] and script.runs() == [0, 1, 0, 0]


def test_no_time_is_taken_of_a_step_with_chunks() -> None:
    script = two_rows()
    script.enqueue(2, 5)
    script.plan()
    assert script.spy.asked[1:] == [(2, True)]
    script.result_is([2, 3, 1])
    assert script.spy.gains == [(2, 5)] and script.spy.times == []


def test_usage_counts_what_a_request_keeps_and_begins_anew_in_a_row_that_is_used_again() -> None:
    script = two_rows()
    script.plan()
    script.result_is([4, 3])  # of the first row's four tokens, two are within its limit
    ledger = script.server.ledger
    counts = [plane[:2].tolist() for plane in (ledger.draft_steps, ledger.drafted, ledger.accepted)]
    assert counts == [[1, 1], [3, 3], [1, 2]]
    script.enqueue(0, 9)
    assert ledger.draft_steps[0] == ledger.drafted[0] == ledger.accepted[0] == 0
    assert ledger.accepted[1] == 2
