"""What is read from a model's configuration, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from procs.model_files import DEFAULT_MODEL, ModelError, read_model_info, resolve_model
from procs.model_info import ROPE_FREQUENCIES
from shm.safetensors_file import read_json
from tests.model_factory import TinyLlama, TinyQwen3, write_json, write_safetensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return TinyLlama().write_hf(tmp_path / "tiny")


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; ... removes one."""
    content = {**read_json(path), **values}
    write_json(path, {key: value for key, value in content.items() if value is not ...})


def change_gguf(path: Path, edit: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Write the tiny model's GGUF with what `edit` does to the writer before it writes its head."""
    write_header, done = gguf.GGUFWriter.write_header_to_file, []

    def edited(writer: gguf.GGUFWriter, *args: Any) -> None:
        edit(writer)
        done.append(writer)
        write_header(writer, *args)

    gguf.GGUFWriter.write_header_to_file = edited
    try:
        return TinyLlama().write_gguf(path)
    finally:
        gguf.GGUFWriter.write_header_to_file = write_header
        assert done


def replace(key: str, add: Callable[[gguf.GGUFWriter], None]) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        add(writer)

    return edit


@pytest.mark.parametrize("tied", [False, True])
def test_both_formats_say_the_same(tmp_path: Path, tied: bool) -> None:
    model = TinyLlama(tied=tied, rope_theta=50000.0)
    from_folder = read_model_info(model.write_hf(tmp_path / "tiny"))
    from_file = read_model_info(model.write_gguf(tmp_path / "tiny.gguf"))
    # A float32 in one, a decimal in the other.
    assert from_file.rms_eps == pytest.approx(from_folder.rms_eps)
    assert (
        dataclasses.replace(from_file, format="hf", path=from_folder.path, rms_eps=from_folder.rms_eps) == from_folder
    )
    assert (from_folder.name, from_folder.path) == ("tiny", str(tmp_path / "tiny"))
    assert (from_folder.vocab_size, from_folder.context_len, from_folder.head_dim) == (304, 512, 16)
    assert (from_folder.eos_token_ids, from_folder.bos_token_id) == ((2, 0), 0)
    assert (from_folder.tie_word_embeddings, from_folder.rope_theta, from_folder.rope_scaling) == (tied, 50000.0, None)
    assert read_model_info(tmp_path / "tiny", "org/tiny").name == "org/tiny"


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [([5, 5, 7], 2, (5, 7)), (9, 2, (9,)), (None, 2, (2,)), (None, [2, 3], (2, 3)), (None, None, ()), (0, 2, (0,))],
)
def test_eos_ids_of_a_folder(folder: Path, generation: Any, config: Any, ids: tuple[int, ...]) -> None:
    change(folder / "config.json", eos_token_id=config)
    change(folder / "generation_config.json", eos_token_id=generation)
    assert read_model_info(folder).eos_token_ids == ids
    if generation is None:
        (folder / "generation_config.json").unlink()
        assert read_model_info(folder).eos_token_ids == ids


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({"rope_theta": ...}, 10000.0, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            5e5,
            {"rope_type": "linear", "factor": 2},
        ),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 10000.0, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4, None),
    ],
)
def test_rotary_scaling_of_a_folder(folder: Path, values: Any, theta: float, scaling: Any) -> None:
    change(folder / "config.json", **values)
    info = read_model_info(folder)
    assert (info.rope_theta, info.rope_scaling) == (theta, scaling)


def test_a_mistral_whose_window_never_binds(folder: Path) -> None:
    change(folder / "config.json", architectures=["MistralForCausalLM"], sliding_window=None)
    assert read_model_info(folder).num_layers == 2
    change(folder / "config.json", sliding_window=512)
    assert read_model_info(folder).context_len == 512


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 256},
            "sliding_window = 256, which is not supported",
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture Qwen2ForCausalLM is not supported"),
        ({"architectures": ..., "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True, which is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"hidden_size": ...}, "hidden_size is None"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight is not part of a plain Llama"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"num_attention_heads": 64, "num_key_value_heads": 32}, "even size of a head"),
        (
            {"intermediate_size": 96},
            r"mlp.gate_proj.weight has shape \[128, 64\] where the configuration wants \[96, 64\]",
        ),
        ({"vocab_size": 100, "eos_token_id": 2}, r"embed_tokens.weight has shape \[304, 64\]"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"max_position_embeddings": 1}, "context_len: must be 2 to"),
    ],
)
def test_a_folder_that_is_refused(folder: Path, values: Any, says: str) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(ModelError, match=says) as caught:
        read_model_info(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_a_qwen3(tmp_path: Path, tied: bool) -> None:
    folder = TinyQwen3(tied=tied).write_hf(tmp_path / "tiny")
    info = read_model_info(folder)
    assert info.qk_norm and not read_model_info(TinyLlama().write_hf(tmp_path / "llama")).qk_norm
    assert (info.hidden_size, info.num_heads, info.num_kv_heads, info.head_dim) == (64, 4, 2, 32)
    assert (info.tie_word_embeddings, info.rope_scaling) == (tied, None)
    # As such files often stand: a window that is named and not used, and the kind of every layer.
    change(folder / "config.json", sliding_window=256, layer_types=["full_attention"] * 2)
    assert read_model_info(folder) == info
    # Without the size of a head it is 128, whatever the hidden size.
    change(folder / "config.json", head_dim=...)
    with pytest.raises(ModelError, match=r"q_proj.weight has shape .* wants \[512, 64\]"):
        read_model_info(folder)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attention_bias": True}, "attention_bias = True, which is not supported"),
        ({"use_sliding_window": True, "sliding_window": 256}, "sliding_window = 256, which is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({"layer_types": 2}, "layer_types = 2"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, "mixture-of-experts models are not supported"),
        ({"num_experts": 8}, "mixture-of-experts models are not supported"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "architecture Qwen3MoeForCausalLM is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn' is not supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "q_norm.weight is not part of a plain Llama"),
        ({"head_dim": 16}, r"q_proj.weight has shape \[128, 64\]"),
        ({"head_dim": 31}, "even size of a head"),
    ],
)
def test_a_qwen3_that_is_refused(tmp_path: Path, values: Any, says: str) -> None:
    folder = TinyQwen3().write_hf(tmp_path / "tiny")
    change(folder / "config.json", **values)
    with pytest.raises(ModelError, match=says) as caught:
        read_model_info(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"model.layers.1.self_attn.k_norm.weight": None}, "tensor model.layers.1.self_attn.k_norm.weight is missing"),
        ({"model.layers.1.self_attn.k_norm.weight": np.ones(16)}, r"k_norm.weight has shape \[16\]"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(128)}, "q_proj.bias is not part of a plain Qwen3"),
    ],
)
def test_weights_of_a_folder_that_are_not_a_plain_qwen3(tmp_path: Path, edit: dict[str, Any], says: str) -> None:
    folder = TinyQwen3().write_hf(tmp_path / "tiny")
    tensors = TinyQwen3().weights() | edit
    kept = {name: array.astype(np.float32) for name, array in tensors.items() if array is not None}
    write_safetensors(folder / "model.safetensors", kept)
    with pytest.raises(ModelError, match=says):
        read_model_info(folder)


def test_eos_ids_that_are_none(folder: Path) -> None:
    for value in ([304], "2", [-5], [2.0]):
        change(folder / "generation_config.json", eos_token_id=value)
        with pytest.raises(ModelError, match="eos_token_id is"):
            read_model_info(folder)


def test_missing_and_broken_files_of_a_folder(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelError, match=r"it has no tokenizer.json; tokenizer.model alone is not supported"):
        read_model_info(folder)
    (folder / "tokenizer.model").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled weights .* are refused"):
        read_model_info(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: not JSON"):
        read_model_info(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        read_model_info(folder)
    with pytest.raises(ModelError, match="no such file"):
        read_model_info(folder / "absent.gguf")


def test_weights_of_a_folder_that_are_not_a_plain_llama(folder: Path) -> None:
    tensors = TinyLlama().weights()
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    write_safetensors(folder / "model.safetensors", tensors | harmless)
    read_model_info(folder)
    write_safetensors(
        folder / "model.safetensors", tensors | {"model.layers.0.mlp.up_proj.bias": np.ones(128, np.float32)}
    )
    with pytest.raises(ModelError, match=r"up_proj.bias is not part of a plain Llama"):
        read_model_info(folder)
    write_safetensors(folder / "model.safetensors", tensors)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b'"dtype": "F32"', b'"dtype": "F99"', 1))
    with pytest.raises(ModelError, match=r"embed_tokens.weight has type F99, which is not supported"):
        read_model_info(folder)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            replace("general.architecture", lambda w: w.add_string("general.architecture", "qwen3")),
            "architecture 'qwen3'",
        ),
        (replace("", lambda w: w.add_uint16("split.count", 3)), "one part of a model"),
        (replace("", lambda w: w.add_expert_count(8)), "mixture-of-experts"),
        (replace("", lambda w: w.add_value_length(32)), "value_length is 32"),
        (replace("llama.rope.dimension_count", lambda w: w.add_rope_dimension_count(8)), "dimension_count is 8"),
        (replace("", lambda w: w.add_string("llama.rope.scaling.type", "yarn")), "rotary scaling 'yarn'"),
        (replace("", lambda w: w.add_float32("llama.rope.scaling.factor", -1.0)), "scaling.factor is -1"),
        (replace("llama.block_count", lambda w: None), "lack llama.block_count"),
        (replace("llama.context_length", lambda w: w.add_string("llama.context_length", "x")), "not an integer"),
        (replace("tokenizer.ggml.pre", lambda w: w.add_tokenizer_pre("tekken")), "pre-tokenizer 'tekken'"),
        (replace("tokenizer.ggml.model", lambda w: w.add_tokenizer_model("llama")), "tokenizer model 'llama'"),
        (replace("tokenizer.ggml.model", lambda w: None), "tokenizer model 'none'"),
        (replace("tokenizer.ggml.eos_token_id", lambda w: w.add_eos_token_id(304)), "eos_token_id is"),
        (
            lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)),
            "attn_q.bias is not part of a plain Llama",
        ),
        (lambda w: w.add_tensor(ROPE_FREQUENCIES, np.ones(7, np.float32)), r"not F32 of shape \[8\]"),
        (lambda w: w.add_tensor(ROPE_FREQUENCIES, np.zeros(8, np.float32)), "not positive"),
    ],
)
def test_a_gguf_that_is_refused(tmp_path: Path, edit: Callable[[gguf.GGUFWriter], None], says: str) -> None:
    path = change_gguf(tmp_path / "m.gguf", edit)
    with pytest.raises(ModelError, match=says) as caught:
        read_model_info(path)
    assert str(path) in str(caught.value)


def test_rotary_scaling_of_a_gguf(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    assert read_model_info(change_gguf(tmp_path / "a.gguf", linear)).rope_scaling == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = change_gguf(tmp_path / "b.gguf", lambda writer: writer.add_tensor(ROPE_FREQUENCIES, factors))
    assert read_model_info(path).rope_scaling == {"rope_type": "factors", "factors": factors.tolist()}


@pytest.mark.model
def test_the_default_model() -> None:
    info = read_model_info(resolve_model(DEFAULT_MODEL), DEFAULT_MODEL)
    assert (info.name, info.vocab_size, info.context_len, info.hidden_size) == (DEFAULT_MODEL, 49152, 8192, 576)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.intermediate_size, info.rope_theta, info.eos_token_ids, info.bos_token_id) == (1536, 1e5, (2,), 1)
    assert info.tie_word_embeddings
