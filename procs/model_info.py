"""From a model's files to the ModelInfo that every process works with.

Owns the reading of the architecture: GGUF metadata, or config.json and generation_config.json of a folder in Hugging
Face layout. Everything that would make the server compute something else than the model was trained for (a window,
biases, experts, another activation, an unknown rotary scaling, another architecture) is refused with one line; nothing
is ignored. Never reads the numbers in a weight, only the table of tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from procs.tokenizer_files import check_tokenizer
from shm.clocked_file import ClockedFile, is_clocked
from shm.config import ConfigError, ModelInfo
from shm.gguf_file import GgufFile
from shm.safetensors_file import INDEX_FILE, SINGLE_FILE, read_folder, read_json
from shm.tensor_map import ModelError, TensorEntry, check_tensors, gguf_name, llama_tensors

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})
ROPE_FREQUENCIES = "rope_freqs.weight"
LAYERS_MAX, SIZE_MAX = 4096, 1 << 24
# Names in config.json, as architecture or as model type.
_LLAMA = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "llama"})
_QWEN3 = frozenset({"Qwen3ForCausalLM", "qwen3"})
_QWEN3_HEAD_DIM = 128  # of a Qwen3 that says nothing; a Llama's is hidden_size / num_attention_heads

# What each supported kind of rotary scaling needs to say.
_ROPE_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_model_info(path: str | Path, name: str | None = None) -> ModelInfo:
    """Describe the model at `path`, a .gguf file or a folder in Hugging Face layout; some tens of milliseconds.

    name: what ModelInfo.name shall be; the file's or folder's own name if None. All tensors are checked to be there
    with the right shapes and supported types, and the tokenizer to be of a supported kind. rope_scaling is None or a
    dict with "rope_type": "linear" (factor), "llama3" (keys as in config.json) or "factors" (factors: head_dim / 2
    divisors of the rotary frequencies). Raises ModelError.
    """
    path = Path(path).absolute()
    try:
        if path.is_dir() and is_clocked(read_json(path / "config.json")):
            check_tokenizer(path)
            return ClockedFile.read(path).info(path, name or path.name)
        if path.is_dir():
            info, entries, ignored = _from_folder(path, name or path.name)
        else:
            info, entries, ignored = _from_gguf(path, name or path.stem)
    except ConfigError as error:
        raise ModelError(f"{path}: {error}") from None
    check_tensors(info, entries)
    known = {gguf_name(hf_name) if info.format == "gguf" else hf_name for hf_name in llama_tensors(info)}
    for entry in entries:
        if entry not in known and not entry.endswith(ignored):
            family = "Qwen3" if info.qk_norm else "Llama"
            raise ModelError(f"{path}: tensor {entry} is not part of a plain {family}; this model is not supported")
    return info


def _from_gguf(path: Path, name: str) -> tuple[ModelInfo, dict[str, TensorEntry], tuple[str, ...]]:
    refuse_other_files(path)
    file = GgufFile(path)
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{path}: architecture {architecture!r} is not supported (llama is)")
    if file.integer("split.count", 1) > 1:
        raise ModelError(
            f"{path}: one part of a model split into several files; merge them first (llama-gguf-split --merge)"
        )
    if file.integer("llama.expert_count", 0):
        raise ModelError(f"{path}: mixture-of-experts models are not supported")
    check_tokenizer(path, file)
    sizes = _Sizes(path)
    hidden = sizes.check("llama.embedding_length", file.integer("llama.embedding_length"))
    heads = sizes.check("llama.attention.head_count", file.integer("llama.attention.head_count"))
    head_dim = sizes.check("llama.attention.key_length", file.integer("llama.attention.key_length", hidden // heads))
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if file.integer(key, head_dim) != head_dim:
            raise ModelError(
                f"{path}: {key} is {file.integer(key)}, but only {head_dim}, the size of a head, is supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = embedding.shape[0] if embedding else len(file.texts("tokenizer.ggml.tokens"))
    eos_keys = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    bos_id = file.integer("tokenizer.ggml.bos_token_id", -1)
    info = ModelInfo(
        name=name,
        path=str(path),
        format="gguf",
        vocab_size=vocab_size,
        context_len=sizes.check("llama.context_length", file.integer("llama.context_length")),
        hidden_size=hidden,
        num_layers=sizes.check("llama.block_count", file.integer("llama.block_count"), LAYERS_MAX),
        num_heads=heads,
        num_kv_heads=sizes.heads(heads, file.integer("llama.attention.head_count_kv", heads)),
        head_dim=sizes.even("llama.attention.key_length", head_dim),
        intermediate_size=sizes.check("llama.feed_forward_length", file.integer("llama.feed_forward_length")),
        rope_theta=sizes.positive("llama.rope.freq_base", file.real("llama.rope.freq_base", 10000.0)),
        rope_scaling=_gguf_rope_scaling(file, head_dim),
        rms_eps=sizes.positive(
            "llama.attention.layer_norm_rms_epsilon", file.real("llama.attention.layer_norm_rms_epsilon")
        ),
        tie_word_embeddings="output.weight" not in file.tensors,
        qk_norm=False,
        eos_token_ids=sizes.token_ids(
            "tokenizer.ggml.eos_token_id", [file.integer(key, -1) for key in eos_keys], vocab_size
        ),
        bos_token_id=bos_id if 0 <= bos_id < vocab_size else None,
    )
    return info, file.tensors, (ROPE_FREQUENCIES,)


def _gguf_rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    kind = file.text("llama.rope.scaling.type", "none")
    factor = file.real("llama.rope.scaling.factor", file.real("llama.rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported (none and linear are)")
    factors = file.tensors.get(ROPE_FREQUENCIES)
    if factors is not None:
        if factors.kind != "F32" or factors.shape != (head_dim // 2,):
            raise ModelError(f"{file.path}: {ROPE_FREQUENCIES} is not F32 of shape [{head_dim // 2}]")
        values: list[float] = np.ascontiguousarray(factors.data).view("<f4").tolist()
        if not all(0 < value < float("inf") for value in values):
            raise ModelError(f"{file.path}: {ROPE_FREQUENCIES} has values that are not positive")
        return {"rope_type": "factors", "factors": values}
    if factor <= 0:
        raise ModelError(f"{file.path}: llama.rope.scaling.factor is {factor}")
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _from_folder(folder: Path, name: str) -> tuple[ModelInfo, dict[str, TensorEntry], tuple[str, ...]]:
    config = read_json(folder / "config.json")
    is_qwen3 = _check_architecture(folder, config)
    check_tokenizer(folder)
    if not (folder / INDEX_FILE).exists() and not (folder / SINGLE_FILE).exists():
        pickles = any(file.suffix in PICKLE_SUFFIXES for file in folder.iterdir())
        hint = "; pickled weights (.bin, .pt, .pth) are refused because loading them runs code" if pickles else ""
        raise ModelError(f"{folder}: it has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    sizes = _Sizes(folder / "config.json")

    def integer(key: str, default: int | None = None, largest: int = SIZE_MAX) -> int:
        value = config.get(key)
        return sizes.check(key, default if value is None else value, largest)

    hidden, heads, vocab_size = integer("hidden_size"), integer("num_attention_heads"), integer("vocab_size")
    rope_theta, rope_scaling = _rope(folder, config)
    eos: Any = config.get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json").get("eos_token_id")
        eos = eos if generation is None else generation
    eos_ids = eos if isinstance(eos, list) else [-1 if eos is None else eos]
    bos_id = config.get("bos_token_id")
    info = ModelInfo(
        name=name,
        path=str(folder),
        format="hf",
        vocab_size=vocab_size,
        context_len=integer("max_position_embeddings", 2048),
        hidden_size=hidden,
        num_layers=integer("num_hidden_layers", largest=LAYERS_MAX),
        num_heads=heads,
        num_kv_heads=sizes.heads(heads, integer("num_key_value_heads", heads)),
        head_dim=sizes.even("head_dim", integer("head_dim", _QWEN3_HEAD_DIM if is_qwen3 else hidden // heads)),
        intermediate_size=integer("intermediate_size"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_eps=sizes.positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=config.get("tie_word_embeddings") is True,
        qk_norm=is_qwen3,
        eos_token_ids=sizes.token_ids("eos_token_id", eos_ids, vocab_size),
        bos_token_id=bos_id if type(bos_id) is int and 0 <= bos_id < vocab_size else None,
    )
    ignored = (".rotary_emb.inv_freq", *(("lm_head.weight",) if info.tie_word_embeddings else ()))
    return info, read_folder(folder), ignored


def _check_architecture(folder: Path, config: dict[str, Any]) -> bool:
    """Raise ModelError for whatever is neither a plain Llama nor a plain Qwen3; return whether it is a Qwen3."""
    named = config.get("architectures") or [config.get("model_type")]
    architectures = set(map(str, named)) if isinstance(named, list) else {str(named)}
    if any(config.get(key) for key in ("num_experts", "num_local_experts")):
        raise ModelError(f"{folder}: mixture-of-experts models are not supported")
    if not architectures & (_LLAMA | _QWEN3):
        listed = ", ".join(sorted(architectures))
        raise ModelError(
            f"{folder}: architecture {listed} is not supported (LlamaForCausalLM and Qwen3ForCausalLM are)"
        )
    is_qwen3 = not architectures & _LLAMA
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    window_binds = window is not None and not (
        isinstance(window, int) and isinstance(context, int) and window >= context
    )
    layers = config.get("layer_types")
    is_full = layers is None or (isinstance(layers, list) and all(kind == "full_attention" for kind in layers))
    refused = {
        # A Qwen3 has a window that it does not use unless it says so.
        "sliding_window": window_binds and (not is_qwen3 or config.get("use_sliding_window", False) is not False),
        "layer_types": not is_full,
        "attention_bias": config.get("attention_bias") not in (None, False),
        "quantization_config": config.get("quantization_config") is not None,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ModelError(f"{folder}: config.json asks for {key} = {config[key]!r}, which is not supported")
    return is_qwen3


def _rope(folder: Path, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; newer files keep both in rope_parameters, older ones in rope_theta and rope_scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"{folder}: config.json has a rope_scaling that is not an object")
    sizes = _Sizes(folder / "config.json")
    theta = sizes.positive("rope_theta", scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    keys = _ROPE_SCALING_KEYS.get(str(kind))
    if keys is None:
        raise ModelError(
            f"{folder}: rotary scaling {kind!r} is not supported (default, {', '.join(_ROPE_SCALING_KEYS)} are)"
        )
    values = {key: sizes.positive(f"rope_scaling.{key}", scaling.get(key)) for key in keys}
    return theta, {"rope_type": kind, **values}


def refuse_other_files(path: Path) -> None:
    """Raise ModelError, saying what to do instead, for a file that is plainly not GGUF."""
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelError(f"{path}: pickled weights are refused because loading them runs code; use safetensors or GGUF")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: name the folder that holds this file, its config.json and its tokenizer.json")


class _Sizes:
    """Checks of numbers from a model's configuration; every failure names the file and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, key: str, value: Any, largest: int = SIZE_MAX) -> int:
        if type(value) is not int or not 0 < value <= largest:
            raise ModelError(f"{self._path}: {key} is {value!r}, not a number from 1 to {largest}")
        return value

    def positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"{self._path}: {key} is {value!r}, not a positive number")
        return float(value)

    def even(self, key: str, value: int) -> int:
        if value % 2:
            raise ModelError(f"{self._path}: {key} is {value}, but rotary embedding needs an even size of a head")
        return value

    def heads(self, heads: int, kv_heads: int) -> int:
        if self.check("the number of KV heads", kv_heads) > heads or heads % kv_heads:
            raise ModelError(f"{self._path}: {heads} heads cannot share {kv_heads} KV heads")
        return kv_heads

    def token_ids(self, key: str, values: list[Any], vocab_size: int) -> tuple[int, ...]:
        """The distinct ids in their order; -1 stands for one that is not given."""
        if not all(type(value) is int and -1 <= value < vocab_size for value in values):
            raise ModelError(f"{self._path}: {key} is {values}, not ids below {vocab_size}")
        return tuple(dict.fromkeys(value for value in values if value >= 0))
