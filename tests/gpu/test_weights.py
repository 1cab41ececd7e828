"""Weights: every element type against the gguf package, every format against the arrays that were written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.models.weights import open_weights
from gpu.models.weights_dequantize import CHUNK_BLOCKS, to_float32
from procs.model_files import DEFAULT_MODEL, read_model_info, resolve_model
from shm.gguf_file import GgufFile
from shm.tensor_map import BLOCKS, ModelError, tensor_bytes
from tests.model_factory import TinyLlama, TinyQwen3, gguf_name, write_safetensors

QUANTS = ["Q8_0", "Q4_0", "Q4_1"]


def reference(kind: str, shape: tuple[int, ...], raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw.reshape(shape[0], -1), gguf.GGMLQuantizationType[kind]).reshape(shape)


def assert_same_bits(left: np.ndarray, right: np.ndarray) -> None:
    assert left.dtype == right.dtype == np.float32
    # Random scales may be NaN; which of the many does not matter.
    np.testing.assert_array_equal(np.isnan(left), np.isnan(right))
    numbers = ~np.isnan(left)
    np.testing.assert_array_equal(left[numbers].view(np.uint32), right[numbers].view(np.uint32))


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "F32"])
@settings(max_examples=30, deadline=2000)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_any_bytes_as_the_reference_has_them(kind: str, rows: int, blocks: int, seed: int) -> None:
    shape = (rows, blocks * 32)
    raw = np.random.default_rng(seed).integers(0, 256, tensor_bytes(kind, shape), np.uint8)
    with np.errstate(all="ignore"):
        assert_same_bits(to_float32(kind, shape, raw), reference(kind, shape, raw))


@pytest.mark.parametrize("kind", BLOCKS)
def test_tensors_of_several_chunks(kind: str) -> None:
    shape = (3, (CHUNK_BLOCKS // 2 + 17) * 32)
    values = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).reshape(-1).view(np.uint8)
    assert_same_bits(to_float32(kind, shape, raw), reference(kind, shape, raw) if kind != "F32" else values)


def test_unaligned_bytes() -> None:
    values = np.arange(8, dtype=np.float32)
    raw = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:]
    np.testing.assert_array_equal(to_float32("F32", (2, 4), raw), values.reshape(2, 4))


def test_bytes_that_do_not_match_the_shape() -> None:
    with pytest.raises(ValueError, match="do not match"):
        to_float32("Q8_0", (2, 32), np.zeros(67, np.uint8))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("form", ["gguf", "hf", "hf sharded", "hf qwen3"])
def test_what_was_written_comes_back_under_its_name(tmp_path: Path, form: str, dtype: str, tied: bool) -> None:
    model = (TinyQwen3 if "qwen3" in form else TinyLlama)(seed=3, tied=tied)
    if form == "gguf":
        path = model.write_gguf(tmp_path / "m.gguf", dtype)
    else:
        path = model.write_hf(tmp_path / "m", dtype, shards=3 if "sharded" in form else 1)
    source = open_weights(read_model_info(path))
    written = model.weights()
    assert source.names() == list(written)
    tolerance = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8}[dtype]
    for name, values in written.items():
        read = source.tensor(name)
        assert (read.dtype, read.shape) == (np.float32, values.shape)
        assert read.flags.c_contiguous
        assert read.flags.writeable
        np.testing.assert_allclose(read, values, rtol=tolerance, atol=1e-6 if tolerance else 0, err_msg=name)
    assert np.array_equal(source.tensor("lm_head.weight"), source.tensor("model.embed_tokens.weight")) == tied


@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_rows_of_q_and_k_are_put_back(tmp_path: Path, quant: str) -> None:
    model = TinyLlama(seed=5)
    source = open_weights(read_model_info(model.write_gguf(tmp_path / "m.gguf", quant)))
    for name, values in model.weights().items():
        # A block's step is its range over 15 (4 bit) or 127 (8 bit).
        bound = 0.0 if values.ndim == 1 else float(np.abs(values).max()) * (0.01 if quant == "Q8_0" else 0.14)
        assert float(np.abs(source.tensor(name) - values).max()) <= bound, name


def test_a_tensor_that_the_model_lacks(tmp_path: Path) -> None:
    for path in (TinyLlama().write_gguf(tmp_path / "m.gguf"), TinyLlama().write_hf(tmp_path / "hf")):
        source = open_weights(read_model_info(path))
        for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "nonsense"):
            with pytest.raises(ModelError, match=f"no tensor {name}"):
                source.tensor(name)


def test_files_that_changed_after_the_model_was_described(tmp_path: Path) -> None:
    model = TinyLlama()
    path = model.write_gguf(tmp_path / "m.gguf")
    info = read_model_info(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(ModelError, match=r"tensor blk\.1\.\S+ ends at byte"):
        open_weights(info)
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_gate\.weight has shape \[128, 64\]"):
        open_weights(dataclasses.replace(info, intermediate_size=96))
    with pytest.raises(ModelError, match=r"tensor blk\.2\.attn_norm\.weight is missing"):
        open_weights(dataclasses.replace(info, num_layers=3))
    folder = model.write_hf(tmp_path / "hf")
    info = read_model_info(folder)
    write_safetensors(folder / "model.safetensors", {"lm_head.weight": model.weights()["lm_head.weight"]})
    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is missing"):
        open_weights(info)


@pytest.mark.model
def test_the_default_model_as_the_reference_has_it() -> None:
    info = read_model_info(resolve_model(DEFAULT_MODEL))
    source, file = open_weights(info), GgufFile(Path(info.path))
    for name in ("model.embed_tokens.weight", "model.layers.29.mlp.down_proj.weight", "model.norm.weight"):
        entry = file.tensors[gguf_name(name)]
        np.testing.assert_array_equal(source.tensor(name), reference(entry.kind, entry.shape, entry.data))
    q_proj, entry = source.tensor("model.layers.3.self_attn.q_proj.weight"), file.tensors["blk.3.attn_q.weight"]
    stored = reference(entry.kind, entry.shape, entry.data).reshape(9, 32, 2, 576)
    np.testing.assert_array_equal(q_proj.reshape(9, 2, 32, 576), stored.swapaxes(1, 2))
