"""A two-layer Llama of random weights with a large vocabulary, as a folder in Hugging Face layout, made with numpy.

Owns config.json, tokenizer.json and one safetensors file. The model is as small as can be, so that what a server of it
costs is the server; its vocabulary is a real one's in size, and its tokens are short words, so that text has to be
made. What it says means nothing.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.clocked_model import byte_tokenizer

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 49152, 64, 2, 4, 2, 128
CONTEXT = 2048
SPACE = "Ġ"  # how byte-level BPE writes the blank in front of a word


def write_random_llama(folder: Path, seed: int = 0) -> Path:
    """Write the model; an absolute path. bf16, tied embeddings; no token ends an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = (SPACE + "".join(chosen) for size in (2, 3, 4) for chosen in itertools.product(letters, repeat=size))
    tokenizer = byte_tokenizer(list(itertools.islice(words, VOCAB - 256)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    header, at = {}, 0
    for name, shape in _tensors():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    choose = np.random.default_rng(seed)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in _tensors():
            values = np.ones(shape) if len(shape) == 1 else choose.standard_normal(shape) * 2 * shape[-1] ** -0.5
            file.write((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return folder.absolute()


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the file."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        yield base + "input_layernorm.weight", (HIDDEN,)
        yield base + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield base + "self_attn.k_proj.weight", (kv, HIDDEN)
        yield base + "self_attn.v_proj.weight", (kv, HIDDEN)
        yield base + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield base + "post_attention_layernorm.weight", (HIDDEN,)
        yield base + "mlp.gate_proj.weight", (FFN, HIDDEN)
        yield base + "mlp.up_proj.weight", (FFN, HIDDEN)
        yield base + "mlp.down_proj.weight", (HIDDEN, FFN)
    yield "model.norm.weight", (HIDDEN,)
