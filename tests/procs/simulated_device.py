"""A device that is only its rules: relay, slot table and page contents, and a model that is a pure function of all
tokens.

It runs step descriptors as the executor does, and asserts what a descriptor must guarantee: a position is written
inside the row's reserved pages, an entry was published before it is read, and the cache of a row holds the row's own
tokens. The content of a slot is a chain over all tokens up to it, so one wrong, stale or foreign page changes every
later token.
"""

from dataclasses import dataclass

import numpy as np

from shm.config import ModelInfo, ServerConfig
from shm.ledger import Ledger
from shm.records import ResultView, StepView

VOCAB = 40
EOS = 3
NO_PAGE = -1
UNPUBLISHED = -1
U64 = 2**64
A, B, C = 6364136223846793005, 1442695040888963407, 0x9E3779B97F4A7C15


def chain(before: int, token: int, salt: int) -> int:
    """The content of a slot: everything up to and including its token."""
    return (before * A + (token + 1) * B + C + salt) % U64


def choose(content: int, seed: int, position: int) -> int:
    """The model: the token at `position`, from the cache up to position - 1, the seed and the position."""
    mixed = (content ^ (seed * C) ^ (position * B)) % U64
    return (mixed * A % U64 >> 40) % VOCAB


def accept_length(content: int, window: int) -> int:
    return 1 + (content >> 33) % window


def reference(prompt: list[int], seed: int, count: int, salt: int = 0) -> list[int]:
    """The first `count` output tokens of a request, computed alone."""
    content = 0
    for token in prompt:
        content = chain(content, token, salt)
    outputs: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        outputs.append(choose(content, seed, position))
        content = chain(content, outputs[-1], salt)
    return outputs


def tiny_config(**changes: object) -> ServerConfig:
    """A configuration small enough that everything runs out of everything."""
    model = ModelInfo(
        name="chain",
        path="-",
        format="gguf",
        vocab_size=VOCAB,
        context_len=8192,
        hidden_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        intermediate_size=1,
        rope_theta=1.0,
        rope_scaling=None,
        rms_eps=1e-5,
        tie_word_embeddings=True,
        qk_norm=False,
        eos_token_ids=(EOS,),
        bos_token_id=None,
    )
    values: dict[str, object] = {
        "max_running": 3,
        "max_queued": 8,
        "kv_tokens": 64,
        "page_size": 4,
        "max_len": 32,
        "prefill_chunk": 8,
    }
    values |= changes
    return ServerConfig(model=model, served_model_name="chain", host="h", port=0, threads=1, **values)  # type: ignore[arg-type]


@dataclass
class Ran:
    """What one step touched: the pages that it wrote, per row of the step (decode rows, then chunks)."""

    entries: list[int]
    written: list[set[int]]


class SimulatedDevice:
    def __init__(self, config: ServerConfig, ledger: Ledger, salt: int = 0) -> None:
        self.ledger = ledger
        self.salt = salt
        self.page_size = config.page_size
        self.window = config.window
        self.table = np.full((config.entries, config.pages_per_row), NO_PAGE)
        self.length = [UNPUBLISHED] * config.entries
        self.token = [UNPUBLISHED] * config.entries
        self.seed = [0] * config.entries
        # Python ints: the chain is 64 bits wide and wraps.
        self.content = [[0] * config.page_size for _ in range(config.pages)]

    def run(self, step: StepView, result: ResultView) -> Ran:
        """Run one step; `result` gets its tokens."""
        self._write_tables(step)
        decodes = step.decode_entries[: step.n_decode].tolist()
        chunks = step.chunks[:, : step.n_chunks].T.tolist()
        assert all(0 < entry < len(self.length) for entry in decodes) and len(set(decodes)) == len(decodes)
        outputs: list[list[int]] = []
        ran = Ran([], [])
        for entry in decodes:
            tokens, written = self._decode(entry)
            outputs.append(tokens)
            ran.entries.append(entry)
            ran.written.append(written)
        for entry, row, start, count, last, _ in chunks:
            assert count > 0
            content, written = self._chunk(entry, row, start, count)
            if last:
                end = start + count
                self.length[entry], self.token[entry] = end, choose(content, self.seed[entry], end)
                outputs.append([self.token[entry]])
            ran.entries.append(entry)
            ran.written.append(written)
        result.n_rows, result.window, result.step = len(outputs), self.window, step.step
        for index, tokens in enumerate(outputs):
            result.counts[index] = len(tokens)
            result.tokens[: len(tokens), index] = tokens
        return ran

    def _write_tables(self, step: StepView) -> None:
        seeds = step.seeds().tolist()
        for index, entry in enumerate(step.sampling[0, : step.n_sampling].tolist()):
            # A new life of the entry: whatever is not given to it from now on is poison.
            self.table[entry] = NO_PAGE
            self.length[entry] = self.token[entry] = UNPUBLISHED
            self.seed[entry] = seeds[index]
        writes = step.slot_writes[:, : step.n_slot_writes]
        assert (writes[2] > 0).all(), "page 0 belongs to padding"
        assert (self.table[writes[0], writes[1]] == NO_PAGE).all(), "a slot was written twice"
        self.table[writes[0], writes[1]] = writes[2]

    def _slot(self, entry: int, position: int) -> tuple[int, int]:
        page = int(self.table[entry, position // self.page_size])
        assert page != NO_PAGE, f"entry {entry}: position {position} is not reserved"
        return page, position % self.page_size

    def _write(self, entry: int, position: int, token: int, written: set[int]) -> int:
        before = 0
        if position:
            page, offset = self._slot(entry, position - 1)
            before = self.content[page][offset]
        page, offset = self._slot(entry, position)
        self.content[page][offset] = chain(before, token, self.salt)
        written.add(page)
        return self.content[page][offset]

    def _decode(self, entry: int) -> tuple[list[int], set[int]]:
        """One window: the newest token and drafts of which the first accepted ones are right."""
        start, token, written = self.length[entry], self.token[entry], set[int]()
        assert start != UNPUBLISHED, f"entry {entry} was read before it was published"
        outputs: list[int] = []
        accepted = self.window
        for offset in range(self.window):
            content = self._write(entry, start + offset, token, written)
            if offset == 0:
                accepted = accept_length(content, self.window)
            token = choose(content, self.seed[entry], start + offset + 1)
            if offset < accepted:
                outputs.append(token)
            else:
                token = (token + 1) % VOCAB  # the rest of the window is written too, and wrong
        self.length[entry], self.token[entry] = start + len(outputs), outputs[-1]
        return outputs, written

    def _chunk(self, entry: int, row: int, start: int, count: int) -> tuple[int, set[int]]:
        written: set[int] = set()
        content = 0
        for position in range(start, start + count):
            content = self._write(entry, position, int(self.ledger.tokens[row, position]), written)
        return content, written

    def check_contents(self, entry: int, tokens: list[int]) -> None:
        """Assert that the cache of a row holds exactly `tokens`, from position 0 on."""
        content = 0
        for position, token in enumerate(tokens):
            content = chain(content, token, self.salt)
            page, offset = self._slot(entry, position)
            assert self.content[page][offset] == content, f"entry {entry}: position {position} holds another token"
