"""Pages of rows laid end to end: the kernel against slices of numpy."""

import numpy as np
import pytest
import torch

from gpu.kernels.triton_pages import BLOCK, join_pages


@pytest.mark.parametrize("counts", [[1], [3, 0, 2], [BLOCK, 1], [1, BLOCK + 7, 2 * BLOCK, 5]])
def test_pages_lie_end_to_end(counts: list[int]) -> None:
    wide = max(counts) + 3
    table = torch.arange(1, 1 + 2 * len(counts) * wide, dtype=torch.int32).view(len(counts), 2 * wide)
    page_rows = table[:, :wide]  # a longer stride
    starts = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
    joined = torch.full((sum(counts) + 4,), -1, dtype=torch.int32)
    join_pages(page_rows, starts, joined)
    wanted = np.concatenate([row[:count] for row, count in zip(page_rows.numpy(), counts, strict=True)])
    np.testing.assert_array_equal(joined[: sum(counts)], wanted)
    assert joined[sum(counts) :].tolist() == [-1] * 4, "nothing behind the last row is written"
