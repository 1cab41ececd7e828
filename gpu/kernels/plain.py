"""Plain references of the model's kernels in torch: slow, without pages of work or tricks, on any device.

Owns what each operation means. `triton_rows` and `triton_attention` have the same signatures and are compared with
these; they round where these round, to the dtype of the activations. Never used to serve.
"""

import math
from typing import Any

import torch

from gpu.kernels.step_kernels import Extents

Array = Any  # torch.Tensor


def embed(tokens: Array, table: Array, out: Array) -> None:
    """out [T, width] = table [vocab, width][tokens i32[T]]; NaN for a token that is none."""
    known = (tokens >= 0) & (tokens < table.shape[0])
    found = table[torch.where(known, tokens, 0).long()]
    out.copy_(torch.where(known[:, None], found, math.nan))


def _normed(x: Array, weight: Array, eps: float, dtype: Any) -> Array:
    """RMS norm over the last dim as Hugging Face has it: rounded to `dtype` before the weight and after it."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(dtype).float() * weight.float()).to(dtype)


def rmsnorm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out [T, width] = x / sqrt(mean(x^2) + eps) * weight [width], or weight [parts, width][t % parts]."""
    weights = weight.reshape(-1, weight.shape[-1])
    out.copy_(_normed(x, weights.repeat(-(-len(x) // len(weights)), 1)[: len(x)], eps, out.dtype))


def add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float, out: Array) -> None:
    """residual [T, width] += x, then out = rmsnorm(residual) * weight."""
    residual.copy_(residual.float() + x.float())
    out.copy_(_normed(residual, weight, eps, out.dtype))


def silu_mul(gate_up: Array, out: Array) -> None:
    """out [T, width] = silu(gate) * up; gate_up [T, 2 * width] has the gate first."""
    gate, up = gate_up.chunk(2, -1)
    activated = torch.nn.functional.silu(gate.float()).to(out.dtype)
    out.copy_(activated.float() * up.float())


def _rotated(x: Array, cosine: Array, sine: Array) -> Array:
    """First half of the last dim against the second half. x [T, heads, D]; cosine, sine [T, D/2]; float32."""
    a, b = x.float().chunk(2, -1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


def rope_write(
    qkv: Array,
    positions: Array,
    seqs: Array,
    page_rows: Array,
    cosines: Array,
    sines: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    q_out: Array,
    k_layer: Array,
    v_layer: Array,
) -> None:
    """Norm (if there are weights) and rotate queries and keys; queries to q_out, keys and values to the cache.

    qkv [T, (HQ + 2 HKV) * D]; positions, seqs i32[T]; page_rows i32[R, pages_per_row]; cosines, sines
    f32[positions, D/2]; q_norm, k_norm [D]; q_out [T, HQ, D]; k_layer, v_layer [pages, page_size, HKV, D].
    """
    count, heads, dim = q_out.shape
    _, size, kv_heads, _ = k_layer.shape
    q, k, v = qkv.view(count, -1, dim).split((heads, kv_heads, kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = _normed(q, q_norm, eps, qkv.dtype), _normed(k, k_norm, eps, qkv.dtype)
    at = positions.long()
    q_out.copy_(_rotated(q, cosines[at], sines[at]))
    pages = page_rows[seqs.long(), at // size].long()
    k_layer[pages, at % size] = _rotated(k, cosines[at], sines[at]).to(k_layer.dtype)
    v_layer[pages, at % size] = v.to(v_layer.dtype)


def attention(
    q: Array,
    k_layer: Array,
    v_layer: Array,
    page_rows: Array,
    seqs: Array,
    positions: Array,
    extents: Extents,
    out: Array,
) -> None:
    """out [T, HQ, D]: softmax attention of token t over keys 0..positions[t] of row seqs[t], scaled by 1/sqrt(D).

    q [T, HQ, D]; k_layer, v_layer [pages, page_size, HKV, D]; the rest as in `attention_contract`. `extents` is not
    needed. Works in float32 throughout and rounds once.
    """
    _, heads, dim = q.shape
    _, size, kv_heads, _ = k_layer.shape
    for t, (row, position) in enumerate(zip(seqs.tolist(), positions.tolist(), strict=True)):
        pages = page_rows[row, : position // size + 1].long()
        k, v = (
            cache[pages].flatten(0, 1)[: position + 1].float().repeat_interleave(heads // kv_heads, 1)
            for cache in (k_layer, v_layer)
        )
        scores = torch.einsum("hd,khd->hk", q[t].float(), k) / math.sqrt(dim)
        out[t] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(out.dtype)
