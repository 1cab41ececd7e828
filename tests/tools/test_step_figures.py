"""What spans of steps say: gaps, starvation, parts of the CPU's work, and three steps to draw."""

import numpy as np
import pytest

from shm.trace import What
from tools.step_figures import figures, starved_ns, typical, within

US = 1000


def spans_of(*rows: tuple[What, int, int, int]) -> np.ndarray:
    """(what, step, begin us, end us)."""
    return np.array([(int(what), step, begin * US, end * US) for what, step, begin, end in rows], np.uint64)


def steps(number: int, *, gap: int, queued_before: int) -> np.ndarray:
    """Steps of 1000 us, `gap` us apart, each queued so long before the last one ended (negative: after it)."""
    rows: list[tuple[What, int, int, int]] = []
    for i in range(number):
        begin = 5000 + i * (1000 + gap)
        rows.append((What.STEP, 7 + i, begin, begin + 1000))
        queued = begin - gap - queued_before
        rows += [(What.PLAN, 7 + i, queued - 60, queued - 40), (What.PUSH, 7 + i, queued - 40, queued - 30)]
        rows += [(What.LAUNCH, 7 + i, queued - 20, queued), (What.PROCESS, 7 + i, begin + 1000, begin + 1050)]
        if i:
            rows.append((What.GAP, 7 + i, begin - gap, begin))
    order = np.random.default_rng(1).permutation(len(rows))  # as lanes are read, not as steps were
    return spans_of(*[rows[i] for i in order])


def test_a_step_that_was_queued_in_time_does_not_starve() -> None:
    found = figures(steps(300, gap=20, queued_before=100))
    assert found is not None and found.steps == 300
    assert (found.step_us, found.period_us, found.gap_us_p50, found.gap_us_p99) == (1000, 1020, 20, 20)
    assert (found.starved_us_mean, found.starved_steps, found.starved_time) == (0, 0, 0)
    assert (found.prepare_us, found.launch_us, found.process_us) == (30, 20, 50)


def test_what_passes_until_a_step_is_queued_is_starved_and_the_rest_is_the_devices() -> None:
    found = figures(steps(300, gap=200, queued_before=-150))
    assert found is not None
    assert (found.gap_us_p50, found.starved_us_mean, found.starved_steps) == (200, 150, 1)
    assert found.starved_time == pytest.approx(150 / 1200, rel=0.01)


def test_no_gap_starves_longer_than_it_is() -> None:
    _, gaps, starved = starved_ns(steps(10, gap=200, queued_before=-900))
    assert (starved == gaps).all() and len(gaps) == 9


def test_a_gap_whose_launch_was_overwritten_is_not_called_starved() -> None:
    spans = steps(10, gap=200, queued_before=-150)
    _, _, starved = starved_ns(spans[~((spans[:, 0] == int(What.LAUNCH)) & (spans[:, 1] == 9))])
    assert (starved > 0).sum() == 8


def test_idle_time_without_work_is_no_gap_and_no_period() -> None:
    spans = steps(3, gap=20, queued_before=100)
    far = spans_of(
        (What.STEP, 50, 900_000, 901_000), (What.STEP, 51, 901_020, 902_020), (What.GAP, 51, 901_000, 901_020)
    )
    found = figures(np.concatenate((spans, far)))
    assert found is not None and (found.period_us, found.gap_us_p99) == (1020, 20)


def test_too_few_steps_have_no_figures() -> None:
    assert figures(np.empty((0, 4), np.uint64)) is None
    assert figures(spans_of((What.STEP, 1, 0, 10))) is None
    assert typical(np.empty((0, 4), np.uint64)) == {}


def test_three_usual_steps_begin_at_zero() -> None:
    drawn = typical(steps(30, gap=20, queued_before=100))
    assert drawn["step"] == [(0, 1000), (1020, 2020), (2040, 3040)]
    assert len(drawn["process"]) >= 2 and all(end > begin for begin, end in drawn["launch"])


def test_within_keeps_whole_spans() -> None:
    spans = steps(10, gap=20, queued_before=100)
    kept = within(spans, 6_000 * US, 9_000 * US)
    assert len(kept) and kept[:, 2].min() >= 6_000 * US and kept[:, 3].max() <= 9_000 * US
