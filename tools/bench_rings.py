"""A benchmark's server without its text stages: the real scheduler and gpu processes, asked through their rings.

Owns the client that stands in for frontend, tokenizer and detokenizer, so that what two cores can do is left to the two
processes whose work a step needs. For comparison with the whole server; answers are checked all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from procs.model_files import read_model_info
from shm.config import ServerConfig
from tools.bench_run import TIMEOUT_S, Ask, Load, judged
from tools.bench_serve import BenchError
from tools.bench_watch import Seen, Watch
from tools.gpu_check_engine import Engine, EngineError, Prompt, running

READY_S = 120.0


@dataclass(frozen=True)
class RingsBench:
    """See `bench_run.Bench`. Nothing is streamed: whoever has the ledger has the tokens."""

    engine: Engine
    watch: Watch

    def run(
        self, asks: Sequence[Ask], at_once: int, *, stream: bool = False, advance: Callable[[], None] = lambda: None
    ) -> tuple[Load, Seen]:
        """See `bench_run.Bench`. Raises BenchError if a process ends or nothing comes."""
        prompts = [Prompt(ask.prompt, ask.count, ignore_eos=True) for ask in asks]
        with self.watch.run() as seen:
            began, cpu_began = time.perf_counter(), time.process_time()
            try:
                answers = self.engine.generate(prompts, at_once, TIMEOUT_S)
            except EngineError as error:
                raise BenchError(str(error)) from error
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        ttft_ms = 1e3 * sum(answer.first_s - answer.sent_s for answer in answers) / len(answers)
        return judged(asks, [(tuple(answer.ids), None) for answer in answers], seconds, cpu_s, ttft_ms), seen


@contextmanager
def rings_serving(model: Path, at_once: int, length: int, drafts: int, overlap: bool = True) -> Iterator[RingsBench]:
    """Start the two processes for a clocked model and requests of `length` tokens; they end with the block.

    Raises BenchError.
    """
    config = ServerConfig(
        model=read_model_info(model),
        served_model_name=model.name,
        host="127.0.0.1",
        port=0,
        overlap=overlap,
        max_running=at_once,
        max_len=length,
        kv_tokens=at_once * (length + 32),
        threads=1,
        speculate="clocked" if drafts else "off",
        window=1 + drafts,
        draft_when="always",
    )
    try:
        with running(config, READY_S) as engine:
            memory = engine.memory
            yield RingsBench(engine, Watch(memory.trace, memory.stats, engine.pids))
    except EngineError as error:
        raise BenchError(str(error)) from error
