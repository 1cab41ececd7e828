"""Token by token kernels: Triton in the interpreter, the host's native kernels and plain torch on the same inputs."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gpu.kernels import packing, plain, rows, triton_rows
from gpu.kernels.native import host_kernel
from gpu.kernels.team import Team, aligned
from gpu.models.rope import rope_tables
from tests.interpret.access import RaceError, trace

FLOAT32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FLOAT32, BF16]
EPS = 1e-5
PAGE = 16
PLAIN_AND_TRITON = [plain, triton_rows]


@host_kernel
def host_norm(x, weight, out, count, width, eps):
    for t in range(count):
        rows.rms_norm(x + 4 * width * t, weight, out + 4 * width * t, width, eps)


@host_kernel
def host_silu(gate_up, out, count, width):
    for t in range(count):
        rows.silu_times(gate_up + 8 * width * t, gate_up + 4 * width * (2 * t + 1), out + 4 * width * t, width)


@host_kernel
def host_embed(bf16, panels, scales, tokens, width, out):
    for t in range(len(tokens)):
        if bf16:
            packing.embed_bfloat16(panels, scales, tokens[t], width, out + 4 * width * t)
        else:
            packing.embed_float32(panels, scales, tokens[t], width, out + 4 * width * t)


@host_kernel
def host_rope(bf16, qkv, positions, places, cosines, sines, heads, kv_heads, dim, size, k_cache, v_cache, page_bytes):
    """`places` are the slots of the tokens in the cache; rotates in place."""
    width = (heads + 2 * kv_heads) * dim
    for t in range(len(positions)):
        q = qkv + 4 * width * t
        k = q + 4 * heads * dim
        table = 2 * dim * positions[t]
        rows.rotate(q, heads + kv_heads, dim, cosines + table, sines + table, np.float32(1))
        k_page, v_page = k_cache + places[t] // size * page_bytes, v_cache + places[t] // size * page_bytes
        v = k + 4 * kv_heads * dim
        if bf16:
            rows.cache_bfloat16(k, v, k_page, v_page, places[t] % size, kv_heads, dim, size)
        else:
            rows.cache_float32(k, v, k_page, v_page, places[t] % size, kv_heads, dim, size)


def at(array: Any) -> int:
    return int(array.ctypes.data)


def normal(*shape: int, seed: int, dtype: Any = FLOAT32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Any) -> Any:
    return np.array(x.float().numpy())


def same(made: Any, expected: Any, dtype: Any, roundings: int = 1, atol: float = 1e-3) -> None:
    """Equal up to the order of float32 sums, or up to bfloat16 roundings that one side does not make."""
    rtol, atol = (2e-5, 2e-6) if dtype == FLOAT32 else (roundings * 2**-8, atol)
    torch.testing.assert_close(torch.as_tensor(made).float(), torch.as_tensor(expected).float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80])
def test_embed(dtype: Any, width: int) -> None:
    table, tokens = normal(40, width, seed=1, dtype=dtype), torch.tensor([39, 0, 7, 7], dtype=torch.int32)
    outs = [torch.zeros(4, width, dtype=dtype) for _ in PLAIN_AND_TRITON]
    for module, out in zip(PLAIN_AND_TRITON, outs, strict=True):
        module.embed(tokens, table, out)
        assert torch.equal(out, table[tokens.long()])
    precision, itemsize = ("float32", 4) if dtype == FLOAT32 else ("bfloat16", 2)
    panels, scales = aligned((48 * width * itemsize,), np.uint8), aligned((48,), np.float32)
    packing.Packer(Team(1), precision, width).pack(wide(table), panels, scales)
    host = np.empty((4, width), np.float32)
    host_embed(dtype == BF16, at(panels), at(scales), tokens.numpy(), width, at(host))
    assert np.array_equal(host, wide(outs[1]))


@pytest.mark.parametrize("module", PLAIN_AND_TRITON)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_none_embeds_as_nan(module: ModuleType, dtype: Any) -> None:
    out = torch.zeros(3, 16, dtype=dtype)
    module.embed(torch.tensor([-1, 5, 6], dtype=torch.int32), normal(6, 16, seed=2, dtype=dtype), out)
    assert out.isnan().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 576])
def test_rmsnorm(dtype: Any, width: int) -> None:
    x, weight = 3 * normal(3, width, seed=1, dtype=dtype), normal(width, seed=2, dtype=dtype)
    expected, out = torch.zeros_like(x), torch.zeros_like(x)
    plain.rmsnorm(x, weight, EPS, expected)
    triton_rows.rmsnorm(x, weight, EPS, out)
    same(out, expected, dtype, 2)
    host = np.empty((3, width), np.float32)
    x_wide, weight_wide = wide(x), wide(weight)
    host_norm(at(x_wide), at(weight_wide), at(host), 3, width, EPS)
    same(out, host, dtype, 2)
    triton_rows.rmsnorm(x, weight, EPS, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_side_by_side_have_norms_of_their_own(dtype: Any) -> None:
    """States are float32 whatever the activations are."""
    width, parts = 80, 3
    x, weight = 3 * normal(2 * parts, width, seed=1), normal(parts, width, seed=2, dtype=dtype)
    expected, out = (torch.zeros(2 * parts, width, dtype=dtype) for _ in range(2))
    plain.rmsnorm(x, weight, EPS, expected)
    triton_rows.rmsnorm(x, weight, EPS, out)
    same(out, expected, dtype, 2)
    for part in range(parts):
        alone = torch.zeros(2, width, dtype=dtype)
        triton_rows.rmsnorm(x[part::parts].contiguous(), weight[part], EPS, alone)
        assert torch.equal(out[part::parts], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rmsnorm(dtype: Any) -> None:
    width = 80
    x, weight, before = (normal(*s, seed=i, dtype=dtype) for i, s in enumerate(((3, width), (width,), (3, width))))
    residuals, outs = [before.clone(), before.clone()], [torch.zeros_like(x), torch.zeros_like(x)]
    for module, residual, out in zip(PLAIN_AND_TRITON, residuals, outs, strict=True):
        module.add_rmsnorm(x, residual, weight, EPS, out)
    assert torch.equal(residuals[1], before + x)
    assert torch.equal(residuals[0], residuals[1])
    same(outs[1], outs[0], dtype, 2)
    host, added, weight_wide = np.empty((3, width), np.float32), wide(before + x), wide(weight)
    host_norm(at(added), at(weight_wide), at(host), 3, width, EPS)
    same(outs[1], host, dtype, 2)


def test_bfloat16_is_rounded_where_hugging_face_rounds() -> None:
    """The formulas of transformers' modelling code, in bfloat16."""
    x, residual, weight = (normal(4, 256, seed=i, dtype=BF16) for i in (1, 2, 3))
    weight, out = weight[0], torch.zeros_like(x)
    total = residual + x
    normed = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + EPS)
    triton_rows.add_rmsnorm(x, residual, weight, EPS, out)
    assert torch.equal(residual, total)
    assert (out == weight * normed.bfloat16()).float().mean() > 0.99  # the sums' order may tip a rounding
    gate_up, out = normal(4, 512, seed=4, dtype=BF16), torch.zeros(4, 256, dtype=BF16)
    triton_rows.silu_mul(gate_up, out)
    expected = torch.nn.functional.silu(gate_up[:, :256]) * gate_up[:, 256:]
    assert (out == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1040])  # one block, and one with a rest
def test_silu_mul(dtype: Any, width: int) -> None:
    gate_up = 8 * normal(2, 2 * width, seed=1, dtype=dtype)
    gate_up[0, 0] = -80
    expected, out = torch.zeros(2, width, dtype=dtype), torch.zeros(2, width, dtype=dtype)
    plain.silu_mul(gate_up, expected)
    triton_rows.silu_mul(gate_up, out)
    same(out, expected, dtype)
    host, source = np.empty((2, width), np.float32), wide(gate_up)
    host_silu(at(source), at(host), 2, width)
    same(out, host, dtype, 2)


class RopeCase:
    """Tokens of a few rows, with a cache full of numbers that must not change elsewhere."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: Any, norm: bool) -> None:
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.positions = torch.tensor([0, 31, 15, 16, 17, 0], dtype=torch.int32)
        self.seqs = torch.tensor([0, 1, 2, 2, 2, 3], dtype=torch.int32)
        self.pages = torch.tensor([[5, 99], [2, 7], [1, 3], [0, 99]], dtype=torch.int32)[:, :2]  # the last: padding
        self.qkv = normal(6, (heads + 2 * kv_heads) * dim, seed=1, dtype=dtype)
        self.tables = [torch.from_numpy(t) for t in rope_tables(dim, 40, 10000.0, None)]
        self.norms = [normal(dim, seed=s, dtype=dtype) for s in (2, 3)] if norm else [None, None]
        self.k, self.v = (normal(8, PAGE, kv_heads, dim, seed=s, dtype=dtype) for s in (4, 5))
        pages = self.pages[self.seqs.long(), self.positions.long() // PAGE]
        self.places = pages * PAGE + self.positions % PAGE

    def run(self, module: ModuleType) -> tuple[Any, Any, Any]:
        q, k, v = torch.zeros(6, self.heads, self.dim, dtype=self.dtype), self.k.clone(), self.v.clone()
        module.rope_write(self.qkv, self.positions, self.seqs, self.pages, *self.tables, *self.norms, EPS, q, k, v)
        return q, k, v

    def run_host(self) -> tuple[Any, Any, Any]:
        heads, kv_heads, dim, bf16 = self.heads, self.kv_heads, self.dim, self.dtype == BF16
        qkv = wide(self.qkv).reshape(6, -1, dim)
        for first, last, weight in zip((0, heads), (heads, heads + kv_heads), self.norms, strict=True):
            if weight is not None:
                part, weight_wide = np.ascontiguousarray(qkv[:, first:last]), wide(weight)
                host_norm(at(part), at(weight_wide), at(part), 6 * (last - first), dim, EPS)
                qkv[:, first:last] = part
        k_pages, v_pages = self.k.permute(0, 2, 3, 1), self.v.permute(0, 2, 1, 3)
        kept = [aligned(tuple(x.shape), np.uint16 if bf16 else np.float32) for x in (k_pages, v_pages)]
        for store, x in zip(kept, (k_pages, v_pages), strict=True):
            store[:] = x.contiguous().view(torch.uint16).numpy() if bf16 else x.numpy()
        cosines, sines = (np.ascontiguousarray(t.numpy()) for t in self.tables)
        shape = (heads, kv_heads, dim, PAGE, at(kept[0]), at(kept[1]), kept[0][0].nbytes)
        positions, places = self.positions.numpy(), self.places.numpy().astype(np.int64)
        host_rope(bf16, at(qkv), positions, places, at(cosines), at(sines), *shape)
        k, v = (torch.from_numpy(x).view(BF16) if bf16 else torch.from_numpy(x) for x in kept)
        return torch.from_numpy(qkv[:, :heads]), k.permute(0, 3, 1, 2), v.permute(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norm"), [(9, 3, 64, False), (4, 2, 128, True), (2, 2, 64, True), (2, 1, 16, False)]
)
def test_rope_write(dtype: Any, heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    case = RopeCase(heads, kv_heads, dim, dtype, norm)
    expected, made, host = case.run(plain), case.run(triton_rows), case.run_host()
    for by_triton, by_plain, by_host in zip(made, expected, host, strict=True):
        same(by_triton, by_plain, dtype, 2)
        same(by_triton, by_host, dtype, 4, atol=2**-8 * 4)  # the host does not round the norm, before a rotation
    v = case.qkv.view(6, -1, dim)[:, heads + kv_heads :]
    assert torch.equal(made[2].flatten(0, 1)[case.places.long()], v)


def elements(shape: tuple[int, ...], *chosen: Any) -> Any:
    made = np.zeros(shape, np.bool_)
    made[chosen] = True
    return made


def test_what_rope_write_touches() -> None:
    case = RopeCase(9, 3, 64, FLOAT32, False)
    q, (cosines, sines) = torch.zeros(6, 9, 64), case.tables
    with trace() as seen:
        triton_rows.rope_write(
            case.qkv, case.positions, case.seqs, case.pages, cosines, sines, None, None, EPS, q, case.k, case.v
        )
    assert seen.kernels == ["rope_kernel"]
    positions, places = case.positions.numpy(), case.places.numpy()
    for cache in (case.k, case.v):
        assert np.array_equal(seen.written(cache), elements(tuple(cache.shape), places // PAGE, places % PAGE))
        assert not seen.read(cache).any()
    assert np.array_equal(seen.read(case.pages), elements((4, 2), case.seqs.numpy(), positions // PAGE))
    for table in (cosines, sines):
        assert np.array_equal(seen.read(table), elements((40, 32), positions))
    assert seen.written(q).all()
    assert seen.read(case.qkv).all()
    assert not any(seen.written(x).any() for x in (case.qkv, case.positions, case.seqs, case.pages, cosines, sines))


def test_two_tokens_in_one_slot_are_seen() -> None:
    """The control of the test above: a trace would notice tokens that share a slot."""
    case = RopeCase(2, 1, 16, FLOAT32, False)
    case.positions[2] = case.positions[3]
    with trace(), pytest.raises(RaceError, match=r"rope_kernel.* race for [kv]_layer"):
        case.run(triton_rows)


def test_what_the_others_touch() -> None:
    tokens, table, out = torch.tensor([3, -1, 6], dtype=torch.int32), normal(6, 80, seed=1), torch.zeros(3, 80)
    with trace() as seen:
        triton_rows.embed(tokens, table, out)
    assert np.array_equal(seen.read(table), elements((6, 80), 3))
    assert seen.written(out).all()
    x, residual, weight, gate_up = (
        normal(3, 80, seed=2),
        normal(3, 80, seed=3),
        normal(80, seed=4),
        normal(3, 160, seed=5),
    )
    with trace() as seen:
        triton_rows.rmsnorm(x, weight, EPS, out)
    assert seen.read(x).all()
    assert not seen.written(x).any()
    with trace() as seen:
        triton_rows.add_rmsnorm(x, residual, weight, EPS, out)
        triton_rows.silu_mul(gate_up, x)
    assert seen.written(residual).all()
    assert not any(seen.written(given).any() for given in (weight, gate_up))
    assert all(seen.written(made).all() for made in (out, x))


def test_nothing_to_do_is_no_launch() -> None:
    none, ints = torch.zeros(0, 80), torch.zeros(0, dtype=torch.int32)
    case = RopeCase(2, 1, 16, FLOAT32, False)
    with trace() as seen:
        triton_rows.embed(ints, torch.zeros(4, 80), none)
        triton_rows.rmsnorm(none, torch.ones(80), EPS, none)
        triton_rows.silu_mul(torch.zeros(0, 160), none)
        q = torch.zeros(0, 2, 16)
        triton_rows.rope_write(
            torch.zeros(0, 64), ints, ints, case.pages, *case.tables, None, None, EPS, q, case.k, case.v
        )
    assert seen.kernels == []
