"""What a fresh scheduler takes over of the batch tables, and what it does not believe."""

from collections.abc import Callable

import numpy as np
import pytest

from procs.sched_adoption import adopt
from procs.sched_audit import check_conservation
from procs.sched_rows import Rows
from shm.batch_tables import BatchTables
from shm.config import ServerConfig
from shm.ledger import Ledger
from shm.segment import Segment
from shm.stats import Stats
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import Request, new_ledger

MEMORY = 4
PAGES = {1: [5, 6, 7], 2: [5, 9, 8]}  # by entry: rows 0 and 1, whose first pages are one


@pytest.fixture
def config() -> ServerConfig:
    return tiny_config()


@pytest.fixture
def ledger(config: ServerConfig) -> Ledger:
    made = new_ledger(config)
    for row, last in ((0, 3), (1, 2)):
        Request([1] * 4 + [last] * 6, 9).write(made, row)
        made.begun[row], made.count[row] = 1, 3
        made.tokens[row, 10:13] = (7, 8, 9)
        made.arrival_ns[row] = row
    return made


@pytest.fixture
def tables(config: ServerConfig) -> BatchTables:
    made = BatchTables.private(config.entries, config.pages_per_row)
    made.memory = MEMORY
    for entry, pages in PAGES.items():
        made.row[entry], made.generation[entry], made.counted[entry] = entry - 1, 1, 12
        made.pages[entry, : len(pages)] = pages
        made.used[entry] = True
    return made


def fresh(config: ServerConfig, ledger: Ledger, tables: BatchTables) -> Rows:
    return Rows(config, ledger, Stats(Segment.create("stats", Stats.size())).writer("scheduler"), tables)


def found(rows: Rows, row: int) -> list[int]:
    count = int(rows.ledger.prompt_len[row] + rows.ledger.count[row])
    return rows.cache.match(rows.ledger.tokens[row, :count]).tolist()


def test_rows_find_their_full_counted_pages(config: ServerConfig, ledger: Ledger, tables: BatchTables) -> None:
    rows = fresh(config, ledger, tables)
    assert adopt(rows, MEMORY) == 5
    assert (found(rows, 0), found(rows, 1)) == ([5, 6, 7], [5, 9, 8])
    assert not tables.used.any() and not tables.counted.any() and tables.memory == MEMORY
    assert rows.pool.free == rows.pool.usable - 5 and rows.cache.evictable == 5
    check_conservation(rows)
    for row in (0, 1):
        rows.enqueue(row, 1)
    assert rows.admit(99) and rows.admit(99)
    assert rows.state.cursor[1:3].tolist() == [12, 12] and rows.state.shared[1:3].tolist() == [3, 3]
    check_conservation(rows)


def test_pages_of_the_row_that_is_admitted_last_are_evicted_first(
    config: ServerConfig, ledger: Ledger, tables: BatchTables
) -> None:
    rows = fresh(config, ledger, tables)
    adopt(rows, MEMORY)
    assert rows.cache.evict(4).tolist() == [8, 9, 7, 6]


def test_a_count_that_the_ledger_does_not_have_yet_is_not_believed(
    config: ServerConfig, ledger: Ledger, tables: BatchTables
) -> None:
    """Tokens are stored, `counted` is, and the scheduler dies in front of the ledger's count."""
    ledger.count[0] = 2  # the newest token is not in the cache: 11 positions are
    rows = fresh(config, ledger, tables)
    adopt(rows, MEMORY)
    assert found(rows, 0) == [5, 6] and len(rows.cache.pages()) == 4


def test_with_mtp_the_token_behind_belongs_to_the_key(ledger: Ledger) -> None:
    config = tiny_config(speculate="mtp", drafter_file="-", window=2)
    tables = BatchTables.private(config.entries, config.pages_per_row)
    tables.memory, tables.counted[1], tables.generation[1] = MEMORY, 8, 1
    tables.pages[1, :3] = PAGES[1]
    tables.used[1] = True
    rows = fresh(config, ledger, tables)
    assert rows.cache.behind == 1 and adopt(rows, MEMORY) == 2 and found(rows, 0) == [5, 6]
    ledger.tokens[0, 8] += 1
    assert found(rows, 0) == [5], "another token behind it, another page"


Break = Callable[[Ledger, BatchTables], object]
# What is wrong, and which pages the rows find for all that.
DOUBTS: dict[str, tuple[Break, list[int], list[int]]] = {
    "not in use": (lambda _, t: t.used.__setitem__(1, False), [5], [5, 9, 8]),
    "another generation": (lambda _, t: t.generation.__setitem__(1, 2), [5], [5, 9, 8]),
    "a row that is over": (lambda ledger, _: ledger.done.__setitem__(0, 1), [5], [5, 9, 8]),
    "a row that is given out again": (lambda ledger, _: ledger.generation.__setitem__(0, 2), [5], [5, 9, 8]),
    "a count of an earlier life": (lambda ledger, _: ledger.begun.__setitem__(0, 0), [5], [5, 9, 8]),
    "nothing counted": (lambda _, t: t.counted.__setitem__(1, 0), [5], [5, 9, 8]),
    "counted below": (lambda _, t: t.counted.__setitem__(1, -9), [5], [5, 9, 8]),
    "counted beyond": (lambda _, t: t.counted.__setitem__(1, 10**9), [5, 6, 7], [5, 9, 8]),
    "no such row": (lambda _, t: t.row.__setitem__(1, 10**6), [5], [5, 9, 8]),
    "the padding page": (lambda _, t: t.pages.__setitem__((1, 1), 0), [5], [5, 9, 8]),
    "no such page": (lambda _, t: t.pages.__setitem__((1, 1), 10**6), [5], [5, 9, 8]),
    "a page below": (lambda _, t: t.pages.__setitem__((1, 2), -7), [5, 6], [5, 9, 8]),
    "a page of another row": (lambda _, t: t.pages.__setitem__((1, 1), 8), [5], [5, 9, 8]),
    "a page twice": (lambda _, t: t.pages.__setitem__((2, 2), 9), [5, 6, 7], [5, 9]),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_cannot_be_right_ends_what_is_believed_of_that_row(
    config: ServerConfig, ledger: Ledger, tables: BatchTables, doubt: str
) -> None:
    breaks, first, second = DOUBTS[doubt]
    breaks(ledger, tables)
    rows = fresh(config, ledger, tables)
    assert adopt(rows, MEMORY) == len({*first, *second})
    assert (found(rows, 0), found(rows, 1)) == (first, second)
    assert rows.pool.free == rows.pool.usable - rows.cache.cached and not tables.used.any()


@pytest.mark.parametrize(("memory", "is_sound"), [(MEMORY + 1, True), (0, True), (MEMORY, False)])
def test_another_memory_or_a_writer_that_erred_leaves_nothing(
    config: ServerConfig, ledger: Ledger, tables: BatchTables, memory: int, is_sound: bool
) -> None:
    rows = fresh(config, ledger, tables)
    assert adopt(rows, memory, is_sound) == 0
    assert rows.pool.free == rows.pool.usable and not rows.cache.cached
    assert not tables.used.any() and tables.memory == memory


def test_a_row_that_computed_the_same_for_itself_adds_nothing(
    config: ServerConfig, ledger: Ledger, tables: BatchTables
) -> None:
    ledger.tokens[1, :13] = ledger.tokens[0, :13]
    rows = fresh(config, ledger, tables)
    assert adopt(rows, MEMORY) == 3
    assert found(rows, 0) == found(rows, 1) == PAGES[2], "those of the one that came first in the cache"
    assert np.isin([6, 7], rows.pool.free_pages()).all()


@pytest.mark.parametrize("memory", [MEMORY, MEMORY + 1])
def test_a_new_gpu_process_has_the_cached_pages_or_not(
    config: ServerConfig, ledger: Ledger, tables: BatchTables, memory: int
) -> None:
    rows = fresh(config, ledger, tables)
    adopt(rows, MEMORY)
    rows.enqueue(0, 1)
    assert rows.admit(99)
    rows.forget_device(np.array([1]), memory, 1)
    assert list(rows.waiting) == [0] and tables.memory == memory
    assert found(rows, 0) == ([5, 6, 7] if memory == MEMORY else [])
    check_conservation(rows)
