"""Once a server on CUDA has started, no pass of any shape compiles or loads a kernel while requests wait for it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu.kernels import triton_sampling
from gpu.kernels.attention_cut import Cut, variants
from gpu.kernels.cuda_sampling_work import CHUNK, scratch_words
from gpu.kernels.step_kernels import Extents, Gained, PassShape, Rows, Tables
from gpu.kernels.triton_ngram import TritonNgramKernels
from gpu.kernels.triton_spec import kernel_modules, kernels_of
from gpu.kernels.triton_step import TritonStepKernels
from gpu.kernels.triton_trained import TritonTrainedKernels
from gpu.models import cuda_drafters
from gpu.models.cuda_drafters import CudaDflash, CudaMtp
from gpu.models.cuda_llama import CudaLlama
from shm.config import ModelInfo
from shm.records import STEP_MIXED, StepLayout
from tests.compile.fake_driver import FakeDriver, active
from tests.gpu.paged_mill import small_config

PAGE, PER_ROW, RUNNING, TOKENS = 16, 32, 8, 96
INFO = ModelInfo(
    name="a", path="a", format="hf", vocab_size=64, context_len=PER_ROW * PAGE, hidden_size=64, num_layers=1,
    num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64, rope_theta=1e4, rope_scaling=None, rms_eps=1e-5,
    tie_word_embeddings=True, qk_norm=False, eos_token_ids=(1,), bos_token_id=None,
)  # fmt: skip


class Zeros:
    """Weights."""

    def tensor(self, name: str) -> np.ndarray:
        if name.startswith("target_in"):
            return np.zeros((1, 64) if "norms" in name else (64, 64), np.float32)
        if "norm" in name:
            return np.zeros(64, np.float32)
        rows = 32 if "k_proj" in name or "v_proj" in name else 64
        return np.zeros((rows, 64), np.float32)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.fixture(scope="module")
def shapes() -> list[list[int]]:
    """Tokens of each row: passes of every kind."""
    rng = np.random.default_rng(4)
    found = [[1], [TOKENS], [2] * RUNNING, [12] * RUNNING, [24, 24], [1] * 7 + [80], [1, 3, 2]]
    for _ in range(60):
        rows = int(rng.integers(1, RUNNING + 1))
        counts = rng.integers(1, 1 + TOKENS // rows, rows)
        found.append([int(counts[0])] * rows if rng.random() < 0.3 else counts.tolist())
    return found


def a_pass(model: CudaLlama, counts: list[int]) -> None:
    tokens, rows = sum(counts), len(counts)
    extents = Extents(ints(RUNNING + 1)[: rows + 1], ints(RUNNING)[:rows], max(counts))
    given = (ints(TOKENS)[:tokens] for _ in range(3))
    model.forward(*given, ints(RUNNING, PER_ROW)[:rows], ints(RUNNING)[:rows], torch.zeros(rows, 64), extents)


def compiled() -> set[tuple[str, str]]:
    """Every variant of every kernel that exists for the device."""
    kernels = [kernel for module in kernel_modules().values() for kernel in kernels_of(module).values()]
    return {(k.__name__, key) for k in kernels if k.device_caches for key in k.device_caches[0][0]}


def new_of(act: Callable[[], Any]) -> set[str]:
    """Kernels of which `act` compiled a variant."""
    before = compiled()
    act()
    return {name for name, _ in compiled() - before}


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with active(90) as driver:
        yield driver


def test_no_pass_of_a_warm_model_compiles(shapes: list[list[int]], driver: FakeDriver) -> None:
    model = CudaLlama(INFO, Zeros(), "bfloat16", PAGE, 8, PER_ROW, TOKENS, RUNNING, device="cpu")
    model.warm()
    assert compiled()
    assert not new_of(lambda: [a_pass(model, counts) for counts in shapes])


def test_no_pass_of_a_warm_drafter_compiles(
    shapes: list[list[int]], driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_drafters, "DrafterWeights", lambda file: Zeros())
    file: Any = SimpleNamespace(
        check=lambda info: None, taps=(0,), layers=2, mask=3, vocabulary=np.arange(20, dtype=np.int32)
    )
    target = CudaLlama(INFO, Zeros(), "bfloat16", PAGE, 8, PER_ROW, TOKENS, RUNNING, device="cpu", taps=(0,))
    mtp, dflash = CudaMtp(target, file), CudaDflash(target, file)

    def all_passes() -> None:
        for counts in shapes:
            tokens, rows, states = sum(counts), len(counts), torch.zeros(TOKENS, 1, 64)
            extents = Extents(ints(RUNNING + 1)[: rows + 1], ints(RUNNING)[:rows], max(counts))
            passed = (ints(TOKENS)[:tokens] for _ in range(3))
            given = (*passed, ints(RUNNING, PER_ROW)[:rows], ints(RUNNING)[:rows], torch.zeros(rows, 20), extents)
            mtp.learn(states[:tokens], *given)
            mtp.begin(states[:tokens], *given)
            mtp.draft(states[:tokens], *given)
            dflash.know(states[:tokens], *given)
            dflash.draft(states[:tokens], ints(TOKENS)[:tokens], *given)

    assert new_of(mtp.warm) and not new_of(dflash.warm), "the passes of either are those of the other"
    assert not new_of(all_passes)


def test_every_cut_of_a_pass_is_among_the_variants(shapes: list[list[int]]) -> None:
    """And the shapes of this test reach all of them."""
    for itemsize in (2, 4):
        cuts = [Cut.of(sum(c), len(c), max(c), PER_ROW * PAGE, 2, 2, itemsize) for c in shapes]
        cuts += [Cut.of(sum(c), len(c), max(c), PER_ROW * PAGE, 2, 200, itemsize) for c in shapes]
        met = {(cut.queries, cut.row_blocks > 0, cut.splits > 1) for cut in cuts}
        assert met == {(cut.queries, cut.row_blocks > 0, cut.splits > 1) for cut in variants(PER_ROW * PAGE, itemsize)}


def test_a_model_that_is_not_warm_compiles_when_a_pass_comes(driver: FakeDriver) -> None:
    """The control: what is warmed is what would have been missed."""
    model = CudaLlama(INFO, Zeros(), "bfloat16", PAGE, 8, PER_ROW, TOKENS, RUNNING, device="cpu")
    a_pass(model, [1] * 4)
    assert new_of(lambda: a_pass(model, [1, 30])) == {"attention_kernel"}


def test_the_kernels_of_a_step_have_one_variant_of_each_window_for_all_steps(driver: FakeDriver) -> None:
    config = small_config(max_running=RUNNING, prefill_chunk=64, window=4)
    layout, kernels = StepLayout(config), TritonStepKernels.of(config)
    descriptor, ids, fault = ints(layout.nbytes // 4), ints(config.prefill_chunk), ints(1)
    tokens, samples = config.pass_tokens, RUNNING * config.window
    seed = torch.zeros(samples, dtype=torch.int64)
    wide = ints(config.entries, config.pages_per_row)
    tables = Tables(ints(config.entries), ints(config.entries), wide, torch.zeros(3, config.entries), ints(9), seed)
    rows = Rows(
        tokens=ints(tokens), positions=ints(tokens), seqs=ints(tokens), pages=ints(RUNNING, config.pages_per_row),
        starts=ints(RUNNING + 1), ends=ints(RUNNING), entries=ints(RUNNING), lengths=ints(RUNNING),
        logit_rows=ints(samples), places=ints(samples), real=torch.zeros(3, samples), top_k=ints(samples), seed=seed,
    )  # fmt: skip
    targets, newest = ints(samples), ints(RUNNING)
    gained = Gained(ints(RUNNING), ints(config.window, RUNNING), newest)
    view = layout.view(np.zeros(layout.nbytes // 4, np.int32))
    view.kind = STEP_MIXED

    def a_step(decode: int, chunks: list[int], writes: int, window: int) -> None:
        view.n_decode, view.n_chunks, view.drafts = decode, len(chunks), window - 1
        view.chunks[3, : len(chunks)], view.chunks[4, : len(chunks)] = chunks, 1
        shape = PassShape.of_step(view)
        step = kernels.view(descriptor)
        kernels.write_slots(step, writes, tables.pages, fault)
        kernels.write_sampling(step, min(writes, RUNNING), tables.real, tables.top_k, tables.seed, fault)
        kernels.gather(step, tables, ids, rows, shape, fault)
        kernels.accept(rows, targets[: shape.samples], gained, tables.length, shape)
        kernels.stash(tables.token, rows.entries[: shape.gainers], newest[: shape.gainers])

    a_step(1, [], 1, 1)  # what the warm-up does
    a_step(1, [], 1, 4)
    a_step(0, [1], 1, 1)

    def others() -> None:
        for decode in range(RUNNING + 1):
            for chunks in ([], [1], [16], [7, 9], [32, 32], [1, 1, 1]):
                for window in (1, 4):
                    if 0 < decode + len(chunks) <= RUNNING:
                        a_step(decode, chunks, 1 + 3 * decode, window)

    assert not new_of(others)
    assert new_of(lambda: a_step(1, [], 1, 3)) == {"gather_decode_kernel", "accept_kernel"}, "the control"


@pytest.mark.parametrize("shared", [False, True])
def test_drafts_are_looked_up_by_one_variant_for_all_steps(driver: FakeDriver, shared: bool) -> None:
    window, most = 4, 2 * RUNNING * 4
    kernels, history, known = TritonNgramKernels(RUNNING, "cpu"), ints(RUNNING + 1, 129), ints(RUNNING + 1)
    arrays = {name: ints(most) for name in Rows._fields}
    rows, gained = Rows(**arrays), Gained(ints(RUNNING), ints(window, RUNNING), ints(RUNNING))

    def a_step(decode: int, lasts: int, window: int) -> None:
        shape = PassShape(decode, lasts, decode * window + lasts, lasts, window, window)
        kernels.look_up(history, known, rows, shape, shared=shared)
        kernels.note_gains(history, known, rows, gained, shape)

    a_step(1, 0, 1)  # what the warm-up does
    a_step(1, 0, window)
    a_step(0, 1, 1)

    def others() -> None:
        for gainers in range(1, RUNNING + 1):
            for decode in range(gainers + 1):
                a_step(decode, gainers - decode, 1)
                a_step(decode, gainers - decode, window)

    assert not new_of(others)
    assert new_of(lambda: a_step(1, 0, 3)) == {"search_kernel", "draft_kernel"}, "the control"


def test_trained_drafters_have_one_variant_of_each_window_for_all_steps(driver: FakeDriver) -> None:
    window, most, kernels = 4, RUNNING * 4 + 64, TritonTrainedKernels()
    rows = Rows(**{name: ints(most) for name in Rows._fields})
    kept, residual = torch.zeros(RUNNING + 1, 64), torch.zeros(most, 64, dtype=torch.bfloat16)
    targets, tails, counts, places = (ints(most) for _ in range(4))

    def a_step(decode: int, chunks: int, window: int) -> None:
        size = 5 * chunks
        shape = PassShape(decode, chunks, decode * window + chunks * size, chunks, max(window, size), window)
        if window > 1 and decode:
            kernels.recall(kept, rows, shape, torch.zeros(decode, 1, 64))
            kernels.recall(kept, rows, shape, torch.zeros(decode * window, 1, 64))
            kernels.lay_blocks(rows, shape, decode, *(ints(decode * window) for _ in range(3)))
            for place in range(1, window):
                kernels.put_drafts(torch.zeros(decode, 100), ints(100), rows.tokens, window, place)
            kernels.put_drafts(torch.zeros(decode * 3, 100), ints(100), rows.tokens, window, 1, window - 1)
        kernels.next_tokens(rows, targets, tails, shape, ints(most))
        kernels.newest_places(counts, rows, shape, places)
        kernels.keep(kept, rows.entries[: shape.gainers], residual, places)

    a_step(1, 0, 1)  # what the warm-up does
    a_step(1, 0, window)
    a_step(0, 1, 1)

    def others() -> None:
        for decode in range(RUNNING + 1):
            for chunks in range(3):
                for width in (1, window):
                    if decode + chunks:
                        a_step(decode, chunks, width)

    assert not new_of(others)
    assert new_of(lambda: a_step(1, 0, 3)) == {"recall_kernel", "newest_kernel", "blocks_kernel"}, "the control"


def test_the_sampler_has_one_variant_for_all_batches(driver: FakeDriver) -> None:
    def sample(rows: int) -> None:
        real = torch.zeros(3, RUNNING)
        triton_sampling.sample(
            torch.zeros(RUNNING, 300)[:rows],
            *(row[:rows] for row in real),
            ints(RUNNING)[:rows],
            torch.zeros(RUNNING, dtype=torch.int64)[:rows],
            ints(RUNNING)[:rows],
            ints(RUNNING)[:rows],
            torch.zeros(scratch_words(RUNNING, 300, CHUNK), dtype=torch.int64),
        )

    sample(1)
    assert not new_of(lambda: [sample(rows) for rows in range(2, RUNNING + 1)])
