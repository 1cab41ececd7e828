"""What trained drafters take out of a pass and put into it: Triton's kernels, the host's and the plain reference agree.

The interpreter runs Triton's kernels on the memory of numpy arrays, traced. Blocks are made small, so that a few tokens
take several of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from gpu.device.protocol import DeviceError
from gpu.kernels import plain_trained, triton_trained
from gpu.kernels.draft_kernels import NO_TAIL, Tail
from gpu.kernels.step_kernels import PassShape, Rows
from gpu.kernels.trained import HostTrainedKernels
from gpu.kernels.triton_trained import TritonTrainedKernels
from tests.interpret.access import trace
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here

SENTINEL = -77
ENTRIES, HIDDEN = 12, 20
HOST, CUDA = HostTrainedKernels(), TritonTrainedKernels()
WILD = np.array([-(2**31), -1, ENTRIES, 2**30, 2**31 - 1], np.int32)  # no entries


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_trained, "LOGITS_BLOCK", 8)
    monkeypatch.setattr(triton_trained, "TOKENS_BLOCK", 4)
    monkeypatch.setattr(triton_trained, "ROWS_BLOCK", 4)


def tensors(arrays: Any) -> Any:
    return type(arrays)(*map(torch.from_numpy, arrays))


@dataclass
class World:
    """One pass, as a gather and an acceptance leave it, and what a drafter keeps."""

    rows: Rows
    shape: PassShape
    targets: Any
    counts: Any
    tails: Any
    kept: Any  # f32[ENTRIES, HIDDEN]

    def copy(self) -> "World":
        rows = Rows(*(a.copy() for a in self.rows))
        return World(rows, self.shape, self.targets.copy(), self.counts.copy(), self.tails.copy(), self.kept.copy())


def random_world(rng: np.random.Generator, window: int, chunks: int | None = None) -> World:
    """Decode rows, some of them padding, and chunks, some of them the last of their prompt."""
    decode = int(rng.integers(0 if chunks != 0 else 1, 6))
    sizes = rng.integers(1, 8, rng.integers(decode == 0, 4) if chunks is None else chunks).tolist()
    is_last = rng.integers(0, 2, len(sizes)).astype(bool)
    before, count = decode * window, decode * window + sum(sizes)
    shape = PassShape(decode, len(sizes), count, int(is_last.sum()), max([window, *sizes]), window)
    bounds = np.cumsum([0, *[window] * decode, *sizes])
    arrays = dict.fromkeys(Rows._fields, np.zeros(0, np.int32))
    live = rng.permutation(np.arange(1, ENTRIES))[: shape.gainers]
    live[: rng.integers(0, decode + 1)] = 0
    ends = [before + sum(sizes[: c + 1]) - 1 for c in range(len(sizes)) if is_last[c]]
    arrays |= {
        "tokens": np.concatenate([rng.integers(1, 60, count), [SENTINEL] * 3]),
        "positions": np.concatenate([rng.integers(0, 9) + np.arange(window) for _ in range(decode + 1)]),
        "starts": np.concatenate([bounds, [SENTINEL] * 2]),
        "entries": np.concatenate([live, [SENTINEL]]),
        "logit_rows": np.array([*range(before), *ends, SENTINEL]),
    }
    rows = Rows(**{name: array.astype(np.int32) for name, array in arrays.items()})
    targets = np.concatenate([rng.integers(-1, 60, shape.samples), [SENTINEL]]).astype(np.int32)
    counts = np.concatenate([rng.integers(1, window + 1, decode), np.ones(shape.lasts + 1)]).astype(np.int32)
    tails = np.concatenate([np.where(is_last, NO_TAIL, rng.integers(1, 60, len(sizes))), [SENTINEL] * 2])
    kept = rng.standard_normal((ENTRIES, HIDDEN)).astype(np.float32)
    return World(rows, shape, targets, counts, tails.astype(np.int32), kept)


def blank(count: int) -> list[Any]:
    """Room for three results of so many numbers, and what nobody may write behind it."""
    return [np.full(count + 2, SENTINEL, np.int32) for _ in range(3)]


def same(results: list[Any]) -> None:
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("seed", range(10))
def test_the_token_behind_each_and_the_newest_place(seed: int) -> None:
    world = random_world(np.random.default_rng(seed), 1 + seed % 4)
    rows, shape, made = world.rows, world.shape, tensors(world.rows)
    behind, places = blank(shape.tokens), blank(shape.gainers)
    plain_trained.next_tokens(rows, world.targets, world.tails, shape, behind[0])
    HOST.next_tokens(rows, world.targets, world.tails, shape, behind[1])
    plain_trained.newest_places(world.counts, rows, shape, places[0])
    HOST.newest_places(world.counts, rows, shape, places[1])
    given = [torch.from_numpy(array) for array in (world.targets, world.tails, world.counts, behind[2], places[2])]
    with trace() as seen:
        CUDA.next_tokens(made, given[0], given[1], shape, given[3])
        CUDA.newest_places(given[2], made, shape, given[4])
    same(behind)
    same(places)
    assert seen.written(given[3]).sum() == shape.tokens and seen.written(given[4]).sum() == shape.gainers
    assert not any(seen.written(array).any() for array in (*made, *given[:3]))


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_laid_the_same_on_all_three(seed: int) -> None:
    window = 2 + seed % 3
    world = random_world(np.random.default_rng(seed), window, chunks=seed % 2)
    shape, made = world.shape, tensors(world.rows)
    tokens = shape.decode * window
    sizes = (tokens, tokens, tokens - shape.decode)
    results = [[np.full(n, SENTINEL, np.int32) for n in sizes] for _ in range(3)]
    plain_trained.lay_blocks(world.rows, shape, 61, *results[0])
    HOST.lay_blocks(world.rows, shape, 61, *results[1])
    arrays = [torch.from_numpy(array) for array in results[2]]
    with trace() as seen:
        CUDA.lay_blocks(made, shape, 61, *arrays)
    for result in results[1:]:
        for array, wanted in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(array, wanted)
    assert seen.read(made.tokens).sum() == shape.decode
    assert not any(seen.written(array).any() for array in made)


@pytest.mark.parametrize("each", ["once", "for each token"])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_recalled_the_same_on_all_three(seed: int, each: str) -> None:
    window = 2 + seed % 3
    world = random_world(np.random.default_rng(seed), window)
    shape, rng, times = world.shape, np.random.default_rng(9), 1 if each == "once" else window
    residual = rng.standard_normal((shape.tokens + 2, HIDDEN)).astype(np.float32)
    places = rng.integers(0, shape.tokens, shape.gainers).astype(np.int32)
    kept = [world.kept.copy() for _ in range(3)]
    states = [np.full((shape.decode * times, 1, HIDDEN), np.nan, np.float32) for _ in kept]
    entries, kernels = world.rows.entries[: shape.gainers], (plain_trained, HOST)
    for one, known, recalled in zip(kernels, kept, states, strict=False):
        one.keep(known, entries, residual, places)
        one.recall(known, world.rows, shape, recalled)
    made, there, given = tensors(world.rows), torch.from_numpy(kept[2]), torch.from_numpy(states[2])
    with trace() as seen:
        CUDA.keep(there, made.entries[: shape.gainers], torch.from_numpy(residual), torch.from_numpy(places))
        CUDA.recall(there, made, shape, given)
    live = np.repeat(world.rows.entries[: shape.decode] > 0, times)
    for known, recalled in zip(kept[1:], states[1:], strict=True):
        np.testing.assert_array_equal(known[1:], kept[0][1:])
        np.testing.assert_array_equal(recalled[live], states[0][live])
    assert not seen.written(there)[0].any(), "padding keeps nothing"
    assert not any(seen.written(array).any() for array in made), "no token is drafted by that"


@pytest.mark.parametrize("width", [1, 7, 8, 21])
@pytest.mark.parametrize("each", [1, 2])
def test_the_likeliest_tokens_are_the_same_on_all_three(width: int, each: int) -> None:
    """With equal logits among them, of which the first counts."""
    rng = np.random.default_rng(width)
    count, window = 3, 4
    logits = rng.integers(0, 3, (count * each, width)).astype(np.float32)
    logits[0] = -np.inf
    vocabulary = (5 * np.arange(width) + 2).astype(np.int32)
    results = blank(count * window)
    plain_trained.put_drafts(logits, vocabulary, results[0], window, 1, each)
    HOST.put_drafts(logits, vocabulary, results[1], window, 1, each)
    with trace() as seen:
        CUDA.put_drafts(*map(torch.from_numpy, (logits, vocabulary, results[2])), window, 1, each)
    same(results)
    assert seen.kernels == ["best_kernel"]
    HOST.put_drafts(logits[:0], vocabulary, results[1], window, 1, each)
    CUDA.put_drafts(*map(torch.from_numpy, (logits[:0], vocabulary, results[2])), window, 1, each)
    same(results)


def test_logits_without_a_number_still_say_a_token() -> None:
    logits, target = torch.full((1, 9), torch.nan), torch.zeros(1, dtype=torch.int32)
    with trace():
        CUDA.put_drafts(logits, torch.arange(3, 12, dtype=torch.int32), target, 1, 0)
    assert target.item() in range(3, 12)


def test_tails_are_noted_the_same_on_host_and_cuda() -> None:
    plane, wanted = np.arange(40, dtype=np.int32).reshape(4, 10), [Tail(3, 6), Tail(1, NO_TAIL), Tail(0, 9)]
    host, cuda = np.full(5, SENTINEL, np.int32), np.full(5, SENTINEL, np.int32)
    HOST.note_tails(plane, wanted, host)
    CUDA.note_tails(torch.from_numpy(plane), wanted, torch.from_numpy(cuda))
    assert host.tolist() == cuda.tolist() == [36, NO_TAIL, 9, SENTINEL, SENTINEL]
    for tail in (Tail(4, 0), Tail(-1, 0), Tail(0, 10), Tail(0, -2)):
        with pytest.raises(DeviceError, match="what follows a chunk"):
            HOST.note_tails(plane, [tail], host)
        with pytest.raises(DeviceError, match="what follows a chunk"):
            CUDA.note_tails(torch.from_numpy(plane), [tail], torch.from_numpy(cuda))


def test_states_are_copied_whatever_their_type() -> None:
    residual, states = torch.randn(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 1, HIDDEN)
    CUDA.copy_states(residual[:2], states)
    assert torch.equal(states[:, 0], residual[:2].float())
    kept = torch.zeros(ENTRIES, HIDDEN)
    CUDA.keep(kept, torch.tensor([4], dtype=torch.int32), residual, torch.tensor([2]).int())
    assert torch.equal(kept[4], residual[2].float()) and not kept[5:].any()


@pytest.mark.parametrize("name", ["entries", "places"])
def test_nothing_else_is_touched_whatever_the_device_holds(name: str) -> None:
    """The trace raises before a kernel touches what it was not given."""
    count, window = len(WILD), 2
    world = random_world(np.random.default_rng(0), window)
    kept = torch.from_numpy(world.kept.copy())
    arrays = {field: torch.zeros(count * window, dtype=torch.int32) for field in Rows._fields}
    rows, residual = Rows(**arrays), torch.zeros(ENTRIES, HIDDEN)
    rows.entries[:count] = torch.arange(1, count + 1)
    places = torch.zeros(count, dtype=torch.int32)
    (rows.entries if name == "entries" else places)[:count] = torch.from_numpy(WILD)
    with trace() as seen:
        CUDA.keep(kept, rows.entries[:count], residual, places)
        CUDA.recall(kept, rows, PassShape.of_decode(count, window), torch.zeros(count, 1, HIDDEN))
    assert not seen.written(kept).any()


@pytest.mark.parametrize("wild", WILD.tolist())
def test_a_chunk_that_ends_anywhere_stays_inside_the_pass(wild: int) -> None:
    """What a gather has found wrong leaves starts that do not fit."""
    world = random_world(np.random.default_rng(4), 2, chunks=2)
    shape, made = world.shape, tensors(world.rows)
    made.starts[shape.decode + 1] = wild
    tails = torch.full((3,), NO_TAIL, dtype=torch.int32)
    out = torch.full((shape.tokens,), SENTINEL, dtype=torch.int32)
    with trace():
        CUDA.next_tokens(made, torch.from_numpy(world.targets[: shape.samples]), tails, shape, out)
    assert out[: shape.decode * 2].min() >= 0
