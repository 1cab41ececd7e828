"""A stand-in for FlashInfer that records how it is called, with the parameters of 0.6.13 as far as they are used."""

from types import SimpleNamespace
from typing import Any

import torch


class Wrapper:
    """BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        *,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    ) -> None:
        assert kv_layout == "NHD" and use_cuda_graph
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.starts, self.pages, self.last = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self.workspaces: tuple[Any, Any] = (float_workspace_buffer, None)
        self.plans: list[dict[str, Any]] = []
        self.runs: list[tuple[Any, ...]] = []

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer) -> None:
        self.workspaces = (float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        q_data_type="float16",
        kv_data_type=None,
    ) -> None:
        assert len(last_page_len) == len(self.last)
        assert len(indices) <= len(self.pages)
        self.starts.copy_(indptr)
        self.last.copy_(last_page_len)
        given = {"indptr": indptr, "last": last_page_len, "lengths": kv_lengths(indptr, last_page_len, page_size)}
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)
        self.plans.append({**given, "shape": shape})

    def run(self, q, paged_kv_cache, *, out=None) -> None:
        self.runs.append((q, paged_kv_cache, out))


def kv_lengths(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> list[int]:
    """The lengths that a plan stands for."""
    return ((indptr[1:] - indptr[:-1] - 1) * page_size + last).tolist()


class Library:
    """The package."""

    __version__ = "0.6.13"

    def __init__(self) -> None:
        self.wrappers: list[Wrapper] = []
        self.decodes: list[dict[str, Any]] = []
        self.decode = SimpleNamespace(
            BatchDecodeWithPagedKVCacheWrapper=self._make,
            trtllm_batch_decode_with_kv_cache=self._decode,
        )

    def _make(self, *arguments: Any, **named: Any) -> Wrapper:
        self.wrappers.append(Wrapper(*arguments, **named))
        return self.wrappers[-1]

    def _decode(
        self,
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale=1.0,
        *,
        out=None,
        kv_layout="HND",
        backend="auto",
    ) -> None:
        self.decodes.append(dict(locals()))
