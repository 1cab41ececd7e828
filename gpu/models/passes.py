"""One pass of a llama-like model over the tokens of a step, as a single native job.

Owns the order of the phases and the block of words that describes a model and a pass. Every task writes places that no
other task of its phase touches, and computes them the same way whatever the number of tokens: no result depends on which
tokens share a pass. A pass never allocates, never calls Python, and never reads a key or value that is not in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu.kernels.attention import GROUP_MAX, attend_bfloat16, attend_float32
from gpu.kernels.gemm import (
    BFLOAT16,
    COLUMNS,
    FLOAT32,
    INT8,
    WEIGHT_BYTES,
    rows_by_panel_bfloat16,
    rows_by_panel_float32,
    rows_by_panel_int8,
)
from gpu.kernels.native import entry, kernel
from gpu.kernels.packing import embed_bfloat16, embed_float32, embed_int8
from gpu.kernels.rows import (
    cache_bfloat16,
    cache_float32,
    condense_bfloat16,
    condense_float32,
    condense_int8,
    rms_norm,
    rotate,
    silu_times,
)
from gpu.kernels.team import await_phase, finish, take
from gpu.kernels.vectors import load_f32, load_i32, load_i64, store_f32, store_i64

# Words of the block. First what changes with every pass; written by the caller of Team.run.
TOKEN_COUNT, LOGIT_COUNT, TOKENS, POSITIONS, SEQUENCES, PAGE_ROWS, PAGES_PER_ROW, LOGIT_ROWS, LOGITS, FAULT = range(10)
# Then the model's sizes,
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, PAGE_SIZE, PAGES, POSITIONS_MAX, SEQUENCES_MAX = range(10, 21)
# numbers kept as float32 in the low half of a word,
EPSILON, QUERY_FACTOR, LIMIT_HIDDEN, LIMIT_ATTENTION, LIMIT_FFN = range(21, 26)
# addresses of weights: LAYER_TABLE has 4 words of panels, then 4 of scales, for each layer: qkv, out, gate-up, down,
LAYER_TABLE, NORMS, EMBEDDING, EMBEDDING_SCALES, HEAD, HEAD_SCALES, COSINES, SINES = range(26, 34)
# and of working memory. SCRATCH is one piece of SCRATCH_BYTES for each worker.
X, ACTIVATIONS, ROW_SCALES, QKV, ATTENDED, GATED, K_CACHE, V_CACHE, SCRATCH, SCRATCH_BYTES, SCORE_ROOM = range(34, 45)
BLOCK_WORDS = 45
LAYER_WORDS = 8

FAULT_TOKEN, FAULT_POSITION, FAULT_PAGE, FAULT_LOGIT_ROW, FAULT_SEQUENCE = range(1, 6)

GATE_ROWS = 12  # rows between which gate and up panels alternate, so that both stay in the first-level cache
TASK_WEIGHTS_BYTES = 36864  # panels of one task, at least, when rows are few


@kernel
def word(block: int, index: int) -> int:
    """Word `index` of the block."""
    return load_i64(block + 8 * index)


@kernel
def panels_per_task(rows: int, panel_bytes: int) -> int:
    """Few rows: a stretch of memory that is worth streaming. Many rows: one panel is work enough."""
    return max(1, TASK_WEIGHTS_BYTES // (panel_bytes * ((rows + 3) // 4)))


@kernel
def rows_per_task(rows: int) -> int:
    """Rows of one task in a phase of cheap row work."""
    return 1 + rows // 64


@kernel
def layer_word(block: int, layer: int, index: int) -> int:
    """Address from the table of layers."""
    return load_i64(word(block, LAYER_TABLE) + 8 * (layer * LAYER_WORDS + index))


@kernel
def worker_scratch(block: int, worker: int) -> int:
    """Address of this worker's own working memory."""
    return word(block, SCRATCH) + worker * word(block, SCRATCH_BYTES)


@kernel
def row_pages(block: int, row: int) -> int:
    """Address of the page numbers of the sequence that token `row` belongs to."""
    sequence = load_i32(word(block, SEQUENCES) + 4 * row)
    return word(block, PAGE_ROWS) + 4 * sequence * word(block, PAGES_PER_ROW)


@kernel
def task_count(items: int, group: int) -> int:
    """Tasks of a phase over `items`: at least one, so that every pass has the same number of phases."""
    return max(1, (items + group - 1) // group)


def _make_pass(
    rows_by_panel: Callable[..., None],
    condense: Callable[..., None],
    embed: Callable[..., None],
    write_cache: Callable[..., None],
    attend: Callable[..., None],
    weight_bytes: int,
    activation_bytes: int,
    cache_bytes: int,
) -> Callable[[int, int, int, int], None]:
    @kernel
    def condensed(block: int, row: int, width: int) -> int:
        return word(block, ACTIVATIONS) + activation_bytes * width * row

    @kernel
    def embed_rows(block: int, control: int, serial: int) -> int:
        rows, hidden = word(block, TOKEN_COUNT), word(block, HIDDEN)
        group = rows_per_task(rows)
        tasks = task_count(rows, group)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for row in range(task * group, min(rows, (task + 1) * group)):
                token = load_i32(word(block, TOKENS) + 4 * row)
                out = word(block, X) + 4 * hidden * row
                embed(word(block, EMBEDDING), word(block, EMBEDDING_SCALES), token, hidden, out)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def norm_rows(block: int, worker: int, control: int, serial: int, norm: int, final: int) -> int:
        """Norm and rounding of every row, or (final) of the rows whose logits are wanted."""
        hidden = word(block, HIDDEN)
        rows = word(block, LOGIT_COUNT if final else TOKEN_COUNT)
        weight = word(block, NORMS) + 4 * hidden * norm
        epsilon, limit = load_f32(block + 8 * EPSILON), load_f32(block + 8 * LIMIT_HIDDEN)
        scratch = worker_scratch(block, worker)
        group = rows_per_task(rows)
        tasks = task_count(rows, group)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for row in range(task * group, min(rows, (task + 1) * group)):
                source = load_i32(word(block, LOGIT_ROWS) + 4 * row) if final else row
                rms_norm(word(block, X) + 4 * hidden * source, weight, scratch, hidden, epsilon)
                scale = word(block, ROW_SCALES) + 4 * row
                condense(scratch, hidden, condensed(block, row, hidden), scale, limit)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def condense_rows(block: int, control: int, serial: int, source: int, width: int, limit: float) -> int:
        rows = word(block, TOKEN_COUNT)
        group = rows_per_task(rows)
        tasks = task_count(rows, group)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for row in range(task * group, min(rows, (task + 1) * group)):
                scale = word(block, ROW_SCALES) + 4 * row
                condense(source + 4 * width * row, width, condensed(block, row, width), scale, limit)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def multiply(
        block: int,
        control: int,
        serial: int,
        rows: int,
        k: int,
        panels: int,
        weights: int,
        scales: int,
        out: int,
        out_stride: int,
        adds: int,
    ) -> int:
        panel_bytes = COLUMNS * k * weight_bytes
        group = panels_per_task(rows, panel_bytes)
        tasks = task_count(panels, group)
        x, row_scales = word(block, ACTIVATIONS), word(block, ROW_SCALES)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for p in range(task * group, min(panels, (task + 1) * group)):
                w, place = weights + p * panel_bytes, out + 4 * COLUMNS * p
                column_scales = scales + 4 * COLUMNS * p
                stride = activation_bytes * k
                rows_by_panel(
                    x, stride, rows, w, k, 2 * panel_bytes, row_scales, column_scales, place, out_stride, adds
                )
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def gate_up(block: int, worker: int, control: int, serial: int, weights: int, scales: int) -> int:
        """silu(gate) * up. Panels alternate: 16 columns of gate, the same 16 of up."""
        rows, k, ffn = word(block, TOKEN_COUNT), word(block, HIDDEN), word(block, FFN)
        panel_bytes = COLUMNS * k * weight_bytes
        couples = ffn // COLUMNS
        group = panels_per_task(rows, 2 * panel_bytes)
        tasks = task_count(couples, group)
        stride = activation_bytes * k
        gate = worker_scratch(block, worker)
        up = gate + 4 * COLUMNS * GATE_ROWS
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for p in range(task * group, min(couples, (task + 1) * group)):
                w, column_scales = weights + 2 * p * panel_bytes, scales + 8 * COLUMNS * p
                first, pieces = 0, (rows + GATE_ROWS - 1) // GATE_ROWS
                while first < rows:
                    count = (rows - first + pieces - 1) // pieces
                    x, row_scales = condensed(block, first, k), word(block, ROW_SCALES) + 4 * first
                    rows_by_panel(x, stride, count, w, k, 2 * panel_bytes, row_scales, column_scales, gate, 64, 0)
                    rows_by_panel(
                        x,
                        stride,
                        count,
                        w + panel_bytes,
                        k,
                        2 * panel_bytes,
                        row_scales,
                        column_scales + 64,
                        up,
                        64,
                        0,
                    )
                    out = word(block, GATED) + 4 * (first * ffn + COLUMNS * p)
                    for row in range(count):
                        silu_times(gate + 64 * row, up + 64 * row, out + 4 * ffn * row, COLUMNS)
                    first += count
                    pieces -= 1
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def cache_rows(block: int, control: int, serial: int, layer: int) -> int:
        """Rotary embedding of queries and keys; keys and values into the cache."""
        rows, heads, kv_heads = word(block, TOKEN_COUNT), word(block, HEADS), word(block, KV_HEADS)
        dim, page_size = word(block, HEAD_DIM), word(block, PAGE_SIZE)
        width = (heads + 2 * kv_heads) * dim
        page_bytes = kv_heads * dim * page_size * cache_bytes
        layer_offset = layer * word(block, PAGES) * page_bytes
        factor = load_f32(block + 8 * QUERY_FACTOR)
        group = rows_per_task(rows)
        tasks = task_count(rows, group)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for row in range(task * group, min(rows, (task + 1) * group)):
                position = load_i32(word(block, POSITIONS) + 4 * row)
                cosine = word(block, COSINES) + 2 * dim * position
                sine = word(block, SINES) + 2 * dim * position
                q = word(block, QKV) + 4 * width * row
                k = q + 4 * heads * dim
                rotate(q, heads, dim, cosine, sine, factor)
                rotate(k, kv_heads, dim, cosine, sine, 1.0)
                page = load_i32(row_pages(block, row) + 4 * (position // page_size))
                offset = layer_offset + page * page_bytes
                k_page, v_page = word(block, K_CACHE) + offset, word(block, V_CACHE) + offset
                write_cache(k, k + 4 * kv_heads * dim, k_page, v_page, position % page_size, kv_heads, dim, page_size)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def attend_rows(block: int, worker: int, control: int, serial: int, layer: int) -> int:
        """One task for each row and key/value head."""
        rows, heads, kv_heads = word(block, TOKEN_COUNT), word(block, HEADS), word(block, KV_HEADS)
        dim, page_size = word(block, HEAD_DIM), word(block, PAGE_SIZE)
        width, group = (heads + 2 * kv_heads) * dim, heads // kv_heads
        head_bytes = dim * page_size * cache_bytes
        page_bytes = kv_heads * head_bytes
        layer_offset = layer * word(block, PAGES) * page_bytes
        scratch, room = worker_scratch(block, worker), word(block, SCORE_ROOM)
        tasks = task_count(rows * kv_heads, 1)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            row, head = task // kv_heads, task % kv_heads
            if row < rows:
                keys = load_i32(word(block, POSITIONS) + 4 * row) + 1
                offset = layer_offset + head * head_bytes
                q = word(block, QKV) + 4 * (width * row + head * group * dim)
                out = word(block, ATTENDED) + 4 * (heads * row + head * group) * dim
                k_cache, v_cache = word(block, K_CACHE) + offset, word(block, V_CACHE) + offset
                pages = row_pages(block, row)
                attend(
                    q, group, dim, keys, pages, page_size, k_cache, v_cache, page_bytes, scratch, room, out
                )
            finish(control, serial, tasks)
        return await_phase(control, serial)

    @kernel
    def run_pass(worker: int, block: int, control: int, serial: int) -> None:
        rows, hidden, ffn = word(block, TOKEN_COUNT), word(block, HIDDEN), word(block, FFN)
        attended = word(block, HEADS) * word(block, HEAD_DIM)
        qkv = attended + 2 * word(block, KV_HEADS) * word(block, HEAD_DIM)
        x = word(block, X)
        serial = embed_rows(block, control, serial)
        for layer in range(word(block, LAYERS)):
            w, s = layer_word(block, layer, 0), layer_word(block, layer, 4)
            serial = norm_rows(block, worker, control, serial, 2 * layer, 0)
            serial = multiply(
                block, control, serial, rows, hidden, qkv // COLUMNS, w, s, word(block, QKV), 4 * qkv, 0
            )
            serial = cache_rows(block, control, serial, layer)
            serial = attend_rows(block, worker, control, serial, layer)
            limit = load_f32(block + 8 * LIMIT_ATTENTION)
            serial = condense_rows(block, control, serial, word(block, ATTENDED), attended, limit)
            w, s = layer_word(block, layer, 1), layer_word(block, layer, 5)
            serial = multiply(block, control, serial, rows, attended, hidden // COLUMNS, w, s, x, 4 * hidden, 1)
            serial = norm_rows(block, worker, control, serial, 2 * layer + 1, 0)
            w, s = layer_word(block, layer, 2), layer_word(block, layer, 6)
            serial = gate_up(block, worker, control, serial, w, s)
            limit = load_f32(block + 8 * LIMIT_FFN)
            serial = condense_rows(block, control, serial, word(block, GATED), ffn, limit)
            w, s = layer_word(block, layer, 3), layer_word(block, layer, 7)
            serial = multiply(block, control, serial, rows, ffn, hidden // COLUMNS, w, s, x, 4 * hidden, 1)
        serial = norm_rows(block, worker, control, serial, 2 * word(block, LAYERS), 1)
        count, vocab = word(block, LOGIT_COUNT), word(block, VOCAB)
        w, s = word(block, HEAD), word(block, HEAD_SCALES)
        multiply(block, control, serial, count, hidden, vocab // COLUMNS, w, s, word(block, LOGITS), 4 * vocab, 0)

    return run_pass


_pass_int8 = _make_pass(
    rows_by_panel_int8, condense_int8, embed_int8, cache_bfloat16, attend_bfloat16, 1, 2, 2
)
_pass_bfloat16 = _make_pass(
    rows_by_panel_bfloat16, condense_bfloat16, embed_bfloat16, cache_bfloat16, attend_bfloat16, 2, 4, 2
)
_pass_float32 = _make_pass(
    rows_by_panel_float32, condense_float32, embed_float32, cache_float32, attend_float32, 4, 4, 4
)


@entry
def pass_int8(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass with int8 weights."""
    _pass_int8(worker, block, control, first)


@entry
def pass_bfloat16(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass with bfloat16 weights."""
    _pass_bfloat16(worker, block, control, first)


@entry
def pass_float32(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass with float32 weights."""
    _pass_float32(worker, block, control, first)


PASSES = {INT8: pass_int8, BFLOAT16: pass_bfloat16, FLOAT32: pass_float32}


@entry
def check_pass(block: int) -> None:
    """Set FAULT to the first rule that the tokens of a pass break, or to 0. Cheap: a few nanoseconds a token."""
    fault = 0
    for row in range(word(block, TOKEN_COUNT)):
        token = load_i32(word(block, TOKENS) + 4 * row)
        position = load_i32(word(block, POSITIONS) + 4 * row)
        sequence = load_i32(word(block, SEQUENCES) + 4 * row)
        if token < 0 or token >= word(block, VOCAB):
            fault = FAULT_TOKEN
        elif position < 0 or position >= word(block, POSITIONS_MAX):
            fault = FAULT_POSITION
        elif sequence < 0 or sequence >= word(block, SEQUENCES_MAX):
            fault = FAULT_SEQUENCE
        else:
            pages = row_pages(block, row)
            for index in range(position // word(block, PAGE_SIZE) + 1):
                page = load_i32(pages + 4 * index)
                if page < 0 or page >= word(block, PAGES):
                    fault = FAULT_PAGE
    for row in range(word(block, LOGIT_COUNT)):
        place = load_i32(word(block, LOGIT_ROWS) + 4 * row)
        if place < 0 or place >= word(block, TOKEN_COUNT):
            fault = FAULT_LOGIT_ROW
    store_i64(block + 8 * FAULT, fault)
