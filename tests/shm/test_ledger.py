"""The ledger: planes that do not overlap, and stop strings that survive."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shm.ledger import FINISH_ERROR, FINISH_NAMES, FINISH_NONE, PLANES, Ledger
from shm.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, STOP_BYTES
from shm.segment import LayoutError, Segment

WIDEST = chr(0x10FFFF)


def make(rows: int, max_len: int) -> tuple[Ledger, Ledger]:
    """Return two views of one ledger, as two processes have them."""
    segment = Segment.create("ledger", Ledger.size(rows, max_len))
    other = Segment.attach(segment.fd, segment.size, "ledger")
    return Ledger(segment, rows, max_len), Ledger(other, rows, max_len)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.randoms(use_true_random=False))
def test_every_cell_of_every_plane_is_its_own(rows: int, max_len: int, random: object) -> None:
    mine, theirs = make(rows, max_len)
    rng = np.random.default_rng(rows * 1000 + max_len)
    expected = {}
    for plane in PLANES:
        view = getattr(mine, plane.name)
        columns = plane.columns or max_len
        assert view.shape == ((rows,) if plane.columns == 1 else (rows, columns))
        assert not view.any(), "a new ledger is all zero"
        expected[plane.name] = rng.integers(1, 120, view.shape).astype(plane.dtype)
    order = list(expected)
    random.shuffle(order)  # type: ignore[attr-defined]
    for name in order:
        getattr(mine, name)[...] = expected[name]
    for name, values in expected.items():
        assert np.array_equal(getattr(theirs, name), values), name
    row = int(rng.integers(rows))
    theirs.tokens[row, max_len - 1 :] = -5
    theirs.generation[row] = 2**40
    expected["tokens"][row, max_len - 1] = -5
    expected["generation"][row] = 2**40
    for name, values in expected.items():
        assert np.array_equal(getattr(mine, name), values), name
    mine.segment.close()


def test_planes_of_two_writers_share_no_cache_line() -> None:
    mine, _ = make(3, 5)
    start = np.frombuffer(mine.segment.buf, np.uint8).ctypes.data
    lines: dict[int, str] = {}
    for plane in PLANES:
        view = getattr(mine, plane.name)
        assert (view.ctypes.data - start) % view.itemsize == 0
        for line in range((view.ctypes.data - start) // 64, (view.ctypes.data - start + view.nbytes - 1) // 64 + 1):
            assert lines.setdefault(line, plane.writer) == plane.writer


STOPS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=MAX_STOP_CHARS), max_size=MAX_STOP_STRINGS)


@settings(deadline=None)
@given(STOPS, STOPS)
@example([WIDEST * MAX_STOP_CHARS] * MAX_STOP_STRINGS, ["\0"])
@example(["a", "ab", "\n\n", "€"], [])
def test_stop_strings_round_trip_over_those_of_an_earlier_request(first: list[str], second: list[str]) -> None:
    mine, theirs = make(3, 4)
    mine.write_stop_strings(0, ["x"])
    mine.write_stop_strings(2, ["y"])
    for strings in (first, second):
        mine.write_stop_strings(1, strings)
        assert theirs.stop_strings(1) == strings
    assert (theirs.stop_strings(0), theirs.stop_strings(2)) == (["x"], ["y"])
    mine.segment.close()


@pytest.mark.parametrize(
    "strings", [["a"] * (MAX_STOP_STRINGS + 1), [""], ["a" * (MAX_STOP_CHARS + 1)], ["\ud800"]], ids=str
)
def test_stop_strings_that_do_not_fit_are_refused_and_change_nothing(strings: list[str]) -> None:
    mine, _ = make(2, 4)
    mine.write_stop_strings(1, ["old"])
    with pytest.raises(ValueError):
        mine.write_stop_strings(1, strings)
    assert mine.stop_strings(1) == ["old"]


def test_a_ledger_of_another_shape_is_refused() -> None:
    segment = Segment.create("ledger", Ledger.size(4, 8))
    Ledger(segment, 4, 8)
    with pytest.raises(LayoutError, match="layout"):
        Ledger(segment, 8, 4)


def test_constants_agree() -> None:
    assert len(FINISH_NAMES) == FINISH_ERROR + 1
    assert FINISH_NAMES[FINISH_NONE] is None
    columns = {plane.name: plane.columns for plane in PLANES}
    assert columns["stop_ids"] == MAX_STOP_TOKEN_IDS
    assert columns["stop_text"] == STOP_BYTES >= MAX_STOP_STRINGS * len((WIDEST * MAX_STOP_CHARS).encode())
