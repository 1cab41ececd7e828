"""The scheduler's choices, each against its rule."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procs import policy
from procs.batch_state import BatchState


def state_of(rows: Sequence[dict[str, int]], page_size: int = 1, window: int = 1) -> BatchState:
    state = BatchState(len(rows), pages_per_row=200, page_size=page_size, window=window, stop_ids=2)
    for order, numbers in enumerate(rows):
        entry = state.begin(row=order, generation=1, order=order)
        for name, value in numbers.items():
            getattr(state, name)[entry] = value
    return state


def test_decode_rows_are_those_that_can_still_grow() -> None:
    state = state_of(
        [
            {"fill": 9, "cursor": 9, "limit": 5},  # 1: its last chunk may still be in flight
            {"fill": 9, "cursor": 8, "limit": 5},  # 2: a token left to prefill
            {"fill": 9, "cursor": 9, "limit": 5, "outputs": 3, "in_flight": 2},  # 3: certain to reach its limit
            {"fill": 9, "cursor": 9, "limit": 5, "outputs": 3, "in_flight": 1},  # 4
        ]
    )
    assert policy.decode_rows(state).tolist() == [1, 4]
    state.end(4)
    assert policy.decode_rows(state).tolist() == [1]


def test_nobody_runs_in_an_empty_batch() -> None:
    state = BatchState(3, pages_per_row=4, page_size=1, window=1, stop_ids=1)
    assert len(policy.decode_rows(state)) == len(policy.prefill_rows(state)) == 0


@pytest.mark.parametrize(
    ("window", "page_size", "counted", "pages", "wanted"),
    [
        (1, 16, 14, 1, 0),
        (1, 16, 15, 1, 1),
        (4, 1, 100, 108, 0),
        (4, 1, 103, 108, 3),
        (4, 16, 9, 1, 1),
        (16, 4, 0, 1, 7),
    ],
)
def test_rows_are_filled_two_windows_beyond_their_count(
    window: int, page_size: int, counted: int, pages: int, wanted: int
) -> None:
    state = state_of([{"counted": counted, "fill": min(counted, 5), "page_count": pages}], page_size, window)
    assert policy.pages_wanted(state, np.array([1])).tolist() == [wanted]
    assert wanted == max(0, policy.pages_for_prompt(state, counted) - pages), "admission reserves by the same rule"


def test_a_row_whose_last_chunk_is_in_flight_counts_as_filled() -> None:
    state = state_of([{"fill": 20, "cursor": 20, "counted": 8, "page_count": 21}])
    assert policy.pages_wanted(state, np.array([1])).tolist() == [1]


def test_prefill_is_first_come_first_served() -> None:
    state = state_of([{"fill": 9}, {"fill": 9}, {"fill": 9, "cursor": 9}, {"fill": 9, "cursor": 4}])
    state.order[1:] = [40, 20, 10, 30]
    assert policy.prefill_rows(state).tolist() == [2, 4, 1]


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 100))
def test_budget_goes_in_turn(remaining: list[int], budget: int) -> None:
    shares = policy.split_budget(np.array(remaining, dtype=np.int64), budget).tolist()
    expected = []
    for tokens in remaining:
        expected.append(min(tokens, budget - sum(expected)))
    assert shares == expected


def test_the_last_row_is_never_retracted() -> None:
    state = state_of([{"outputs": 1}])
    with pytest.raises(AssertionError):
        policy.retraction_victim(state)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=2, max_size=6))
def test_retraction_takes_fewest_outputs_then_longest_prompt_then_newest(rows: list[tuple[int, int]]) -> None:
    state = state_of([{"outputs": outputs, "prompt": prompt} for outputs, prompt in rows])
    expected = min(range(len(rows)), key=lambda at: (rows[at][0], -rows[at][1], -at))
    assert policy.retraction_victim(state) == expected + 1


def test_admission_leaves_headroom_to_those_that_run() -> None:
    assert policy.may_admit(pages_wanted=10, pages_available=10, running=0, headroom=4)
    assert not policy.may_admit(pages_wanted=10, pages_available=13, running=1, headroom=4)
    assert policy.may_admit(pages_wanted=10, pages_available=14, running=1, headroom=4)


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_accept_cuts_at_the_first_stop_or_the_limit(data: st.DataObject, window: int, rows: int) -> None:
    token = st.integers(0, 5)
    runs = data.draw(st.lists(st.lists(token, min_size=1, max_size=window), min_size=rows, max_size=rows))
    stops = data.draw(st.lists(st.tuples(token | st.just(-1), token | st.just(-1)), min_size=rows, max_size=rows))
    room = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    tokens = np.full((window, rows), stops[0][0], dtype=np.int32)  # what lies behind a run must not matter
    for at, run in enumerate(runs):
        tokens[: len(run), at] = run
    counts = np.array([len(run) for run in runs], dtype=np.int32)
    taken, stopped = policy.accept(tokens, counts, np.array(stops, dtype=np.int32), np.array(room))
    for at, run in enumerate(runs):
        kept = run[: room[at]]
        ends = [index for index, value in enumerate(kept) if value in stops[at]]
        assert bool(stopped[at]) == bool(ends)
        assert taken[at] == (ends[0] + 1 if ends else len(kept))
