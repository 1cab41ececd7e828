"""Stats against a dictionary; a restarted writer goes on counting."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.control import STAGES
from shm.segment import LayoutError, Segment
from shm.stats import BUCKETS_S, TABLE, Histogram, Stats

COUNTERS = [(stage, name) for stage in STAGES for name in TABLE[stage].counters]
GAUGES = [(stage, name) for stage in STAGES for name in TABLE[stage].gauges]
HISTOGRAMS = [(stage, name) for stage in STAGES for name in TABLE[stage].histograms]

ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(COUNTERS), st.integers(0, 2**40)),
    st.tuples(st.just("set"), st.sampled_from(GAUGES), st.floats(allow_nan=False)),
    st.tuples(st.just("observe"), st.sampled_from(HISTOGRAMS), st.floats(0, 1000)),
)


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.integers(0, 60))
def test_against_a_dictionary(actions: list[tuple[str, tuple[str, str], Any]], restart_at: int) -> None:
    segment = Segment.create("stats", Stats.size())
    writers = {stage: Stats(segment).writer(stage) for stage in STAGES}
    reader = Stats(Segment.attach(segment.fd, segment.size, "stats"))
    counters: Counter[tuple[str, str]] = Counter()
    gauges = dict.fromkeys(GAUGES, 0.0)
    observed: dict[tuple[str, str], list[float]] = {key: [] for key in HISTOGRAMS}
    for i, (action, (stage, name), value) in enumerate(actions):
        if i == restart_at:
            writers = {stage: reader.writer(stage) for stage in STAGES}
        getattr(writers[stage], action)(name, value)
        if action == "add":
            counters[stage, name] += value
        elif action == "set":
            gauges[stage, name] = value
        else:
            observed[stage, name].append(value)
    seen = reader.read()
    segment.close()
    assert {key: seen[key[0]][key[1]] for key in COUNTERS} == {key: counters[key] for key in COUNTERS}
    assert {key: seen[key[0]][key[1]] for key in GAUGES} == gauges
    for (stage, name), values in observed.items():
        histogram = seen[stage][name]
        assert isinstance(histogram, Histogram)
        assert histogram.count == len(values)
        assert histogram.sum == pytest.approx(sum(values))
        for i, bound in enumerate(BUCKETS_S):
            assert sum(histogram.counts[: i + 1]) == sum(value <= bound for value in values)
    assert {stage: set(values) for stage, values in seen.items()} == {
        stage: {*names.counters, *names.gauges, *names.histograms} for stage, names in TABLE.items()
    }


def test_quantiles_are_bounds_of_buckets() -> None:
    writer = Stats(segment := Segment.create("stats", Stats.size())).writer("gpu")
    for seconds in [1.5e-6] * 98 + [0.004, 1e9]:
        writer.observe("step_gap_s", seconds)
    histogram = Stats(segment).read_stage("gpu")["step_gap_s"]
    assert isinstance(histogram, Histogram)
    assert [histogram.quantile(q) for q in (0.5, 0.98, 0.99, 1.0)] == [2e-6, 2e-6, 5e-3, float("inf")]
    assert Histogram(tuple([0] * (len(BUCKETS_S) + 1)), 0.0).quantile(0.5) == 0.0


def test_unknown_names_are_errors() -> None:
    writer = Stats(Segment.create("stats", Stats.size())).writer("gpu")
    for call in (
        lambda: writer.add("launches"),
        lambda: writer.set("steps_total", 1),
        lambda: writer.observe("graphs", 1),
    ):
        with pytest.raises(KeyError):
            call()


def test_another_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment.create("stats", Stats.size())
    Stats(segment)
    monkeypatch.setattr("shm.stats._SCHEMA", 1)
    with pytest.raises(LayoutError, match="layout"):
        Stats(segment)
