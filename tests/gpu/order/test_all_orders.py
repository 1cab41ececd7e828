"""The step program gives the same tokens in every order that CUDA permits; with an order missing, some are wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.enumeration import Orders, all_orders, wrong_orders
from gpu.device.policies import Eager, Policy, policies
from shm.config import ServerConfig
from shm.limits import STEPS_IN_FLIGHT
from tests.gpu.order.served_mill import Asked, ServedMill, check, served_config, workload
from tests.gpu.paged_mill import Bench, Issued, reference, small_config

STREAMS = ("schedule", "forward", "copy")
ALL_STREAMS = (*STREAMS, "lengths")
Mutate = Callable[[Any], None]  # of a step program


def nothing(program: Any) -> None: ...


def unfenced(program: Any) -> None:
    program.fence.hold = lambda *_: None


def without(*events: str) -> Mutate:
    """Drop every wait for these events of the lanes."""

    def mutate(program: Any) -> None:
        for lane in program.lanes:
            for event in events:
                getattr(lane, event).wait = lambda *_: None

    return mutate


# ---------------------------------------------------------------------- a whole server


def serve(
    device: AdversaryDevice, asked: list[Asked], mutate: Mutate = nothing, max_running: int = 3, **options: Any
) -> bool:
    """Serve a workload; fails if it goes wrong."""
    config = served_config(max_running=max_running)
    mill = ServedMill(device, config, asked, **options)
    mutate(mill.program)
    check(asked, mill.run(), config)
    return True


def one_behind_another() -> list[Asked]:
    """One entry: a short row that is aborted while a step with it is queued, and behind it a long cached prompt."""
    long = list(range(10, 27))
    return [
        Asked(prompt=long, max_new=1),
        Asked(prompt=[3, 4], max_new=12, arrival=1, abort_after=6),
        Asked(prompt=long, max_new=6, arrival=2),
    ]


def test_a_served_workload_uses_all_that_could_go_wrong() -> None:
    """Control: the workloads retract, find prefixes, abort, and use pages and entries again."""
    totals = dict.fromkeys(("retractions_total", "prefix_hit_tokens_total", "aborted_total", "surplus_tokens_total"), 0)
    for seed in range(6):
        config, asked = served_config(), workload(seed)
        mill = ServedMill(AdversaryDevice(Eager()), config, asked)
        check(asked, mill.run(), config)
        assert mill.total("admitted_total") > config.max_running
        for name in totals:
            totals[name] += mill.total(name)
    assert all(totals.values()), totals


@pytest.mark.parametrize("early_lengths", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_its_own_tokens_in_whatever_order_the_device_runs(seed: int, early_lengths: bool) -> None:
    streams = ALL_STREAMS if early_lengths else STREAMS
    for policy in policies(streams, seeds=15):
        device = AdversaryDevice(policy)
        try:
            serve(device, workload(seed), early_lengths=early_lengths)
        except Exception as error:
            raise AssertionError(f"{policy.name}: {error}") from error


@pytest.mark.parametrize(
    ("ask", "mutate", "options"),
    [
        (one_behind_another, unfenced, {"max_running": 1}),
        (lambda: workload(0), without("staged"), {}),
        (lambda: workload(0), without("done"), {}),
        (lambda: workload(0), nothing, {"slots": STEPS_IN_FLIGHT - 1}),
    ],
    ids=["no fence", "no staged", "no done", "one slot where two are needed"],
)
def test_a_server_with_an_order_missing_is_found_out(
    ask: Callable[[], list[Asked]], mutate: Mutate, options: dict[str, Any]
) -> None:
    def run(device: AdversaryDevice) -> bool:
        return serve(device, ask(), mutate, **options)

    wrong = wrong_orders(run, True, policies(STREAMS, seeds=10))
    print(f"\n{wrong} of {len(list(policies(STREAMS, seeds=10)))} policies give wrong tokens or a fault")
    assert wrong > 0


def test_the_workload_for_the_fence_is_right_with_it() -> None:
    for policy in policies(STREAMS, seeds=40):
        assert serve(AdversaryDevice(policy), one_behind_another(), max_running=1)


# ---------------------------------------------------------------------- every order of a few steps


def tiny_config() -> ServerConfig:
    return small_config(max_running=3, max_queued=1, kv_tokens=40, max_len=20, prefill_chunk=8, poison=True)


PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16], [40, 3]]
ONE, TWO, THREE = (reference(prompt, 6) for prompt in PROMPTS)
# Each: steps, and the tokens that they give. Entry 1 holds pages 1 and 2, and so on; a row that is gone leaves its own.
PROGRAMS: dict[str, tuple[list[dict[str, Any]], list[list[int]]]] = {
    "decode behind a prompt": (
        [{"fill": {1: [1, 2]}, "chunks": [(1, 0, 0, 3, 1)]}, {"decode": [1]}, {"decode": [1]}, {"decode": [1]}],
        [[t] for t in ONE[:4]],
    ),
    "a mixed step between decode steps": (
        [
            {"fill": {1: [1, 2]}, "chunks": [(1, 0, 0, 3, 1)]},
            {"decode": [1]},
            {"decode": [1], "fill": {2: [3, 4]}, "chunks": [(2, 1, 0, 6, 1)]},
            {"decode": [2, 1]},
        ],
        [[ONE[0]], [ONE[1]], [ONE[2], TWO[0]], [TWO[1], ONE[3]]],
    ),
    "a row that ended leaves its entry and its pages to another": (
        [
            {"fill": {1: [1, 2]}, "chunks": [(1, 0, 0, 3, 1)]},
            {"decode": [1]},
            {"fill": {1: [2, 1]}, "chunks": [(1, 1, 0, 6, 1)]},  # the same entry, the same pages, the other way round
            {"decode": [1]},
        ],
        [[ONE[0]], [ONE[1]], [TWO[0]], [TWO[1]]],
    ),
    "a retracted row comes back in another entry": (
        [
            {"fill": {1: [1, 2], 2: [3, 4]}, "chunks": [(1, 0, 0, 3, 1), (2, 2, 0, 2, 1)]},
            {"decode": [1, 2]},
            {"decode": [1], "fill": {3: [4, 3]}, "chunks": [(3, 3, 0, 3, 1)]},  # with the token that it had got
            {"decode": [3, 1]},
        ],
        [[ONE[0], THREE[0]], [ONE[1], THREE[1]], [ONE[2], THREE[1]], [THREE[2], ONE[3]]],
    ),
    "every lane three times": (
        [
            {"fill": {1: [1, 2, 3]}, "chunks": [(1, 0, 0, 3, 1)]},
            {"decode": [1]},
            {"decode": [1], "fill": {2: [4, 5]}, "chunks": [(2, 2, 0, 2, 1)]},
            {"decode": [1, 2]},
            {"decode": [2], "fill": {1: [3, 6, 7]}, "chunks": [(1, 1, 0, 6, 1)]},
            {"decode": [2, 1]},
            {"decode": [1], "fill": {3: [5, 4]}, "chunks": [(3, 2, 0, 2, 1)]},
            {"decode": [3, 1]},
            {"decode": [1, 3]},
        ],
        [
            [ONE[0]], [ONE[1]], [ONE[2], THREE[0]], [ONE[3], THREE[1]], [THREE[2], TWO[0]], [THREE[3], TWO[1]],
            [TWO[2], THREE[0]], [THREE[1], TWO[3]], [TWO[4], THREE[2]],
        ],
    ),
    "a prompt in two chunks, and its row grows": (
        [
            {"fill": {2: [3, 4]}, "chunks": [(2, 1, 0, 2, 0)]},
            {"fill": {1: [1]}, "chunks": [(2, 1, 2, 4, 1), (1, 0, 0, 3, 1)]},
            {"decode": [1, 2], "slots": [(1, 1, 2)]},
            {"decode": [2, 1], "slots": [(2, 2, 5)]},
        ],
        [[], [TWO[0], ONE[0]], [ONE[1], TWO[1]], [TWO[2], ONE[2]]],
    ),
}  # fmt: skip


def queue(bench: Bench, steps: list[dict[str, Any]]) -> list[Issued]:
    for row, prompt in enumerate([*PROMPTS, [*PROMPTS[2], THREE[0]]]):
        bench.prompt(row, prompt)
    issued = []
    for step in steps:
        fills = [w for entry, pages in step.get("fill", {}).items() for w in bench.fill(entry, pages)]
        rest = {name: value for name, value in step.items() if name != "fill"}
        slots = [*fills, *rest.pop("slots", [])]
        issued.append(bench.step(slots=slots, **rest))
    return issued


def every_order(name: str, mutate: Mutate = nothing, **options: Any) -> Orders:
    """Run a program in every order. The outcome is what lies in the result slots."""
    steps, expected = PROGRAMS[name]
    device = AdversaryDevice()
    bench = Bench(device, tiny_config(), **options)
    mutate(bench.program)
    views = [issued.result.view for issued in queue(bench, steps)]
    return all_orders(device, lambda: [v.tokens[0, : v.n_rows].tolist() for v in views] == expected)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("early_lengths", [False, True])
def test_a_small_program_is_right_in_every_order(name: str, early_lengths: bool) -> None:
    found = every_order(name, early_lengths=early_lengths)
    print(f"\n{name}, early lengths {early_lengths}: {found.total:.3g} orders, {found.states} states")
    assert found.wrong == 0
    assert found.total > 10**6
    assert found.states > 100


DROPPED: list[tuple[str, Mutate, str]] = [
    ("no fence", unfenced, "a row that ended leaves its entry and its pages to another"),
    ("no staged", without("staged"), "decode behind a prompt"),
    ("no done", without("done"), "decode behind a prompt"),
    ("no left", without("left"), "decode behind a prompt"),
    ("no left", without("left"), "a mixed step between decode steps"),
]


@pytest.mark.unordered
@pytest.mark.parametrize(("what", "mutate", "name"), DROPPED, ids=[f"{what}: {name}" for what, _, name in DROPPED])
def test_with_an_order_missing_some_orders_are_wrong_and_some_are_right(what: str, mutate: Mutate, name: str) -> None:
    found = every_order(name, mutate)
    print(f"\n{what}, {name}: {found.wrong:.3g} of {found.total:.3g} orders are wrong, {found.states} states")
    assert 0 < found.wrong < found.total


def test_chance_and_enumeration_agree_on_what_is_wrong() -> None:
    """The fence's absence: what the walk finds, seeds find too, and with the fence neither finds anything."""
    steps, expected = PROGRAMS["a row that ended leaves its entry and its pages to another"]

    def run(device: AdversaryDevice, mutate: Mutate) -> list[list[int]]:
        bench = Bench(device, tiny_config())
        mutate(bench.program)
        queue(bench, steps)
        device.synchronize()
        return [issued.tokens or [] for issued in bench.completed]

    def many() -> list[Policy]:
        return list(policies(STREAMS, seeds=60))

    assert wrong_orders(lambda device: run(device, nothing), expected, many()) == 0
    assert wrong_orders(lambda device: run(device, unfenced), expected, many()) > 0


def test_padding_stays_inside_entry_0_in_every_order() -> None:
    """The relay beyond the live rows is untouched whatever the order: a batch of three padded rows decodes one."""
    device = AdversaryDevice()
    bench = Bench(device, tiny_config())
    assert bench.program.graphs.sizes[-1] == 3
    queue(bench, [{"fill": {1: [1, 2]}, "chunks": [(1, 0, 0, 3, 1)]}, {"decode": [1]}, {"decode": [1]}])
    length, token = bench.program.relay.length.array, bench.program.relay.token.array
    found = all_orders(device, lambda: length.tolist() == [0, 5, 0, 0] and not np.any(token[2:]))
    assert found.wrong == 0
