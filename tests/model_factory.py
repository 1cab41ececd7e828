"""Tiny random Llama and Qwen3 models for tests, in the formats that the server reads.

Use from any test: `from tests.model_factory import TinyLlama, TinyQwen3`.

    TinyLlama(seed=0).write_hf(tmp_path / "hf")          -> Path of a folder in Hugging Face layout
    TinyLlama(seed=0).write_gguf(tmp_path / "m.gguf")    -> Path of the same model (weights, tokenizer) as one GGUF file
    TinyQwen3(seed=0).write_hf(tmp_path / "qwen")        -> Path of a folder; heads of 32, normed, and no GGUF form

Defaults: hidden 64, 2 layers, 4 heads over 2 KV heads of 16, intermediate 128, context 512, vocabulary 304 (byte-level
BPE: ids 0..2 = <|endoftext|> (bos), <|im_start|>, <|im_end|> (eos); 256 bytes; 45 merges), a ChatML template, eos ids
(2, 0). Weights are scaled so that greedy output is varied. The same seed gives the same weights. Writes only under
the path that it is given.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID = 0
EOS_TOKEN_IDS = (2, 0)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Every merge's parts must be made by an earlier one; "Ġ" is the space and "Ċ" the newline of byte-level BPE.
MERGES = [
    *("Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "o r", "e n", "Ġ o", "i t", "e s"),
    *("Ġ b", "i s", "Ġ c", "a n", "o u", "in g", "a l", "Ġ m", "Ġ f", "Ġ p", "e d", "Ġo f", "Ġ in", "Ġa n", "Ġan d"),
    *("a r", "Ġt o", "i on", "i c", "Ġ d", "l e", "r o", "Ġ h", "Ġ Ġ", "Ċ Ċ", "Ġ l", "Ġ n", "l y", "u r"),
]


def byte_alphabet() -> list[str]:
    """The characters that stand for the bytes 0..255: printable ones for themselves, the others from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    """The 304 tokens in id order."""
    return [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


@dataclass(frozen=True)
class TinyLlama:
    """Shape and seed of one random model; the methods write it. Every size is a count of elements."""

    seed: int = 0
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    context: int = 512
    rope_theta: float = 10000.0
    tied: bool = False

    qk_norm: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """HF name -> float32 array in HF layout."""
        rng = np.random.default_rng(self.seed)
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        vocab_size = len(vocabulary())

        def linear(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
            return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

        def norm() -> NDArray[np.float32]:
            return (1 + 0.1 * rng.standard_normal(self.hidden)).astype(np.float32)

        tensors = {"model.embed_tokens.weight": linear(vocab_size, self.hidden, gain=np.sqrt(self.hidden))}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            tensors |= {
                prefix + "input_layernorm.weight": norm(),
                prefix + "self_attn.q_proj.weight": linear(q_width, self.hidden, gain=2.0),
                prefix + "self_attn.k_proj.weight": linear(kv_width, self.hidden, gain=2.0),
                prefix + "self_attn.v_proj.weight": linear(kv_width, self.hidden),
                prefix + "self_attn.o_proj.weight": linear(self.hidden, q_width, gain=2.0),
                prefix + "post_attention_layernorm.weight": norm(),
                prefix + "mlp.gate_proj.weight": linear(self.intermediate, self.hidden),
                prefix + "mlp.up_proj.weight": linear(self.intermediate, self.hidden),
                prefix + "mlp.down_proj.weight": linear(self.hidden, self.intermediate, gain=2.0),
            }
            if self.qk_norm:
                for name in ("q_norm", "k_norm"):  # uneven, so that no element can stand for another
                    values = 1.5 + 0.5 * rng.standard_normal(self.head_dim)
                    tensors[f"{prefix}self_attn.{name}.weight"] = values.astype(np.float32)
        tensors["model.norm.weight"] = norm()
        if not self.tied:
            tensors["lm_head.weight"] = linear(vocab_size, self.hidden, gain=4.0)
        return tensors

    def config(self) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(vocabulary()),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": BOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_IDS[0],
            "torch_dtype": "float32",
        }

    def write_hf(self, folder: Path, dtype: str = "F32", shards: int = 1) -> Path:
        """Write the folder (made if missing). dtype: F32, F16 or BF16; shards > 1 adds model.safetensors.index.json."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config())
        write_json(folder / "generation_config.json", {"eos_token_id": list(EOS_TOKEN_IDS)})
        write_json(folder / "tokenizer.json", tokenizer_json())
        tokens = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2], "chat_template": CHAT_TEMPLATE}
        write_json(folder / "tokenizer_config.json", tokens)
        tensors = self.weights()
        if shards == 1:
            write_safetensors(folder / "model.safetensors", tensors, dtype)
            return folder
        weight_map = {}
        for shard in range(shards):
            file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in list(tensors)[shard::shards]}
            write_safetensors(folder / file_name, part, dtype)
            weight_map |= dict.fromkeys(part, file_name)
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        return folder

    def write_gguf(self, path: Path, quant: str = "F32", pre: str = "smollm") -> Path:
        """Write one GGUF file. quant: type of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1; norms stay F32)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("Tiny random Llama")
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_feed_forward_length(self.intermediate)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_rope_freq_base(self.rope_theta)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(len(vocabulary()))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocabulary())
        writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(vocabulary()) - len(SPECIAL_TOKENS)))
        writer.add_token_merges(list(MERGES))
        writer.add_bos_token_id(BOS_TOKEN_ID)
        writer.add_eos_token_id(EOS_TOKEN_IDS[0])
        writer.add_eot_token_id(EOS_TOKEN_IDS[1])
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
        for name, array in self.weights().items():
            kind = gguf.GGMLQuantizationType[quant if array.ndim > 1 else "F32"]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(self._gguf_rows(name, array), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _gguf_rows(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """GGUF stores the rows of q and k with the two halves of each head interleaved."""
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}.get(name.split(".")[-2])
        if heads is None:
            return array
        halves = array.reshape(heads, 2, self.head_dim // 2, self.hidden)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


@dataclass(frozen=True)
class TinyQwen3(TinyLlama):
    """A Qwen3: normed queries and keys, and heads whose size has nothing to do with the hidden size."""

    head_size: int = 32

    qk_norm: ClassVar[bool] = True

    @property
    def head_dim(self) -> int:
        return self.head_size

    def config(self) -> dict[str, object]:
        """The content of config.json."""
        return {
            **super().config(),
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": self.head_dim,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.layers,
        }


def gguf_name(hf_name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight, and so on for every tensor of a Llama."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem = hf_name.removesuffix(".weight")
    if stem in whole:
        return whole[stem] + ".weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.weight"


def tokenizer_json() -> dict[str, object]:
    """The content of tokenizer.json: digits one by one, then byte-level BPE, special tokens matched first."""
    specials = [
        {
            "id": token_id,
            "content": text,
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for token_id, text in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": specials,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {text: token_id for token_id, text in enumerate(vocabulary())},
            "merges": list(MERGES),
        },
    }


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]], dtype: str = "F32") -> Path:
    """Header length (u64), JSON header, arrays. dtype: F32, F16 or BF16 (rounded to nearest even)."""
    header: dict[str, object] = {}
    data = b""
    for name, array in tensors.items():
        raw = _convert(array, dtype).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _convert(array: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    if dtype == "F32":
        return array
    if dtype == "F16":
        return array.astype(np.float16)
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
