"""The part of the check that compares every Triton kernel with its plain reference, at the shapes of real models.

Owns inputs, tolerances and the list of operations. On the host, where Triton interprets its kernels, shapes are small
and in float32 only. Everything is compared before the part fails, so that one kernel hides no other.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.device.buffers import signed
from gpu.device.protocol import DeviceError
from gpu.kernels import plain, plain_step, triton_rows
from gpu.kernels.attention_cut import scratch_floats
from gpu.kernels.step_kernels import Extents, Gained, PassShape, Rows, Tables
from gpu.kernels.triton_attention import PagedAttention
from gpu.kernels.triton_step import TritonStepKernels
from shm.config import ServerConfig
from shm.records import STEP_MIXED, StepLayout
from shm.segment import Segment
from tools.gpu_check import Options
from tools.gpu_check_ngram import compare_ngram
from tools.gpu_check_part import Figures, open_device, run
from tools.gpu_check_sampling import compare_sampling
from tools.gpu_check_step import small_config
from tools.gpu_check_trained import compare_trained

PAGE, MOST_WINDOW = 16, 3
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Sizes:
    """The shape of a model, and of the passes."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    norm: bool
    chunks: tuple[int, ...]  # tokens of the rows of a mixed pass
    before: tuple[int, ...]  # what these rows had in the cache


TINY = Sizes("tiny", 64, 4, 2, 16, 96, True, (1, 5, 1), (20, 0, 40))
REAL = (
    Sizes("SmolLM2-135M", 576, 9, 3, 64, 1536, False, (1, 1, 1, 200, 37), (0, 700, 33, 0, 512)),
    Sizes("Qwen3-0.6B", 1024, 16, 8, 128, 3072, True, (1, 1, 1, 200, 37), (0, 700, 33, 0, 512)),
)


class Made:
    """Random inputs, the same in every run."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(7)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return values.to(self.dtype)

    def ints(self, values: Any) -> Tensor:
        """i32."""
        return torch.as_tensor(np.asarray(values, np.int32)).to(self.device)


def error(made: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to numbers above 1; infinite where one is not finite and the other is."""
    a, b = made.float(), wanted.float()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())


def layout_of(sizes: Sizes, made: Made) -> tuple[Tensor, Tensor, Tensor, Extents, int]:
    """positions, seqs, page rows, extents and the number of pages of a mixed pass with scattered pages."""
    ends = [before + count for before, count in zip(sizes.before, sizes.chunks, strict=True)]
    width = -(-max(ends) // PAGE) + 1
    pages = 1 + len(ends) * width
    order = np.random.default_rng(3).permutation(pages - 1) + 1
    positions = np.concatenate([np.arange(b, e) for b, e in zip(sizes.before, ends, strict=True)])
    seqs = np.repeat(np.arange(len(ends)), sizes.chunks)
    starts = np.concatenate([[0], np.cumsum(sizes.chunks)])
    extents = Extents(made.ints(starts), made.ints(ends), max(sizes.chunks))
    return made.ints(positions), made.ints(seqs), made.ints(order.reshape(len(ends), width)), extents, pages


def compare_model(sizes: Sizes, made: Made) -> Iterator[tuple[str, float]]:
    """Every kernel of a layer: (operation, error)."""
    tokens, hidden, ffn, dim = sum(sizes.chunks), sizes.hidden, sizes.ffn, sizes.dim
    table, ids = made.normal(50, hidden), made.ints(np.arange(tokens) % 50)
    outs = [torch.zeros(tokens, hidden, dtype=made.dtype, device=made.device) for _ in range(2)]
    triton_rows.embed(ids, table, outs[0])
    plain.embed(ids, table, outs[1])
    yield "embed", error(*outs)
    x, residual, weight = made.normal(tokens, hidden), made.normal(tokens, hidden), made.normal(hidden)
    triton_rows.rmsnorm(x, weight, 1e-5, outs[0])
    plain.rmsnorm(x, weight, 1e-5, outs[1])
    yield "rmsnorm", error(*outs)
    states, norms = made.normal(3 * tokens, hidden).float(), made.normal(3, hidden)  # as drafters get them
    made_of = [torch.zeros(3 * tokens, hidden, dtype=made.dtype, device=made.device) for _ in range(2)]
    triton_rows.rmsnorm(states, norms, 1e-5, made_of[0])
    plain.rmsnorm(states, norms, 1e-5, made_of[1])
    yield "rmsnorm of states", error(*made_of)
    sums = [residual.clone(), residual.clone()]
    triton_rows.add_rmsnorm(x, sums[0], weight, 1e-5, outs[0])
    plain.add_rmsnorm(x, sums[1], weight, 1e-5, outs[1])
    yield "add+rmsnorm", max(error(*outs), error(*sums))
    gate_up = made.normal(tokens, 2 * ffn)
    gated = [torch.zeros(tokens, ffn, dtype=made.dtype, device=made.device) for _ in range(2)]
    triton_rows.silu_mul(gate_up, gated[0])
    plain.silu_mul(gate_up, gated[1])
    yield "silu-mul", error(*gated)
    positions, seqs, page_rows, extents, pages = layout_of(sizes, made)
    angles = torch.arange(page_rows.shape[1] * PAGE, device=made.device)[:, None] * 0.01 * made_range(dim, made)
    norms = (made.normal(dim), made.normal(dim)) if sizes.norm else (None, None)
    qkv = made.normal(tokens, (sizes.heads + 2 * sizes.kv_heads) * dim)
    pool = made.normal(pages, PAGE, sizes.kv_heads, dim), made.normal(pages, PAGE, sizes.kv_heads, dim)
    written = []
    both: tuple[Any, ...] = (triton_rows.rope_write, plain.rope_write)
    for rope_write in both:
        caches = pool[0].clone(), pool[1].clone()
        queries = torch.zeros(tokens, sizes.heads, dim, dtype=made.dtype, device=made.device)
        rope_write(qkv.clone(), positions, seqs, page_rows, angles.cos(), angles.sin(), *norms, 1e-6, queries, *caches)
        written.append((queries, *caches))
    yield "rope + KV write", max(error(a, b) for a, b in zip(*written, strict=True))
    q, k, v = written[1]
    attended = [torch.zeros_like(q) for _ in range(2)]
    scratch = torch.zeros(scratch_floats(dim), dtype=torch.float32, device=made.device)
    attention = PagedAttention(sizes.heads, sizes.kv_heads, dim, scratch)
    attention.run(q, k, v, page_rows, seqs, positions, extents, attended[0])
    plain.attention(q, k, v, page_rows, seqs, positions, extents, attended[1])
    yield "paged attention, mixed", error(*attended)
    for window in (1, 4):
        yield f"paged attention, decode of {window}", decode_error(sizes, made, attention, pages, (k, v), window)


def made_range(dim: int, made: Made) -> Tensor:
    """Frequencies of half a head: f32[1, dim / 2]."""
    return (torch.arange(dim // 2, device=made.device)[None] + 1).float()


def decode_error(
    sizes: Sizes, made: Made, attention: PagedAttention, pages: int, caches: tuple[Tensor, Tensor], window: int
) -> float:
    """A window of tokens at the end of each row's cache."""
    ends = [max(b + c, window) for b, c in zip(sizes.before, sizes.chunks, strict=True)]
    rows, width = len(ends), (pages - 1) // len(ends)
    page_rows = made.ints(np.arange(1, rows * width + 1).reshape(rows, width))
    positions = made.ints(np.concatenate([np.arange(end - window, end) for end in ends]))
    seqs = made.ints(np.repeat(np.arange(rows), window))
    extents = Extents(made.ints(np.arange(rows + 1) * window), made.ints(ends), window)
    q = made.normal(rows * window, sizes.heads, sizes.dim)
    outs = [torch.zeros_like(q) for _ in range(2)]
    attention.run(q, *caches, page_rows, seqs, positions, extents, outs[0])
    plain.attention(q, *caches, page_rows, seqs, positions, extents, outs[1])
    return error(*outs)


def compare_step(device: str, window: int) -> Iterator[tuple[str, float]]:
    """The step's bookkeeping on a mixed step: the number of arrays that differ from the plain reference's."""
    config = small_config(MOST_WINDOW)
    layout = StepLayout(config)
    rng = np.random.default_rng(5)
    payload = np.zeros(layout.nbytes // 4, np.int32)
    view = layout.view(payload)
    view.kind, view.n_decode, view.n_chunks, view.n_slot_writes, view.n_sampling = STEP_MIXED, 1, 1, 3, 1
    view.decode_entries[0], view.drafts = 2, window - 1
    view.chunks[:5, 0] = (1, 1, 0, 6, 1)
    view.slot_writes[:, :3] = [[1, 1, 3], [0, 1, 0], [4, 5, 6]]
    view.set_sampling(0, 1, 0.5, 0.9, 0.1, 7, 2**63 + 11)
    tables = _tables(config, rng)
    shape = PassShape(2, 1, 2 * window + 6, 1, 6, window)  # a row of padding
    ids = np.arange(100, 100 + config.prefill_chunk, dtype=np.int32)
    rows = _rows(config)
    plain_step.write_slots(view, tables.pages, config.pages)
    plain_tables = Tables(*(array.copy() for array in tables))
    moved = Tables(*(_tensor(array, device) for array in tables))
    moved_rows = Rows(*(_tensor(array, device) for array in rows))
    step, fault = _tensor(payload, device), torch.zeros(1, dtype=torch.int32, device=device)
    kernels = TritonStepKernels.of(config)
    kernels.write_slots(step, view.n_slot_writes, moved.pages, fault)
    kernels.write_sampling(step, view.n_sampling, moved.real, moved.top_k, moved.seed, fault)
    kernels.gather(step, moved, _tensor(ids, device), moved_rows, shape, fault)
    plain_step.write_sampling(view, plain_tables.real, plain_tables.top_k, plain_tables.seed)
    plain_step.gather(view, plain_tables, ids, rows, shape, config.page_size, poison=True)
    differ = _differing((*moved, *moved_rows), (*plain_tables, *rows)) + int(fault.item() != 0)
    yield f"slot writes, sampling writes, gather, windows of {window}", float(differ)
    for right in range(window):
        targets = rng.integers(1, 99, shape.samples).astype(np.int32)
        rows.tokens[1 : 1 + right], rows.tokens[1 + right : window] = targets[:right], 0
        accepted = Rows(*(array.copy() for array in rows))
        gained = Gained(*(np.full(n, -7, np.int32) for n in (3, (MOST_WINDOW, 3), 3)))
        made = Rows(*(_tensor(array, device) for array in rows)), Gained(*(_tensor(a, device) for a in gained))
        length = plain_tables.length.copy()
        on_device = _tensor(length, device)
        kernels.accept(made[0], _tensor(targets, device), made[1], on_device, shape)
        plain_step.accept(accepted, targets, gained, length, shape)
        assert gained.counts[0] == right + 1
        differ = _differing((*made[0], *made[1], on_device), (*accepted, *gained, length))
        yield f"acceptance of {right} of {window - 1} drafts", float(differ)
    table = _tensor(np.zeros(9, np.int32), device)
    kernels.stash(table, _tensor(rows.entries[:3], device), _tensor(rows.places[:3], device))
    expected = np.zeros(9, np.int32)
    plain_step.scatter(expected, rows.entries[:3], rows.places[:3])
    yield f"stash, windows of {window}", float((table.cpu().numpy() != expected).sum())


def _differing(made: Iterable[Tensor], wanted: Iterable[Any]) -> int:
    """How many of the arrays."""
    return sum(not np.array_equal(a.cpu().numpy(), signed(b)) for a, b in zip(made, wanted, strict=True))


def compare_copies(device: str) -> Iterator[tuple[str, float]]:
    """Uploads from and deliveries to a segment, pinned as the rings and the ledger are: numbers that differ."""
    config = small_config()
    layout, rng = StepLayout(config), np.random.default_rng(9)
    ints, ledger = layout.nbytes // 4, config.rows * config.max_len
    segment = Segment.create("check", 4 * (2 * ints + ledger))
    payload, result = segment.array("i4", ints, 0), segment.array("i4", ints, 4 * ints)
    plane = segment.array("i4", ledger, 8 * ints).reshape(config.rows, config.max_len)
    payload[:], plane[:] = rng.integers(0, 1000, ints), rng.integers(0, 1000, plane.shape)
    view = layout.view(payload)
    view.kind, view.n_decode, view.n_chunks, view.n_slot_writes, view.n_sampling = STEP_MIXED, 1, 2, 1, 0
    view.chunks[:5, 0], view.chunks[:5, 1] = (1, 1, 2, 3, 1), (2, 2, config.max_len - 4, 4, 0)
    opened = open_device("cuda") if device == "cuda" else None  # on the host Triton's kernels take tensors as they are
    pinned = [opened.pinned(a, "check").array if opened else torch.from_numpy(a) for a in (payload, plane, result)]
    kernels = TritonStepKernels.of(config)
    descriptor, ids, outcome = (torch.full((n,), -5, dtype=torch.int32, device=device) for n in (ints, 8, ints))
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    wanted, used = np.full(ints, -5, np.int32), view.used_nbytes // 4
    wanted[:used] = payload[:used]
    kernels.upload(view, pinned[0], descriptor, pinned[1], ids, fault)
    chunks = [*plane[1, 2:5].tolist(), *plane[2, -4:].tolist(), -5]
    differ = int((descriptor.cpu().numpy() != wanted).sum()) + (ids.tolist() != chunks)
    yield "upload of a descriptor and its chunks", float(differ)
    outcome += torch.arange(ints, dtype=torch.int32, device=device)
    kernels.deliver(outcome, pinned[2], 7)
    if opened:
        torch.cuda.synchronize()
    yield "delivery of a result", float((result != [*range(-5, 2), *[0] * (ints - 7)]).sum())
    view.chunks[2, 1] = config.max_len - 3
    accepted = 1.0
    try:
        kernels.upload(view, pinned[0], descriptor, pinned[1], ids, fault)
    except DeviceError:
        accepted = 0
    yield "uploads of a chunk that lies outside of its row", accepted
    if opened:
        torch.cuda.synchronize()
        opened.close()


def _tables(config: ServerConfig, rng: np.random.Generator) -> Tables:
    entries, width = config.entries, config.pages_per_row
    pages = rng.integers(1, config.pages, (entries, width)).astype(np.int32)
    pages[0] = 0
    length = np.array([0, 3, 7, 2], np.int32)
    token = np.array([0, 5, 6, 7], np.int32)
    real = rng.random((3, entries)).astype(np.float32)
    return Tables(length, token, pages, real, np.arange(entries, dtype=np.int32), np.arange(entries, dtype=np.uint64))


def _rows(config: ServerConfig) -> Rows:
    rows, tokens, samples = config.max_running, config.pass_tokens, config.max_running * config.window

    def ints(*shape: int) -> Any:
        return np.full(shape, -7, np.int32)

    return Rows(
        tokens=ints(tokens), positions=ints(tokens), seqs=ints(tokens), pages=ints(rows, config.pages_per_row),
        starts=ints(rows + 1), ends=ints(rows), entries=ints(rows), lengths=ints(rows), logit_rows=ints(samples),
        places=ints(samples), real=np.zeros((3, samples), np.float32), top_k=ints(samples),
        seed=np.zeros(samples, np.uint64),
    )  # fmt: skip


def _tensor(array: Any, device: str) -> Tensor:
    return torch.from_numpy(signed(array).copy()).to(device)


def kernels(options: Options, figures: Figures) -> None:
    """Everything, against the plain references."""
    device = "cuda" if options.device == "cuda" else "cpu"
    shapes, dtypes = (REAL, tuple(TOLERANCE)) if device == "cuda" else ((TINY,), (torch.float32,))
    failed = []

    def check(name: str, found: float, allowed: float) -> None:
        figures.add(name, f"{found:.3g} (at most {allowed:g})")
        if not found <= allowed:
            failed.append(name)

    for sizes in shapes:
        for dtype in dtypes:
            for name, found in compare_model(sizes, Made(device, dtype)):
                check(f"{name}, {sizes.name}, {str(dtype).removeprefix('torch.')}", found, TOLERANCE[dtype])
    for result in compare_sampling(device):
        check(*result)
    steps = (compare_step(device, window) for window in (1, MOST_WINDOW))
    drafts = compare_ngram(device), compare_trained(device)
    for name, found in itertools.chain(*steps, compare_copies(device), *drafts):
        check(name, found, 0)
    assert not failed, f"differs from the reference: {', '.join(failed)}"


if __name__ == "__main__":
    run({"kernels": kernels})
