"""Triton kernel that lays the pages of all rows end to end, the form in which FlashInfer's wrappers take them.

Owns that one copy. It runs inside of a pass, behind the gather that wrote the rows of pages; how many pages of a row
count comes from a plan, on the device. Never allocates, never looks at a length on the host.
"""

from typing import Any

import triton
import triton.language as tl

from gpu.kernels.triton_spec import KernelSpec

Array = Any  # torch.Tensor
BLOCK = 256  # pages that one program copies at a time


@triton.jit(do_not_specialize=["page_stride"])
def join_pages_kernel(page_rows, starts, joined, page_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """joined[starts[r] + i] = page_rows[r, i] for i < starts[r + 1] - starts[r], one program a row."""
    row = tl.program_id(0)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    source = page_rows + row.to(tl.int64) * page_stride
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        page = tl.load(source + place, mask=place < count)
        tl.store(joined + start + place, page, mask=place < count)


def join_pages(page_rows: Array, starts: Array, joined: Array) -> None:
    """Queue joined[starts[r] : starts[r + 1]] = the first pages of row r.

    page_rows i32[R, pages_per_row]; starts i32[R + 1], ascending from 0, rows no longer than pages_per_row; joined i32,
    with room for all.
    """
    join_pages_kernel[(page_rows.shape[0],)](page_rows, starts, joined, page_rows.stride(0), BLOCK=BLOCK, num_warps=1)


SPECS: list[KernelSpec] = [
    KernelSpec(
        join_pages_kernel,
        {"page_rows": "*i32", "starts": "*i32", "joined": "*i32", "page_stride": "i32"},
        {"BLOCK": BLOCK},
        ("page_rows", "starts", "joined"),
        {"num_warps": 1},
    )
]
