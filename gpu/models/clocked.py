"""The clocked model: passes that take the time that they are told and no core meanwhile, and answers to be checked.

Owns its cache, one word for each token. The word at a position is a hash of the word before it, of the token and of the
position, so whatever goes wrong on the way (a token, a length, a page, an order) makes every later token another one;
the token behind a position is made of its word. `tools.clocked_model` has the same in plain Python. A pass ends at an
absolute moment, counted from its begin, and what it computes happens meanwhile. It samples nothing: a row's token is in
the first column of its logits, and temperature, seed and filters change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device.protocol import DeviceError
from gpu.kernels.clock import TIMESPEC_BYTES, now_ns, wait_until
from gpu.kernels.native import host_kernel, kernel
from gpu.kernels.splitmix import GOLDEN, mix
from gpu.kernels.step_kernels import Extents
from gpu.models.caches import Caches, OwnCaches
from shm.clocked_file import ClockedFile, open_clock, times_ns
from shm.config import ServerConfig

Words = NDArray[np.uint64]

FIRST_TOKEN, TOKENS = 32, np.uint64(95)  # answers are of printable ASCII
SHARES = np.uint64(1 << 20)  # in which the probability of a draft is told


@kernel
def next_word(before: Any, token: Any, position: Any) -> Any:
    """The word of `token` at `position` (int) behind the word `before`."""
    return mix(before + np.uint64(token) * GOLDEN + np.uint64(position) + np.uint64(1))


@kernel
def token_behind(state: Any) -> Any:
    """The token that the model chooses behind a word."""
    return FIRST_TOKEN + np.int64((state >> np.uint64(20)) % TOKENS)


@kernel
def word_before(cache: Any, pages: Any, position: Any, seed: Any) -> Any:
    """What the cache of one row, pages i32[n], holds for the position before `position`; the seed at the beginning."""
    if position == 0:
        return seed
    before = position - 1
    return cache[pages[before // cache.shape[1]], before % cache.shape[1]]


@host_kernel
def run_pass(
    tokens: Any, positions: Any, seqs: Any, page_rows: Any, logit_rows: Any, logits: Any, cache: Any, words: Any,
    seed: Any, pass_ns: Any, work: Any,
) -> int:  # fmt: skip
    """Fill cache u64[pages, page_size] and logits[:, 0]; return `pass_ns` behind the call. words u64[T]: of the tokens.

    work: address of two timespecs. Returns 0, or 1 for a number that is out of range.
    """
    end_ns = now_ns(work) + pass_ns
    size = cache.shape[1]
    for t in range(tokens.shape[0]):
        position, row = positions[t], seqs[t]
        if position < 0 or position >= page_rows.shape[1] * size or row < 0 or row >= page_rows.shape[0]:
            return 1
        page = page_rows[row, position // size]
        if page < 0 or page >= cache.shape[0]:
            return 1
        state = next_word(word_before(cache, page_rows[row], position, seed), tokens[t], position)
        cache[page, position % size] = state
        words[t] = state
    for s in range(logit_rows.shape[0]):
        logits[s, 0] = token_behind(words[logit_rows[s]])
    wait_until(end_ns, work, work + TIMESPEC_BYTES)
    return 0


@host_kernel
def run_draft(
    tokens: Any, positions: Any, entries: Any, kept: Any, count: Any, window: Any, share: Any, pass_ns: Any, work: Any
) -> None:
    """Put drafts behind the newest token of `count` rows; return `pass_ns` behind the call.

    kept u64[entries]: the word before that token. A draft is the token that the model will choose with the probability
    of share / SHARES, or else another one: which of the two follows from the row's own word. What stands behind a wrong
    draft is as good as any other token.
    """
    end_ns = now_ns(work) + pass_ns
    for i in range(count):
        first = i * window
        state = kept[entries[i]]
        for w in range(window - 1):
            state = next_word(state, tokens[first + w], positions[first] + w)
            token = token_behind(state)
            if mix(state ^ GOLDEN) % SHARES >= share:
                token = FIRST_TOKEN + (token - FIRST_TOKEN + 1) % np.int64(TOKENS)
            tokens[first + w + 1] = token
    wait_until(end_ns, work, work + TIMESPEC_BYTES)


@host_kernel
def pass_time(pass_ns: Any, work: Any) -> None:
    """Return `pass_ns` behind the call."""
    wait_until(now_ns(work) + pass_ns, work, work + TIMESPEC_BYTES)


class ClockedModel:
    """See `gpu.step.Model`. The cache is both of the caches; the other one is empty of meaning."""

    def __init__(self, config: ServerConfig, file: ClockedFile, caches: Caches | None = None) -> None:
        """caches: where its cache lives, if not in its own memory."""
        self.k_cache: Words = (caches or OwnCaches()).array((config.pages, config.page_size), np.uint64)
        self.v_cache: Words = np.zeros((1, 1), np.uint64)
        self.seed = np.uint64(file.seed)
        self.share = np.uint64(round(file.accept * int(SHARES)))
        rows = max(config.max_running, 1)
        self._pass_ns = times_ns(file.pass_us, rows).tolist()
        self._token_ns = round(file.prompt_token_us * 1000)
        self.draft_ns: list[int] = times_ns(file.draft_us, rows).tolist()
        self.extend_ns: list[int] = times_ns(file.extend_us, rows).tolist()
        self._clock = open_clock(Path(config.model.path))
        self.words: Words = np.zeros(config.pass_tokens, np.uint64)  # behind a pass: of each of its tokens
        self._timespecs = np.zeros(2 * TIMESPEC_BYTES // 8, np.int64)
        self.work = self._timespecs.ctypes.data  # for whoever runs on the forward stream

    def forward(
        self,
        tokens: Any,
        positions: Any,
        seqs: Any,
        page_rows: Any,
        logit_rows: Any,
        logits: Any,
        extents: Extents,
    ) -> None:
        """One pass. What is more than a token for each sample is a prompt. Raises DeviceError for a number out of
        range."""
        prompt = len(tokens) - len(logit_rows)
        took_ns = self._pass_ns[len(page_rows)] + self._token_ns * prompt
        if self._clock is not None and (told_ns := int(self._clock[0])) > 0:
            took_ns = told_ns
        arrays = (tokens, positions, seqs, page_rows, logit_rows, logits, self.k_cache, self.words)
        if run_pass(*arrays, self.seed, took_ns, self.work):
            raise DeviceError("the clocked model was given a position or a page that is out of range")


def clocked_sample(logits: Any, *parameters: Any) -> None:
    """See `gpu.step.Sampler`: takes what the model has chosen."""
    parameters[-1][:] = logits[:, 0]
