"""Working memory of sampling and acceptance on CUDA, and how rows of logits are laid over programs.

Owns sizes and the cutting of the caller's scratch into sections. Allocates nothing and imports no Triton.
"""

from typing import Any, NamedTuple

import torch

Array = Any  # torch.Tensor
CHUNK = 4096  # tokens of the vocabulary that one program looks at
VOCAB_MAX = 1 << 18  # tokens whose masses a sum in int64 can hold
DIGITS_OF_SEARCH = 32  # thresholds that one level of a search looks at
STATE_SIZE = 3  # of a search: lower end of the bracket, sum above its upper end, goal
TALLY_SIZE = 2  # of a chunk: mass above the bound, tokens at the bound


class Work(NamedTuple):
    """Working memory for `rows` rows of logits: sections of the caller's scratch."""

    partials: Array  # i64[2, rows, parts, 32]: sums of the level before, and of this one
    states: Array  # i64[2, rows, 3]
    tallies: Array  # i64[rows, parts, 2]
    bounds: Array  # i64[rows, 2]: bits above which tokens stay, and how many stay at them
    floors: Array  # i32[rows]: bits below which top_k cuts
    peaks: Array  # f32[rows]: largest logit
    chunk_peaks: Array  # f32[rows, parts]
    chunk_firsts: Array  # i32[rows, parts]: first token with the largest logit


def _sections(rows: int, vocab: int, chunk: int) -> list[int]:
    """Words of 8 bytes that each section takes; even, so that all begin at a multiple of 16 bytes."""
    parts = rows * -(-vocab // chunk)
    wide = [2 * parts * DIGITS_OF_SEARCH, 2 * rows * STATE_SIZE, parts * TALLY_SIZE, 2 * rows]
    return [*wide, *(2 * -(-count // 4) for count in (rows, rows, parts, parts))]


def scratch_words(rows: int, vocab: int, chunk: int = CHUNK) -> int:
    """Words, of int64, of the scratch for `rows` rows of logits. Raises ValueError if the vocabulary is too large."""
    if vocab > VOCAB_MAX:
        raise ValueError(f"a vocabulary of {vocab} tokens; sums hold {VOCAB_MAX}")
    return sum(_sections(rows, vocab, chunk))


def carve(scratch: Array, rows: int, vocab: int, chunk: int = CHUNK) -> Work:
    """The sections of `scratch` i64[scratch_words(...)] or more. Raises ValueError if it is too small."""
    if scratch.shape[0] < scratch_words(rows, vocab, chunk):
        raise ValueError(f"scratch of {scratch.shape[0]} words; {scratch_words(rows, vocab, chunk)} are needed")
    kinds = [torch.int64] * 4 + [torch.int32, torch.float32, torch.float32, torch.int32]
    sections, at = [], 0
    for words, kind in zip(_sections(rows, vocab, chunk), kinds, strict=True):
        sections.append(scratch[at : at + words].view(kind))
        at += words
    return Work(*sections)


class Cut(NamedTuple):
    """How rows of logits are laid over programs: constants of every kernel that looks at them."""

    vocab: int
    chunk: int
    window: int  # rows of logits that share the parameters of one request

    @property
    def parts(self) -> int:
        """Chunks of a row."""
        return -(-self.vocab // self.chunk)

    def constants(self, *names: str) -> dict[str, int]:
        """Those named."""
        splits = max(2, 1 << (self.parts - 1).bit_length())
        whole = {"VOCAB": self.vocab, "CHUNK": self.chunk, "PARTS": self.parts, "SPLITS": splits, "WINDOW": self.window}
        return {name: whole[name] for name in names or whole}
