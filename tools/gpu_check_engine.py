"""The engine of a server without its text stages: the real scheduler and gpu processes, fed with token ids.

Owns the shared memory, the two processes and the outer ends of their rings: it writes rows as the tokenizer does, and
reads progress as the detokenizer does. For machines that have neither a web server nor a tokenizer. It decides
nothing about steps, and it never imports what belongs to the device.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from procs.child_specs import CHILD_SPECS, child_environment
from procs.server_memory import ServerMemory
from procs.stage_process import StageProcess
from shm.config import ServerConfig
from shm.control import DRAINING, READY
from shm.ledger import FINISH_NAMES, FINISH_NONE, Ledger
from shm.records import intake_record, read_progress, ring_specs
from shm.ring import Ring

STAGES_NEEDED = ("gpu", "scheduler")
LOOK_AGAIN_S = 0.05


class EngineError(Exception):
    """A stage ended, or the engine made no progress; the text says which and why."""


@dataclass(frozen=True)
class Prompt:
    """One request. Greedy at temperature 0."""

    ids: Sequence[int]
    max_new: int
    ignore_eos: bool = False


@dataclass(frozen=True)
class Answer:
    """What came of a request: its output ids, why it ended, and when it was sent and its tokens came, in seconds from
    the start.
    """

    ids: list[int]
    finish: str
    first_s: float
    last_s: float
    sent_s: float = 0.0


class Engine:
    """Made by `running`. Calls come from one thread."""

    def __init__(self, config: ServerConfig, memory: ServerMemory) -> None:
        self._config = config
        self._memory = memory
        self._children: list[StageProcess] = []
        self._ledger = Ledger(memory.segments["ledger"], config.rows, config.max_len)
        self._intake = self._ring("intake").attach_producer()
        self._progress = self._ring("progress").attach_consumer()
        self._bell = memory.control.doorbell("detokenizer", memory.doorbell_fds["detokenizer"])

    def _ring(self, name: str) -> Ring:
        memory, spec = self._memory, ring_specs(self._config)[name]
        consumer, producer = (
            memory.control.doorbell(stage, memory.doorbell_fds[stage]) for stage in (spec.consumer, spec.producer)
        )
        return Ring(memory.segments[name], consumer, producer, schema=spec.schema)

    def start(self, ready_seconds: float) -> None:
        """Start the stages and wait until they serve. Raises EngineError."""
        control = self._memory.control
        for spec in CHILD_SPECS:
            if spec.stage in STAGES_NEEDED:
                control.set_epoch(spec.stage, control.epoch(spec.stage) + 1)
                env = child_environment(spec, self._config, os.environ)
                self._children.append(StageProcess(spec, self._memory, env, None))
        deadline_s = time.monotonic() + ready_seconds
        while not all(child.is_ready for child in self._children):
            self._look(deadline_s, "is not ready")
            time.sleep(LOOK_AGAIN_S)
        control.state = READY
        self._memory.kick_all()

    def stop(self) -> None:
        """End the stages, gently first."""
        self._memory.control.state = DRAINING
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            child.wait_exit(child.spec.stop_seconds)
            child.reap()

    @property
    def memory(self) -> ServerMemory:
        """What the stages share, to look into."""
        return self._memory

    def pids(self) -> dict[str, int]:
        """Process ids by stage."""
        return {child.stage: child.pid for child in self._children}

    def gpu_stats(self) -> dict[str, Any]:
        """Counters and histograms of the gpu process."""
        return self._memory.stats.read_stage("gpu")

    def generate(self, prompts: Sequence[Prompt], at_once: int, seconds: float) -> list[Answer]:
        """Answer all prompts, `at_once` of them at any time. Raises EngineError after `seconds`."""
        begin_s = time.monotonic()
        waiting = deque(enumerate(prompts))
        free = list(range(min(at_once, self._config.rows)))
        running: dict[int, int] = {}  # row: index of its prompt
        sent: dict[int, float] = {}
        first: dict[int, float] = {}
        answers: dict[int, Answer] = {}
        while len(answers) < len(prompts):
            for index in self._submit(waiting, free, running):
                sent[index] = time.monotonic() - begin_s
            self._bell.wait(lambda: self._progress.available() > 0)
            self._look(begin_s + seconds, f"has not answered {len(prompts) - len(answers)} of {len(prompts)} requests")
            for row, count, finish in self._news():
                now_s, index = time.monotonic() - begin_s, running[row]
                if count:
                    first.setdefault(index, now_s)
                if finish != FINISH_NONE:
                    ids = self._output(row, count)
                    answers[index] = Answer(
                        ids, FINISH_NAMES[finish] or "", first.get(index, now_s), now_s, sent[index]
                    )
                    free.append(row)
                    del running[row]
        return [answers[i] for i in range(len(prompts))]

    def _submit(self, waiting: deque[tuple[int, Prompt]], free: list[int], running: dict[int, int]) -> Iterator[int]:
        """Indices of the prompts that are sent, each as it is."""
        while waiting and free and self._intake.space() > 0:
            index, prompt = waiting.popleft()
            row = free.pop()
            running[row] = index
            generation = self._write(row, prompt)
            self._intake.push(intake_record([row], [generation]))
            yield index

    def _write(self, row: int, prompt: Prompt) -> int:
        ledger, n = self._ledger, len(prompt.ids)
        generation = int(ledger.generation[row]) + 1
        ledger.generation[row] = generation
        ledger.arrival_ns[row] = time.monotonic_ns()
        ledger.delivered[row] = 0
        ledger.prompt_len[row] = n
        ledger.tokens[row, :n] = prompt.ids
        ledger.temperature[row], ledger.top_p[row], ledger.min_p[row], ledger.top_k[row] = 0.0, 1.0, 0.0, 0
        ledger.seed[row] = 0
        ledger.max_new[row] = prompt.max_new
        ledger.ignore_eos[row] = prompt.ignore_eos
        ledger.stop_ids[row] = -1
        ledger.stop_lens[row] = 0
        ledger.ready[row] = generation  # LAST
        return generation

    def _output(self, row: int, count: int) -> list[int]:
        start = int(self._ledger.prompt_len[row])
        return np.array(self._ledger.tokens[row, start : start + count]).tolist()  # type: ignore[no-any-return]

    def _news(self) -> list[tuple[int, int, int]]:
        """(row, output tokens so far, FINISH_*) of everything the scheduler told since the last call."""
        news: list[tuple[int, int, int]] = []
        records = self._progress.available()
        for i in range(records):
            rows, _, counts, finishes = (column.tolist() for column in read_progress(self._progress.peek(i).payload))
            news += zip(rows, counts, finishes, strict=True)
        if records:
            self._progress.release(records)
        return news

    def _look(self, deadline_s: float, what: str) -> None:
        for child in self._children:
            child.listen()
            if child.wait_exit(0):
                raise EngineError(f"{child.stage}: {child.how_it_ended()}")
        if time.monotonic() > deadline_s:
            said = "; ".join(f"{child.stage} said last: {child.last_words}" for child in self._children)
            raise EngineError(f"the engine {what} in time ({said})")


@contextlib.contextmanager
def running(config: ServerConfig, ready_seconds: float) -> Iterator[Engine]:
    """Start an engine, and stop it at the end, whatever happens."""
    memory = ServerMemory(config)
    engine = Engine(config, memory)
    try:
        engine.start(ready_seconds)
        yield engine
    finally:
        engine.stop()
        memory.close()
