"""The part of the check that runs the step program: right tokens whatever is slow, and every edge dropped in turn.

Owns a small workload with the mill as its model, delays on single streams, and the table of mutants. On CUDA the delays
are sleeps of the device and the kernels are Triton's; on the host device they are sleeps of its threads. With all edges
every run must be right and unflagged; without one, the checker must flag the program. How often tokens went wrong is
reported: luck decides that.
"""

from typing import Any

import numpy as np
import torch

from gpu.device.mutations import Edge, MutatedDevice
from gpu.device.order import OrderChecker
from gpu.device.protocol import Device
from gpu.kernels.step_kernels import StepKernels
from gpu.lanes import ResultSlot, StepSlot
from gpu.step import StepProgram
from shm.config import ModelInfo, ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout
from tools.gpu_check import Options
from tools.gpu_check_device import sleep
from tools.gpu_check_part import Figures, open_device, run
from tools.mill import VOCAB, reference
from tools.torch_mill import TorchMill, mill_sample

PROMPTS = {1: [5, 6, 7], 2: [11, 12, 13, 14, 15, 16], 3: [40, 3]}
SLEEP_S = 0.003
SLOW = ("", "forward", "copy", "schedule")  # streams; "": none
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


def expected() -> list[list[int]]:
    """The tokens that each step gives: decode rows first, then prompts."""
    one, two, three = (reference(PROMPTS[i], 9) for i in (1, 2, 3))
    return [
        [one[0]], [one[1], two[0]], [one[2], two[1]], [two[2], one[3]], [one[4], two[3]], [two[4], three[0]],
        [two[5], three[1]], [three[2], two[6]],
    ]  # fmt: skip


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


class Slow:
    """Kernels of which those on one stream take long."""

    def __init__(self, kernels: StepKernels, kind: str, stream: str) -> None:
        self._kernels, self._kind, self._stream = kernels, kind, stream

    def __getattr__(self, name: str) -> Any:
        stream = {"upload": "schedule", "gather": "forward", "deliver": "copy"}.get(name)
        act = getattr(self._kernels, name)
        if stream != self._stream:
            return act

        def slow(*arguments: Any) -> None:
            sleep(self._kind, SLEEP_S)
            act(*arguments)

        return slow


def run_steps(kind: str, device: Device, slow: str) -> list[list[int]]:
    """Queue all steps at once, wait for them, and return the tokens of each."""
    config = small_config()
    layout, results = StepLayout(config), ResultLayout(config)
    mill = TorchMill(config.pages, config.page_size, config.max_len, "cuda" if kind == "cuda" else "cpu")
    kernels: Any
    model: Any
    sampler: Any
    if kind == "cuda":
        from gpu.kernels.triton_step import TritonStepKernels

        kernels = TritonStepKernels.of(config)
        model, sampler = mill, mill_sample
    else:
        from gpu.kernels.host_step import HostStepKernels

        kernels = HostStepKernels.of(config)
        model, sampler = NumpyMill(mill), sample_numpy
    ledger = np.zeros((config.rows, config.max_len), np.int32)
    for entry, prompt in PROMPTS.items():
        ledger[entry, : len(prompt)] = prompt
    program = StepProgram(device, config, model, Slow(kernels, kind, slow), sampler, ledger)
    program.capture()
    tokens: list[list[int]] = []
    for number, (fills, decode, prompts) in enumerate(STEPS):
        payload, answer = np.zeros(layout.nbytes // 4, np.int32), np.zeros(results.nbytes // 4, np.int32)
        slot = StepSlot.on(device, layout, payload, f"step{number}")
        kept = ResultSlot.on(device, results, answer, f"result{number}")
        view = slot.view
        view.step, view.kind = number, STEP_MIXED if prompts else STEP_DECODE
        view.n_decode, view.n_chunks = len(decode), len(prompts)
        view.decode_entries[: len(decode)] = decode
        writes = [(entry, i, page) for entry, pages in fills.items() for i, page in enumerate(pages)]
        for i, write in enumerate(writes):
            view.slot_writes[:, i] = write
        for i, entry in enumerate(fills):
            view.set_sampling(i, entry, 0.0, 1.0, 0.0, 0, 1)
        view.n_slot_writes, view.n_sampling = len(writes), len(fills)
        for i, row in enumerate(prompts):
            entry = 1 if row == 3 else row
            view.chunks[:5, i] = (entry, row, 0, len(PROMPTS[row]), 1)

        def complete(result: Any = kept.view) -> None:
            tokens.append(result.tokens[0, : result.n_rows].tolist())

        done = program.enqueue(slot, kept, complete)
    device.synchronize()
    while not done.query():
        device.check()
    return tokens


def small_config() -> ServerConfig:
    """A server of three rows for the mill."""
    model = ModelInfo(
        name="mill", path="/none", format="hf", vocab_size=VOCAB, context_len=64, hidden_size=16, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=16, rope_theta=1e4, rope_scaling=None,
        rms_eps=1e-5, tie_word_embeddings=True, eos_token_ids=(), bos_token_id=None, qk_norm=False,
    )  # fmt: skip
    return ServerConfig(
        model=model, served_model_name="mill", host="none", port=0, max_running=3, max_queued=1, kv_tokens=64,
        page_size=4, max_len=16, prefill_chunk=8, threads=1, poison=True,
    )  # fmt: skip


def attempt(kind: str, edge: Edge | None, slow: str) -> tuple[MutatedDevice, OrderChecker, bool]:
    """One run: the device with the edges it heard of, what the checker found, and whether all tokens were right."""
    checker = OrderChecker(collect=True)
    device = open_device(kind, checker)
    mutated = MutatedDevice(device, edge)
    try:
        right = run_steps(kind, mutated, slow) == expected()
    except Exception:  # with an edge missing, a fault is one of the ways to be wrong
        if edge is None:
            raise
        right = False
    finally:
        _close(device)
    return mutated, checker, right


def _close(device: Device) -> None:
    try:
        device.close()
    except Exception as error:  # noqa: BLE001 - a mutant may have broken the device; the run's own outcome counts
        print(f"close: {error}")


def step(options: Options, figures: Figures) -> None:
    """With all edges: right and unflagged, whatever is slow. Without one: flagged."""
    kind = options.device
    edges: dict[Edge, int] = {}
    for slow in SLOW:
        mutated, checker, right = attempt(kind, None, slow)
        assert not checker.violations, str(checker.violations[0])
        assert right, f"wrong tokens with a slow {slow or 'nothing'}"
        edges |= mutated.edges
    figures.add("all edges", f"right and unflagged in {len(SLOW)} runs of {len(STEPS)} steps")
    unflagged = []
    for edge in edges:
        runs = [attempt(kind, edge, slow) for slow in SLOW]
        flagged = all(checker.violations for _, checker, _ in runs)
        wrong = sum(not right for _, _, right in runs)
        figures.add(f"without '{edge}'", f"{'flagged' if flagged else 'NOT flagged'}, wrong in {wrong} of {len(runs)}")
        if not flagged:
            unflagged.append(str(edge))
    assert not unflagged, f"not flagged: {', '.join(unflagged)}"


if __name__ == "__main__":
    run({"step": step})
