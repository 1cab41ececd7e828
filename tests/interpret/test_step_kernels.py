"""The step's own kernels: Triton's, the host's and the plain reference leave the same, whatever the batch.

The interpreter runs Triton's kernels on the memory of numpy arrays, traced: what they touch is exactly what they need.
Blocks are made small, so that a few rows take several of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from gpu.device.protocol import DeviceError
from gpu.kernels import plain_step, triton_gather, triton_step
from gpu.kernels.host_step import HostStepKernels
from gpu.kernels.step_kernels import (
    BAD_ENTRY,
    BAD_PAGE,
    BAD_POSITION,
    BAD_SOURCE,
    FAULT_BITS,
    NOT_FILLED,
    NOT_PUBLISHED,
    Gained,
    PassShape,
    Rows,
    Tables,
    explain,
)
from gpu.kernels.triton_step import TritonStepKernels
from shm.records import STEP_MIXED, ResultLayout, StepLayout, StepView
from tests.gpu.paged_mill import small_config
from tests.interpret.access import Trace, trace
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here

WINDOWS = (1, 2, 4)
CONFIG = small_config(window=WINDOWS[-1])
LAYOUT = StepLayout(CONFIG)
PAGE, PER_ROW, ENTRIES = CONFIG.page_size, CONFIG.pages_per_row, CONFIG.entries
CAP = PAGE * PER_ROW
MOST = ResultLayout(CONFIG).max_rows
TOKENS = CONFIG.pass_tokens
SAMPLES = MOST * CONFIG.window
SENTINEL = -77
BATCHES, SPOILT = 12, 16  # that are gathered
IDS = np.arange(1000, 1000 + CONFIG.prefill_chunk, dtype=np.int32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gather, "PAGES_BLOCK", 4)
    monkeypatch.setattr(triton_gather, "TOKENS_BLOCK", 8)
    monkeypatch.setattr(triton_step, "WRITES_BLOCK", 4)
    monkeypatch.setattr(triton_step, "SCATTER_BLOCK", 4)


@dataclass
class World:
    """All memory that the kernels of one step work on."""

    descriptor: Any
    tables: Tables
    rows: Rows
    ids: Any
    fault: Any

    @property
    def step(self) -> StepView:
        return LAYOUT.view(self.descriptor)

    def copy(self) -> "World":
        tables, rows = Tables(*(a.copy() for a in self.tables)), Rows(*(a.copy() for a in self.rows))
        return World(self.descriptor.copy(), tables, rows, self.ids.copy(), self.fault.copy())

    def tensors(self) -> "World":
        """The same memory in the form in which CUDA has it."""
        tables, rows = Tables(*map(tensor, self.tables)), Rows(*map(tensor, self.rows))
        return World(tensor(self.descriptor), tables, rows, tensor(self.ids), tensor(self.fault))

    def named(self) -> dict[str, Any]:
        return {
            "descriptor": self.descriptor, "ids": self.ids, "fault": self.fault,
            **{f"tables.{name}": array for name, array in self.tables._asdict().items()},
            **{f"rows.{name}": array for name, array in self.rows._asdict().items()},
        }  # fmt: skip


def tensor(array: Any) -> Any:
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array)


def empty_rows(fill: int) -> Rows:
    def ints(*shape: int) -> Any:
        return np.full(shape, fill, np.int32)

    real, seed = np.full((3, SAMPLES), fill, np.float32), np.full(SAMPLES, fill & 0xFF, np.uint64)
    return Rows(
        tokens=ints(TOKENS), positions=ints(TOKENS), seqs=ints(TOKENS), pages=ints(MOST, PER_ROW),
        starts=ints(MOST + 1), ends=ints(MOST), entries=ints(MOST), lengths=ints(MOST),
        logit_rows=ints(SAMPLES), places=ints(SAMPLES), real=real, top_k=ints(SAMPLES), seed=seed,
    )  # fmt: skip


def random_world(rng: np.random.Generator) -> World:
    """Tables in which every entry is running and filled; an empty descriptor whose unused parts are nonsense."""
    pages = rng.integers(1, CONFIG.pages, (ENTRIES, PER_ROW)).astype(np.int32)
    pages[0] = 0
    length = rng.integers(0, CAP - CONFIG.window + 1, ENTRIES).astype(np.int32)
    length[1], length[2], length[3] = 0, CAP - CONFIG.window, PAGE - 1
    length[0] = 0
    tables = Tables(
        length=length,
        token=rng.integers(0, 99, ENTRIES).astype(np.int32),
        pages=pages,
        real=rng.random((3, ENTRIES)).astype(np.float32),
        top_k=rng.integers(0, 9, ENTRIES).astype(np.int32),
        seed=rng.integers(0, 2**64, ENTRIES, np.uint64),
    )
    descriptor = np.full(LAYOUT.nbytes // 4, -99, np.int32)
    world = World(descriptor, tables, empty_rows(SENTINEL), IDS.copy(), np.zeros(1, np.int32))
    world.step.clear()
    world.step.kind = STEP_MIXED
    return world


def random_batch(rng: np.random.Generator, world: World, window: int) -> PassShape:
    """Decode rows, padding and chunks in the descriptor, of any number and size."""
    step, order = world.step, rng.permutation(np.arange(1, ENTRIES))
    world.tables.length[2] = CAP - window  # it just fits
    n_chunks = int(rng.integers(0, 4))
    padded = int(rng.integers(0 if n_chunks else 1, MOST - n_chunks + 1))
    live = int(rng.integers(0, padded + 1))
    step.n_decode, step.n_chunks, step.drafts = live, n_chunks, window - 1
    step.decode_entries[:live] = order[:live]
    left = len(IDS)
    for c in range(n_chunks):
        count = int(rng.integers(1, left - (n_chunks - c) + 2)) if rng.random() < 0.7 else 1
        left -= count
        start = int(rng.choice([0, CAP - count, rng.integers(0, CAP - count + 1)]))
        step.chunks[:5, c] = order[live + c], 0, start, count, rng.integers(0, 2)
    shape = PassShape.of_step(step)
    return replace(shape, decode=padded, tokens=shape.tokens + (padded - live) * window)


def kernels(kind: Any, *, poison: bool = False) -> Any:
    return kind(LAYOUT, page_size=PAGE, pages=CONFIG.pages, poison=poison)


def same(a: World, b: World) -> None:
    for (name, x), y in zip(a.named().items(), b.named().values(), strict=True):
        np.testing.assert_array_equal(x, y, name)


def on_triton(world: World, run: Callable[[Any, World], None], *, poison: bool = False) -> tuple[Trace, World]:
    """Run a Triton operation on the memory of `world`, which then holds the outcome. Returns the trace and tensors."""
    tensors = world.tensors()
    with trace() as seen:
        run(kernels(TritonStepKernels, poison=poison), tensors)
    return seen, tensors


def only(shape: Any, *index: Any) -> Any:
    """A mask that is true at these indices."""
    mask = np.zeros(shape, np.bool_)
    mask[index] = True
    return mask


# ------------------------------------------------------------------ gather


def gather_with(shape: PassShape) -> Callable[[Any, World], None]:
    return lambda k, w: k.gather(k.view(w.descriptor), w.tables, w.ids, w.rows, shape, w.fault)


@pytest.mark.parametrize("seed", range(BATCHES))
def test_a_gather_leaves_the_same_on_all_three(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain, poison = random_world(rng), seed % 2 == 1
    shape = random_batch(rng, plain, WINDOWS[seed % 3])
    before, host, device = plain.copy(), plain.copy(), plain.copy()
    assert plain_step.gather(plain.step, plain.tables, plain.ids, plain.rows, shape, PAGE, poison=poison) == []
    gather_with(shape)(kernels(HostStepKernels, poison=poison), host)
    seen, tensors = on_triton(device, gather_with(shape), poison=poison)
    same(host, plain)
    same(device, plain)
    check_gather_touches(before, shape, poison, seen, tensors)


def check_gather_touches(before: World, shape: PassShape, poison: bool, seen: Trace, tensors: World) -> None:
    """Exactly what the pass needs was read, and exactly what it leaves was written."""
    outcomes = []
    for fill in (SENTINEL, SENTINEL - 1):  # what does not depend on what was there has been written
        world = before.copy()
        world.rows = empty_rows(fill)
        plain_step.gather(world.step, world.tables, world.ids, world.rows, shape, PAGE, poison=poison)
        outcomes.append(world.rows)
    for name, one, other in zip(Rows._fields, *outcomes, strict=True):
        written = seen.written(getattr(tensors.rows, name))
        np.testing.assert_array_equal(written, one == other, name)
        assert not seen.read(getattr(tensors.rows, name)).any(), name

    step, after = before.step, outcomes[0]
    live, n = step.n_decode, shape.chunks
    decoding = [*step.decode_entries[:live].tolist(), *[0] * (shape.decode - live)]
    chunked = step.chunks[0, :n].tolist()
    sampled = after.entries[: shape.gainers].tolist()
    assert seen.read(tensors.tables.length).tolist() == only(ENTRIES, decoding).tolist()
    assert seen.read(tensors.tables.token).tolist() == only(ENTRIES, decoding).tolist()
    for name in ("real", "top_k", "seed"):
        array = getattr(tensors.tables, name)
        np.testing.assert_array_equal(seen.read(array), only(tuple(array.shape), ..., sampled), name)
    pages = only((ENTRIES, PER_ROW), [], [])
    for row, entry in enumerate(decoding + chunked):
        pages[entry, : (after.ends[row] - 1) // PAGE + 1] = True
    np.testing.assert_array_equal(seen.read(tensors.tables.pages), pages)
    assert seen.read(tensors.ids).sum() == shape.tokens - shape.decode * shape.window

    marked = only(ENTRIES, [e for e in chunked if poison])
    consumed = only(ENTRIES, [e for e in decoding + chunked if poison and e])
    np.testing.assert_array_equal(seen.written(tensors.tables.length), marked)
    np.testing.assert_array_equal(seen.written(tensors.tables.token), consumed)
    for array in (*tensors.tables[2:], tensors.descriptor, tensors.ids, tensors.fault):
        assert not seen.written(array).any()
    assert len(seen.kernels) == (shape.decode > 0) + (n > 0)


def spoil(rng: np.random.Generator, world: World, shape: PassShape) -> None:
    """Put something into the batch that no scheduler may ask for."""
    step, tables = world.step, world.tables
    decode = int(step.decode_entries[rng.integers(0, step.n_decode)]) % ENTRIES if step.n_decode else 0
    ways: list[Callable[[], Any]] = []

    def unfill(entry: int, position: int) -> None:
        tables.pages[entry % ENTRIES, position // PAGE % PER_ROW] = 0  # both may have been spoilt before

    if step.n_decode:
        last = step.n_decode - 1
        ways += [
            lambda: tables.length.__setitem__(decode, -1),
            lambda: tables.token.__setitem__(decode, -1),
            lambda: tables.length.__setitem__(decode, CAP - shape.window + 1),
            lambda: tables.length.__setitem__(decode, CAP + int(rng.integers(0, 2**31 - CAP))),
            lambda: unfill(decode, int(tables.length[decode]) + shape.window - 1),
            lambda: step.decode_entries.__setitem__(last, ENTRIES),
            lambda: step.decode_entries.__setitem__(last, 2**31 - 1),
            lambda: step.decode_entries.__setitem__(last, -(2**31)),
        ]
    if step.n_chunks:
        c = int(rng.integers(0, step.n_chunks))
        entry, _, start, count = step.chunks[:4, c].tolist()
        ways += [
            lambda: step.chunks.__setitem__((0, c), ENTRIES + 5),
            lambda: step.chunks.__setitem__((0, c), -1),
            lambda: step.chunks.__setitem__((2, c), CAP - count + 1),
            lambda: unfill(entry, start + count - 1),
        ]
    if shape.decode > step.n_decode:
        ways += [lambda: tables.length.__setitem__(0, -5)]
    ways[int(rng.integers(0, len(ways)))]()


@pytest.mark.parametrize("seed", range(SPOILT))
def test_what_no_scheduler_may_ask_for_is_a_fault_on_all_three(seed: int) -> None:
    rng = np.random.default_rng((1, seed))
    plain = random_world(rng)
    shape = random_batch(rng, plain, WINDOWS[seed % 3])
    for _ in range(1 + seed % 2):
        spoil(rng, plain, shape)
    host, device = plain.copy(), plain.copy()
    faults = plain_step.gather(plain.step, plain.tables, plain.ids, plain.rows, shape, PAGE, poison=False)
    assert faults
    first = faults[0] & ((1 << FAULT_BITS) - 1)
    sentence = explain(first).split("0", 1)[1]  # behind the entry
    with pytest.raises(DeviceError, match=sentence):
        gather_with(shape)(kernels(HostStepKernels), host)
    on_triton(device, gather_with(shape))
    plain.fault[0] = max(faults)
    same(device, plain)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("code", [BAD_POSITION, NOT_FILLED])
def test_the_last_token_of_a_window_has_to_have_its_place(code: int, window: int) -> None:
    plain = random_world(np.random.default_rng(0))
    plain.step.n_decode, plain.step.drafts = 2, window - 1
    plain.step.decode_entries[:2] = 5, 6
    plain.tables.length[5] = CAP - window + (code == BAD_POSITION)
    if code == NOT_FILLED:
        plain.tables.pages[5, -1] = 0
    shape, host, device = PassShape.of_step(plain.step), plain.copy(), plain.copy()
    faults = plain_step.gather(plain.step, plain.tables, plain.ids, plain.rows, shape, PAGE, poison=False)
    assert faults == [plain_step.fault(code, 5)]
    with pytest.raises(DeviceError, match="entry 5"):
        gather_with(shape)(kernels(HostStepKernels), host)
    seen, tensors = on_triton(device, gather_with(shape))
    plain.fault[0] = faults[0]
    same(device, plain)
    assert seen.read(tensors.tables.pages)[5].any() == (code == NOT_FILLED)


def test_the_random_batches_have_every_kind_of_pass_among_them() -> None:
    kinds = set()
    for seed in range(BATCHES):
        rng = np.random.default_rng(seed)
        world = random_world(rng)
        shape = random_batch(rng, world, WINDOWS[seed % 3])
        kinds |= {(shape.window, part) for part in ("decode", "chunks", "lasts") if getattr(shape, part)}
        kinds |= {(shape.window, "padding")} if shape.decode > world.step.n_decode else set()
    assert kinds == {(window, part) for window in WINDOWS for part in ("decode", "chunks", "lasts", "padding")}


@pytest.mark.parametrize("change", [(3, 0), (3, -5), (3, 33), (3, 2**31 - 1), (2, -1), (2, -(2**31))])
def test_a_chunk_that_no_upload_lets_through_touches_nothing_else(change: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    world = random_world(rng)
    step = world.step
    step.n_decode, step.n_chunks = 1, 3
    step.decode_entries[0] = 4
    for c, entry in enumerate((5, 6, 7)):
        step.chunks[:5, c] = entry, 0, 4, 5, 1
    shape = PassShape.of_step(step)
    step.chunks[change[0], 1] = change[1]
    seen, tensors = on_triton(world, gather_with(shape))
    assert int(world.fault[0]) & ((1 << FAULT_BITS) - 1) == BAD_SOURCE
    assert not seen.written(tensors.tables.pages).any()
    assert world.rows.entries[1] == 5
    assert world.rows.entries[2] == 0


# ------------------------------------------------------------------ writes to the shared tables


def slot_write_step(world: World, writes: list[tuple[int, int, int]]) -> None:
    world.step.n_slot_writes = len(writes)
    world.step.slot_writes[:, : len(writes)] = np.array(writes, np.int32).T


def slot_writes(count: int) -> Callable[[Any, World], None]:
    return lambda k, w: k.write_slots(k.view(w.descriptor), count, w.tables.pages, w.fault)


@pytest.mark.parametrize("seed", range(3))
def test_slot_writes_leave_the_same_on_all_three(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = random_world(rng)
    places = rng.permutation((ENTRIES - 1) * PER_ROW)[: rng.integers(1, LAYOUT.slot_write_cap)]
    entries, indices = places // PER_ROW + 1, places % PER_ROW
    pages = rng.integers(1, CONFIG.pages, len(places))
    slot_write_step(plain, list(zip(entries.tolist(), indices.tolist(), pages.tolist(), strict=True)))
    host, device = plain.copy(), plain.copy()
    assert plain_step.write_slots(plain.step, plain.tables.pages, CONFIG.pages) == []
    slot_writes(len(places))(kernels(HostStepKernels), host)
    seen, tensors = on_triton(device, slot_writes(len(places)))
    same(host, plain)
    same(device, plain)
    np.testing.assert_array_equal(seen.written(tensors.tables.pages), only((ENTRIES, PER_ROW), entries, indices))
    at = LAYOUT.slot_writes_at
    np.testing.assert_array_equal(
        seen.read(tensors.descriptor), only(len(plain.descriptor), slice(at, at + 3 * len(places)))
    )


BAD_WRITES = {
    (0, 0, 1): BAD_ENTRY, (-1, 0, 1): BAD_ENTRY, (ENTRIES, 0, 1): BAD_ENTRY, (2**31 - 1, 0, 1): BAD_ENTRY,
    (1, -1, 1): BAD_PAGE, (1, PER_ROW, 1): BAD_PAGE, (1, 0, 0): BAD_PAGE, (1, 0, CONFIG.pages): BAD_PAGE,
    (1, 2**31 - 1, 1): BAD_PAGE, (1, 0, -1): BAD_PAGE,
}  # fmt: skip


@pytest.mark.parametrize("write", BAD_WRITES)
def test_a_slot_write_that_names_what_does_not_exist_is_a_fault(write: tuple[int, int, int]) -> None:
    plain = random_world(np.random.default_rng(0))
    slot_write_step(plain, [(3, 1, 9), write, (4, 0, 8)])
    host, device = plain.copy(), plain.copy()
    faults = plain_step.write_slots(plain.step, plain.tables.pages, CONFIG.pages)
    assert [fault & 0xFF for fault in faults] == [BAD_WRITES[write]]
    with pytest.raises(DeviceError, match=str(write[0])):
        slot_writes(3)(kernels(HostStepKernels), host)
    on_triton(device, slot_writes(3))
    plain.fault[0] = faults[0]
    same(device, plain)


def sampling_writes(count: int) -> Callable[[Any, World], None]:
    return lambda k, w: k.write_sampling(k.view(w.descriptor), count, *w.tables[3:], w.fault)


@pytest.mark.parametrize("seed", range(2))
def test_sampling_writes_leave_the_same_on_all_three(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = random_world(rng)
    count = int(rng.integers(1, CONFIG.max_running + 1))
    entries = rng.permutation(np.arange(1, ENTRIES))[:count]
    for i, entry in enumerate(entries.tolist()):
        value = int(rng.integers(0, 2**64, dtype=np.uint64))
        plain.step.set_sampling(i, entry, *rng.random(3).tolist(), int(rng.integers(0, 99)), value)
    plain.step.n_sampling = count
    host, device = plain.copy(), plain.copy()
    assert plain_step.write_sampling(plain.step, *plain.tables[3:]) == []
    sampling_writes(count)(kernels(HostStepKernels), host)
    seen, tensors = on_triton(device, sampling_writes(count))
    same(host, plain)
    same(device, plain)
    for array in tensors.tables[3:]:
        np.testing.assert_array_equal(seen.written(array), only(tuple(array.shape), ..., entries))
        assert not seen.read(array).any()


@pytest.mark.parametrize("entry", [0, -1, ENTRIES, 2**31 - 1])
def test_a_sampling_write_of_no_entry_is_a_fault(entry: int) -> None:
    plain = random_world(np.random.default_rng(0))
    for i, e in enumerate((2, entry, 3)):
        plain.step.set_sampling(i, e, 0.5, 0.25, 0.125, 7, 2**63 + 1)
    plain.step.n_sampling = 3
    host, device = plain.copy(), plain.copy()
    faults = plain_step.write_sampling(plain.step, *plain.tables[3:])
    with pytest.raises(DeviceError, match=f"entry {entry} does not exist"):
        sampling_writes(3)(kernels(HostStepKernels), host)
    on_triton(device, sampling_writes(3))
    plain.fault[0] = faults[0]
    same(device, plain)


# ------------------------------------------------------------------ what rows gain


@dataclass
class Outcome:
    """What an accept reads and writes beside the rows."""

    targets: Any  # i32[SAMPLES]
    gained: Gained
    table: Any  # i32[ENTRIES]

    @classmethod
    def empty(cls, targets: Any, fill: int) -> "Outcome":
        ints = (np.full(shape, fill, np.int32) for shape in (MOST, (CONFIG.window, MOST), MOST, ENTRIES))
        return cls(targets.copy(), Gained(*(next(ints) for _ in range(3))), next(ints))

    def arrays(self) -> list[Any]:
        return [self.targets, *self.gained, self.table]


def random_pass(rng: np.random.Generator) -> tuple[Rows, Any, PassShape]:
    """Rows as a gather leaves them, with drafts; targets that foresee some of them, and some that are no tokens."""
    rows, window = empty_rows(SENTINEL), int(rng.choice(WINDOWS))
    lasts = int(rng.integers(0, 4))
    decode = int(rng.integers(0 if lasts else 1, MOST - lasts + 1))
    shape = PassShape(decode, 3, decode * window + 9, lasts, 9, window)
    rows.tokens[: shape.tokens] = rng.integers(0, 2, shape.tokens)
    rows.entries[: shape.gainers] = rng.permutation(np.arange(1, ENTRIES))[: shape.gainers]
    rows.lengths[: shape.gainers] = rng.integers(1, CAP, shape.gainers)
    padded = int(rng.integers(0, decode + 1))
    rows.entries[decode - padded : decode] = rows.lengths[decode - padded : decode] = 0
    targets = np.full(SAMPLES, SENTINEL, np.int32)
    targets[: shape.samples] = rng.integers(-(rng.random() < 0.4), 2, shape.samples)
    drafted = np.arange(decode * window) % window > 0  # from the second token of each window on
    right = drafted & (rng.random(len(drafted)) < 0.8)
    rows.tokens[: len(right)][right] = targets[np.flatnonzero(right) - 1]
    return rows, targets, shape


@pytest.mark.parametrize("seed", range(16))
def test_an_accept_leaves_the_same_on_all_three(seed: int) -> None:
    given, targets, shape = random_pass(np.random.default_rng(seed))

    def plainly(fill: int) -> tuple[Rows, Outcome]:
        rows, outcome = Rows(*(array.copy() for array in given)), Outcome.empty(targets, fill)
        plain_step.accept(rows, outcome.targets, outcome.gained, outcome.table, shape)
        return rows, outcome

    (rows, plain), (_, other) = plainly(SENTINEL), plainly(SENTINEL - 1)
    host_rows, host = Rows(*(array.copy() for array in given)), Outcome.empty(targets, SENTINEL)
    kernels(HostStepKernels).accept(host_rows, host.targets, host.gained, host.table, shape)
    cuda_rows, cuda = Rows(*(array.copy() for array in given)), Outcome.empty(targets, SENTINEL)
    made_rows, made = Rows(*map(tensor, cuda_rows)), [tensor(array) for array in cuda.arrays()]
    with trace() as seen:
        kernels(TritonStepKernels).accept(made_rows, made[0], Gained(*made[1:4]), made[4], shape)
    for one, two, three in zip(
        (*rows, *plain.arrays()), (*host_rows, *host.arrays()), (*cuda_rows, *cuda.arrays()), strict=True
    ):
        np.testing.assert_array_equal(two, one)
        np.testing.assert_array_equal(three, one)
    for array, one, two in zip(made[1:], plain.arrays()[1:], other.arrays()[1:], strict=True):
        np.testing.assert_array_equal(seen.written(array), one == two)
        assert not seen.read(array).any()
    for name, array in made_rows._asdict().items():
        gainers = only(tuple(array.shape), slice(shape.gainers)) if name in ("entries", "lengths") else None
        drafts = np.arange(TOKENS) % shape.window > 0
        drafts[shape.decode * shape.window :] = False
        wanted = gainers if gainers is not None else drafts if name == "tokens" else only(tuple(array.shape), [])
        np.testing.assert_array_equal(seen.read(array), wanted, name)
        np.testing.assert_array_equal(seen.written(array), wanted if name == "lengths" else wanted & False, name)
    np.testing.assert_array_equal(seen.read(made[0]), only(SAMPLES, slice(shape.samples)))
    assert seen.kernels == ["accept_kernel"]


def test_the_random_passes_have_every_count_among_them() -> None:
    counts, faulty = set(), 0
    for seed in range(16):
        rows, targets, shape = random_pass(np.random.default_rng(seed))
        outcome = Outcome.empty(targets, SENTINEL)
        plain_step.accept(rows, outcome.targets, outcome.gained, outcome.table, shape)
        counts |= {(shape.window, int(count)) for count in outcome.gained.counts[: shape.decode]}
        faulty += int((outcome.gained.newest[: shape.gainers] < 0).sum())
    assert counts == {(window, count) for window in WINDOWS for count in range(1, window + 1)}
    assert faulty > 3


def test_what_is_gained_by_an_entry_that_does_not_exist_is_published_nowhere() -> None:
    given, targets, _ = random_pass(np.random.default_rng(0))
    outcome = Outcome.empty(targets, SENTINEL)
    given.entries[:3] = ENTRIES, -1, 2
    given.lengths[:3] = 5
    made, shape = [tensor(array) for array in outcome.arrays()], PassShape.of_decode(3)
    with trace():
        kernels(TritonStepKernels).accept(Rows(*map(tensor, given)), made[0], Gained(*made[1:4]), made[4], shape)
    assert np.flatnonzero(outcome.table != SENTINEL).tolist() == [2]


# ------------------------------------------------------------------ relay, upload, result


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_a_stash_leaves_the_same_on_all_three(count: int) -> None:
    rng = np.random.default_rng(count)
    entries = rng.permutation(np.arange(1, ENTRIES))[:count].astype(np.int32)
    values = rng.integers(0, 99, count).astype(np.int32)
    padding = count // 2
    entries[padding + 1 :], values[padding + 1 :] = 0, 5  # padding rows all say the same
    tables = [rng.integers(-1, 99, ENTRIES).astype(np.int32)] * 3
    plain, host, device = (table.copy() for table in tables)
    plain_step.scatter(plain, entries, values)
    kernels(HostStepKernels).stash(host, entries, values)
    with trace() as seen:
        kernels(TritonStepKernels).stash(tensor(device), tensor(entries), tensor(values))
    assert host.tolist() == plain.tolist()
    assert device.tolist() == plain.tolist()
    assert seen.written(tensor(device)).tolist() == only(ENTRIES, entries).tolist()
    assert not seen.read(tensor(device)).any()


def test_an_entry_that_does_not_exist_is_not_written() -> None:
    table = np.zeros(ENTRIES, np.int32)
    with trace():
        entries = torch.tensor([ENTRIES, -1, 2], dtype=torch.int32)
        kernels(TritonStepKernels).stash(tensor(table), entries, torch.tensor([1, 2, 3], dtype=torch.int32))
    assert table.tolist() == only(ENTRIES, 2).astype(int).dot(3).tolist()


@pytest.fixture
def upload() -> Iterator[Callable[[Any], tuple[Any, Any, Any]]]:
    """Runs an upload of three chunks, with a change to them, on host or Triton kernels."""
    payload = np.arange(-LAYOUT.nbytes // 4, 0, dtype=np.int32)
    plane = np.arange(CONFIG.rows * CONFIG.max_len, dtype=np.int32).reshape(CONFIG.rows, CONFIG.max_len)
    slot = LAYOUT.view(payload)
    slot.clear()
    slot.n_decode, slot.n_chunks, slot.n_slot_writes = 2, 3, 5

    def run(kind: Any, *change: Any) -> tuple[Any, Any, Any]:
        for c, chunk in enumerate(((3, 2, 7, 4, 0), (1, 0, 0, 9, 1), (2, 5, CONFIG.max_len - 3, 3, 1))):
            slot.chunks[:5, c] = chunk
        if change:
            slot.chunks[change[0], 1] = change[1]
        descriptor = np.full(LAYOUT.nbytes // 4, SENTINEL, np.int32)
        ids, fault = np.full(CONFIG.prefill_chunk, SENTINEL, np.int32), np.ones(1, np.int32)
        arrays = (payload, descriptor, plane, ids, fault)
        kernels(kind).upload(slot, *(map(tensor, arrays) if kind is TritonStepKernels else arrays))
        return descriptor, ids, fault

    yield run


def test_an_upload_leaves_the_same_on_host_and_cuda(upload: Any) -> None:
    host, device = upload(HostStepKernels), upload(TritonStepKernels)
    for x, y in zip(host, device, strict=True):
        np.testing.assert_array_equal(x, y)
    assert device[2] == 1  # a fault stays
    assert device[1][:17].tolist() == [
        *range(2 * 64 + 7, 2 * 64 + 11), *range(9), *range(6 * 64 - 3, 6 * 64), SENTINEL,
    ]  # fmt: skip


@pytest.mark.parametrize("change", [(1, -1), (1, CONFIG.rows), (2, -1), (2, CONFIG.max_len - 8), (3, 0), (3, 33)])
@pytest.mark.parametrize("kind", [HostStepKernels, TritonStepKernels])
def test_a_chunk_outside_of_its_row_is_not_uploaded(upload: Any, kind: Any, change: tuple[int, int]) -> None:
    with pytest.raises(DeviceError, match="a chunk of entry 1 lies outside"):
        upload(kind, *change)


def test_a_result_is_delivered_up_to_its_last_row() -> None:
    outcome, payload = torch.arange(20, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    with trace() as seen:
        kernels(TritonStepKernels).deliver(outcome, payload, 7)
    assert payload.tolist() == [*range(7), *[0] * 13]
    assert seen.read(outcome).sum() == seen.written(payload).sum() == 7


def test_the_spoilt_batches_have_every_fault_among_them() -> None:
    codes = set()
    for seed in range(SPOILT):
        rng = np.random.default_rng((1, seed))
        world = random_world(rng)
        shape = random_batch(rng, world, WINDOWS[seed % 3])
        for _ in range(1 + seed % 2):
            spoil(rng, world, shape)
        faults = plain_step.gather(world.step, world.tables, world.ids, world.rows, shape, PAGE, poison=False)
        codes |= {fault & 0xFF for fault in faults}
    assert codes == {BAD_ENTRY, BAD_POSITION, NOT_FILLED, NOT_PUBLISHED}
