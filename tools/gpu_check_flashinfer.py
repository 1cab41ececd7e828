"""The part of the check that compares FlashInfer's decode, where it is installed, with our own and the plain attention.

Owns passes of one token a row, at the shapes of real models, whose lengths change while their memory stays where it is:
first queued one by one, then captured and replayed. Everything goes through the contract of paged attention. On the
host nothing is captured, and a library can only be a stand-in.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gpu.kernels import flashinfer_attention, plain
from gpu.kernels.attention_contract import Attention
from gpu.kernels.attention_cut import scratch_floats
from gpu.kernels.flashinfer_attention import Shape
from gpu.kernels.step_kernels import Extents
from gpu.kernels.triton_attention import PagedAttention
from tools.gpu_check import Options
from tools.gpu_check_kernels import Made, error
from tools.gpu_check_part import Figures, Skipped, run

PAGE = 16
TOLERANCE = 3e-2  # of numbers with 8 bits
SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128)}  # query heads, key/value heads, dims
LENGTHS = ([1, 16, 17, 300, 1000], [1000, 33, 2, 15, 700], [512])  # of live rows, pass by pass
TINY, TINY_LENGTHS = (2, 1, 64), ([1, 17], [5])
Compared = Iterator[tuple[str, float]]  # what, and the error against the plain reference and against our own


class Decode:
    """A pass of one token for each of `rows` rows, padding included, in memory that never moves."""

    def __init__(self, shape: Shape, rows: int) -> None:
        made = Made(str(shape.device), shape.dtype)
        pool = (1 + rows * shape.pages_per_row, shape.page_size, shape.kv_heads, shape.dim)
        self.shape, self.rows = shape, rows
        self.k_layer, self.v_layer = made.normal(*pool), made.normal(*pool)
        self.q = made.normal(rows, shape.heads, shape.dim)
        self.page_rows = made.ints(np.zeros((rows, shape.pages_per_row)))
        self.seqs, self.positions = made.ints(np.arange(rows)), made.ints(np.zeros(rows))
        self.extents = Extents(made.ints(np.arange(rows + 1)), made.ints(np.ones(rows)), 1)
        order = np.random.default_rng(3).permutation(pool[0] - 1) + 1
        self._pages = order.reshape(rows, shape.pages_per_row).astype(np.int32)

    def load(self, lengths: Sequence[int]) -> None:
        """Give the first rows these lengths and pages of their own; the others are padding."""
        live = len(lengths)
        ends = np.ones(self.rows, np.int32)
        ends[:live] = lengths
        pages = self._pages.copy()
        pages[live:] = 0
        for target, values in ((self.extents.ends, ends), (self.positions, ends - 1), (self.page_rows, pages)):
            target.copy_(torch.from_numpy(values))

    def queue(self, attention: Attention, out: Any) -> None:
        """One layer of the pass."""
        attention.begin(self.page_rows, self.extents)
        where = (self.page_rows, self.seqs, self.positions, self.extents)
        attention.run(self.q, self.k_layer, self.v_layer, *where, out)

    def errors(self, own: Attention, out: Any) -> float:
        """The larger error of `out`: against the plain reference, or against our own kernels."""
        plainly, ours = torch.zeros_like(out), torch.zeros_like(out)
        where = (self.page_rows, self.seqs, self.positions, self.extents)
        plain.attention(self.q, self.k_layer, self.v_layer, *where, plainly)
        self.queue(own, ours)
        return max(error(out, plainly), error(out, ours))


def compare(attention: Attention, own: Attention, decode: Decode, passes: Sequence[Sequence[int]]) -> Compared:
    """All passes, queued one by one and replayed: (what, error)."""
    out = torch.zeros_like(decode.q)

    def rounds(act: Callable[[], None]) -> float:
        found = []
        for lengths in passes:
            out.zero_()
            decode.load(lengths)
            attention.plan(np.array(lengths, np.int32), decode.rows)
            act()
            found.append(decode.errors(own, out))
        return max(found)

    def queue() -> None:
        decode.queue(attention, out)

    yield "queued", rounds(queue)
    if decode.shape.device.type != "cuda":
        yield "queued once more", rounds(queue)
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention.plan(np.array(passes[-1], np.int32), decode.rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            queue()
        yield "captured", rounds(graph.replay)
        stream.synchronize()


def flashinfer(options: Options, figures: Figures) -> None:
    """Each of FlashInfer's ways that supports a shape, each guarded, so that one hides no other."""
    library, missing = flashinfer_attention.load()
    if library is None:
        raise Skipped(missing)
    figures.add("version", library.__version__)
    on_gpu = options.device == "cuda"
    shapes, passes, rows = (SHAPES, LENGTHS, 8) if on_gpu else ({"tiny": TINY}, TINY_LENGTHS, 3)
    capability = torch.cuda.get_device_capability() if on_gpu else (9, 0)
    dtype = torch.bfloat16 if on_gpu else torch.float16  # which numpy has, and so the interpreter
    failed: list[str] = []
    compared = 0
    for model, heads in shapes.items():
        per_row = -(-max(map(max, passes)) // PAGE)
        shape = Shape(*heads, PAGE, per_row, dtype, torch.device("cuda" if on_gpu else "cpu"))
        scratch = torch.zeros(scratch_floats(shape.dim), device=shape.device)
        own = PagedAttention(*heads, scratch)
        for way, kind in flashinfer_attention.KINDS.items():
            name = f"{way}, {model}"
            if wrong := kind.unsupported(shape, capability):
                figures.add(name, f"not supported: {wrong}")
                continue
            try:
                for what, found in compare(kind(library, shape, own), own, Decode(shape, rows), passes):
                    compared += 1
                    figures.add(f"{name}, {what}", f"{found:.3g} (at most {TOLERANCE:g})")
                    failed += [] if found <= TOLERANCE else [f"{name}, {what}"]
            except Exception as problem:  # noqa: BLE001 - whatever a foreign library raises
                figures.add(f"{name}, failed", repr(problem)[:500])
                failed.append(name)
    assert not failed, f"fails, or differs from the reference: {', '.join(failed)}"
    if not compared:
        raise Skipped("FlashInfer supports none of the shapes on this GPU")


if __name__ == "__main__":
    run({"flashinfer": flashinfer})
