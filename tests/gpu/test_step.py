"""The step program: right tokens with every step queued ahead, and the orders that make them right."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.device.host import HostDevice
from gpu.device.order import OrderChecker
from gpu.device.protocol import DeviceError
from gpu.lanes import LANES
from tests.gpu.paged_mill import Bench, reference, small_config

WAIT_S = 10.0


class Gate:
    """An operation that holds its stream until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, *_: Any) -> None:
        self.entered.set()
        assert self._open.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    devices: list[HostDevice] = []

    def build(early_lengths: bool = False, checked: bool = True, **changes: Any) -> Bench:
        devices.append(HostDevice(OrderChecker() if checked else None))
        return Bench(devices[-1], small_config(**changes), early_lengths=early_lengths)

    yield build
    for device in devices:
        device.close()


def hold(bench: Bench) -> Gate:
    """Hold the forward stream before the next step."""
    gate = Gate()
    bench.device.launch(bench.program.forward, gate, reads=(), writes=(), name="gate")
    return gate


PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16], [21] * 9, [30, 31], [40, 3, 2, 1]]


def test_all_steps_can_be_queued_before_the_first_has_run(make: Callable[..., Bench]) -> None:
    """The CPU knows entries and pages, and no token until the end."""
    bench = make()
    gate = hold(bench)
    prompt = PROMPTS[1]
    bench.prompt(0, prompt)
    bench.step(slots=bench.fill(3, [9, 4, 7, 12, 2]), chunks=[(3, 0, 0, len(prompt), 1)])
    for _ in range(10):
        bench.step(decode=[3])
    assert bench.completed == []
    gate.open()
    bench.device.synchronize()
    assert [step.tokens for step in bench.completed] == [[t] for t in reference(prompt, 11)]


def test_requests_join_chunk_by_chunk_and_each_gets_its_own_tokens(make: Callable[..., Bench]) -> None:
    bench = make(poison=True)
    n = 6
    outputs: dict[int, list[int]] = {}
    running: list[int] = []
    for r, prompt in enumerate(PROMPTS):
        bench.prompt(r, prompt)
        entry = 8 - r
        pages = [1 + r + 8 * i for i in range(5)]
        seed, temperature = 2**63 - 5 - r, float(r % 2)
        cut = len(prompt) // 2
        bench.step(
            decode=running, slots=bench.fill(entry, pages), sampling=[(entry, temperature, seed)],
            chunks=[(entry, r, 0, cut, 0)],
        )  # fmt: skip
        bench.step(decode=running, chunks=[(entry, r, cut, len(prompt) - cut, 1)])
        running = [*running, entry]
        outputs[entry] = reference(prompt, 20, temperature, seed)
    for _ in range(n):
        bench.step(decode=running[::-1])
    bench.device.synchronize()
    got: dict[int, list[int]] = {entry: [] for entry in running}
    for step in bench.completed:
        view = step.slot.view
        entries = [
            *view.decode_entries[: view.n_decode].tolist(),
            *view.chunks[0, : view.n_chunks][view.chunks[4, : view.n_chunks] == 1].tolist(),
        ]
        assert step.tokens is not None
        for entry, token in zip(entries, step.tokens, strict=True):
            got[entry].append(token)
    for entry, tokens in got.items():
        assert len(tokens) >= n
        assert tokens == outputs[entry][: len(tokens)], entry


def test_several_chunks_in_one_step_and_only_the_last_ones_give_a_token(make: Callable[..., Bench]) -> None:
    bench = make()
    for row, prompt in enumerate(PROMPTS):
        bench.prompt(row, prompt)
    fills = [w for entry in (1, 2, 3) for w in bench.fill(entry, [entry * 3, entry * 3 + 1, entry * 3 + 2])]
    first = bench.step(slots=fills, chunks=[(1, 1, 0, 6, 1), (2, 2, 0, 4, 0), (3, 0, 0, 3, 1)])
    second = bench.step(decode=[3, 1], chunks=[(2, 2, 4, 5, 1)])
    bench.device.synchronize()
    one, two, three = reference(PROMPTS[1], 2), reference(PROMPTS[2], 1), reference(PROMPTS[0], 2)
    assert first.tokens == [one[0], three[0]]
    assert second.tokens == [three[1], one[1], two[0]]
    assert first.result.view.step == 1000
    assert second.result.view.step == 1001
    assert first.result.view.begin_ns < first.result.view.end_ns <= second.result.view.begin_ns


def test_a_step_of_middle_chunks_gives_no_rows(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.prompt(0, PROMPTS[2])
    step = bench.step(slots=bench.fill(1, [3, 4, 5]), chunks=[(1, 0, 0, 4, 0)])
    bench.device.synchronize()
    assert step.tokens == []
    assert bench.program.relay.length.array.tolist() == [0] * 9


def test_results_come_in_order_and_begin_before_the_next_step_ends(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.prompt(0, PROMPTS[0])
    issued = [bench.step(slots=bench.fill(1, [1, 2, 3, 4, 5, 6, 7]), chunks=[(1, 0, 0, 3, 1)])]
    issued += [bench.step(decode=[1]) for _ in range(12)]
    bench.device.synchronize()
    assert bench.completed == issued


def test_enqueue_returns_while_the_device_stands_still(make: Callable[..., Bench]) -> None:
    """Invariant 1: however many steps are queued, the launch loop is never held."""
    bench = make()
    bench.prompt(0, PROMPTS[0])
    gate = hold(bench)

    def launch() -> None:
        bench.step(slots=bench.fill(1, [1, 2, 3, 4, 5]), chunks=[(1, 0, 0, 3, 1)])
        for _ in range(3 * LANES):
            bench.step(decode=[1])

    launcher = threading.Thread(target=launch)
    launcher.start()
    launcher.join(WAIT_S / 2)
    held = launcher.is_alive()
    gate.open()
    launcher.join(WAIT_S)
    assert not held
    bench.device.synchronize()
    assert [step.tokens for step in bench.completed] == [[t] for t in reference(PROMPTS[0], 1 + 3 * LANES)]


@pytest.mark.parametrize("fenced", [True, pytest.param(False, marks=pytest.mark.unordered)])
def test_the_fence_keeps_later_slot_writes_behind_the_steps_reads(make: Callable[..., Bench], fenced: bool) -> None:
    """Invariant 4. A request ends in a step that is queued; its entry goes to another one, whose writes must wait."""
    bench = make(checked=fenced)
    program = bench.program
    bench.prompt(0, PROMPTS[1])
    bench.prompt(1, PROMPTS[0])
    bench.step(slots=bench.fill(1, [1, 2, 3]), chunks=[(1, 0, 0, 6, 1)])
    bench.device.synchronize()
    if not fenced:
        program.fence.hold = lambda *_: None  # type: ignore[method-assign]
    gate = hold(bench)
    late = bench.step(decode=[1])  # the old request's surplus step
    lane = program.lanes[program.steps_launched % LANES]
    new = bench.step(slots=bench.fill(1, [7, 8, 9]), chunks=[(1, 1, 0, 3, 1)])
    if fenced:
        assert gate.entered.wait(WAIT_S)
        time.sleep(0.02)
        assert not lane.staged.query()
    else:
        lane.staged.synchronize()  # the writes ran though nothing has read the tables yet
    gate.open()
    bench.device.synchronize()
    assert (late.tokens == [reference(PROMPTS[1], 2)[1]]) == fenced
    assert new.tokens == [reference(PROMPTS[0], 1)[0]]


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.unordered)])
def test_a_lane_is_not_taken_again_while_its_result_is_still_read(make: Callable[..., Bench], guarded: bool) -> None:
    """Invariant 6, with a copy stream that lags behind by more steps than there are lanes."""
    bench = make(checked=guarded)
    program = bench.program
    bench.prompt(0, PROMPTS[0])
    bench.step(slots=bench.fill(1, [1, 2, 3, 4, 5, 6]), chunks=[(1, 0, 0, 3, 1)])
    bench.device.synchronize()
    if not guarded:
        for lane in program.lanes:
            lane.left.wait = lambda *_: None  # type: ignore[method-assign]
    gate = Gate()
    bench.device.launch(program.copy, gate, reads=(), writes=(), name="gate")
    for _ in range(2 * LANES):
        bench.step(decode=[1])
    if guarded:
        time.sleep(0.02)
    else:
        program.forward.synchronize()
    gate.open()
    bench.device.synchronize()
    right = [[t] for t in reference(PROMPTS[0], 1 + 2 * LANES)]
    assert ([step.tokens for step in bench.completed] == right) == guarded


def test_padding_touches_entry_0_and_page_0_alone(make: Callable[..., Bench]) -> None:
    """Invariant 5. The row beyond a batch of 5 holds the stale entry of an earlier batch of 6."""
    bench = make()
    program = bench.program
    for entry in range(1, 7):
        bench.prompt(entry, [entry, 2 * entry])
        bench.step(slots=bench.fill(entry, [3 * entry, 3 * entry + 1]), chunks=[(entry, entry, 0, 2, 1)])
    for _ in range(LANES):
        bench.step(decode=[1, 2, 3, 4, 5, 6])
    bench.device.synchronize()
    length, token, kv = program.relay.length.array, program.relay.token.array, bench.model.k_cache.reshape(-1, 4)
    before = length.copy(), token.copy(), kv.copy()
    assert program.graphs.key(5, 1, 0).rows == 6
    bench.step(decode=[1, 2, 3, 4, 5])
    bench.device.synchronize()
    assert (length - before[0]).tolist() == [0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert length[0] == 0
    assert token[6:].tolist() == before[1][6:].tolist()
    written = np.flatnonzero((kv != before[2]).any(axis=1)).tolist()
    assert set(written) <= {0, 4, 7, 10, 13, 16}  # position 5 of entries 1 to 5 lies in their second page
    assert len(written) >= 5


def test_a_decode_descriptor_is_the_same_whatever_the_request_holds(make: Callable[..., Bench]) -> None:
    """Invariant 2: neither tokens nor lengths of running requests are in it."""
    payloads, tokens = [], []
    for prompt in (PROMPTS[0], PROMPTS[2]):
        bench = make()
        bench.prompt(0, prompt)
        bench.step(slots=bench.fill(1, [1, 2, 3, 4]), chunks=[(1, 0, 0, len(prompt), 1)])
        step = bench.step(decode=[1])
        bench.device.synchronize()
        payloads.append(step.slot.buffer.array.tobytes())
        tokens.append(step.tokens)
    assert payloads[0] == payloads[1]
    assert tokens[0] != tokens[1]


def test_lengths_can_be_copied_out_before_the_step_ends(make: Callable[..., Bench]) -> None:
    bench = make(early_lengths=True)
    program = bench.program
    bench.prompt(0, PROMPTS[0])
    stash, gate = program.kernels.stash, Gate()

    def late_stash(*args: Any) -> None:
        gate()
        stash(*args)

    program.kernels.stash = late_stash  # type: ignore[method-assign]
    step = bench.step(slots=bench.fill(1, [1, 2, 3, 4]), chunks=[(1, 0, 0, 3, 1)])
    assert program.early_lengths is not None
    program.early_lengths.out[0].synchronize()
    assert program.early_lengths.copies[0].array[0] == 3
    assert step.tokens is None
    gate.open()
    bench.device.synchronize()
    assert step.tokens == reference(PROMPTS[0], 1)


@pytest.mark.parametrize("early_lengths", [False, True])
def test_only_a_program_that_wants_early_lengths_has_what_they_need(early_lengths: bool) -> None:
    threads = set(threading.enumerate())  # those that other tests have left may have the same names
    device = HostDevice()
    made: list[str] = []
    event, pinned = device.event, device.pinned
    device.event = lambda name: made.append(name) or event(name)  # type: ignore[method-assign, func-returns-value]
    device.pinned = lambda *of: made.append(of[1]) or pinned(*of)  # type: ignore[method-assign, func-returns-value]
    Bench(device, small_config(), early_lengths=early_lengths)
    streams = {thread.name for thread in set(threading.enumerate()) - threads}
    device.close()
    assert ("stream-lengths" in streams) == early_lengths
    assert any("lengths_out" in name for name in made) == early_lengths
    assert any("early" in name for name in made) == early_lengths


def first_chunk(bench: Bench) -> None:
    bench.prompt(0, PROMPTS[1])
    bench.step(slots=bench.fill(1, [1, 2]), chunks=[(1, 0, 0, 4, 0)])


FAULTS: dict[str, tuple[str, Callable[[Bench], Any], bool]] = {
    "decode before the last chunk": (
        "entry 1 is read before",
        lambda b: (first_chunk(b), b.step(decode=[1])),
        True,
    ),
    "read twice in a step": (
        "entry 1 is read before",
        lambda b: (first_chunk(b), b.step(chunks=[(1, 0, 4, 2, 1)]), b.step(decode=[1, 1])),
        True,
    ),
    "no page for the position": ("entry 2 reaches a position", lambda b: b.step(decode=[2]), False),
    "entry past the table": ("entry 9 does not exist", lambda b: b.step(decode=[9]), False),
    "slot write for entry 0": ("entry 0 does not exist", lambda b: b.step(decode=[1], slots=[(0, 0, 1)]), False),
    "slot write of page 0": ("padding page", lambda b: b.step(decode=[1], slots=[(1, 0, 0)]), False),
    "slot write past the pool": ("entry 1", lambda b: b.step(decode=[1], slots=[(1, 0, 65)]), False),
    "slot write past the row": ("entry 1", lambda b: b.step(decode=[1], slots=[(1, 17, 1)]), False),
    "sampling of no entry": ("entry 9", lambda b: b.step(decode=[1], sampling=[(9, 1.0, 1)]), False),
    "chunk past its row": ("chunk of entry 1", lambda b: b.step(chunks=[(1, 0, 60, 5, 1)]), False),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_no_scheduler_may_ask_for_is_a_device_error(make: Callable[..., Bench], what: str) -> None:
    message, act, poison = FAULTS[what]
    bench = make(poison=poison)
    with pytest.raises(DeviceError, match=message):  # at the next call, whichever that is
        act(bench)
        bench.device.synchronize()


def test_a_step_that_is_too_large_or_empty_is_refused_at_once(make: Callable[..., Bench]) -> None:
    bench = make()
    with pytest.raises(AssertionError, match="computes something"):
        bench.step()
    with pytest.raises(AssertionError):
        bench.step(chunks=[(1, 0, 0, 41, 1)])
