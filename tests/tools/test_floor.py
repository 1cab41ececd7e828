"""The search for the shortest step, over devices that are functions; and what a run is summed up to."""

from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.tools.test_step_figures import steps
from tools.bench_floor import parse
from tools.bench_watch import Seen
from tools.floor_figures import FACTOR, Probe, probe_of, search, table_text
from tools.floor_picture import picture


def seen_of(spans: np.ndarray) -> Seen:
    return Seen(spans, core_wait_ns={"gpu": 300_000}, counters={"gpu": {"steps_total": 300.0}})


def device(floor_us: float, asked: list[float] | None = None) -> Callable[[float], Probe]:
    """Starved by what a step is shorter than `floor_us`."""

    def measure(pass_us: float) -> Probe:
        if asked is not None:
            asked.append(pass_us)
        starved = max(0.0, (floor_us - pass_us) / floor_us)
        return Probe(8, pass_us, 1000, pass_us + 40, pass_us + 60, 20, 90, starved, starved + 0.01, 70, 60, 5, 0)

    return measure


@pytest.mark.parametrize("floor_us", [60.0, 150.0, 333.0, 900.0])
def test_the_shortest_step_that_is_enough_is_found(floor_us: float) -> None:
    floor = search(device(floor_us), (1600.0, 20.0), 0.01)
    assert floor.found is not None and floor.at_once == 8
    assert floor_us * 0.99 <= floor.found.pass_us <= floor_us / FACTOR**0.5
    assert floor.found.starved <= 0.01


def test_a_device_that_never_starves_is_tried_down_to_the_shortest_step() -> None:
    floor = search(device(0.001), (100.0, 50.0), 0.01)
    assert floor.found is not None and 50 <= floor.found.pass_us < 50 / FACTOR
    assert len(floor.tried) == 4


def test_one_that_always_starves_has_no_floor_and_is_not_tried_for_long() -> None:
    asked: list[float] = []
    floor = search(device(5000.0, asked), (1600.0, 20.0), 0.01, tries=3)
    assert floor.found is None and asked == [1600.0] * 3
    assert "> 1600" in table_text([floor], 0.01)


def test_a_step_that_starved_by_chance_is_tried_again() -> None:
    measured = device(100.0)
    bad = {1600.0, 1600.0 * FACTOR}

    def measure(pass_us: float) -> Probe:
        if pass_us in bad:
            bad.remove(pass_us)
            return device(9999.0)(pass_us)
        return measured(pass_us)

    floor = search(measure, (1600.0, 20.0), 0.01)
    assert floor.found is not None and floor.found.pass_us < 120


def test_a_run_is_summed_up_over_the_time_in_which_all_requests_ran() -> None:
    seen = seen_of(steps(300, gap=100, queued_before=-50))
    seen.running = [(0, 1), (20_000_000, 8), (200_000_000, 8), (400_000_000, 3)]
    probe = probe_of(8, 1000.0, seen)
    assert 160 <= probe.steps <= 165 and probe.step_us == 1000 and probe.gap_us_p50 == 100
    assert probe.starved == pytest.approx(50 / 1100, rel=0.05) and probe.idle == pytest.approx(100 / 1100, rel=0.05)
    assert (probe.scheduler_us, probe.launch_us, probe.core_wait_us) == (80, 20, 1)


def test_a_run_in_which_they_never_all_ran_counts_as_starved() -> None:
    assert probe_of(8, 1000.0, seen_of(steps(300, gap=100, queued_before=50))).starved == 1.0


def test_table_and_picture_show_every_setting() -> None:
    floors = [search(device(us), (1600.0, 20.0), 0.01) for us in (80.0, 5000.0)]
    assert len(table_text(floors, 0.01).splitlines()) == 6
    root = ElementTree.fromstring(picture(floors, 0.01))
    kinds = [element.get("class") for element in root.iter()]
    assert kinds.count("floor") >= 1 and kinds.count("run") + kinds.count("floor") == sum(len(f.tried) for f in floors)


def test_levels_are_checked() -> None:
    assert parse(["--concurrency", "64,1"]).concurrency == [1, 64]
    with pytest.raises(SystemExit):
        parse(["--concurrency", "0"])
