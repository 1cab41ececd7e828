"""The same model in plain torch float32, without pages, batches or threads: what the host kernels are compared with.

Owns nothing, is never served, and is written to be read: Hugging Face's Llama and Qwen3 in a few lines.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu.models.rope import rope_tables
from shm.config import ModelInfo


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [heads, T, head_dim]; tables: [T, head_dim/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


def reference_logits(info: ModelInfo, weights: Any, token_ids: list[int]) -> npt.NDArray[np.float32]:
    """Logits after every token of one sequence: float32 [T, vocab]. `weights` has `tensor(hf_name) -> float32`."""

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.array(weights.tensor(name), np.float32))

    count, dim = len(token_ids), info.head_dim
    cosine, sine = (torch.from_numpy(t) for t in rope_tables(dim, count, info.rope_theta, info.rope_scaling))
    mask = torch.full((count, count), -math.inf).triu(1)
    embedding = tensor("model.embed_tokens.weight")
    x = embedding[torch.tensor(token_ids)]
    for layer in range(info.num_layers):
        base = f"model.layers.{layer}."
        h = _norm(x, tensor(base + "input_layernorm.weight"), info.rms_eps)
        q, k, v = (
            (h @ tensor(f"{base}self_attn.{n}_proj.weight").T).view(count, -1, dim).transpose(0, 1) for n in "qkv"
        )
        if info.qk_norm:
            q = _norm(q, tensor(base + "self_attn.q_norm.weight"), info.rms_eps)
            k = _norm(k, tensor(base + "self_attn.k_norm.weight"), info.rms_eps)
        group = info.num_heads // info.num_kv_heads
        k, v = _rotate(k, cosine, sine).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = _rotate(q, cosine, sine) @ k.transpose(1, 2) / math.sqrt(dim) + mask
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        x = x + attended @ tensor(base + "self_attn.o_proj.weight").T
        h = _norm(x, tensor(base + "post_attention_layernorm.weight"), info.rms_eps)
        gate, up = (h @ tensor(f"{base}mlp.{n}_proj.weight").T for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ tensor(base + "mlp.down_proj.weight").T
    head = embedding if info.tie_word_embeddings else tensor("lm_head.weight")
    logits: npt.NDArray[np.float32] = (_norm(x, tensor("model.norm.weight"), info.rms_eps) @ head.T).numpy()
    return logits
