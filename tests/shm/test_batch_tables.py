"""The batch tables: what one scheduler stores, the next one finds, and nothing else is taken for it."""

import pytest

from shm.batch_tables import BatchTables
from shm.segment import LayoutError, Segment

ENTRIES, WIDTH = 5, 7


def two() -> tuple[BatchTables, BatchTables]:
    """Two views of one segment, as two processes have them."""
    segment = Segment.create("batch", BatchTables.size(ENTRIES, WIDTH))
    first = BatchTables(segment, ENTRIES, WIDTH)
    return first, BatchTables(Segment.attach(segment.fd, segment.size, "batch"), ENTRIES, WIDTH)


def test_what_is_stored_is_found() -> None:
    mine, theirs = two()
    assert not theirs.used.any() and not theirs.counted.any() and theirs.memory == 0
    mine.memory = 3
    for at, array in enumerate((mine.row, mine.generation, mine.counted)):
        array[:] = range(10 * at, 10 * at + ENTRIES)
    mine.pages[2] = range(WIDTH)
    mine.used[2] = True
    assert theirs.memory == 3 and theirs.used.tolist() == [False, False, True, False, False]
    for at, array in enumerate((theirs.row, theirs.generation, theirs.counted)):
        assert array.tolist() == list(range(10 * at, 10 * at + ENTRIES))
    assert theirs.pages[2].tolist() == list(range(WIDTH)) and not theirs.pages[[0, 1, 3, 4]].any()


def test_cleared_tables_say_nothing() -> None:
    mine, theirs = two()
    mine.used[:], mine.counted[:] = True, 9
    mine.clear()
    assert not theirs.used.any() and not theirs.counted.any()


def test_the_memory_stays_while_an_entry_is_in_use() -> None:
    mine, _ = two()
    mine.used[1] = True
    with pytest.raises(AssertionError, match="in another memory"):
        mine.memory = 2


@pytest.mark.parametrize("shape", [(ENTRIES + 1, WIDTH), (ENTRIES, WIDTH - 1)])
def test_tables_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    segment = Segment.create("batch", BatchTables.size(ENTRIES, WIDTH))
    BatchTables(segment, ENTRIES, WIDTH)
    with pytest.raises(LayoutError, match="layout"):
        BatchTables(segment, *shape)
