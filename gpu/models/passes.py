"""One pass of a Llama or Qwen3 over the tokens of a step, as a single native job.

Owns the order of the phases. Every task writes places that no other task of its phase touches, and computes them the
same way whatever the number of tokens: no result depends on which tokens share a pass. A pass never allocates, never
calls Python, and never attends to a key or value that is not in the cache."""

from __future__ import annotations

from collections.abc import Callable

from gpu.kernels.attention import attend_bfloat16, attend_float32
from gpu.kernels.gemm import (
    BFLOAT16,
    FLOAT32,
    INT8,
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
)
from gpu.kernels.vectors import load_f32, load_i32, store_i64, word
from gpu.models.product_phases import make_gate_up, make_multiply
from gpu.models.row_phases import (
    make_attend_rows,
    make_cache_rows,
    make_condense_rows,
    make_embed_rows,
    make_norm_rows,
    make_norm_states,
    tap_rows,
)
from gpu.models.words import (
    ADD,
    ATTENDED,
    FAULT,
    FAULT_LOGIT_ROW,
    FAULT_PAGE,
    FAULT_POSITION,
    FAULT_SEQUENCE,
    FAULT_TOKEN,
    FFN,
    GATED,
    HEAD,
    HEAD_DIM,
    HEAD_ROWS,
    HEAD_SCALES,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAST_SEEN,
    LAYER_TABLE,
    LAYER_TAP,
    LAYER_WORDS,
    LAYERS,
    LIMIT_ATTENTION,
    LIMIT_FFN,
    LOGIT_COUNT,
    LOGIT_ROWS,
    LOGITS,
    OF_LOGITS,
    OF_TOKENS,
    PAGE_SIZE,
    PAGES,
    POSITIONS,
    POSITIONS_MAX,
    QKV,
    RESIDUAL,
    SEQUENCES,
    SEQUENCES_MAX,
    STATE_IN,
    STATE_IN_SCALES,
    STATE_PARTS,
    STORE,
    TOKEN_COUNT,
    TOKEN_IN,
    TOKEN_IN_SCALES,
    TOKENS,
    VOCAB,
    row_pages,
)


def make_begin(
    rows_by_panel: Callable[..., None],
    condense: Callable[..., None],
    embed: Callable[..., None],
    weight_bytes: int,
    activation_bytes: int,
    begins: bool,
    tokens_in: bool,
    states_in: bool,
) -> Callable[..., int]:
    """Phases: what `residual` holds of each token when the layers begin. begins: with the token, or else it stays. In a
    drafter tokens go through a matrix first (tokens_in), and states from elsewhere join them, or stand alone
    (states_in).
    """
    embed_rows = make_embed_rows(embed)
    norm_rows = make_norm_rows(condense, activation_bytes)
    norm_states = make_norm_states(condense, activation_bytes)
    multiply = make_multiply(rows_by_panel, weight_bytes, activation_bytes)
    how = ADD if begins else STORE

    @kernel
    def begin(block: int, worker: int, control: int, serial: int) -> int:
        rows, hidden, x = word(block, TOKEN_COUNT), word(block, HIDDEN), word(block, RESIDUAL)
        if begins:
            serial = embed_rows(block, control, serial)
        if tokens_in:
            w, s = word(block, TOKEN_IN), word(block, TOKEN_IN_SCALES)
            serial = norm_rows(block, worker, control, serial, 2 * word(block, LAYERS) + 1, OF_TOKENS)
            serial = multiply(block, worker, control, serial, rows, hidden, hidden, w, s, x, 4 * hidden, STORE)
        if states_in:
            w, s, wide = word(block, STATE_IN), word(block, STATE_IN_SCALES), hidden * word(block, STATE_PARTS)
            serial = norm_states(block, worker, control, serial)
            serial = multiply(block, worker, control, serial, rows, wide, hidden, w, s, x, 4 * hidden, how)
        return serial

    return begin


def make_pass(
    rows_by_panel: Callable[..., None],
    condense: Callable[..., None],
    embed: Callable[..., None],
    write_cache: Callable[..., None],
    attend: Callable[..., None],
    weight_bytes: int,
    activation_bytes: int,
    cache_bytes: int,
    begins: bool = True,
    tokens_in: bool = False,
    states_in: bool = False,
) -> Callable[[int, int, int, int], None]:
    """All layers and the logits. begins, tokens_in, states_in: see `make_begin`."""
    sizes = weight_bytes, activation_bytes
    begin = make_begin(rows_by_panel, condense, embed, *sizes, begins, tokens_in, states_in)
    norm_rows = make_norm_rows(condense, activation_bytes)
    condense_rows = make_condense_rows(condense, activation_bytes)
    cache_rows = make_cache_rows(write_cache, cache_bytes)
    attend_rows = make_attend_rows(attend, cache_bytes)
    multiply = make_multiply(rows_by_panel, *sizes)
    gate_up = make_gate_up(rows_by_panel, *sizes)

    @kernel
    def run_pass(worker: int, block: int, control: int, serial: int) -> None:
        rows, hidden, ffn = word(block, TOKEN_COUNT), word(block, HIDDEN), word(block, FFN)
        attended = word(block, HEADS) * word(block, HEAD_DIM)
        qkv = attended + 2 * word(block, KV_HEADS) * word(block, HEAD_DIM)
        x = word(block, RESIDUAL)
        serial = begin(block, worker, control, serial)
        for layer in range(word(block, LAYERS)):
            table = word(block, LAYER_TABLE) + 8 * LAYER_WORDS * layer
            w, s = word(table, 0), word(table, 4)
            serial = norm_rows(block, worker, control, serial, 2 * layer, OF_TOKENS)
            serial = multiply(block, worker, control, serial, rows, hidden, qkv, w, s, word(block, QKV), 4 * qkv, STORE)
            serial = cache_rows(block, control, serial, layer)
            serial = attend_rows(block, worker, control, serial, layer)
            limit = load_f32(block + 8 * LIMIT_ATTENTION)
            serial = condense_rows(block, control, serial, word(block, ATTENDED), attended, limit)
            w, s = word(table, 1), word(table, 5)
            serial = multiply(block, worker, control, serial, rows, attended, hidden, w, s, x, 4 * hidden, ADD)
            serial = norm_rows(block, worker, control, serial, 2 * layer + 1, OF_TOKENS)
            w, s = word(table, 2), word(table, 6)
            serial = gate_up(block, worker, control, serial, w, s)
            limit = load_f32(block + 8 * LIMIT_FFN)
            serial = condense_rows(block, control, serial, word(block, GATED), ffn, limit)
            w, s = word(table, 3), word(table, 7)
            serial = multiply(block, worker, control, serial, rows, ffn, hidden, w, s, x, 4 * hidden, ADD)
            if word(table, LAYER_TAP) != 0:
                serial = tap_rows(block, control, serial, word(table, LAYER_TAP))
        serial = norm_rows(block, worker, control, serial, 2 * word(block, LAYERS), OF_LOGITS)
        count, wide = word(block, LOGIT_COUNT), word(block, HEAD_ROWS)
        w, s = word(block, HEAD), word(block, HEAD_SCALES)
        multiply(block, worker, control, serial, count, hidden, wide, w, s, word(block, LOGITS), 4 * wide, STORE)

    return run_pass


# What a pass is made of in each precision.
PARTS = {
    INT8: (rows_by_panel_int8, condense_int8, embed_int8, cache_bfloat16, attend_bfloat16, 1, 2, 2),
    BFLOAT16: (rows_by_panel_bfloat16, condense_bfloat16, embed_bfloat16, cache_bfloat16, attend_bfloat16, 2, 4, 2),
    FLOAT32: (rows_by_panel_float32, condense_float32, embed_float32, cache_float32, attend_float32, 4, 4, 4),
}
_pass_int8, _pass_bfloat16, _pass_float32 = (make_pass(*PARTS[dtype]) for dtype in (INT8, BFLOAT16, FLOAT32))


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
        last = load_i32(word(block, LAST_SEEN) + 4 * row)
        sequence = load_i32(word(block, SEQUENCES) + 4 * row)
        if token < 0 or token >= word(block, VOCAB):
            fault = FAULT_TOKEN
        elif position < 0 or position > last or last >= word(block, POSITIONS_MAX):
            fault = FAULT_POSITION
        elif sequence < 0 or sequence >= word(block, SEQUENCES_MAX):
            fault = FAULT_SEQUENCE
        else:
            pages = row_pages(block, row)
            for index in range(last // word(block, PAGE_SIZE) + 1):
                page = load_i32(pages + 4 * index)
                if page < 0 or page >= word(block, PAGES):
                    fault = FAULT_PAGE
    for row in range(word(block, LOGIT_COUNT)):
        place = load_i32(word(block, LOGIT_ROWS) + 4 * row)
        if place < 0 or place >= word(block, TOKEN_COUNT):
            fault = FAULT_LOGIT_ROW
    store_i64(block + 8 * FAULT, fault)
