"""Every call site of every Triton kernel, through Triton's real launch path, for every supported GPU; no GPU is needed.

Shapes are those of real models, one layer of each. What is launched has to be what the specs say, so that the kernels
that were compiled and measured ahead of time are the ones that a server runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton

from gpu.kernels import triton_pages, triton_sampling, triton_window
from gpu.kernels.cuda_sampling_work import scratch_words
from gpu.kernels.draft_kernels import Tail, Text
from gpu.kernels.step_kernels import Extents, Gained, PassShape, Rows, Tables
from gpu.kernels.triton_compile import TARGETS, compile_spec
from gpu.kernels.triton_gather import SPEC_WINDOWS, spec_layouts
from gpu.kernels.triton_ngram import TritonNgramKernels
from gpu.kernels.triton_rows import SPEC_TAPS
from gpu.kernels.triton_spec import collect_specs, kernel_modules, kernels_of
from gpu.kernels.triton_step import TritonStepKernels
from gpu.kernels.triton_trained import SPEC_HIDDEN, SPEC_VOCABULARY, TritonTrainedKernels
from gpu.models import cuda_drafters
from gpu.models.cuda_drafters import CudaDflash, CudaMtp
from gpu.models.cuda_llama import CudaLlama
from shm.config import ModelInfo
from shm.records import STEP_MIXED
from tests.compile.fake_driver import Launch, active

STREAM = 11
PAGE = 16
LAYOUT, (ENTRIES, PER_ROW), CHUNK = spec_layouts()[0]
RUNNING = ENTRIES - 1
PAGES = 10000


@dataclass(frozen=True)
class Size:
    """What tells the kernels of a model apart."""

    dtype: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int

    def info(self) -> ModelInfo:
        """The model with one layer, and a vocabulary of a few words: its matrix would only take time."""
        return ModelInfo(
            name="a",
            path="a",
            format="hf",
            vocab_size=64,
            context_len=PER_ROW * PAGE,
            hidden_size=self.hidden,
            num_layers=1,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            intermediate_size=self.ffn,
            rope_theta=10000.0,
            rope_scaling=None,
            rms_eps=1e-5,
            tie_word_embeddings=True,
            qk_norm=self.dim == 128,
            eos_token_ids=(1,),
            bos_token_id=None,
        )

    def tensor(self, name: str) -> np.ndarray:
        """Weights that are all zero."""
        queries, keys = self.heads * self.dim, self.kv_heads * self.dim
        shapes = {
            "embed_tokens": (64, self.hidden),
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.ffn, self.hidden),
            "up_proj": (self.ffn, self.hidden),
            "down_proj": (self.hidden, self.ffn),
            "q_norm": (self.dim,),
            "k_norm": (self.dim,),
            "token_in": (self.hidden, self.hidden),
            "state_in": (self.hidden, self.hidden),
            "matrix": (self.hidden, SPEC_TAPS * self.hidden),
            "norms": (SPEC_TAPS, self.hidden),
        }
        part = name.removesuffix(".weight").rpartition(".")[2]
        return np.zeros(shapes.get(part, (self.hidden,)), np.float32)


SIZES = {
    "smollm2-135m": Size("float32", 576, 1536, 9, 3, 64, 49152),
    "qwen3-0.6b": Size("bfloat16", 1024, 3072, 16, 8, 128, 151936),
}


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def run_model(size: Size) -> None:
    """Decode passes of few and many rows, windows of several tokens, and passes with chunks, split and not."""
    model = CudaLlama(size.info(), size, size.dtype, PAGE, 4, PER_ROW, RUNNING + CHUNK, RUNNING, device="cpu")
    for counts in ([1], [1] * RUNNING, [4] * 6, [1] * 24 + [CHUNK // 2] * 2):
        tokens, rows = sum(counts), len(counts)
        starts = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
        extents = Extents(starts, ints(rows), max(counts))
        logits = torch.zeros(rows, 64)
        model.forward(*(ints(tokens) for _ in range(3)), ints(rows, PER_ROW), ints(rows), logits, extents)


def run_drafters(size: Size) -> None:
    """Every pass of trained drafters, whose files hold zeros too."""
    taps = tuple(range(SPEC_TAPS))
    target = CudaLlama(size.info(), size, size.dtype, PAGE, 4, PER_ROW, 16, 8, device="cpu", taps=taps)
    file: Any = SimpleNamespace(
        check=lambda info: None, taps=taps, layers=1, mask=3, vocabulary=np.arange(20, dtype=np.int32)
    )
    with patch.object(cuda_drafters, "DrafterWeights", lambda file: size):
        mtp, dflash = CudaMtp(target, file), CudaDflash(target, file)
    states = torch.zeros(8, SPEC_TAPS, size.hidden)
    passed = (ints(8), ints(8), ints(8), ints(2, PER_ROW))
    rest = ints(2), torch.zeros(2, 20), Extents(ints(3), ints(2), 4)
    mtp.learn(states, *passed, *rest)
    mtp.begin(states[:, :1].contiguous(), *passed, *rest)
    mtp.draft(states[:, :1].contiguous(), *passed, *rest)
    dflash.know(states, *passed, *rest)
    dflash.draft(states[:, :1].contiguous(), ints(8), *passed, *rest)


def run_sampler(size: Size) -> None:
    for rows in (1, 8):
        real = torch.zeros(3, 64)
        triton_sampling.sample(
            torch.zeros(rows, size.vocab),
            *(row[:rows] for row in real),
            ints(rows),
            torch.zeros(rows, dtype=torch.int64),
            ints(rows),
            ints(rows),
            torch.zeros(scratch_words(rows, size.vocab), dtype=torch.int64),
        )


def run_window(size: Size) -> None:
    """Acceptance of three drafts, with the probabilities of all tokens and without."""
    window, requests = 4, 2
    shape = window - 1, requests, size.vocab
    for draft_probs in (None, torch.zeros(shape)):
        triton_window.accept(
            torch.zeros(window * requests, size.vocab),
            ints(*shape[:2]),
            draft_probs,
            *(row[:requests] for row in torch.zeros(3, 64)),
            ints(requests),
            torch.zeros(requests, dtype=torch.int64),
            ints(requests),
            ints(requests),
            ints(window, requests),
            ints(requests),
            ints(requests),
            ints(window * requests),
            torch.zeros(scratch_words(window * requests, size.vocab), dtype=torch.int64),
        )


def empty_rows(most: int) -> Rows:
    """Room for the largest pass with windows of up to `most` tokens."""
    tokens, samples = RUNNING * most + CHUNK, RUNNING * most
    sizes = dict.fromkeys(("tokens", "positions", "seqs"), tokens)
    sizes |= {"starts": RUNNING + 1, **dict.fromkeys(("logit_rows", "places", "top_k"), samples)}
    made = {name: ints(sizes.get(name, RUNNING)) for name in Rows._fields}
    made |= {"pages": ints(RUNNING, PER_ROW), "real": torch.zeros(3, samples)}
    return Rows(**{**made, "seed": torch.zeros(samples, dtype=torch.int64)})


def run_step(poison: bool, most: int) -> None:
    """Every method of the step's own kernels; the descriptor lies in memory that any process may share."""
    kernels = TritonStepKernels(LAYOUT, page_size=PAGE, pages=PAGES, poison=poison)
    payload = np.zeros(LAYOUT.nbytes // 4, np.int32)
    slot = LAYOUT.view(payload)
    slot.clear()
    slot.kind, slot.n_decode, slot.n_chunks, slot.n_slot_writes, slot.drafts = STEP_MIXED, 3, 2, 1, most - 1
    slot.chunks[:5, 0] = 4, 0, 0, 20, 1
    slot.chunks[:5, 1] = 5, 1, 3, 7, 0
    descriptor, ids, fault = ints(LAYOUT.nbytes // 4), ints(CHUNK), ints(1)
    kernels.upload(slot, torch.from_numpy(payload), descriptor, ints(8, 128), ids, fault)
    step = kernels.view(descriptor)
    seed = torch.zeros(ENTRIES, dtype=torch.int64)
    tables = Tables(ints(ENTRIES), ints(ENTRIES), ints(ENTRIES, PER_ROW), torch.zeros(3, ENTRIES), ints(ENTRIES), seed)
    kernels.write_slots(step, 1, tables.pages, fault)
    kernels.write_sampling(step, 2, tables.real, tables.top_k, seed, fault)
    rows, gained = empty_rows(most), Gained(ints(RUNNING), ints(most, RUNNING), ints(RUNNING))
    decode = [PassShape.of_decode(count, window) for count in (1, RUNNING) for window in {1, most}]
    for shape in (*decode, PassShape.of_step(slot)):
        kernels.gather(step, tables, ids, rows, shape, fault)
        kernels.accept(rows, ints(shape.samples), gained, tables.length, shape)
    for count in (1, 3):
        kernels.stash(tables.token, rows.entries[:count], ints(count))
    kernels.deliver(ints(64), ints(64), 64)


def run_ngram() -> None:
    """Texts noted, looked up and continued; those of other rows are asked, and not."""
    window, kernels = SPEC_WINDOWS[-1], TritonNgramKernels(RUNNING, "cpu")
    history, known, rows = ints(ENTRIES, PER_ROW * PAGE + 1), ints(ENTRIES), empty_rows(window)
    kernels.note_prompts(history, known, ints(8, 128), [Text(1, 2, 100)])
    gained = Gained(ints(RUNNING), ints(window, RUNNING), ints(RUNNING))
    for shape in (PassShape.of_decode(1, window), PassShape.of_decode(RUNNING, window)):
        for shared in (False, True):
            kernels.look_up(history, known, rows, shape, shared=shared)
        kernels.note_gains(history, known, rows, gained, shape)


def run_trained() -> None:
    """What trained drafters of either kind do in a step, with chunks and without."""
    most, kernels = SPEC_WINDOWS[-1], TritonTrainedKernels()
    rows, tails, tokens = empty_rows(most), ints(RUNNING), RUNNING * most + CHUNK
    kept = torch.zeros(ENTRIES, SPEC_HIDDEN)
    kernels.note_tails(ints(8, 128), [Tail(1, 9)], tails)
    chunks = PassShape(2, 3, 2 * most + 9, 1, 5, most)
    for shape in (PassShape.of_decode(1, most), PassShape.of_decode(RUNNING, most), chunks, PassShape.of_decode(1)):
        kernels.next_tokens(rows, ints(RUNNING * most), tails, shape, ints(tokens))
        kernels.newest_places(ints(RUNNING), rows, shape, ints(RUNNING))
        for dtype in (torch.bfloat16, torch.float32):
            residual, entries = torch.zeros(tokens, SPEC_HIDDEN, dtype=dtype), rows.entries[: shape.gainers]
            kernels.keep(kept, entries, residual, ints(RUNNING))
        if shape.window > 1:
            kernels.recall(kept, rows, shape, torch.zeros(shape.decode, 1, SPEC_HIDDEN))
            kernels.recall(kept, rows, shape, torch.zeros(shape.decode * most, 1, SPEC_HIDDEN))
            kernels.lay_blocks(rows, shape, 7, *(ints(shape.decode * most) for _ in range(3)))
        logits = torch.zeros(shape.decode, SPEC_VOCABULARY)
        kernels.put_drafts(logits, ints(SPEC_VOCABULARY), rows.tokens, most, 1)


def run_pages() -> None:
    for rows in (1, RUNNING):
        triton_pages.join_pages(ints(rows, PER_ROW), ints(rows + 1), ints(rows * PER_ROW))


CALLS: dict[str, Callable[[], Any]] = {
    **{f"model-{name}": lambda size=size: run_model(size) for name, size in SIZES.items()},
    "sampler": lambda: run_sampler(SIZES["smollm2-135m"]),
    "window": lambda: run_window(SIZES["qwen3-0.6b"]),
    **{f"step-{most}": lambda most=most: run_step(False, most) for most in SPEC_WINDOWS},
    "step-poisoned": lambda: run_step(True, 1),
    "ngram": run_ngram,
    "trained": run_trained,
    **{f"drafters-{name}": lambda size=size: run_drafters(size) for name, size in SIZES.items()},
    "pages": run_pages,
}


@pytest.fixture(scope="module")
def launched() -> dict[int, list[Launch]]:
    """All launches so far, by target."""
    return {capability: [] for capability in TARGETS}


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("call", CALLS)
def test_call_sites(launched, call: str, capability: int) -> None:
    with active(capability) as driver:
        driver.stream = STREAM
        try:
            CALLS[call]()
        finally:
            launched[capability] += driver.launches
    assert driver.launches
    assert {launch.stream for launch in driver.launches} == {STREAM}
    strangers = {describe(launch) for launch in driver.launches if not is_specified(launch)}
    assert not strangers, "launched, but no spec compiles it:\n" + "\n".join(strangers)


SPECS = collect_specs()
# Chosen pass by pass, in more combinations than are worth compiling ahead of time; the driver measures those here.
VARIED = {
    "attention_kernel": {"QUERIES", "KEYS", "EVEN", "SPLIT", "out", "num_warps"},
    "combine_kernel": {"SPLITS", "HEADS", "DIM", "out"},
    **{name: {"WINDOW"} for name in ("start_kernel", "cut_kernel", "settle_kernel", "tally_kernel")},
}


def is_specified(launch: Launch) -> bool:
    varied = frozenset(VARIED.get(launch.kernel.__name__, ()))
    return any(launch.is_variant_of(spec, varied) for spec in SPECS)


def describe(launch: Launch) -> str:
    kinds = {name: kind for name, kind in launch.signature.items() if kind != "constexpr"}
    unaligned = sorted(name for name, kind in kinds.items() if kind.startswith("*") and name not in launch.aligned)
    also = sorted(name for name in launch.aligned if not kinds[name].startswith("*"))
    return f"{launch.kernel.__name__} {kinds} {launch.constants} {unaligned=} {also=} {launch.warps} {launch.stages}"


@pytest.mark.parametrize("capability", TARGETS)
def test_no_kernel_is_left_out(request: pytest.FixtureRequest, launched, capability: int) -> None:
    ran = {
        item.callspec.params["call"]
        for item in request.session.items
        if "call" in getattr(item, "callspec", SimpleNamespace(params=())).params
    }
    if ran != set(CALLS):
        pytest.skip("needs all call sites to have run")
    every = {kernel.__name__ for module in kernel_modules().values() for kernel in kernels_of(module).values()}
    assert {launch.kernel.__name__ for launch in launched[capability]} == every


def test_a_launch_that_no_spec_has_is_seen() -> None:
    with active(90) as driver:
        run_pages()
    (first, *_) = driver.launches
    (spec,) = (spec for spec in SPECS if first.is_variant_of(spec))
    assert not first.is_variant_of(replace(spec, constants={"BLOCK": 128}))
    assert not first.is_variant_of(replace(spec, aligned=spec.aligned[1:]))


@pytest.mark.parametrize("capability", TARGETS)
def test_a_launch_finds_what_its_spec_has_compiled(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """To Triton's cache too, a spec and its launch are one thing."""
    kernel = triton_pages.join_pages_kernel
    for spec in triton_pages.SPECS:
        compile_spec(spec, capability)
    found = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **also: found.append(cache_hit))
    with active(capability):
        run_pages()
        assert found == [True]
        kernel[(1,)](ints(1, 8), ints(2), ints(8)[1:], 8, BLOCK=triton_pages.BLOCK, num_warps=1)
    assert found == [True, False], "a variant that no spec has is compiled anew"
