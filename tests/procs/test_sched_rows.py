"""The rows' ledger, as others see it in between: what is stored before what. And when a request that waits is asked
again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from procs.sched_rows import Rows
from shm.ledger import FINISH_ABORT, FINISH_LENGTH, FINISH_NONE, Ledger
from shm.segment import Segment
from shm.stats import Stats
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import UNWRITTEN, Request, SimulatedServer, new_ledger

ENOUGH = 10**6  # slot writes


class Plane(np.ndarray):
    """A plane of the ledger with somebody who looks just before every store: `watch(key, value)`."""

    watch: Callable[[Any, Any], None]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.watch(key, value)
        super().__setitem__(key, value)


def watch(ledger: Ledger, name: str, see: Callable[[Any, Any], None]) -> None:
    plane = getattr(ledger, name).view(Plane)
    plane.watch = see
    setattr(ledger, name, plane)


class Onlooker:
    """Asserts, at each store of a word that publishes others, that those are there."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.seen = {"count": 0, "begun": 0, "done": 0}
        ledger.tokens[:] = UNWRITTEN
        watch(ledger, "count", self.count)
        watch(ledger, "begun", self.begun)
        watch(ledger, "done", self.done)

    def count(self, rows: Any, counts: Any) -> None:
        ledger = self.ledger
        for row, count in zip(np.atleast_1d(rows).tolist(), np.atleast_1d(counts).tolist(), strict=True):
            assert count == 0 or ledger.begun[row] == ledger.generation[row], "a count before the row had begun"
            begin = int(ledger.prompt_len[row])
            assert (ledger.tokens[row, begin : begin + count] != UNWRITTEN).all(), "a count before its tokens"
            self.seen["count"] += count > 0

    def begun(self, row: int, generation: int) -> None:
        ledger = self.ledger
        assert ledger.count[row] == 0 and ledger.finish[row] == FINISH_NONE, "begun before it was reset"
        self.seen["begun"] += 1

    def done(self, rows: Any, generations: Any) -> None:
        assert (self.ledger.finish[rows] != FINISH_NONE).all(), "done before the finish"
        self.seen["done"] += len(rows)


def requests(config_rows: int) -> list[Request]:
    """Twice as many as there are rows, so that each is used again, with fewer tokens than it held before."""
    first = [Request([1] * 5, 9 + at % 3, seed=at, abort_after=6 if at % 4 == 0 else None) for at in range(config_rows)]
    return first + [Request([2] * 2, 3 + at % 2, arrival=1, seed=at) for at in range(config_rows)]


@pytest.mark.parametrize("window", [1, 4])
def test_what_publishes_is_stored_last(window: int) -> None:
    config = tiny_config(window=window, kv_tokens=40)
    server = SimulatedServer(config, requests(config.rows))
    onlooker = Onlooker(server.ledger)
    server.run()
    assert onlooker.seen["begun"] == onlooker.seen["done"] == 2 * config.rows
    assert onlooker.seen["count"] > 10 * config.rows // window
    assert server.total("retractions_total") > 0 or window > 1


def test_a_restart_stores_in_the_same_order() -> None:
    """It ends rows whose newest token was stored and whose finish was not."""
    server = SimulatedServer(tiny_config(), [Request([1, 2], 4)])
    onlooker = Onlooker(server.ledger)
    while server.ledger.count[server.requests[0].row] < 4:
        server.one_turn()
    row = server.requests[0].row
    server.ledger.finish[row] = FINISH_NONE
    server.ledger.done.view(np.ndarray)[row] = 0
    server.requests[0].finish = FINISH_NONE
    server.by_row[row] = server.requests[0]
    before = onlooker.seen["done"]
    server.restart_scheduler()
    assert onlooker.seen["done"] == before + 1
    assert server.requests[0].finish == FINISH_LENGTH


def waiting_behind_its_own_prompt() -> tuple[Rows, int]:
    """Two requests with one prompt, and pages for both only if they share them. Returns the first one's entry."""
    config = tiny_config(max_running=2, max_len=20, kv_tokens=32)
    ledger = new_ledger(config)
    rows = Rows(config, ledger, Stats(Segment.create("stats", Stats.size())).writer("scheduler"))
    for row in range(2):
        Request([7] * 16, 4).write(ledger, row)
        rows.enqueue(row, 1)
    entry = rows.admit(ENOUGH)
    assert entry and not rows.admit(ENOUGH) and not rows.admit(ENOUGH)
    rows.state.cursor[entry] = rows.state.counted[entry] = 16
    return rows, entry


def test_a_prefix_that_was_cached_lets_in_who_waits_for_it() -> None:
    rows, entry = waiting_behind_its_own_prompt()
    available = rows.pages_available
    rows.keep_prefix(entry)
    assert rows.pages_available == available, "nothing else has changed"
    second = rows.admit(ENOUGH)
    assert second and rows.state.shared[second] == 3


def test_who_was_refused_is_not_looked_up_again_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = waiting_behind_its_own_prompt()
    monkeypatch.setattr(rows.cache, "match", lambda tokens: pytest.fail("walked the tree"))
    assert not rows.admit(ENOUGH)


def test_each_ended_request_is_counted_once_as_finished_or_as_aborted() -> None:
    server = SimulatedServer(tiny_config(), [Request([at + 1], 9, abort_after=at or None) for at in range(3)]).run()
    stats = server.stats.read_stage("scheduler")
    aborted = sum(request.finish == FINISH_ABORT for request in server.requests)
    assert aborted == 2 and (stats["finished_total"], stats["aborted_total"]) == (1, 2)
