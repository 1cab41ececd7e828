"""The block of words that describes a model and one pass of it to native code.

Owns the numbering of the words, and nothing else. The pass reads the block; only the model's owner writes it, and only
between passes. The words that fix the number of phases (LAYERS) never change once a team knows the block.
"""

from __future__ import annotations

import numpy as np

from gpu.kernels.gemm import COLUMNS
from gpu.kernels.native import kernel
from gpu.kernels.vectors import load_i32, word

# Words of the block. First what changes with every pass; written by the caller of Team.run.
TOKEN_COUNT, LOGIT_COUNT, TOKENS, POSITIONS, SEQUENCES, PAGE_ROWS, PAGES_PER_ROW, LOGIT_ROWS, LOGITS, FAULT = range(10)
# Then the model's sizes,
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, PAGE_SIZE, PAGES, POSITIONS_MAX, SEQUENCES_MAX = range(10, 21)
# numbers kept as float32 in the low half of a word,
EPSILON, QUERY_FACTOR, LIMIT_HIDDEN, LIMIT_ATTENTION, LIMIT_FFN = range(21, 26)
# addresses of weights: LAYER_TABLE has, for each layer, 4 words of panels, then 4 of scales: qkv, out, gate-up, down;
# then the address at which this layer's state is kept for drafters, rows TAP_STRIDE bytes apart, or 0,
# HEAD_NORMS the norm of query heads, then that of key heads, for each layer; 0: this model has none,
LAYER_TABLE, NORMS, HEAD_NORMS, EMBEDDING, EMBEDDING_SCALES, HEAD, HEAD_SCALES, COSINES, SINES = range(26, 35)
# and of working memory. SCRATCH is one piece of SCRATCH_BYTES for each worker.
RESIDUAL, ACTIVATIONS, ROW_SCALES, QKV, ATTENDED, GATED, K_CACHE, V_CACHE = range(35, 43)
SCRATCH, SCRATCH_BYTES = range(43, 45)
# Columns of the head, which a drafter has fewer of than tokens that it can read; the matrix that its tokens go through;
HEAD_ROWS, TOKEN_IN, TOKEN_IN_SCALES = range(45, 48)
# states from elsewhere, f32[tokens, parts, hidden], the first of their norms, how far they are rounded, their matrix;
STATE, STATE_PARTS, STATE_NORM, LIMIT_STATE, STATE_IN, STATE_IN_SCALES = range(48, 54)
# how far apart the rows of a tap are in bytes; and the last position that each token sees, int32[tokens], which is its
# own where tokens come one behind the other.
TAP_STRIDE, LAST_SEEN = range(54, 56)
BLOCK_WORDS = 56
LAYER_WORDS = 9
LAYER_TAP = 8  # of the words of a layer

FAULT_TOKEN, FAULT_POSITION, FAULT_PAGE, FAULT_LOGIT_ROW, FAULT_SEQUENCE = range(1, 6)

# Arguments as numpy integers: numba would compile a function once for every plain literal that it is called with.
STORE, ADD = np.int64(0), np.int64(1)  # what `multiply` does with its products
ONE = np.float32(1)
OF_TOKENS, OF_LOGITS = np.int64(0), np.int64(1)  # the rows that `norm_rows` works on
PANEL_STRIDE = np.int64(4 * COLUMNS)


@kernel
def worker_scratch(block: int, worker: int) -> int:
    """Address of this worker's own working memory."""
    address: int = word(block, SCRATCH) + worker * word(block, SCRATCH_BYTES)
    return address


@kernel
def row_pages(block: int, row: int) -> int:
    """Address of the page numbers of the sequence that token `row` belongs to."""
    sequence = load_i32(word(block, SEQUENCES) + 4 * row)
    address: int = word(block, PAGE_ROWS) + 4 * sequence * word(block, PAGES_PER_ROW)
    return address


@kernel
def rows_per_task(rows: int) -> int:
    """Rows of one task in a phase of cheap row work."""
    return 1 + rows // 64


@kernel
def task_count(items: int, group: int) -> int:
    """Tasks of a phase over `items`: at least one, so that every pass has the same number of phases."""
    return max(1, (items + group - 1) // group)
