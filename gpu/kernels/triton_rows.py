"""Triton kernels that work on tokens one by one: embedding, norms, SiLU, rotary embedding, writes to the KV cache.

Owns the numerics between the matrix products on CUDA, as `rows` does on the host. All arithmetic is float32. Results
are rounded to the dtype of the activations where Hugging Face's models round: the residual after each addition, a norm
before and after its weight, SiLU before the product. Rotation is rounded once, at its end, and its tables stay
float32, which is closer to the exact result than Hugging Face's bfloat16 tables. With float32 activations nothing is
rounded. Launchers queue on torch's current stream, take contiguous arrays (`page_rows` may have a longer stride) and
never allocate.
"""

from typing import Any

import triton
import triton.language as tl

from gpu.kernels.triton_spec import KernelSpec

Array = Any  # torch.Tensor
SILU_BLOCK = 1024
ROPE_HEADS = 8  # heads that one program rotates
SPEC_TAPS = 3  # layers of the target that the trained drafters that specs are for are told of


@triton.jit(do_not_specialize=["vocab"])
def embed_kernel(tokens, table, out, vocab, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[t] = table[tokens[t]], one program a token."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    token = tl.load(tokens + t)
    known = (token >= 0) & (token < vocab)
    place = table + token.to(tl.int64) * WIDTH + column
    x = tl.load(place, mask=(column < WIDTH) & known, other=0.0).to(tl.float32)
    x = tl.where(known, x, float("nan"))
    tl.store(out + t * WIDTH + column, x.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def rmsnorm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr
):
    """out[t] = norm(h[t]) * weight[t % PARTS], one program a token. h = x, or with ADD residual += x."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    h = tl.load(x + t * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        old = tl.load(residual + t * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total = (old + h).to(residual.dtype.element_ty)
        tl.store(residual + t * WIDTH + column, total, mask=inside)
        h = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(h * h, axis=0) / WIDTH + eps)
    scaled = (h * inverse).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + t % PARTS * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * WIDTH + column, (scaled * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[t, f] = silu(gate_up[t, f]) * gate_up[t, WIDTH + f]; a program has BLOCK columns of one token."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + 2 * t * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * t + 1) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + t * WIDTH + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["page_stride"])
def rope_kernel(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    seqs,
    page_rows,
    cosines,
    sines,
    q_norm,
    k_norm,
    q_out,
    k_layer,
    v_layer,
    eps,
    page_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm and rotate queries and keys, write keys and values to the cache; a program has BLOCK heads of one token."""
    DIM: tl.constexpr = 2 * HALF
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_q, is_k = head < Q_HEADS, (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    present = head < Q_HEADS + 2 * KV_HEADS
    is_v = present & (head >= Q_HEADS + KV_HEADS)
    dtype = qkv.dtype.element_ty
    source = qkv + (t * (Q_HEADS + 2 * KV_HEADS) + head) * DIM + column
    first = tl.load(source, mask=present, other=0.0)
    second = tl.load(source + HALF, mask=present, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        q_first, q_second = tl.load(q_norm + column).to(tl.float32), tl.load(q_norm + HALF + column).to(tl.float32)
        k_first, k_second = tl.load(k_norm + column).to(tl.float32), tl.load(k_norm + HALF + column).to(tl.float32)
        a = (a * inverse).to(dtype).to(tl.float32) * tl.where(is_q, q_first, k_first)
        b = (b * inverse).to(dtype).to(tl.float32) * tl.where(is_q, q_second, k_second)
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    position = tl.load(positions + t)
    cosine = tl.load(cosines + position.to(tl.int64) * HALF + column)
    sine = tl.load(sines + position.to(tl.int64) * HALF + column)
    low, high = a * cosine - b * sine, b * cosine + a * sine
    query = q_out + (t * Q_HEADS + head) * DIM + column
    tl.store(query, low.to(q_out.dtype.element_ty), mask=is_q)
    tl.store(query + HALF, high.to(q_out.dtype.element_ty), mask=is_q)
    row = tl.load(seqs + t).to(tl.int64)
    page = tl.load(page_rows + row * page_stride + position // PAGE).to(tl.int64)
    slot = (page * PAGE + position % PAGE) * KV_HEADS * DIM + column
    key = k_layer + slot + (head - Q_HEADS) * DIM
    tl.store(key, low.to(k_layer.dtype.element_ty), mask=is_k)
    tl.store(key + HALF, high.to(k_layer.dtype.element_ty), mask=is_k)
    value = v_layer + slot + (head - Q_HEADS - KV_HEADS) * DIM
    tl.store(value, first.to(v_layer.dtype.element_ty), mask=is_v)
    tl.store(value + HALF, second.to(v_layer.dtype.element_ty), mask=is_v)


def _block(width: int) -> tuple[int, int]:
    """Columns and warps of a program that holds a whole row of `width`."""
    block = triton.next_power_of_2(width)
    return block, min(8, max(1, block // 256))


def embed(tokens: Array, table: Array, out: Array) -> None:
    """out [T, width] = table [vocab, width][tokens i32[T]]; a token that is none gives NaN, so that the fault shows."""
    block, warps = _block(table.shape[1])
    if tokens.shape[0]:
        embed_kernel[(tokens.shape[0],)](
            *(tokens, table, out, table.shape[0]), WIDTH=table.shape[1], BLOCK=block, num_warps=warps
        )


def rmsnorm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """out [T, width] = x / sqrt(mean(x^2) + eps) * weight [width]. `out` may be `x`.

    weight [parts, width]: row t has weight t % parts, as states from several layers have side by side.
    """
    _norm(x, x, weight, eps, out, add=False)


def add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float, out: Array) -> None:
    """residual [T, width] += x, then out = rmsnorm(residual) * weight. `out` may be `x`, but not `residual`."""
    _norm(x, residual, weight, eps, out, add=True)


def _norm(x: Array, residual: Array, weight: Array, eps: float, out: Array, *, add: bool) -> None:
    width = x.shape[1]
    block, warps = _block(width)
    parts = weight.shape[0] if weight.ndim > 1 else 1
    if x.shape[0]:
        rmsnorm_kernel[(x.shape[0],)](
            *(x, residual, weight, out, eps), WIDTH=width, BLOCK=block, ADD=add, PARTS=parts, num_warps=warps
        )


def silu_mul(gate_up: Array, out: Array) -> None:
    """out [T, width] = silu(gate) * up; gate_up [T, 2 * width] has the gate first."""
    count, width = out.shape
    if count:
        grid = (count, triton.cdiv(width, SILU_BLOCK))
        silu_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4)


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
    """Queries to q_out [T, HQ, D], keys and values to the slots of their tokens in the layer's cache.

    qkv [T, (HQ + 2 HKV) * D]: queries, keys, values; HQ may be 0. Token t stands at positions[t] of row seqs[t]
    of page_rows i32[R, pages_per_row]. cosines, sines f32[positions, D/2]. With q_norm and k_norm [D] (both or none)
    every head of queries and keys is normed first. k_layer, v_layer [pages, page_size, HKV, D].
    """
    count, heads, dim = q_out.shape
    _, page, kv_heads, _ = k_layer.shape
    norm = q_norm is not None
    if count:
        rope_kernel[(count, triton.cdiv(heads + 2 * kv_heads, ROPE_HEADS))](
            *(qkv, positions, seqs, page_rows, cosines, sines),
            *((q_norm, k_norm) if norm else (cosines, cosines)),  # not read without a norm
            *(q_out, k_layer, v_layer, eps, page_rows.stride(0)),
            Q_HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            PAGE=page,
            NORM=norm,
            BLOCK=ROPE_HEADS,
            num_warps=max(1, ROPE_HEADS * dim // 256),
        )


def _specs(dtype: str, *, hidden: int, ffn: int, heads: int, kv_heads: int, dim: int, norm: bool) -> list[KernelSpec]:
    """The kernels of one model."""
    data = "*" + dtype
    block, warps = _block(hidden)
    table = {"tokens": "*i32", "table": data, "out": data, "vocab": "i32"}
    normed = {"x": data, "residual": data, "weight": data, "out": data, "eps": "fp32"}
    wide = {"WIDTH": hidden, "BLOCK": block}
    return [
        _spec(embed_kernel, table, wide, warps),
        _spec(rmsnorm_kernel, normed, {**wide, "ADD": False, "PARTS": 1}, warps),
        _spec(rmsnorm_kernel, normed, {**wide, "ADD": True, "PARTS": 1}, warps),
        _spec(silu_mul_kernel, {"gate_up": data, "out": data}, {"WIDTH": ffn, "BLOCK": SILU_BLOCK}, 4),
        _rope_spec(data, heads, kv_heads, dim, norm=norm),
    ]


def _drafter_specs(
    dtype: str, *, hidden: int, ffn: int, heads: int, kv_heads: int, dim: int, norm: bool
) -> list[KernelSpec]:
    """What a model's trained drafters have beside: norms of states in float32, heads without norms, keys alone."""
    data, (block, warps) = "*" + dtype, _block(hidden)
    states = {"x": "*fp32", "residual": "*fp32", "weight": data, "out": data, "eps": "fp32"}
    wide = {"WIDTH": hidden, "BLOCK": block, "ADD": False}
    told = [parts for parts in (1, SPEC_TAPS) if parts > 1 or dtype != "fp32"]  # with float32 a model has the first
    plain_heads = [_rope_spec(data, heads, kv_heads, dim, norm=False)] if norm else []
    return [
        *(_spec(rmsnorm_kernel, states, {**wide, "PARTS": parts}, warps) for parts in told),
        *plain_heads,
        _rope_spec(data, 0, kv_heads, dim, norm=False),
    ]


def _rope_spec(data: str, heads: int, kv_heads: int, dim: int, *, norm: bool) -> KernelSpec:
    types = {
        **dict.fromkeys(("positions", "seqs", "page_rows"), "*i32"),
        **dict.fromkeys(("cosines", "sines"), "*fp32"),
        **dict.fromkeys(("q_norm", "k_norm"), data if norm else "*fp32"),
        **dict.fromkeys(("qkv", "q_out", "k_layer", "v_layer"), data),
        "eps": "fp32",
        "page_stride": "i32",
    }
    shape = {"Q_HEADS": heads, "KV_HEADS": kv_heads, "HALF": dim // 2, "PAGE": 16, "NORM": norm, "BLOCK": ROPE_HEADS}
    return _spec(rope_kernel, types, shape, ROPE_HEADS * dim // 256)


def _spec(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> KernelSpec:
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(kernel, signature, constants, pointers, {"num_warps": warps})


SMOLLM2_135M = {"hidden": 576, "ffn": 1536, "heads": 9, "kv_heads": 3, "dim": 64, "norm": False}
QWEN3_06B = {"hidden": 1024, "ffn": 3072, "heads": 16, "kv_heads": 8, "dim": 128, "norm": True}
QWEN3_8B = {"hidden": 4096, "ffn": 12288, "heads": 32, "kv_heads": 8, "dim": 128, "norm": True}

SPECS: list[KernelSpec] = [
    spec
    for specs, dtype, model in (
        (_specs, "bf16", SMOLLM2_135M),
        (_specs, "fp32", SMOLLM2_135M),
        (_specs, "bf16", QWEN3_06B),
        (_specs, "bf16", QWEN3_8B),
        (_drafter_specs, "fp32", SMOLLM2_135M),
        (_drafter_specs, "bf16", QWEN3_06B),
    )
    for spec in specs(dtype, **model)  # type: ignore[arg-type]
]
