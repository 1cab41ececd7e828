"""Phases of a pass whose tasks are rows: embedding, norms, rounding of activations, cache writes, attention.

Owns which row reads and writes what. A task writes places of its own row only, and reads what an earlier phase wrote:
so keys and values of all rows of a pass are in the cache before the first row attends."""

from __future__ import annotations

from collections.abc import Callable

from gpu.kernels.native import kernel
from gpu.kernels.rows import rms_norm, rotate
from gpu.kernels.team import await_phase, finish, take
from gpu.kernels.vectors import load_f32, load_i32, store_f32, word
from gpu.models.words import (
    ACTIVATIONS,
    ATTENDED,
    COSINES,
    EMBEDDING,
    EMBEDDING_SCALES,
    EPSILON,
    HEAD_DIM,
    HEAD_NORMS,
    HEADS,
    HIDDEN,
    K_CACHE,
    KV_HEADS,
    LAST_SEEN,
    LIMIT_HIDDEN,
    LIMIT_STATE,
    LOGIT_COUNT,
    LOGIT_ROWS,
    NORMS,
    ONE,
    PAGE_SIZE,
    PAGES,
    POSITIONS,
    QKV,
    QUERY_FACTOR,
    RESIDUAL,
    ROW_SCALES,
    SINES,
    STATE,
    STATE_NORM,
    STATE_PARTS,
    TAP_STRIDE,
    TOKEN_COUNT,
    TOKENS,
    V_CACHE,
    row_pages,
    rows_per_task,
    task_count,
    worker_scratch,
)

ROWS_UNDIVIDED = 4  # from here on there are rows enough to keep all threads busy


def make_embed_rows(embed: Callable[..., None]) -> Callable[..., int]:
    """Phase: the embedding of every token."""

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
                out = word(block, RESIDUAL) + 4 * hidden * row
                embed(word(block, EMBEDDING), word(block, EMBEDDING_SCALES), token, hidden, out)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return embed_rows


def make_norm_rows(condense: Callable[..., None], activation_bytes: int) -> Callable[..., int]:
    """Phase: norm and rounding of every row, or of the rows whose logits are wanted."""

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
                rms_norm(word(block, RESIDUAL) + 4 * hidden * source, weight, scratch, hidden, epsilon)
                scale = word(block, ROW_SCALES) + 4 * row
                condense(scratch, hidden, word(block, ACTIVATIONS) + activation_bytes * hidden * row, scale, limit)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return norm_rows


def make_norm_states(condense: Callable[..., None], activation_bytes: int) -> Callable[..., int]:
    """Phase: norm of every part of every state from elsewhere, and rounding of all parts of a token together."""

    @kernel
    def norm_states(block: int, worker: int, control: int, serial: int) -> int:
        rows, hidden, parts = word(block, TOKEN_COUNT), word(block, HIDDEN), word(block, STATE_PARTS)
        width = parts * hidden
        weights = word(block, NORMS) + 4 * hidden * word(block, STATE_NORM)
        epsilon, limit = load_f32(block + 8 * EPSILON), load_f32(block + 8 * LIMIT_STATE)
        scratch = worker_scratch(block, worker)
        group = rows_per_task(rows)
        tasks = task_count(rows, group)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for row in range(task * group, min(rows, (task + 1) * group)):
                source = word(block, STATE) + 4 * width * row
                for part in range(parts):
                    offset = 4 * hidden * part
                    rms_norm(source + offset, weights + offset, scratch + offset, hidden, epsilon)
                scale = word(block, ROW_SCALES) + 4 * row
                condense(scratch, width, word(block, ACTIVATIONS) + activation_bytes * width * row, scale, limit)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return norm_states


def make_condense_rows(condense: Callable[..., None], activation_bytes: int) -> Callable[..., int]:
    """Phase: rounding of every row of `source`."""

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
                condense(
                    source + 4 * width * row,
                    width,
                    word(block, ACTIVATIONS) + activation_bytes * width * row,
                    scale,
                    limit,
                )
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return condense_rows


@kernel
def tap_rows(block: int, control: int, serial: int, out: int) -> int:
    """Phase: the state of every row, kept as it is at this layer."""
    rows, hidden = word(block, TOKEN_COUNT), word(block, HIDDEN)
    group = rows_per_task(rows)
    tasks = task_count(rows, group)
    while True:
        task = take(control, serial, tasks)
        if task < 0:
            break
        for row in range(task * group, min(rows, (task + 1) * group)):
            source, place = word(block, RESIDUAL) + 4 * hidden * row, out + word(block, TAP_STRIDE) * row
            for i in range(hidden):
                store_f32(place + 4 * i, load_f32(source + 4 * i))
        finish(control, serial, tasks)
    return await_phase(control, serial)


@kernel
def norm_heads(x: int, heads: int, dim: int, weight: int, epsilon: float) -> None:
    """Norm of each of `heads` heads by itself, in place."""
    for head in range(heads):
        place = x + 4 * dim * head
        rms_norm(place, weight, place, dim, epsilon)


def make_cache_rows(write_cache: Callable[..., None], cache_bytes: int) -> Callable[..., int]:
    """Phase: norm (where a model has it) and rotary embedding of queries and keys; keys and values into the cache."""

    @kernel
    def cache_rows(block: int, control: int, serial: int, layer: int) -> int:
        """Norm and rotary embedding of queries and keys; keys and values into the cache."""
        rows, heads, kv_heads = word(block, TOKEN_COUNT), word(block, HEADS), word(block, KV_HEADS)
        dim, page_size = word(block, HEAD_DIM), word(block, PAGE_SIZE)
        width = (heads + 2 * kv_heads) * dim
        page_bytes = kv_heads * dim * page_size * cache_bytes
        layer_offset = layer * word(block, PAGES) * page_bytes
        factor, epsilon = load_f32(block + 8 * QUERY_FACTOR), load_f32(block + 8 * EPSILON)
        norms = word(block, HEAD_NORMS)
        q_norm = norms + 8 * dim * layer
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
                if norms != 0:
                    norm_heads(q, heads, dim, q_norm, epsilon)
                    norm_heads(k, kv_heads, dim, q_norm + 4 * dim, epsilon)
                rotate(q, heads, dim, cosine, sine, factor)
                rotate(k, kv_heads, dim, cosine, sine, ONE)
                page = load_i32(row_pages(block, row) + 4 * (position // page_size))
                offset = layer_offset + page * page_bytes
                k_page, v_page = word(block, K_CACHE) + offset, word(block, V_CACHE) + offset
                write_cache(k, k + 4 * kv_heads * dim, k_page, v_page, position % page_size, kv_heads, dim, page_size)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return cache_rows


def make_attend_rows(attend: Callable[..., None], cache_bytes: int) -> Callable[..., int]:
    """Phase: attention, one task for each row, or for each row and key/value head where rows are few."""

    @kernel
    def attend_rows(block: int, worker: int, control: int, serial: int, layer: int) -> int:
        rows, heads, kv_heads = word(block, TOKEN_COUNT), word(block, HEADS), word(block, KV_HEADS)
        dim, page_size = word(block, HEAD_DIM), word(block, PAGE_SIZE)
        width, group = (heads + 2 * kv_heads) * dim, heads // kv_heads
        head_bytes = dim * page_size * cache_bytes
        page_bytes = kv_heads * head_bytes
        layer_offset = layer * word(block, PAGES) * page_bytes
        scratch = worker_scratch(block, worker)
        parts = 1 if rows >= ROWS_UNDIVIDED else kv_heads  # tasks of a row
        together = kv_heads // parts
        tasks = task_count(rows * parts, 1)
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            row, head = task // parts, task % parts
            if row < rows:
                keys = load_i32(word(block, LAST_SEEN) + 4 * row) + 1
                offset = layer_offset + head * head_bytes
                q = word(block, QKV) + 4 * (width * row + head * group * dim)
                out = word(block, ATTENDED) + 4 * (heads * row + head * group) * dim
                k_cache, v_cache = word(block, K_CACHE) + offset, word(block, V_CACHE) + offset
                pages = row_pages(block, row)
                attend(q, together, group, dim, keys, pages, page_size, k_cache, v_cache, page_bytes, scratch, out)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return attend_rows
