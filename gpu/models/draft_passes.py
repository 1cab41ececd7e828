"""Passes of trained drafters, as native jobs: like the target's own, with other beginnings and other ends.

Owns the order of their phases, by the rules of `passes`. A pass of mtp, or over blocks of dflash, joins tokens and
states. `learn` of mtp and `know` of dflash give layers the keys and values of places whose states are there, without
attention and without an end; `resumed` is mtp's pass that goes on with what `learn` has joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.kernels.gemm import BFLOAT16, COLUMNS, FLOAT32, INT8
from gpu.kernels.native import entry, kernel
from gpu.kernels.vectors import word
from gpu.models.passes import PARTS, make_begin, make_pass
from gpu.models.product_phases import make_multiply
from gpu.models.row_phases import make_cache_rows, make_norm_rows
from gpu.models.words import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER_TABLE,
    LAYER_WORDS,
    LAYERS,
    OF_TOKENS,
    QKV,
    STORE,
    TOKEN_COUNT,
)


def _make_know(
    rows_by_panel: Callable[..., None],
    condense: Callable[..., None],
    embed: Any,
    write_cache: Callable[..., None],
    attend: Any,
    weight_bytes: int,
    activation_bytes: int,
    cache_bytes: int,
    tokens_in: bool,
) -> Callable[[int, int, int, int], None]:
    sizes = weight_bytes, activation_bytes
    begin = make_begin(rows_by_panel, condense, embed, *sizes, begins=tokens_in, tokens_in=tokens_in, states_in=True)
    norm_rows = make_norm_rows(condense, activation_bytes)
    cache_rows = make_cache_rows(write_cache, cache_bytes)
    multiply = make_multiply(rows_by_panel, *sizes)

    @kernel
    def run_know(worker: int, block: int, control: int, serial: int) -> None:
        rows, hidden = word(block, TOKEN_COUNT), word(block, HIDDEN)
        attended = word(block, HEADS) * word(block, HEAD_DIM)
        kv = 2 * word(block, KV_HEADS) * word(block, HEAD_DIM)
        stride = 4 * (attended + kv)
        serial = begin(block, worker, control, serial)
        for layer in range(word(block, LAYERS)):
            table = word(block, LAYER_TABLE) + 8 * LAYER_WORDS * layer
            # Keys and values alone: the queries' columns, whole panels, are passed over and stay what they were.
            w = word(table, 0) + attended // COLUMNS * (COLUMNS * hidden * weight_bytes)
            s, out = word(table, 4) + 4 * attended, word(block, QKV) + 4 * attended
            serial = norm_rows(block, worker, control, serial, 2 * layer, OF_TOKENS)
            serial = multiply(block, worker, control, serial, rows, hidden, kv, w, s, out, stride, STORE)
            serial = cache_rows(block, control, serial, layer)

    return run_know


_joined_int8, _joined_bfloat16, _joined_float32 = (
    make_pass(*PARTS[dtype], tokens_in=True, states_in=True) for dtype in (INT8, BFLOAT16, FLOAT32)
)
_resumed_int8, _resumed_bfloat16, _resumed_float32 = (
    make_pass(*PARTS[dtype], begins=False) for dtype in (INT8, BFLOAT16, FLOAT32)
)
_know_int8, _know_bfloat16, _know_float32 = (_make_know(*PARTS[dtype], False) for dtype in (INT8, BFLOAT16, FLOAT32))
_learn_int8, _learn_bfloat16, _learn_float32 = (_make_know(*PARTS[dtype], True) for dtype in (INT8, BFLOAT16, FLOAT32))


@entry
def joined_int8(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass that joins tokens and states, with int8 weights."""
    _joined_int8(worker, block, control, first)


@entry
def joined_bfloat16(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass that joins tokens and states, with bfloat16 weights."""
    _joined_bfloat16(worker, block, control, first)


@entry
def joined_float32(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass that joins tokens and states, with float32 weights."""
    _joined_float32(worker, block, control, first)


@entry
def know_int8(worker: int, block: int, control: int, first: int) -> None:
    """Job: keys and values of places that dflash knows by their states, with int8 weights."""
    _know_int8(worker, block, control, first)


@entry
def know_bfloat16(worker: int, block: int, control: int, first: int) -> None:
    """Job: keys and values of places that dflash knows by their states, with bfloat16 weights."""
    _know_bfloat16(worker, block, control, first)


@entry
def know_float32(worker: int, block: int, control: int, first: int) -> None:
    """Job: keys and values of places that dflash knows by their states, with float32 weights."""
    _know_float32(worker, block, control, first)


@entry
def resumed_int8(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass that goes on with states, with int8 weights."""
    _resumed_int8(worker, block, control, first)


@entry
def resumed_bfloat16(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass that goes on with states, with bfloat16 weights."""
    _resumed_bfloat16(worker, block, control, first)


@entry
def resumed_float32(worker: int, block: int, control: int, first: int) -> None:
    """Job: a pass that goes on with states, with float32 weights."""
    _resumed_float32(worker, block, control, first)


@entry
def learn_int8(worker: int, block: int, control: int, first: int) -> None:
    """Job: keys and values of mtp by states and the tokens behind, with int8 weights."""
    _learn_int8(worker, block, control, first)


@entry
def learn_bfloat16(worker: int, block: int, control: int, first: int) -> None:
    """Job: keys and values of mtp by states and the tokens behind, with bfloat16 weights."""
    _learn_bfloat16(worker, block, control, first)


@entry
def learn_float32(worker: int, block: int, control: int, first: int) -> None:
    """Job: keys and values of mtp by states and the tokens behind, with float32 weights."""
    _learn_float32(worker, block, control, first)


JOINED = {INT8: joined_int8, BFLOAT16: joined_bfloat16, FLOAT32: joined_float32}
KNOW = {INT8: know_int8, BFLOAT16: know_bfloat16, FLOAT32: know_float32}
RESUMED = {INT8: resumed_int8, BFLOAT16: resumed_bfloat16, FLOAT32: resumed_float32}
LEARN = {INT8: learn_int8, BFLOAT16: learn_bfloat16, FLOAT32: learn_float32}
