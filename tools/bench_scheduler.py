"""Measures the scheduler's CPU time per step against the number of running rows: `python -m tools.bench_scheduler`.

Owns a scheduler, with real rings and a real ledger, in this process and alone in it: whenever it waits, a device that
computes nothing answers the oldest step, and whoever else is missing takes what there is. What is measured is the
thread's CPU time of a whole round of the loop (intake, plan, push, process, progress), so that other load on the
machine changes little. It never runs a model, and knows nothing of the device side but the records.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from procs.scheduler import Scheduler
from procs.server_memory import ServerMemory
from shm.child import Child
from shm.config import ModelInfo, ServerConfig
from shm.doorbell import Doorbell
from shm.records import CHUNK_LAST, ResultLayout, StepLayout, intake_record, ring_specs
from shm.ring import Ring

PROMPT_TOKENS = 32
TOKEN = 7
WARM_STEPS = 30  # until all rows have been admitted and every path was taken once, beside one step per row


class Cost(NamedTuple):
    """CPU time of the scheduler per step, in microseconds."""

    rows: int
    steps: int
    median_us: float
    p95_us: float


def bench_config(rows: int, steps: int) -> ServerConfig:
    """A server for `rows` requests of which none ends within `steps` steps, and none is retracted."""
    max_len = PROMPT_TOKENS + steps + 1
    model = ModelInfo(
        name="none",
        path="-",
        format="gguf",
        vocab_size=100,
        context_len=max_len,
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
        eos_token_ids=(2,),
        bos_token_id=None,
    )
    return ServerConfig(
        model=model,
        served_model_name="none",
        host="-",
        port=0,
        max_running=rows,
        max_queued=0,
        kv_tokens=(rows + 1) * (max_len + 32),
        max_len=max_len,
        threads=1,
    )


class OtherStages(Doorbell):
    """The scheduler's doorbell, and everybody who could ring it: they act whenever it waits, in its own thread."""

    def __init__(self, memory: ServerMemory, own: Doorbell, bells: dict[str, Doorbell]) -> None:
        super().__init__(own.fileno(), memory.control.segment.words, 0)
        config = memory.config
        specs = ring_specs(config)
        rings = {
            name: Ring(memory.segments[name], bells[spec.consumer], bells[spec.producer], spec.schema)
            for name, spec in specs.items()
        }
        self._steps, self._results = rings["step"].attach_consumer(), rings["result"].attach_producer()
        self._progress = rings["progress"].attach_consumer()
        self._result_bytes = specs["result"].payload_bytes
        layout, results = StepLayout(config), ResultLayout(config)
        self._step_views = [layout.view(payload) for payload in rings["step"].payloads]
        self._result_views = [results.view(payload) for payload in rings["result"].payloads]
        self.cpu_ns = 0  # what all of this has cost: not the scheduler's

    def wait(self, ready: Callable[[], bool], timeout_ms: float = 0) -> bool:
        """Answer a step and read the progress; then whatever is waited for is there."""
        begin = time.thread_time_ns()
        if self._steps.available():
            self._answer()
        if self._progress.available():
            self._progress.release(self._progress.available())
        self.cpu_ns += time.thread_time_ns() - begin
        return ready()

    def _answer(self) -> None:
        """Give every row of the oldest step one token."""
        seq = self._steps.tail
        step = self._step_views[seq % len(self._step_views)]
        result = self._result_views[self._results.head % len(self._result_views)]
        rows = step.n_decode + int(np.count_nonzero(step.chunks[CHUNK_LAST, : step.n_chunks]))
        result.n_rows, result.window, result.step = rows, 1, step.step
        result.counts[:rows] = 1
        result.tokens[0, :rows] = TOKEN
        self._results.publish(self._result_bytes, source_seq=seq)
        self._steps.release()


def send_requests(memory: ServerMemory, stage: Child, rows: int) -> None:
    """Do the frontend's and the tokenizer's part for `rows` requests with prompts of their own."""
    ledger, spec = stage.ledger, ring_specs(memory.config)["intake"]
    intake = Ring(memory.segments["intake"], None, None, spec.schema).attach_producer()
    for row in range(rows):
        ledger.generation[row] = 1
        ledger.arrival_ns[row] = time.monotonic_ns()
        ledger.prompt_len[row] = PROMPT_TOKENS
        ledger.tokens[row, :PROMPT_TOKENS] = row + np.arange(PROMPT_TOKENS)
        ledger.max_new[row] = memory.config.max_len
        ledger.ignore_eos[row] = 1
        ledger.stop_ids[row] = -1
        ledger.ready[row] = 1
    every = np.arange(rows, dtype=np.int32)
    for some in np.array_split(every, -(-rows // 64)):
        intake.push(intake_record(some, np.ones_like(some)))


def measure(rows: int, steps: int) -> Cost:
    """Run `rows` requests for `steps` steps with all of them running."""
    warm = WARM_STEPS + rows
    memory = ServerMemory(bench_config(rows, warm + steps + WARM_STEPS))
    read_end, write_end = os.pipe()
    try:
        memory.control.set_epoch("scheduler", 1)
        stage = Child(memory.boot_record("scheduler", write_end, None))
        stage.take_over()
        stage.own_doorbell = others = OtherStages(memory, stage.own_doorbell, stage.doorbells)
        scheduler = Scheduler(stage)
        send_requests(memory, stage, rows)
        for _ in range(warm):
            scheduler.turn()
        assert scheduler.rows.state.running == rows, "not all requests run"
        cpu_us = []
        for _ in range(steps):
            begin, others_begin = time.thread_time_ns(), others.cpu_ns
            scheduler.turn()
            spent = time.thread_time_ns() - begin
            cpu_us.append((spent - (others.cpu_ns - others_begin)) / 1e3)
        assert scheduler.rows.state.running == rows, "a request has ended"
    finally:
        os.close(read_end)
        os.close(write_end)
        memory.close()
    return Cost(rows, steps, statistics.median(cpu_us), float(np.percentile(cpu_us, 95)))


def table(costs: Sequence[Cost]) -> str:
    """One line per number of rows; the ratio is to the first line's median."""
    lines = [f"{'rows':>5} {'steps':>6} {'median us':>10} {'p95 us':>8} {'ratio':>6}"]
    for cost in costs:
        ratio = cost.median_us / costs[0].median_us
        lines.append(f"{cost.rows:>5} {cost.steps:>6} {cost.median_us:>10.1f} {cost.p95_us:>8.1f} {ratio:>6.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="CPU time of the scheduler per step, by the number of running rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(argv)
    print(table([measure(rows, options.steps) for rows in options.rows]))


if __name__ == "__main__":
    main()
