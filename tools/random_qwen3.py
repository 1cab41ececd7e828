"""Random weights in the shape of a Qwen3 model, written as a folder in Hugging Face layout.

Owns config.json and one safetensors file, made with torch alone: where this runs, nothing else may be installed. The
numbers are scaled like those of a fresh model, so that logits stay finite; what such a model says means nothing.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model with tied embeddings."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the file."""
        attended, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            base = f"model.layers.{layer}."
            yield base + "input_layernorm.weight", (self.hidden,)
            yield base + "self_attn.q_proj.weight", (attended, self.hidden)
            yield base + "self_attn.k_proj.weight", (kv, self.hidden)
            yield base + "self_attn.v_proj.weight", (kv, self.hidden)
            yield base + "self_attn.q_norm.weight", (self.head_dim,)
            yield base + "self_attn.k_norm.weight", (self.head_dim,)
            yield base + "self_attn.o_proj.weight", (self.hidden, attended)
            yield base + "post_attention_layernorm.weight", (self.hidden,)
            yield base + "mlp.gate_proj.weight", (self.ffn, self.hidden)
            yield base + "mlp.up_proj.weight", (self.ffn, self.hidden)
            yield base + "mlp.down_proj.weight", (self.hidden, self.ffn)
        yield "model.norm.weight", (self.hidden,)

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(torch.Size(shape).numel() for _, shape in self.tensors())


QWEN3_06B = Shape(151936, 1024, 28, 16, 8, 128, 3072)
QWEN3_TINY = Shape(512, 64, 2, 4, 2, 32, 128)


def write_random_qwen3(folder: Path, shape: Shape, device: str, seed: int = 0) -> None:
    """Write the model to `folder`, which exists. bf16; device: "cuda" makes the numbers there, which is faster."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, size in shape.tensors():
        end = at + 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    where = torch.device("cuda" if device == "cuda" else "cpu")
    generator = torch.Generator(where).manual_seed(seed)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, size in shape.tensors():
            if len(size) == 1:
                values = torch.ones(size)
            else:
                values = torch.randn(size, generator=generator, device=where) * size[-1] ** -0.5
            file.write(values.to(torch.bfloat16).cpu().view(torch.uint8).numpy().tobytes())
