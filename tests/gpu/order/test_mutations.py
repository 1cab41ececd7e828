"""Every record and every wait of the step program is dropped in turn: the checker flags each one.

Three things look at each mutant: the order checker, while it is queued; the adversary, which counts the policies that
give wrong tokens; and real threads, which count the runs that do. `pytest -s` prints the table.

Three programs are mutated. Two are served by the real scheduler, which is never more than two steps ahead; the third
queues everything before anything has run, as no scheduler does, so that nothing but events keeps the steps apart.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.host import HostDevice
from gpu.device.mutations import Edge, MutatedDevice
from gpu.device.order import OrderChecker, Violation
from gpu.device.policies import CALLS, Policy, policies
from tests.gpu.order.served_mill import Asked, ServedMill, check, served_config, workload
from tests.gpu.paged_mill import Bench, reference, small_config

STREAMS = ("schedule", "forward", "copy", "lengths")
SEEDS, RUNS = 6, 3
# Edges whose loss the checker need not flag, each with the reason why nothing can go wrong without it. Whoever adds one
# adds a test of the reason as well.
REDUNDANT: dict[Edge, str] = {}


class Row(NamedTuple):
    """What became of one mutant."""

    edge: Edge
    flagged: Violation | None
    wrong_orders: int
    orders: int
    wrong_runs: int
    runs: int

    def __str__(self) -> str:
        flagged = "flagged" if self.flagged else "not flagged"
        return (
            f"{self.edge!s:32} {flagged:12} {self.wrong_orders:3d} of {self.orders} orders wrong"
            f" {self.wrong_runs:3d} of {self.runs} timing runs wrong"
        )


def serve(device: Any, which: int) -> None:
    """A mixed workload, and one that keeps one entry busy with row after row, which is what the fence is for."""
    long = list(range(10, 27))
    behind = [
        Asked(prompt=long, max_new=1),
        Asked(prompt=[3, 4], max_new=12, arrival=1, abort_after=6),
        Asked(prompt=long, max_new=6, arrival=2),
    ]
    requests = behind if which else workload(0)
    config = served_config(max_running=1 if which else 3)
    check(requests, ServedMill(device, config, requests, early_lengths=True).run(), config)


def queue_ahead(device: Any) -> None:
    """Chunks, and decode steps of which each gives a row another page, all queued at once."""
    bench = Bench(device, small_config(), early_lengths=True)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    for entry, prompt in enumerate(prompts):
        bench.prompt(entry, prompt)
    bench.step(slots=bench.fill(1, [1, 2]), sampling=[(1, 0.0, 1)], chunks=[(1, 0, 0, 3, 1)])
    bench.step(decode=[1], slots=bench.fill(2, [20, 21]), sampling=[(2, 0.0, 2)], chunks=[(2, 1, 0, 5, 1)])
    for i in range(6):
        bench.step(decode=[2, 1], slots=[(1, 2 + i, 3 + i), (2, 2 + i, 22 + i)])
    device.synchronize()
    one, two = reference(prompts[0], 8), reference(prompts[1], 7)
    expected = [[one[0]], [one[1], two[0]], *([two[i + 1], one[i + 2]] for i in range(6))]
    assert [step.tokens for step in bench.completed] == expected


PROGRAMS: dict[str, Callable[[Any], None]] = {
    "served": functools.partial(serve, which=0),
    "one entry": functools.partial(serve, which=1),
    "ahead": queue_ahead,
}


def goes_wrong(device: Any, program: str, edge: Edge | None) -> bool:
    try:
        PROGRAMS[program](MutatedDevice(device, edge))
    except Exception:  # noqa: BLE001 - a fault is as wrong as a token
        return True
    finally:
        with contextlib.suppress(Exception):
            device.close()
    return False


def flagged(edge: Edge | None) -> Violation | None:
    """What the checker says to the programs without `edge`, at once, whatever their tokens are."""
    for program in PROGRAMS.values():
        checker = OrderChecker(collect=True)
        with contextlib.suppress(Exception):  # wrong tokens or a fault: what the checker says does not depend on it
            program(MutatedDevice(AdversaryDevice(observer=checker), edge))
        if checker.violations:
            return checker.violations[0]
    return None


def chosen() -> list[Policy]:
    return list(policies((*STREAMS, CALLS), SEEDS))


@functools.cache
def edges() -> tuple[Edge, ...]:
    found: dict[Edge, int] = {}
    for program in PROGRAMS.values():
        device = MutatedDevice(AdversaryDevice(), None)
        program(device)
        found |= device.edges
    return tuple(found)


@functools.cache
def row(edge: Edge) -> Row:
    wrong = [goes_wrong(AdversaryDevice(policy), which, edge) for which in PROGRAMS for policy in chosen()]
    runs = [goes_wrong(HostDevice(), which, edge) for which in PROGRAMS for _ in range(RUNS)]
    return Row(edge, flagged(edge), sum(wrong), len(wrong), sum(runs), len(runs))


def table() -> list[Row]:
    return [row(edge) for edge in edges()]


def test_the_program_has_the_edges_that_its_picture_shows() -> None:
    assert {str(edge) for edge in edges()} == {
        "schedule waits for left", "schedule waits for fence", "schedule records staged", "forward waits for staged",
        "forward records fence", "forward records published", "forward records done", "lengths waits for published",
        "lengths records lengths_out", "copy waits for done", "copy waits for lengths_out", "copy records left",
    }  # fmt: skip


def test_every_edge_that_is_dropped_is_flagged() -> None:
    rows = table()
    print("\n" + "\n".join(map(str, rows)))
    unflagged = {row.edge for row in rows if row.flagged is None}
    assert unflagged == set(REDUNDANT)


def test_nothing_is_flagged_and_nothing_is_wrong_with_all_edges() -> None:
    assert flagged(None) is None
    assert not any(goes_wrong(AdversaryDevice(policy), which, None) for which in PROGRAMS for policy in chosen())


@pytest.mark.parametrize(
    ("edge", "first", "second", "buffer"),
    [
        (Edge("wait", "fence", "schedule"), "'gather' on stream forward", "on stream schedule", "table"),
        (Edge("wait", "staged", "forward"), "on stream schedule", "'gather' on stream forward", "table"),
        (Edge("wait", "done", "copy"), "on stream", "'result' on stream copy", "outcome"),
        (Edge("wait", "left", "schedule"), "on stream copy", "'upload' on stream schedule", "outcome"),
    ],
)
def test_the_violation_names_both_launches_both_streams_and_the_region(
    edge: Edge, first: str, second: str, buffer: str
) -> None:
    violation = flagged(edge)
    assert violation is not None
    text = str(violation)
    assert first in text and second in text, text
    assert "bytes" in text and "record an event on" in text, text
    assert buffer in text or "descriptor" in text or "sampling" in text, text


def test_the_adversary_finds_most_mutants_by_their_tokens() -> None:
    """Control of the whole: what the checker flags is no pedantry."""
    wrong = {row.edge for row in table() if row.wrong_orders}
    assert {"staged", "done"} <= {edge.family for edge in wrong}
