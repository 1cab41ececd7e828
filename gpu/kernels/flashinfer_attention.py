"""FlashInfer's decode kernels behind the contract of paged attention, and the choice between them and Triton's.

Owns how FlashInfer is called: `DeviceLengths` for its kernels that read lengths on the device, `PlannedDecode` for
those that the CPU plans for. Both do passes of one token a row; any other pass goes to the attention they are given,
the project's own. Never imports FlashInfer at import time: nobody needs it to run.
"""

import importlib
import importlib.util
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpu.kernels.attention_contract import Array, Attention
from gpu.kernels.step_kernels import Extents
from gpu.kernels.triton_pages import join_pages
from shm.limits import STEPS_IN_FLIGHT

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation
PLAN_BYTES = 8 << 20  # of one plan, FlashInfer's own default
PLANS = STEPS_IN_FLIGHT + 1  # a plan's memory is used again only once the step that it was made for is known to be over
TOLERANCE = 0.03  # between two ways to compute attention in bfloat16, of numbers around 1
HEAD_DIMS = (64, 128, 256)
DEVICE_LENGTH_GPUS = (9, 10, 12)  # major compute capabilities
DEVICE_LENGTH_PAGES = (16, 32, 64, 128)
PLANNED_GROUPS = (1, 2, 3, 4, 8)  # query heads that share a key/value head


@dataclass(frozen=True)
class Shape:
    """What every pass of a model has in common."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    pages_per_row: int
    dtype: torch.dtype  # of queries, keys and values
    device: torch.device

    def unsupported(self) -> str:
        """Why none of FlashInfer's kernels used here can serve it; empty if they can."""
        if self.dtype not in {torch.bfloat16, torch.float16}:
            return f"{self.dtype} is not supported"
        if self.dim not in HEAD_DIMS:
            return f"heads of {self.dim} dims are not supported"
        return ""


class DeviceLengths:
    """Decode by `trtllm_batch_decode_with_kv_cache`, which needs no plan. Reads lengths and pages on the device."""

    needs_host_lengths = False

    def __init__(self, library: Any, shape: Shape, own: Attention) -> None:
        """Allocates FlashInfer's workspace, whose semaphores have to start at zero."""
        self._decode = library.decode.trtllm_batch_decode_with_kv_cache
        self._own = own
        self._shape = shape
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)

    @staticmethod
    def unsupported(shape: Shape, capability: tuple[int, int]) -> str:
        """Why it cannot serve a shape on a GPU; empty if it can."""
        if capability[0] not in DEVICE_LENGTH_GPUS:
            return f"no kernel for compute capability {capability[0]}.{capability[1]}"
        if shape.page_size not in DEVICE_LENGTH_PAGES:
            return f"pages of {shape.page_size} tokens are not supported"
        return shape.unsupported()

    def plan(self, lengths: NDArray[np.int32] | None, rows: int) -> None:
        """Nothing: lengths are read on the device."""

    def warm(self, *arrays: Any) -> None:
        """What the own attention needs: passes of one token a row run once before they are captured."""
        self._own.warm(*arrays)

    def begin(self, page_rows: Array, extents: Extents) -> None:
        """What the own attention needs, for a pass that it does."""
        if extents.longest > 1:
            self._own.begin(page_rows, extents)

    def run(
        self,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        """See the contract. Behind the pages that positions reach, page_rows may hold any number of a page."""
        if extents.longest > 1:
            self._own.run(q, k_layer, v_layer, page_rows, seqs, positions, extents, out)
            return
        self._decode(
            query=q,
            kv_cache=(k_layer, v_layer),
            workspace_buffer=self._workspace,
            block_tables=page_rows,
            seq_lens=extents.ends,
            max_seq_len=page_rows.shape[1] * self._shape.page_size,
            bmm1_scale=1 / math.sqrt(self._shape.dim),
            out=out,
            kv_layout="NHD",
            backend="xqa",  # the one that is compiled on the machine; others are fetched from a network
        )


class _Wrappers:
    """What passes over a fixed number of rows share: buffers that captured launches read, and ways to fill them.

    Each wrapper has as much pinned memory of its own as a plan has on the device.
    """

    def __init__(self, library: Any, shape: Shape, rows: int, workspace: Array, plan: Array) -> None:
        ints = {"dtype": torch.int32, "device": shape.device}
        self.starts = torch.zeros(rows + 1, **ints)
        self.pages = torch.zeros(rows * shape.pages_per_row, **ints)
        last = torch.ones(rows, **ints)
        pinned = {"dtype": torch.int32, "pin_memory": shape.device.type == "cuda"}
        self._turn = 0
        self._ring = []
        for _ in range(PLANS):
            wrapper = library.decode.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self.starts,
                paged_kv_indices_buffer=self.pages,
                paged_kv_last_page_len_buffer=last,
            )
            # All wrappers fill one plan on the device, which is what a captured launch reads; the pinned memory that
            # a plan is copied from, and that must rest until it has been, is each one's own.
            wrapper.reset_workspace_buffer(workspace, plan)
            self._ring.append((wrapper, torch.zeros(rows + 1, **pinned), torch.zeros(rows, **pinned)))

    @property
    def wrapper(self) -> Any:
        """The one that planned last."""
        return self._ring[self._turn][0]

    def next(self) -> tuple[Any, Array, Array]:
        """The one whose turn it is to plan, with pinned memory for starts and last page lengths."""
        self._turn = (self._turn + 1) % PLANS
        return self._ring[self._turn]


class PlannedDecode:
    """Decode by `BatchDecodeWithPagedKVCacheWrapper`: before every pass the CPU says which program does what."""

    needs_host_lengths = True

    def __init__(self, library: Any, shape: Shape, own: Attention) -> None:
        """Allocates FlashInfer's workspaces."""
        self._library, self._shape, self._own = library, shape, own
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._target = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=shape.device)
        self._wrappers: dict[int, _Wrappers] = {}
        self._is_planned = False  # the next pass

    @staticmethod
    def unsupported(shape: Shape, capability: tuple[int, int]) -> str:
        """Why it cannot serve a shape on a GPU; empty if it can."""
        if capability[0] < 8:
            return f"no kernel for compute capability {capability[0]}.{capability[1]}"
        if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads not in PLANNED_GROUPS:
            return f"{shape.heads} query heads over {shape.kv_heads} key/value heads are not supported"
        return shape.unsupported()

    def plan(self, lengths: NDArray[np.int32] | None, rows: int) -> None:
        """See the contract. The first plan of a number of rows allocates, and compiles, so it belongs to warm-up."""
        self._is_planned = lengths is not None
        if lengths is None:
            return
        shape, live = self._shape, len(lengths)
        if live > rows or (live and not 1 <= lengths.min() <= lengths.max() <= shape.pages_per_row * shape.page_size):
            raise ValueError(f"{live} lengths for {rows} rows, or lengths that no row can have: {lengths}")
        if rows not in self._wrappers:
            self._wrappers[rows] = _Wrappers(self._library, shape, rows, self._workspace, self._target)
        wrapper, starts, last = self._wrappers[rows].next()
        padded = np.ones(rows, np.int32)
        padded[:live] = lengths
        starts.numpy()[1:] = np.cumsum(-(-padded // shape.page_size))
        last.numpy()[:] = (padded - 1) % shape.page_size + 1
        none = self._wrappers[rows].pages[:0]  # pages are laid out by `begin`, on the device
        wrapper.plan(
            *(starts, none, last, shape.heads, shape.kv_heads, shape.dim, shape.page_size),
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def warm(self, *arrays: Any) -> None:
        """What the own attention needs: passes of one token a row run once before they are captured."""
        self._own.warm(*arrays)

    def begin(self, page_rows: Array, extents: Extents) -> None:
        """Lay out the pages of all rows as the plan counts them."""
        if not self._is_planned:
            self._own.begin(page_rows, extents)
            return
        wrappers = self._wrappers[page_rows.shape[0]]
        join_pages(page_rows, wrappers.starts, wrappers.pages)

    def run(
        self,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        """See the contract."""
        if not self._is_planned:
            self._own.run(q, k_layer, v_layer, page_rows, seqs, positions, extents, out)
        else:
            self._wrappers[page_rows.shape[0]].wrapper.run(q, (k_layer, v_layer), out=out)


class Choice(NamedTuple):
    """An attention, and in a sentence why it was taken."""

    attention: Attention
    reason: str


KINDS: dict[str, Any] = {"device lengths": DeviceLengths, "planned": PlannedDecode}


def choose(own: Attention, shape: Shape, capability: tuple[int, int], *, host_lengths: bool) -> Choice:
    """The best attention for `shape` on a GPU of `capability`.

    FlashInfer's that takes lengths on the device, else the one that is planned on the CPU, where `host_lengths` says
    that lengths get there, else `own`. What FlashInfer compiles on the machine is taken only if it then agrees with
    `own`. May take minutes, and waits for the device.
    """
    library, missing = load()
    if library is None:
        return Choice(own, f"own Triton kernels: {missing}")
    reasons: list[str] = []
    for name, kind in KINDS.items():
        wrong = kind.unsupported(shape, capability)
        if not wrong and kind.needs_host_lengths and not host_lengths:
            wrong = "lengths do not reach the CPU in time"
        if not wrong:
            attention, wrong = _tried(partial(kind, library, shape, own), own, shape)
            if attention is not None:
                also = f" ({'; '.join(reasons)})" if reasons else ""
                return Choice(attention, f"FlashInfer {library.__version__}, {name}{also}")
        reasons.append(f"{name}: {wrong}")
    return Choice(own, f"own Triton kernels; FlashInfer {'; '.join(reasons)}")


def _tried(make: Callable[[], Attention], own: Attention, shape: Shape) -> tuple[Attention | None, str]:
    """The attention that `make` makes, or None and why it cannot be used."""
    try:
        attention = make()
        found = difference(attention, own, shape)
    except Exception as error:  # noqa: BLE001 - a compiler, a loader or a driver may fail in any way
        return None, f"{type(error).__name__}: {error}"
    if not found <= TOLERANCE:
        return None, f"differs from the own kernels by {found:g}"
    return attention, ""


def difference(attention: Attention, own: Attention, shape: Shape) -> float:
    """Largest difference between two attentions in a pass of one token a row; NaN where one of them has one.

    Rows of one key, of a page, of one key more, and of all that a row can have.
    """
    most = shape.pages_per_row * shape.page_size
    lengths = np.array([1, min(shape.page_size, most), min(shape.page_size + 1, most), most], np.int32)
    rows, place = len(lengths), {"device": shape.device}
    generator = torch.Generator(shape.device).manual_seed(1)

    def normal(*sizes: int) -> Array:
        return torch.randn(sizes, generator=generator, **place).to(shape.dtype)

    pages = rows * shape.pages_per_row
    pool = (pages, shape.page_size, shape.kv_heads, shape.dim)
    k_layer, v_layer = normal(*pool), normal(*pool)
    page_rows = torch.arange(pages, dtype=torch.int32, **place).flip(0).view(rows, shape.pages_per_row)
    ends = torch.from_numpy(lengths).to(shape.device)
    starts, seqs = (torch.arange(n, dtype=torch.int32, **place) for n in (rows + 1, rows))
    extents, q = Extents(starts, ends, 1), normal(rows, shape.heads, shape.dim)
    outs = []
    for each in (attention, own):
        out = torch.zeros_like(q)
        each.plan(lengths, rows)
        each.begin(page_rows, extents)
        each.run(q, k_layer, v_layer, page_rows, seqs, ends - 1, extents, out)
        outs.append(out.float())
        each.plan(None, rows)  # the plan was for this pass alone
    return float((outs[0] - outs[1]).abs().max())


def load() -> tuple[Any, str]:
    """FlashInfer, or None and what is missing for it."""
    if importlib.util.find_spec("flashinfer") is None:
        return None, "FlashInfer is not installed (extra [cuda])"
    compiler = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    compiled = importlib.util.find_spec("flashinfer_jit_cache") is not None
    if not (compiled or compiler.exists() or shutil.which("nvcc")):
        return None, "FlashInfer compiles its kernels on first use, and there is no nvcc"
    try:
        importlib.import_module("flashinfer.decode")
        return importlib.import_module("flashinfer"), ""
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"FlashInfer cannot be imported: {error}"
