"""Paged attention: Triton in the interpreter, the host's native kernel and plain torch on the same inputs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpu.kernels import attention, plain
from gpu.kernels.attention_cut import PROGRAMS, QUERY_TILES, SPLIT_KEYS, SPLITS_MAX, Cut, scratch_floats
from gpu.kernels.native import host_kernel
from gpu.kernels.step_kernels import Extents
from gpu.kernels.team import aligned
from gpu.kernels.triton_attention import PagedAttention, _find_row
from tests.interpret.access import Trace, trace

FLOAT32, BF16 = torch.float32, torch.bfloat16
PAGE = 16
PADDING = (1, 1)


@host_kernel
def host_attention(
    bf16, q, kv_heads, group, dim, ends, page_rows, seqs, page_row_bytes, size, k, v, page_bytes, scratch, out
):
    for t in range(len(ends)):
        at = 4 * kv_heads * group * dim * t
        pages = page_rows + seqs[t] * page_row_bytes
        shape = (kv_heads, group, dim, ends[t], pages, size, k, v, page_bytes, scratch, out + at)
        if bf16:
            attention.attend_bfloat16(q + at, *shape)
        else:
            attention.attend_float32(q + at, *shape)


class Case:
    """Rows of (tokens in the cache when the pass has run, tokens of the pass), on random pages.

    Slots that no row owns hold NaN, and so does the page that unused entries of the page table name: one number of
    them in a result, and the result is NaN.
    """

    def __init__(
        self, rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: Any, *, context: int = 0
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        random = torch.Generator().manual_seed(len(rows) * heads)
        ends, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
        needed = [0 if row == PADDING else -(-row[0] // PAGE) for row in rows]
        width = max(max(needed) + 1, context // PAGE)
        order = (torch.randperm(sum(needed), generator=random) + 1).to(torch.int32)
        trap = sum(needed) + 1
        self.pages = torch.full((len(rows), width), trap, dtype=torch.int32)
        for row, (count, part) in enumerate(zip(needed, order.split(needed), strict=True)):
            self.pages[row, : max(1, count)] = part if count else 0
        self.starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)))
        self.seqs = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts)
        self.positions = torch.cat([torch.arange(e - c, e, dtype=torch.int32) for e, c in rows])
        self.extents = Extents(self.starts, ends, int(counts.max()))
        self.q = torch.randn(len(self.seqs), heads, dim, generator=random).to(dtype)
        self.k, self.v = (torch.full((trap + 1, PAGE, kv_heads, dim), math.nan, dtype=dtype) for _ in "kv")
        self.owned = torch.zeros(trap + 1, PAGE, dtype=torch.bool)
        for row, end in enumerate(ends.tolist()):
            slots = torch.arange(end)
            self.owned[self.pages[row, slots // PAGE].long(), slots % PAGE] = True
        for cache in (self.k, self.v):
            cache[self.owned] = torch.randn(int(self.owned.sum()), kv_heads, dim, generator=random).to(dtype)

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.pages, self.seqs, self.positions, self.extents

    def run(self, scratch: Any = None) -> Any:
        if scratch is None:
            scratch = torch.full((scratch_floats(self.dim),), math.nan)
        out = torch.full_like(self.q, math.nan)
        PagedAttention(self.heads, self.kv_heads, self.dim, scratch).run(*self.arrays, out)
        return out

    def run_plain(self) -> Any:
        out = torch.full_like(self.q, math.nan)
        plain.attention(*self.arrays, out)
        return out

    def run_host(self) -> Any:
        bf16 = self.dtype == BF16
        q = self.q.float().numpy() / np.float32(math.sqrt(self.dim))
        kept = []
        for pages in (self.k.permute(0, 2, 3, 1), self.v.permute(0, 2, 1, 3)):
            kept.append(aligned(tuple(pages.shape), np.uint16 if bf16 else np.float32))
            kept[-1][:] = pages.contiguous().view(torch.uint16).numpy() if bf16 else pages.numpy()
        scratch = aligned((attention.scratch_floats(self.heads, self.dim, self.pages.shape[1] * PAGE),), np.float32)
        out, pages = np.empty(q.shape, np.float32), self.pages.numpy()
        host_attention(
            *(bf16, q.ctypes.data, self.kv_heads, self.heads // self.kv_heads, self.dim, self.positions.numpy() + 1),
            *(pages.ctypes.data, self.seqs.numpy(), 4 * pages.shape[1], PAGE),
            *(kept[0].ctypes.data, kept[1].ctypes.data, kept[0][0].nbytes, scratch.ctypes.data, out.ctypes.data),
        )
        return torch.from_numpy(out)

    def check(self) -> None:
        made = self.run()
        for expected in (self.run_plain(), self.run_host()):
            rtol, atol = (1e-4, 2e-5) if self.dtype == FLOAT32 else (2e-2, 1e-2)
            torch.testing.assert_close(made.float(), expected.float(), rtol=rtol, atol=atol)

    def cut(self) -> Cut:
        tokens, (rows, width), group = len(self.seqs), self.pages.shape, self.heads // self.kv_heads
        shape = tokens, rows, self.extents.longest, width * PAGE
        return Cut.of(*shape, group, self.kv_heads, self.q.element_size())


DECODE = [(1, 1), (5, 1), (16, 1), (17, 1), (70, 1), PADDING, PADDING]


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (2, 2, 128), (8, 2, 64), (5, 1, 16)])
def test_decode(dtype: Any, heads: int, kv_heads: int, dim: int) -> None:
    Case(DECODE, heads, kv_heads, dim, dtype).check()


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
@pytest.mark.parametrize(("window", "group"), [(2, 3), (4, 4), (5, 3), (8, 1), (16, 2), (6, 8)])
def test_windows(dtype: Any, window: int, group: int) -> None:
    """Tokens of one row see each other as far as they are earlier; large windows take several tiles."""
    case = Case([(window, window), (window + 13, window), (64, window)], group, 1, 64, dtype)
    assert case.cut().row_blocks == -(-window // (case.cut().queries // group))
    case.check()


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 128)])
def test_decode_rows_and_chunks_in_one_pass(dtype: Any, heads: int, dim: int) -> None:
    """Chunks begin at position 0, behind an earlier chunk, and end inside of a tile, page and step of the loop."""
    case = Case([(40, 1), (1, 1), PADDING, (75, 40), (11, 11), (17, 1)], heads, 1, dim, dtype)
    assert case.cut().row_blocks == 0
    case.check()


def test_windows_of_different_sizes() -> None:
    Case([(9, 1), (30, 4), PADDING, (20, 3), (3, 2)], 4, 2, 64, FLOAT32).check()


@triton.jit
def rows_of_blocks(starts, rows, out, TOKENS: tl.constexpr):
    block = tl.program_id(0)
    tl.store(out + block, _find_row(starts, rows, block, TOKENS))


def test_the_row_of_a_block_is_found_among_many() -> None:
    """More rows than are looked through at once. A row has the blocks that its tokens need, and perhaps one more."""
    counts, tokens = [1] * 130 + [12, 1, 5, 6], 5
    starts = np.cumsum([0, *counts])
    found = torch.full((int(starts[-1]) // tokens + len(counts),), -1, dtype=torch.int32)
    rows_of_blocks[(len(found),)](torch.from_numpy(starts).int(), len(counts), found, tokens)
    blocks = np.bincount(found.numpy(), minlength=len(counts))
    assert found.tolist() == sorted(found.tolist())
    assert len(blocks) == len(counts)
    assert all(made - -(-count // tokens) in (0, 1) for made, count in zip(blocks, counts, strict=True))


LONG = [(600, 1), (256, 1), (257, 1), (3, 1), PADDING]


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_long_contexts_are_split(dtype: Any) -> None:
    case = Case(LONG, 3, 1, 64, dtype, context=1024)
    assert case.cut().splits == 4
    case.check()


@pytest.mark.parametrize("end", [257, 260, 263])
def test_a_window_across_the_border_of_two_splits(end: int) -> None:
    """Some of its tokens see no key of the second split."""
    case = Case([(end, 8), (9, 8)], 2, 1, 16, FLOAT32, context=512)
    assert case.cut().splits == 2
    case.check()


def test_a_chunk_across_the_border_of_two_splits() -> None:
    case = Case([(262, 12), (258, 1), PADDING], 2, 1, 16, FLOAT32, context=512)
    assert (case.cut().splits, case.cut().row_blocks) == (2, 0)
    case.check()


def test_a_nan_stays_in_its_row() -> None:
    case = Case([(20, 1), (300, 1), (40, 1)], 2, 1, 16, FLOAT32, context=512)
    case.k[case.pages[1, 0], 3] = math.nan
    assert case.run().isnan().flatten(1).all(1).tolist() == [False, True, False]


# ------------------------------------------------------------------ what is touched


def traced(case: Case) -> tuple[Trace, Any, Any]:
    scratch, out = torch.zeros(scratch_floats(case.dim)), torch.zeros_like(case.q)
    attend = PagedAttention(case.heads, case.kv_heads, case.dim, scratch)
    with trace() as seen:
        attend.run(*case.arrays, out)
    return seen, scratch, out


def check_footprint(case: Case) -> Trace:
    """Returns the trace; what may depend on splits is left to the caller."""
    seen, _, out = traced(case)
    for cache in (case.k, case.v):
        read = seen.read(cache)
        assert np.array_equal(read.any((2, 3)), case.owned.numpy())
        assert np.array_equal(read.all((2, 3)), case.owned.numpy())
        assert not seen.written(cache).any()
    reached = np.arange(case.pages.shape[1]) <= (case.extents.ends.numpy()[:, None] - 1) // PAGE
    assert np.array_equal(seen.read(case.pages), reached)
    assert seen.read(case.q).all()
    assert seen.written(out).all()
    assert not any(seen.written(x).any() for x in (case.q, case.pages, case.seqs, case.positions, *case.extents[:2]))
    return seen


def test_exactly_the_keys_of_the_rows_are_read() -> None:
    check_footprint(Case([(40, 1), PADDING, (75, 30), (17, 1)], 4, 2, 16, BF16))
    check_footprint(Case([(33, 4), (4, 4)], 4, 2, 16, FLOAT32))


def test_splits_touch_the_scratch_of_their_own_tokens_only() -> None:
    case = Case([(258, 4), (9, 4), (250, 4)], 2, 1, 16, FLOAT32, context=512)  # two tokens see one split
    check_footprint(case)
    seen, scratch, _ = traced(case)
    assert seen.kernels == ["attention_kernel", "combine_kernel"]
    splits, lines = 2, len(case.seqs) * 2 * 2
    made = np.arange(splits) * SPLIT_KEYS <= case.positions.numpy()[:, None]  # token, split
    made = np.repeat(made[:, None], 2, 1).ravel()  # token, head, split
    parts = PROGRAMS * QUERY_TILES[-1] * case.dim
    expected = np.zeros(scratch.numel(), np.bool_)
    expected[: lines * 16] = np.repeat(made, 16)
    expected[parts : parts + 2 * lines] = np.repeat(made, 2)
    assert np.array_equal(seen.written(scratch), expected)
    assert np.array_equal(seen.read(scratch), expected)


def test_the_scratch_of_a_pass_without_splits_is_left_alone() -> None:
    case = Case(DECODE[:-1], 3, 1, 16, FLOAT32)
    assert case.cut().splits == 1
    seen, scratch, _ = traced(case)
    assert seen.kernels == ["attention_kernel"]
    assert not seen.written(scratch).any()


def test_no_token_is_no_launch() -> None:
    case = Case([(1, 1)], 2, 1, 16, FLOAT32)
    none = torch.zeros(0, dtype=torch.int32)
    with trace() as seen:
        PagedAttention(2, 1, 16, torch.zeros(scratch_floats(16))).run(
            case.q[:0], case.k, case.v, case.pages[:0], none, none, Extents(none, none, 0), case.q[:0]
        )
    assert seen.kernels == []


# ------------------------------------------------------------------ how a pass is cut


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 8), (32, 8), (64, 8), (16, 1), (4, 4)])
def test_every_cut_covers_its_tokens_and_fits_the_scratch(heads: int, kv_heads: int, itemsize: int) -> None:
    group, context = heads // kv_heads, 1 << 20
    shapes = [(rows * window, rows, window) for rows in (1, 2, 7, 64, 256) for window in (1, 2, 4, 5, 16, 100)]
    shapes += [(rows + chunk, rows + 1, chunk) for rows in (1, 8, 255) for chunk in (2, 17, 512, 2048)]
    for tokens, rows, longest in shapes:
        cut = Cut.of(tokens, rows, longest, context, group, kv_heads, itemsize)
        at_once = cut.queries // group
        assert cut.blocks * at_once >= tokens
        assert cut.row_blocks * at_once >= longest or cut.row_blocks == 0
        assert cut.splits in [1 << i for i in range(SPLITS_MAX.bit_length())]
        if cut.splits > 1:
            for dim in (16, 128):
                assert tokens * heads * cut.splits * (dim + 2) <= scratch_floats(dim)


def test_splits_follow_rows_and_context() -> None:
    assert [Cut.of(rows, rows, 1, 8192, 4, 8, 2).splits for rows in (1, 2, 4, 8, 32, 64, 256)] == [
        32,
        32,
        16,
        8,
        2,
        1,
        1,
    ]
    assert [Cut.of(1, 1, 1, context, 4, 8, 2).splits for context in (16, 256, 257, 1024, 4096)] == [1, 1, 2, 4, 16]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 2, 64), (17, 1, 64), (4, 2, 48), (4, 2, 256), (4, 2, 8)])
def test_heads_that_are_not_supported(heads: int, kv_heads: int, dim: int) -> None:
    with pytest.raises(ValueError, match="not supported"):
        PagedAttention(heads, kv_heads, dim, torch.zeros(scratch_floats(dim)))


def test_too_little_scratch_is_refused() -> None:
    with pytest.raises(ValueError, match="scratch"):
        PagedAttention(4, 2, 64, torch.zeros(scratch_floats(64) - 1))


def test_lengths_are_not_asked_for() -> None:
    attend = PagedAttention(4, 2, 64, torch.zeros(scratch_floats(64)))
    attend.plan(None, 3)
    assert not attend.needs_host_lengths
