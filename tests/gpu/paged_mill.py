"""A model of a few lines whose every token depends on all tokens before it, through the page table, and its reference.

Each slot of its cache holds a hash of token and position; the next token is a hash of the slots of all positions so
far. A single wrong page, position, length or token changes everything that comes after it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.device.protocol import Device
from gpu.kernels.host_step import HostStepKernels
from gpu.lanes import ResultSlot, StepSlot
from gpu.step import StepProgram
from shm.config import ModelInfo, ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout
from tests.gpu.mill_drafter import MillDrafter, make_drafter
from tools.mill import VOCAB, next_token, slot_value


def choose(best: int, temperature: float, seed: int, position: int) -> int:
    """The sampler's rule: greedy at temperature 0, else a function of (seed, position)."""
    return best if temperature == 0 else (best + int(seed) % 89 + 3 * position) % VOCAB


def reference(prompt: list[int], n: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The n tokens after `prompt`, with no pages, steps or streams."""
    tokens = list(prompt)
    for _ in range(n):
        best = next_token([slot_value(t, p) for p, t in enumerate(tokens)])
        tokens.append(choose(best, temperature, seed, len(tokens)))
    return tokens[len(prompt) :]


class PagedMill:
    """The model: its caches are i64[pages * page_size]."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.k_cache = np.zeros(pages * page_size, np.int64)
        self.v_cache = np.zeros(pages * page_size, np.int64)

    def forward(
        self, tokens: Any, positions: Any, seqs: Any, page_rows: Any, logit_rows: Any, logits: Any, extents: Any
    ) -> None:
        def slot(seq: int, position: int) -> int:
            return int(page_rows[seq, position // self.page_size]) * self.page_size + position % self.page_size

        for token, position, seq in zip(tokens.tolist(), positions.tolist(), seqs.tolist(), strict=True):
            at = slot(seq, position)
            self.k_cache[at], self.v_cache[at] = slot_value(token, position)
        logits[:] = 0
        for i, row in enumerate(logit_rows.tolist()):
            seq, position = int(seqs[row]), int(positions[row])
            past = [slot(seq, p) for p in range(position + 1)]
            logits[i, next_token(zip(self.k_cache[past], self.v_cache[past], strict=True))] = 1


class PlannedMill(PagedMill):
    """A mill that is planned: it works with no other lengths than it was told, and for no other number of rows.

    memory: i32[1] on the device, if there is any, that stands for the plan: it holds a hash of it.
    """

    told: Any = None
    rows = 0
    memory: Any = None

    def plan(self, lengths: Any, rows: int) -> None:
        assert lengths is None or len(lengths) <= rows
        self.told, self.rows = lengths, rows
        if self.memory is not None:
            self.memory[0] = self._hash()

    def forward(self, tokens: Any, positions: Any, seqs: Any, page_rows: Any, *others: Any) -> None:
        assert self.rows == len(page_rows), "the plan is for another number of rows"
        if self.told is not None:
            padding = [1] * (len(positions) - len(self.told))
            assert (positions + 1).tolist() == [*self.told.tolist(), *padding], "the plan says other lengths"
        if self.memory is not None:
            assert self.memory[0] == self._hash(), "the plan has not reached the device"
        super().forward(tokens, positions, seqs, page_rows, *others)

    def _hash(self) -> int:
        return 1 if self.told is None else int(self.told.sum()) * 7 + self.rows + 2


def mill_sample(logits: Any, temp: Any, top_p: Any, min_p: Any, top_k: Any, seed: Any, position: Any, out: Any) -> None:
    for i, best in enumerate(logits.argmax(axis=1).tolist()):
        out[i] = choose(best, float(temp[i]), int(seed[i]), int(position[i]))


def small_config(**changes: Any) -> ServerConfig:
    model = ModelInfo(
        name="mill",
        path="/none",
        format="gguf",
        vocab_size=VOCAB,
        context_len=256,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=8,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_eps=1e-5,
        tie_word_embeddings=True,
        qk_norm=False,
        eos_token_ids=(0,),
        bos_token_id=None,
    )
    options: dict[str, Any] = {
        "model": model,
        "served_model_name": "mill",
        "host": "127.0.0.1",
        "port": 0,
        "max_running": 8,
        "max_queued": 8,
        "kv_tokens": 256,
        "page_size": 4,
        "max_len": 64,
        "prefill_chunk": 32,
        "api_key": None,
        "threads": 1,
    }
    return ServerConfig(**(options | changes))


@dataclass
class Issued:
    """One queued step; `tokens` are there once it is complete: what each row has gained, row by row."""

    slot: StepSlot
    result: ResultSlot
    tokens: list[int] | None = None
    counts: list[int] | None = None


Chunk = tuple[int, int, int, int, int]  # entry, ledger row, start, count, last


class Bench:
    """A step program with the mill, and a writer of descriptors. Each step has slots of its own: nothing is reused."""

    def __init__(
        self, device: Device, config: ServerConfig, drafting: str = "mill", planned: bool = False, **options: Any
    ) -> None:
        """drafting: see `mill_drafter`, for windows of more than one token. planned: the model is a PlannedMill."""
        self.config = config
        self.device = device
        self.model = (
            PlannedMill(config.pages, config.page_size) if planned else PagedMill(config.pages, config.page_size)
        )
        if planned:
            options["plan"] = self.model.plan
        self.ledger = np.zeros((config.rows, config.max_len), np.int32)
        kernels = HostStepKernels.of(config)
        drafter = make_drafter(drafting, device, config, self.model) if config.window > 1 else None
        options["drafter"] = drafter
        self.program = StepProgram(device, config, self.model, kernels, mill_sample, self.ledger, **options)
        if isinstance(drafter, MillDrafter):
            drafter.caches = self.program.caches
        if self.program.plans is not None and isinstance(self.model, PlannedMill):
            self.model.memory = self.program.plans.memory
        self.program.capture()
        self.completed: list[Issued] = []
        self._layout, self._result_layout = StepLayout(config), ResultLayout(config)

    def prompt(self, row: int, tokens: list[int]) -> None:
        self.ledger[row, : len(tokens)] = tokens

    def fill(self, entry: int, pages: list[int]) -> list[tuple[int, int, int]]:
        """Slot writes that give `entry` these pages from the first on."""
        return [(entry, i, page) for i, page in enumerate(pages)]

    def describe(
        self,
        decode: list[int] | None = None,
        chunks: list[Chunk] | None = None,
        slots: list[tuple[int, int, int]] | None = None,
        sampling: list[tuple[int, float, int]] | None = None,
    ) -> StepSlot:
        payload = np.full(self._layout.nbytes // 4, -99, np.int32)  # what is not written is not to be read
        view = self._layout.view(payload)
        view.clear()
        view.step = self.program.steps_launched + 1000
        view.kind = STEP_MIXED if chunks else STEP_DECODE
        for i, entry in enumerate(decode or []):
            view.decode_entries[i] = entry
        for i, chunk in enumerate(chunks or []):
            view.chunks[:5, i] = chunk
        for i, write in enumerate(slots or []):
            view.slot_writes[:, i] = write
        for i, (entry, temperature, seed) in enumerate(sampling or []):
            view.set_sampling(i, entry, temperature, 1.0, 0.0, 0, seed)
        view.n_decode, view.n_chunks = len(decode or []), len(chunks or [])
        view.n_slot_writes, view.n_sampling = len(slots or []), len(sampling or [])
        view.drafts = self.config.window - 1
        return StepSlot(self.device.pinned(payload, "step slot"), view)

    def enqueue(self, slot: StepSlot) -> Issued:
        payload = np.zeros(self._result_layout.nbytes // 4, np.int32)
        result = ResultSlot.on(self.device, self._result_layout, payload, "result slot")
        issued = Issued(slot, result)

        def complete() -> None:
            view = result.view
            issued.counts = view.counts[: view.n_rows].tolist()
            issued.tokens = [t for i, n in enumerate(issued.counts) for t in view.tokens[:n, i].tolist()]
            self.completed.append(issued)

        self.program.enqueue(slot, result, complete)
        return issued

    def step(self, **what: Any) -> Issued:
        return self.enqueue(self.describe(**what))
