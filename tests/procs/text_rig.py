"""The neighbours of the tokenizer and the detokenizer in one process: real segments, rings, doorbells and channels.

    rig = TextRig(path)         the memory of a server of the model at `path`, the tests' tiny one
    rig.child("tokenizer")      a stage's view of it
    rig.receive(n)              the next n messages to the frontend

Frontend and scheduler are played by the test, with the calls below.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from procs.child_specs import CHILD_SPECS, child_environment
from procs.model_info import read_model_info
from procs.server_memory import ServerMemory
from procs.stage_process import StageProcess
from shm.channel import Receiver, Sender
from shm.child import Child
from shm.config import ServerConfig
from shm.control import DRAINING
from shm.records import progress_record, read_intake

WAIT_MS = 5000
START_SECONDS = 30


class TextRig:
    """Everything around the two stages. Close it at the end."""

    def __init__(self, path: Path, **changes: Any) -> None:
        values = {"max_running": 8, "max_queued": 24, "kv_tokens": 1024, "max_len": 128, "threads": 1, **changes}
        model = read_model_info(path)
        self.config = ServerConfig(model=model, served_model_name="tiny", host="127.0.0.1", port=0, **values)
        self.memory = ServerMemory(self.config)
        self._ready_fd = os.open(os.devnull, os.O_WRONLY)
        self.frontend = Receiver.bind(self.memory.channels["frontend"], self.memory.control.epoch("frontend"))
        self.scheduler = self.child("scheduler")
        self.ledger = self.scheduler.ledger
        self.stats = self.scheduler.stats
        self._senders: list[Sender] = []

    def child(self, stage: str) -> Child:
        made = Child(self.memory.boot_record(stage, self._ready_fd, None))
        made.take_over()
        return made

    def sender(self, stage: str) -> Sender:
        """A sender to the channel of `stage`."""
        self._senders.append(
            Sender(zmq.Context.instance(), self.memory.channels[stage], self.memory.control.epoch(stage))
        )
        return self._senders[-1]

    def close(self) -> None:
        for end in (self.frontend, *self._senders):
            end.close()
        self.memory.close()
        os.close(self._ready_fd)

    @contextmanager
    def process(self, stage: str) -> Iterator[StageProcess]:
        """Runs the stage as a process of its own; it must be ready soon, and end with status 0 on SIGTERM."""
        spec = next(spec for spec in CHILD_SPECS if spec.stage == stage)
        process = StageProcess(spec, self.memory, child_environment(spec, self.config, os.environ), None)
        try:
            said: list[str] = []
            deadline_s = time.monotonic() + START_SECONDS
            while "ready" not in said:
                assert time.monotonic() < deadline_s and not process.silent, said
                time.sleep(0.01)
                said += [line.event for line in process.listen()]
            yield process
            self.memory.control.state = DRAINING
            process.terminate()
            assert process.wait_exit(spec.stop_seconds), "it did not end on SIGTERM"
        finally:
            process.kill()
            status = process.reap()
        assert status == 0

    # As the frontend does.

    def open(self, row: int) -> int:
        """Allocates a row; returns its generation."""
        self.ledger.delivered[row] = 0
        self.ledger.generation[row] += 1
        return int(self.ledger.generation[row])

    def receive(self, count: int = 1) -> list[dict[str, Any]]:
        """The next `count` messages; fails if they do not come."""
        messages: list[dict[str, Any]] = []
        while len(messages) < count:
            assert self.frontend.wait(WAIT_MS), f"{len(messages)} of {count} messages: {messages}"
            messages += self.frontend.recv_all()
        return messages

    # As the scheduler does.

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits at the scheduler's doorbell; fails if the condition does not come true."""
        deadline_s = time.monotonic() + WAIT_MS / 1000
        while not self.scheduler.own_doorbell.wait(condition):
            assert time.monotonic() < deadline_s

    def take_intake(self, ring: Any) -> list[tuple[int, int]]:
        """Takes one intake record: [(row, generation)]."""
        rows, generations = read_intake(ring.peek().payload)
        pairs = list(zip(rows.tolist(), generations.tolist(), strict=True))
        ring.release()
        return pairs

    def write_output(self, row: int, tokens: Sequence[int]) -> int:
        """Appends output tokens to the row; returns their count."""
        start = int(self.ledger.count[row])
        begin = int(self.ledger.prompt_len[row]) + start
        self.ledger.tokens[row, begin : begin + len(tokens)] = tokens
        self.ledger.count[row] = start + len(tokens)
        return start + len(tokens)

    def record(self, *columns: tuple[int, int, int, int]) -> Any:
        """A progress record of (row, generation, count, finish) each."""
        return progress_record(*np.array(columns).T)
