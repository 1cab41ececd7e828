"""The CUDA model in Triton's interpreter: against the plain reference, and against the model on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.kernels.step_kernels import Extents
from gpu.models import cuda_llama
from gpu.models.cuda_llama import CudaLlama
from gpu.models.llama import HostLlama
from gpu.models.reference import reference_logits
from gpu.models.weights import WeightSource, open_weights
from procs.model_info import read_model_info
from shm.config import ModelInfo
from tests.model_factory import TinyLlama, TinyQwen3

PAGE_SIZE, PAGES_PER_ROW, PAGES = 16, 3, 10
SIZES = {"page_size": PAGE_SIZE, "pages": PAGES, "pages_per_row": PAGES_PER_ROW, "max_tokens": 40, "max_seqs": 40}
# Root mean square error, relative to that of the logits.
FLOAT32_CLOSE, BF16_CLOSE = 1e-5, 2e-2
IDS = {"a": [int(t) for t in np.random.default_rng(1).integers(3, 304, 20)], "b": [9, 280, 33, 70, 4], "pad": [0]}
# Each pass: sequence, first token, tokens. A prompt in chunks across pages, decode steps; "pad" is a padding row.
PASSES = [
    [("a", 0, 7)],
    [("b", 0, 3), ("a", 7, 11)],
    [("b", 3, 1), ("pad", 0, 1), ("a", 18, 1)],
    [("a", 19, 1), ("b", 4, 1)],
]
PAGE_ROWS = {"a": [7, 2, 8], "b": [4, 8, 8], "pad": [0, 0, 0]}


class Changed:
    """Weights of which one tensor is another."""

    def __init__(self, source: WeightSource, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self._source, self._name, self._change = source, name, change

    def tensor(self, name: str) -> np.ndarray:
        values = self._source.tensor(name)
        return self._change(values) if name == self._name else values


class Bfloat16:
    """Weights rounded to bfloat16."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def tensor(self, name: str) -> np.ndarray:
        return torch.from_numpy(self._source.tensor(name)).bfloat16().float().numpy()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelInfo, WeightSource]]:
    folder: Path = tmp_path_factory.mktemp("models")
    paths = {
        "qwen3": TinyQwen3(seed=3, tied=True).write_hf(folder / "qwen3", shards=2),
        "llama": TinyLlama(seed=3).write_gguf(folder / "llama.gguf"),
    }
    infos = {name: read_model_info(path) for name, path in paths.items()}
    return {name: (info, open_weights(info)) for name, info in infos.items()}


def build(info: ModelInfo, weights: Any, dtype: str, device: str = "cpu") -> CudaLlama:
    """A model whose cache holds NaN wherever no pass has written."""
    model = CudaLlama(info, weights, dtype, **SIZES, device=device)
    model.k_cache.fill_(float("nan"))
    model.v_cache.fill_(float("nan"))
    return model


def arrays(parts: list[tuple[str, int, int]]) -> tuple[list[np.ndarray], Extents]:
    """tokens, positions, seqs and page_rows i32 of a pass, and its extents."""
    tokens = [t for name, first, count in parts for t in IDS[name][first : first + count]]
    positions = [p for _, first, count in parts for p in range(first, first + count)]
    seqs = [row for row, (_, _, count) in enumerate(parts) for _ in range(count)]
    pages = [PAGE_ROWS[name] for name, _, _ in parts]
    counts = [count for _, _, count in parts]
    starts, ends = [0, *np.cumsum(counts)], [first + count for _, first, count in parts]
    extents = Extents(np.array(starts, np.int32), np.array(ends, np.int32), max(counts))
    return [np.array(x, np.int32) for x in (tokens, positions, seqs, pages)], extents


def passes(model: Any, as_array: Callable[[np.ndarray], Any]) -> dict[str, np.ndarray]:
    """Run all of PASSES; return the logits behind every token of each sequence: f32[T, vocab]."""
    gathered: dict[str, list[np.ndarray]] = {name: [] for name in IDS}
    for parts in PASSES:
        given, extents = arrays(parts)
        count = len(given[0])
        rows = np.arange(count, dtype=np.int32)[::-1].copy()  # in an order of its own
        logits = np.full((count, model.info.vocab_size), np.nan, np.float32)
        device_extents = Extents(as_array(extents.starts), as_array(extents.ends), extents.longest)
        model.forward(*map(as_array, (*given, rows, logits)), device_extents)
        logits = logits[::-1]
        for row, (name, _, _) in enumerate(parts):
            gathered[name].append(logits[extents.starts[row] : extents.starts[row + 1]])
    return {name: np.concatenate(pieces) for name, pieces in gathered.items()}


def error(logits: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest of all sequences."""
    return max(
        float(np.sqrt(np.mean((logits[name] - expected[name]) ** 2) / np.mean(expected[name] ** 2)))
        for name in ("a", "b")
    )


def references(info: ModelInfo, weights: Any) -> dict[str, np.ndarray]:
    return {name: reference_logits(info, weights, IDS[name]) for name in ("a", "b")}


@pytest.fixture(scope="module")
def float32_logits(models: dict[str, tuple[ModelInfo, WeightSource]]) -> dict[str, dict[str, np.ndarray]]:
    return {name: passes(build(*model, "float32"), torch.from_numpy) for name, model in models.items()}


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_float32_logits_are_those_of_the_reference_and_of_the_host(models: Any, float32_logits: Any, name: str) -> None:
    info, weights = models[name]
    logits = float32_logits[name]
    assert error(logits, references(info, weights)) < FLOAT32_CLOSE
    host = HostLlama(info, weights, "float32", **SIZES, threads=1)
    on_host = passes(host, lambda array: array)
    host.close()
    assert error(logits, on_host) < FLOAT32_CLOSE
    for sequence in ("a", "b"):
        np.testing.assert_array_equal(logits[sequence].argmax(1), on_host[sequence].argmax(1))


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_bfloat16_logits_are_close(models: Any, name: str) -> None:
    info, weights = models[name]
    logits = passes(build(info, weights, "bfloat16"), torch.from_numpy)
    found = error(logits, references(info, Bfloat16(weights)))
    assert FLOAT32_CLOSE < found < BF16_CLOSE, found


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *[("qwen3", f"model.layers.1.self_attn.{part}.weight") for part in ("q_norm", "k_norm")],
        *[("llama", f"model.layers.1.self_attn.{part}_proj.weight") for part in "qkvo"],
        *[("llama", f"model.layers.1.mlp.{part}_proj.weight") for part in ("gate", "up", "down")],
        *[("llama", f"model.layers.1.{part}_layernorm.weight") for part in ("input", "post_attention")],
        *[("llama", part) for part in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight")],
    ],
)
def test_a_tensor_that_is_slightly_wrong_shows(models: Any, float32_logits: Any, name: str, tensor: str) -> None:
    """What the tolerance of float32 can tell apart: the control of the comparisons above."""
    info, weights = models[name]
    wrong = references(info, Changed(weights, tensor, lambda values: np.roll(values, 1, 0)))
    assert error(float32_logits[name], wrong) > 100 * FLOAT32_CLOSE


class Operators(TorchDispatchMode):
    """Notes every torch operator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Triton kernels do nothing: the interpreter itself uses torch operators."""
    called: list[str] = []
    for name in ("embed", "rmsnorm", "add_rmsnorm", "silu_mul", "rope_write"):
        monkeypatch.setattr(cuda_llama.triton_rows, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(cuda_llama.PagedAttention, "run", lambda *_: called.append("attention"))
    yield called


@pytest.mark.parametrize(("dtype", "product"), [("float32", "aten.mm.out"), ("bfloat16", "aten.mm.dtype_out")])
def test_a_pass_neither_allocates_nor_waits(models: Any, no_kernels: list[str], dtype: str, product: str) -> None:
    """On meta tensors, where no value exists that could be waited for, and the shapes are checked all the same."""
    info, weights = models["qwen3"]
    model = build(info, weights, dtype, device="meta")
    given, extents = arrays(PASSES[1])
    tensors = [torch.from_numpy(array).to("meta") for array in given]
    logit_rows, logits = torch.zeros(2, dtype=torch.int32, device="meta"), torch.zeros(2, 304, device="meta")
    on_meta = Extents(*(torch.from_numpy(x).to("meta") for x in extents[:2]), extents.longest)
    with Operators() as seen:
        model.forward(*tensors, logit_rows, logits, on_meta)
    views = {"aten.slice.Tensor", "aten.view.default"}
    products = [name for name in seen.names if name not in views]
    assert products == ["aten.mm.out"] * 4 * info.num_layers + [product]
    layer = ["rope_write", "attention", "add_rmsnorm", "silu_mul", "add_rmsnorm"]
    assert no_kernels == ["embed", "rmsnorm", *layer * info.num_layers, "embed"]


def test_a_pass_without_logits(models: Any) -> None:
    info, weights = models["llama"]
    model = build(info, weights, "float32")
    given, extents = arrays(PASSES[0])
    tensors = [torch.from_numpy(array) for array in given]
    on_device = Extents(torch.from_numpy(extents.starts), torch.from_numpy(extents.ends), extents.longest)
    model.forward(*tensors, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 304), on_device)
    assert not model.k_cache[:, PAGE_ROWS["a"][0], :7].isnan().any()
    assert model.k_cache[:, PAGE_ROWS["a"][0], 7:].isnan().all()


def test_what_it_cannot_do_is_named(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info, weights = models["llama"]
    with pytest.raises(ValueError, match=r"dtype 'int8' is none of bfloat16, float32"):
        build(info, weights, "int8")
    for head_dim in (8, 24):
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}; the CUDA kernels need a power of two"):
            build(ModelInfo(**{**vars(info), "head_dim": head_dim}), weights, "float32")
    wrong = Changed(weights, "model.layers.1.mlp.up_proj.weight", lambda values: values[1:])
    with pytest.raises(ValueError, match=r"up_proj.weight has the shape \(127, 64\), expected \(128, 64\)"):
        build(info, wrong, "float32")
    model = build(info, weights, "float32")
    given, extents = arrays([("a", 0, 20), ("b", 0, 5), ("a", 0, 16)])
    with pytest.raises(ValueError, match="a pass of 41 tokens and 0 logit rows exceeds the buffers"):
        model.forward(*map(torch.from_numpy, given), torch.zeros(0), torch.zeros(0, 304), extents)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(MemoryError, match="no room"):
        build(info, weights, "float32")
