"""Every record and every wait of the step program is dropped in turn, and every record is issued too early.

Three things look at each mutant: the order checker, while it is queued; the adversary, which counts the policies that
give something wrong; and real threads with operations of random length, which count the runs that do. What the checker
does not flag stands in `REDUNDANT` with its reason, and is right in every order. The tests look at each mutant until
something is wrong; `python -m tests.gpu.order.test_mutations` prints the table of all orders and runs.

Some programs are served by the real scheduler, which is never more than two steps ahead; the others queue everything
before anything has run, as no scheduler does, so that nothing but events keeps the steps apart.
"""

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.host import HostDevice
from gpu.device.mutations import RECORD, WAIT, Edge, How, MutatedDevice
from gpu.device.order import OrderChecker, Violation
from gpu.device.policies import Policy, policies
from tests.gpu.order.served_mill import Asked, ServedMill, check, served_config, workload
from tests.gpu.paged_mill import Bench, reference, small_config

pytestmark = pytest.mark.unordered  # the checker is asked by name, and luck is counted without it

STREAMS = ("schedule", "forward", "copy", "lengths")
SEEDS, RUNS = 4, 6
JITTER_S = 5e-4


class Mutation(NamedTuple):
    """One edge, and what became of it."""

    edge: Edge
    how: How = "drop"

    def __str__(self) -> str:
        return f"{self.edge}{', too early' if self.how == 'early' else ', dropped'}"


# What the checker need not flag, each with the reason why nothing can go wrong.
REDUNDANT: dict[Mutation, str] = {}


class Row(NamedTuple):
    """What became of one mutant."""

    mutation: Mutation
    flagged: Violation | None
    wrong_orders: int
    orders: int
    wrong_runs: int
    runs: int

    def __str__(self) -> str:
        flagged = "flagged" if self.flagged else "redundant" if self.mutation in REDUNDANT else "NOT FLAGGED"
        return (
            f"{self.mutation!s:40} {flagged:12} {self.wrong_orders:3d} of {self.orders:2d}"
            f"              {self.wrong_runs:3d} of {self.runs:2d}"
        )


HEAD = f"{'mutation':40} {'checker':12} wrong orders (adversary)  wrong timing runs (threads)"


# ---------------------------------------------------------------------- the programs


def serve(device: Any, which: int) -> None:
    """A mixed workload with retractions; one that keeps one entry busy with row after row, as the fence needs; and one
    with drafts.
    """
    long = list(range(10, 27))
    if which == 2:
        config, requests = served_config(window=3, kv_tokens=64), workload(1)
        check(requests, ServedMill(device, config, requests).run(), config)
        return
    behind = [
        Asked(prompt=long, max_new=1),
        Asked(prompt=[3, 4], max_new=12, arrival=1, abort_after=6),
        Asked(prompt=long, max_new=6, arrival=2),
    ]
    requests = behind if which else workload(0)
    config = served_config(max_running=1 if which else 3)
    check(requests, ServedMill(device, config, requests, early_lengths=not which).run(), config)


def note_lengths(bench: Bench, samples: list[int]) -> list[list[int]]:
    """Whoever wants lengths early, here: it looks at each copy behind its event. Filled as steps run."""
    early, seen = bench.program.early_lengths, []
    assert early is not None
    queue_copy, rows = early.queue, iter(samples)

    def queue_and_look(lane: Any) -> None:
        queue_copy(lane)
        copy, count = early.copies[lane.index], next(rows)

        def look() -> None:
            seen.append(copy.array[:count].tolist())

        bench.device.launch(early.stream, look, reads=(copy.region(),), writes=(), name="look at lengths")

    early.queue = queue_and_look  # type: ignore[method-assign]
    return seen


def queue_ahead(device: Any, early_lengths: bool, spoil: Callable[[Bench], None] = lambda _: None) -> None:
    """Chunks, decode steps of which each gives a row another page, and an entry and pages that are used again."""
    bench = Bench(device, small_config(), early_lengths=early_lengths)
    spoil(bench)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [30, 31]]
    for row, prompt in enumerate(prompts):
        bench.prompt(row, prompt)
    lengths = note_lengths(bench, [1, 2, 2, 2, 2, 2, 2, 2, 2]) if early_lengths else None
    bench.step(slots=bench.fill(1, [1, 2]), sampling=[(1, 0.0, 1)], chunks=[(1, 0, 0, 3, 1)])
    bench.step(decode=[1], slots=bench.fill(2, [20, 21]), sampling=[(2, 0.0, 2)], chunks=[(2, 1, 0, 5, 1)])
    for i in range(4):
        bench.step(decode=[2, 1], slots=[(1, 2 + i, 3 + i), (2, 2 + i, 22 + i)])
    bench.step(decode=[2], slots=bench.fill(1, [2, 1]), sampling=[(1, 1.0, 9)], chunks=[(1, 2, 0, 2, 1)])
    for i in range(2):
        bench.step(decode=[2, 1], slots=[(1, 2 + i, 4 - i), (2, 6 + i, 26 + i)])
    device.synchronize()
    one, two, three = reference(prompts[0], 6), reference(prompts[1], 9), reference(prompts[2], 3, 1.0, 9)
    expected = [[one[0]], [one[1], two[0]], *([two[i + 1], one[i + 2]] for i in range(4))]
    expected += [[two[5], three[0]], [two[6], three[1]], [two[7], three[2]]]
    assert [step.tokens for step in bench.completed] == expected
    for step in bench.completed:
        assert 0 < step.result.view.begin_ns <= step.result.view.end_ns
    if early_lengths:
        assert lengths == [[3], [4, 5], [6, 5], [7, 6], [8, 7], [9, 8], [10, 2], [11, 3], [12, 4]]


def queue_windows(device: Any) -> None:
    """Decode steps whose rows gain one to three tokens, all queued before anybody can know how many."""
    bench = Bench(device, small_config(window=3), early_lengths=True)
    prompts, steps = {1: [5, 6, 7], 2: [9, 8, 7, 6, 5]}, 6
    bench.prompt(1, prompts[1])
    bench.prompt(2, prompts[2])
    lengths = note_lengths(bench, [2] * steps)
    pages = bench.fill(1, list(range(1, 8))) + bench.fill(2, list(range(10, 17)))
    bench.step(slots=pages, chunks=[(1, 1, 0, 3, 1), (2, 2, 0, 5, 1)])
    for _ in range(steps - 1):
        bench.step(decode=[1, 2])
    device.synchronize()
    for i, prompt in enumerate(prompts.values()):
        gained = [step.result.view.tokens[: step.counts[i], i].tolist() for step in bench.completed if step.counts]
        text = [token for tokens in gained for token in tokens]
        assert text == reference(prompt, len(text)) and len(text) > steps, "and some drafts were taken"
        ends = itertools.accumulate(map(len, gained))
        assert [seen[i] for seen in lengths] == [len(prompt) + end - 1 for end in ends]


PROGRAMS: dict[str, Callable[[Any], None]] = {
    "served": functools.partial(serve, which=0),
    "one entry": functools.partial(serve, which=1),
    "ahead": functools.partial(queue_ahead, early_lengths=False),
    "ahead, early lengths": functools.partial(queue_ahead, early_lengths=True),
    "windows": queue_windows,
    "served, windows": functools.partial(serve, which=2),
}
TIMED = ("ahead", "ahead, early lengths", "windows")  # whoever serves asks again and again, and takes the threads' time


# ---------------------------------------------------------------------- the three that look


class JitteryDevice(HostDevice):
    """Some operations take much longer than others, in every run anew."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def launch(self, stream: Any, fn: Callable[[], None], **declared: Any) -> None:
        seconds = self._random.choice((0, 0, JITTER_S, 4 * JITTER_S)) * self._random.random()

        def run() -> None:
            time.sleep(seconds)
            fn()

        super().launch(stream, run, **declared)


def goes_wrong(device: Any, program: str, mutation: Mutation | None) -> bool:
    try:
        PROGRAMS[program](mutated(device, mutation))
    except Exception:  # noqa: BLE001 - a fault is as wrong as a token
        return True
    finally:
        with contextlib.suppress(Exception):
            device.close()
    return False


def mutated(device: Any, mutation: Mutation | None) -> MutatedDevice:
    return MutatedDevice(device, None) if mutation is None else MutatedDevice(device, *mutation)


def flagged(program: Callable[[Any], None], mutation: Mutation | None) -> Violation | None:
    """What the checker says, whatever comes out."""
    checker = OrderChecker(collect=True)
    with contextlib.suppress(Exception):  # wrong tokens or a fault
        program(mutated(AdversaryDevice(observer=checker), mutation))
    return checker.violations[0] if checker.violations else None


def chosen() -> list[Policy]:
    return list(policies(STREAMS, SEEDS))


@functools.cache
def edges(program: str) -> frozenset[Edge]:
    device = MutatedDevice(AdversaryDevice(), None)
    PROGRAMS[program](device)
    return frozenset(device.edges)


@functools.cache
def mutations() -> tuple[Mutation, ...]:
    """All that can be dropped, and all that can be early: a record right behind a host function cannot."""
    found = sorted(frozenset[Edge]().union(*(edges(program) for program in PROGRAMS)), key=str)
    early = []
    for edge in found:
        device = MutatedDevice(AdversaryDevice(), edge, "early")
        with contextlib.suppress(Exception):
            PROGRAMS["ahead, early lengths"](device)
        early += [Mutation(edge, "early")] if device.mutated else []
    return (*(Mutation(edge) for edge in found), *early)


def programs_with(mutation: Mutation) -> list[str]:
    """Those that it concerns, the short ones first."""
    return sorted((name for name in PROGRAMS if mutation.edge in edges(name)), key=lambda name: name not in TIMED)


def orders(mutation: Mutation) -> Iterator[bool]:
    """Of each program and each policy of the adversary, whether it goes wrong."""
    for name in programs_with(mutation):
        yield from (goes_wrong(AdversaryDevice(policy), name, mutation) for policy in chosen())


def runs(mutation: Mutation) -> Iterator[bool]:
    """The same of threads, whose operations take another time in each run."""
    for name in filter(TIMED.__contains__, programs_with(mutation)):
        yield from (goes_wrong(JitteryDevice(seed), name, mutation) for seed in range(RUNS))


@functools.cache
def violation(mutation: Mutation) -> Violation | None:
    return next(filter(None, (flagged(PROGRAMS[name], mutation) for name in reversed(programs_with(mutation)))), None)


def row(mutation: Mutation) -> Row:
    wrong, timed = list(orders(mutation)), list(runs(mutation))
    return Row(mutation, violation(mutation), sum(wrong), len(wrong), sum(timed), len(timed))


# ---------------------------------------------------------------------- tests


def test_the_mutations_are_all_that_there_are() -> None:
    plain = {
        "schedule waits for left", "schedule waits for fence", "schedule records staged", "forward waits for staged",
        "forward records fence", "forward records done", "copy waits for done", "copy records left",
    }  # fmt: skip
    early = {
        "forward records published", "lengths waits for published", "lengths records lengths_out",
        "copy waits for lengths_out",
    }  # fmt: skip
    assert {str(edge) for edge in edges("ahead")} == {str(edge) for edge in edges("one entry")} == plain
    assert {str(edge) for edge in edges("ahead, early lengths")} == {str(e) for e in edges("served")} == plain | early
    assert {str(edge) for edge in edges("windows")} == plain | early, "drafts need no event of their own"
    assert {str(m) for m in mutations() if m.how == "early"} == {
        "schedule records staged, too early", "forward records fence, too early", "forward records done, too early",
        "forward records published, too early", "lengths records lengths_out, too early",
    }  # fmt: skip


def test_what_is_mutated_is_flagged_or_redundant() -> None:
    assert {mutation for mutation in mutations() if violation(mutation) is None} == set(REDUNDANT)
    assert not any(any(orders(mutation)) or any(runs(mutation)) for mutation in REDUNDANT)


@pytest.mark.parametrize("program", ["ahead", "ahead, early lengths"])
def test_an_edge_that_is_dropped_is_flagged_with_and_without_early_lengths(program: str) -> None:
    for edge in edges(program):
        assert flagged(PROGRAMS[program], Mutation(edge)) is not None, edge


def test_nothing_is_flagged_and_nothing_is_wrong_with_all_edges() -> None:
    for name, program in PROGRAMS.items():
        assert flagged(program, None) is None
        assert not any(goes_wrong(AdversaryDevice(policy), name, None) for policy in chosen())
        assert name not in TIMED or not any(goes_wrong(JitteryDevice(seed), name, None) for seed in range(RUNS))


def test_an_edge_that_another_path_implies_is_not_flagged() -> None:
    """Control: a wait that says nothing new, because who waits has waited for what comes behind the same record."""
    planted = Edge(WAIT, "staged", "copy")

    def plant(bench: Bench) -> None:
        deliver = bench.program._deliver

        def wait_once_more(lane: Any, *rest: Any) -> Any:
            lane.staged.wait(bench.program.copy)
            return deliver(lane, *rest)

        bench.program._deliver = wait_once_more  # type: ignore[method-assign]

    program = functools.partial(queue_ahead, early_lengths=False, spoil=plant)
    device = MutatedDevice(AdversaryDevice(), None)
    program(device)
    assert device.edges[planted] == device.edges[Edge(WAIT, "staged", "forward")]
    assert flagged(program, Mutation(planted)) is None
    assert flagged(program, Mutation(Edge(WAIT, "staged", "forward"))) is not None


@pytest.mark.parametrize(
    ("mutation", "first", "second"),
    [
        (Mutation(Edge(WAIT, "fence", "schedule")), "'gather' on stream forward", "'slot writes' on stream schedule"),
        (Mutation(Edge(WAIT, "staged", "forward")), "on stream schedule", "'gather' on stream forward"),
        (Mutation(Edge(WAIT, "done", "copy")), "'gather' on stream forward", "'result' on stream copy"),
        (Mutation(Edge(WAIT, "left", "schedule")), "'result' on stream copy", "'upload' on stream schedule"),
        (Mutation(Edge(WAIT, "published", "lengths")), "'accept' on stream forward", "'early lengths' on stream len"),
        (Mutation(Edge(WAIT, "lengths_out", "copy")), "'early lengths' on stream lengths", "'gather' on stream forw"),
        (Mutation(Edge(RECORD, "fence", "forward"), "early"), "'gather' on stream forward", "'slot writes' on stream"),
    ],
    ids=str,
)
def test_the_violation_names_both_launches_both_streams_the_region_and_the_edge(
    mutation: Mutation, first: str, second: str
) -> None:
    text = str(flagged(PROGRAMS["ahead, early lengths"], mutation))
    assert text.startswith(f"nothing orders {second}"), text
    assert " behind " in text and first in text, text
    assert "of bytes [" in text, text
    assert "record an event on stream" in text, text


def test_the_adversary_finds_what_the_checker_flags() -> None:
    """Control of the whole: what is flagged is no pedantry. Whatever it drops gives wrong results in some order."""
    assert {str(m) for m in mutations() if m not in REDUNDANT and not any(orders(m))} == set()


if __name__ == "__main__":
    print("\n".join((HEAD, *map(str, map(row, mutations())))))
