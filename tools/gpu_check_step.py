"""Runs of the step program, one by one as they are asked for: `python -m tools.gpu_check_step cuda`.

Owns a small workload with the mill as its model and its drafter, the delays on single streams, and what a run tells:
what the checker found, and whether tokens and early lengths were right. On CUDA the delays are sleeps of the device and
the kernels are Triton's; on the host device they are sleeps of its threads. Reads a `Run` a line and answers an
`Outcome` a line; `tools.gpu_check_mutants` judges them. It never outlives a broken device: it says so, and whoever
asked starts another.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu.device.mutations import Edge, MutatedDevice
from gpu.device.order import OrderChecker
from gpu.device.protocol import Device, Regions, Stream
from gpu.lanes import Lane, ResultSlot, StepSlot
from gpu.step import StepProgram
from shm.config import ModelInfo, ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout
from tools.gpu_check_device import sleep
from tools.gpu_check_mutants import Outcome, Run
from tools.gpu_check_part import open_device
from tools.mill import VOCAB, reference
from tools.torch_mill import TorchMill, TorchMillDrafter, mill_sample

PROMPTS = {1: [5, 6, 7], 2: [11, 12, 13, 14, 15, 16], 3: [40, 3]}
SLEEP_S = 0.003
SLEEPS_BEFORE = {"forward": "gather", "copy": "result", "schedule": "upload", "lengths": "early lengths"}  # launches
# Each step: pages that an entry gets, entries that decode, entries whose whole prompt comes in.
STEPS: list[tuple[dict[int, list[int]], list[int], list[int]]] = [
    ({1: [1, 2, 3, 4]}, [], [1]),
    ({2: [5, 6, 7, 8]}, [1], [2]),
    ({}, [1, 2], []),
    ({}, [2, 1], []),
    ({}, [1, 2], []),
    ({1: [4, 3, 2, 1]}, [2], [3]),  # the row of entry 1 has ended; entry and pages go to another prompt
    ({}, [2, 1], []),
    ({}, [1, 2], []),
]
PLAIN = (3, 6)  # steps without drafts among those with them


class Texts:
    """What the rows have gained so far, and what is wrong with it."""

    def __init__(self) -> None:
        self._gained: dict[int, list[int]] = {}  # by the number of the prompt
        self._prompts: dict[int, int] = {}  # by entry
        self.wrong = ""
        self.lengths: list[list[int]] = []  # in the cache of the rows that each step samples, once it has run
        self.most = 0  # tokens that a row gained in one step

    def add(self, number: int, gained: list[list[int]]) -> None:
        """Step `number` gave its rows these tokens: decode rows first, then prompts."""
        _, decode, prompts = STEPS[number]
        self._prompts |= {entry_of(prompt): prompt for prompt in prompts}
        rows, lengths = [*(self._prompts[entry] for entry in decode), *prompts], []
        for prompt, tokens in zip(rows, gained, strict=True):
            text = self._gained.setdefault(prompt, [])
            text += tokens
            lengths.append(len(PROMPTS[prompt]) + len(text) - 1)
            self.most = max(self.most, len(tokens))
            wanted = reference(PROMPTS[prompt], len(text))
            if text != wanted and not self.wrong:
                self.wrong = f"tokens {text} behind prompt {prompt} instead of {wanted}, step {number}"
        self.lengths.append(lengths)


def entry_of(prompt: int) -> int:
    """The entry that the row with this prompt gets."""
    return 1 if prompt == 3 else prompt


class NumpyMill:
    """The mill on numpy arrays: torch looks at the same memory."""

    def __init__(self, mill: TorchMill) -> None:
        self._mill = mill
        self.k_cache, self.v_cache = mill.k_cache.numpy(), mill.v_cache.numpy()

    def forward(self, *arguments: Any) -> None:
        """See `gpu.step.Model`."""
        *arrays, extents = arguments
        tokens, positions, seqs, page_rows, logit_rows, logits = map(torch.from_numpy, arrays)
        self._mill.forward(tokens, positions, seqs, page_rows, logit_rows, logits, extents)


def sample_numpy(*arrays: Any) -> None:
    """The mill's sampler on numpy arrays."""
    nothing = None
    logits, out = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[-1])
    mill_sample(logits, nothing, nothing, nothing, nothing, nothing, nothing, out)


class SlowDevice:
    """Everything of `device`, but one launch of each step on the stream of that name takes long."""

    def __init__(self, device: Device, kind: str, stream: str) -> None:
        self._device, self._kind = device, kind
        self._name = SLEEPS_BEFORE.get(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, stream: Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> None:
        """See `protocol.Device`."""

        def slow() -> None:
            sleep(self._kind, SLEEP_S)
            fn()

        act = slow if name == self._name else fn
        self._device.launch(stream, act, reads=reads, writes=writes, name=name)


def make_program(kind: str, device: Any, config: ServerConfig, early_lengths: bool) -> StepProgram:
    """The step program with the mill, and the prompts in its ledger; its graphs are captured."""
    mill = TorchMill(config.pages, config.page_size, config.max_len, "cuda" if kind == "cuda" else "cpu")
    kernels: Any
    model: Any
    sampler: Any
    if kind == "cuda":
        from gpu.kernels.triton_step import TritonStepKernels

        kernels, model, sampler = TritonStepKernels.of(config), mill, mill_sample
    else:
        from gpu.kernels.host_step import HostStepKernels

        kernels, model, sampler = HostStepKernels.of(config), NumpyMill(mill), sample_numpy
    ledger = np.zeros((config.rows, config.max_len), np.int32)
    for entry, prompt in PROMPTS.items():
        ledger[entry, : len(prompt)] = prompt
    drafter = TorchMillDrafter(mill) if config.window > 1 else None
    program = StepProgram(device, config, model, kernels, sampler, ledger, early_lengths=early_lengths, drafter=drafter)
    if drafter is not None:
        drafter.caches = program.caches
    program.capture()
    return program


def note_lengths(device: Any, program: StepProgram) -> Any:
    """Have whoever wants lengths early look at each copy behind its event: i32[steps, rows], filled as steps run."""
    early = program.early_lengths
    assert early is not None
    queue, counted = early.queue, iter(range(len(STEPS)))
    seen = device.buffer((len(STEPS), early.copies[0].array.shape[0]), np.int32, "seen")

    def queue_and_look(lane: Lane) -> None:
        queue(lane)
        copy, number = early.copies[lane.index], next(counted)

        def look() -> None:
            target = seen.array[number]
            if isinstance(target, np.ndarray):
                np.copyto(target, copy.array)
            else:
                target.copy_(copy.array, non_blocking=True)

        device.launch(early.stream, look, reads=(copy.region(),), writes=(seen.region(),), name="look at lengths")

    vars(early)["queue"] = queue_and_look
    return seen


def fill(view: Any, number: int, window: int) -> None:
    """Write step `number` into its descriptor."""
    fills, decode, prompts = STEPS[number]
    view.step, view.kind = number, STEP_MIXED if prompts else STEP_DECODE
    view.n_decode, view.n_chunks = len(decode), len(prompts)
    view.drafts = 0 if number in PLAIN else window - 1
    view.decode_entries[: len(decode)] = decode
    twice = {entry: [half for page in pages for half in (2 * page - 1, 2 * page)] for entry, pages in fills.items()}
    given = fills if window == 1 else twice
    writes = [(entry, i, page) for entry, pages in given.items() for i, page in enumerate(pages)]
    for i, write in enumerate(writes):
        view.slot_writes[:, i] = write
    for i, entry in enumerate(fills):
        view.set_sampling(i, entry, 0.0, 1.0, 0.0, 0, 1)
    view.n_slot_writes, view.n_sampling = len(writes), len(fills)
    for i, row in enumerate(prompts):
        view.chunks[:5, i] = (entry_of(row), row, 0, len(PROMPTS[row]), 1)


def run_steps(kind: str, device: Any, early_lengths: bool, window: int) -> str:
    """Queue all steps at once and wait for them; what is wrong with what they gave."""
    config = small_config(window)
    layout, results = StepLayout(config), ResultLayout(config)
    program = make_program(kind, device, config, early_lengths)
    seen = note_lengths(device, program) if early_lengths else None
    texts = Texts()
    for number in range(len(STEPS)):
        payload, answer = np.zeros(layout.nbytes // 4, np.int32), np.zeros(results.nbytes // 4, np.int32)
        slot = StepSlot.on(device, layout, payload, f"step{number}")
        kept = ResultSlot.on(device, results, answer, f"result{number}")
        fill(slot.view, number, window)

        def complete(number: int = number, result: Any = kept.view) -> None:
            texts.add(number, [result.tokens[:n, i].tolist() for i, n in enumerate(result.counts[: result.n_rows])])

        done = program.enqueue(slot, kept, complete)
    device.synchronize()
    while not done.query():
        device.check()
    if texts.wrong or seen is None:
        return texts.wrong
    assert (texts.most > 1) == (window > 1), "some drafts are taken"
    lengths = [row[: len(wanted)] for row, wanted in zip(seen.array.tolist(), texts.lengths, strict=True)]
    return "" if lengths == texts.lengths else f"lengths {lengths} instead of {texts.lengths}"


def small_config(window: int = 1) -> ServerConfig:
    """A server of three rows for the mill."""
    model = ModelInfo(
        name="mill", path="/none", format="hf", vocab_size=VOCAB, context_len=64, hidden_size=16, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=16, rope_theta=1e4, rope_scaling=None,
        rms_eps=1e-5, tie_word_embeddings=True, eos_token_ids=(), bos_token_id=None, qk_norm=False,
    )  # fmt: skip
    most = 16 if window == 1 else 32
    return ServerConfig(
        model=model, served_model_name="mill", host="none", port=0, max_running=3, max_queued=1, kv_tokens=4 * most,
        page_size=4, max_len=most, prefill_chunk=8, threads=1, poison=True, window=window,
    )  # fmt: skip


def attempt(kind: str, wanted: Run) -> Outcome:
    """One run, whatever comes of it."""
    checker = OrderChecker(collect=True)
    edge = None if wanted.edge is None else Edge(*wanted.edge)
    device = open_device(kind, checker)
    slow: Any = SlowDevice(device, kind, wanted.slow)
    mutated = MutatedDevice(slow, edge, "early" if wanted.how == "early" else "drop")
    try:
        wrong = run_steps(kind, mutated, wanted.early_lengths, wanted.window)
    except Exception as error:  # noqa: BLE001 - with an edge missing, a fault is one of the ways to be wrong
        wrong = repr(error)[:500]
    try:
        device.close()
    except Exception as error:  # noqa: BLE001 - a mutant may have broken the device; the run's own outcome counts
        print(f"close: {error}", file=sys.stderr)
    flagged = str(checker.violations[0]) if checker.violations else ""
    return Outcome(flagged, wrong, mutated.mutated, [list(edge) for edge in mutated.edges], is_usable(kind))


def is_usable(kind: str) -> bool:
    """Whether the device still works: an error of CUDA stays for the whole process."""
    if kind != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        return int(torch.ones(4, device="cuda").sum()) == 4
    except Exception as error:  # noqa: BLE001 - whatever it says, nothing more can be run here
        print(f"broken: {error}", file=sys.stderr)
        return False


def main() -> None:
    """Do the runs that come in; only answers go to whoever reads them, all else that is printed to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    write = partial(print, file=answers, flush=True)
    write("ready")
    for line in sys.stdin:
        write(json.dumps(asdict(attempt(sys.argv[1], Run(**json.loads(line))))))


if __name__ == "__main__":
    main()
