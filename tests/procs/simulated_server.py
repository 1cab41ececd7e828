"""Everything around the scheduler, in one thread and without rings: who sends requests, the device, and who reads
tokens.

Runs a workload turn by turn in the order of the scheduler's loop, and asserts after every turn what must always hold.
When a queued step is really run, at once or only when its result is waited for, is part of the workload: a scheduler
that runs ahead must be right in both cases.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from procs.prefix_cache import ROOT
from procs.sched_adoption import adopt
from procs.sched_audit import check_conservation
from procs.sched_recovery import recover
from procs.sched_rows import Rows
from procs.sched_steps import Flight, Steps
from shm.batch_tables import BatchTables
from shm.config import ServerConfig
from shm.ledger import FINISH_ABORT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Ledger
from shm.limits import STEPS_IN_FLIGHT
from shm.records import ResultLayout, ResultView, StepLayout, StepView, read_progress
from shm.segment import Segment
from shm.stats import Stats
from tests.procs.simulated_device import EOS, SimulatedDevice, chain, reference

UNWRITTEN = -77  # what a payload holds where nobody wrote: nothing of it may be read


@dataclass
class Request:
    prompt: list[int]
    max_new: int
    arrival: int = 0  # turn
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    abort_after: int | None = None  # turns after its arrival
    text_stop: int | None = None  # output tokens after which the detokenizer finds a stop string
    # What became of it.
    row: int = -1
    generation: int = 0
    count: int = 0
    outputs: list[int] = field(default_factory=list)
    finish: int = FINISH_NONE

    def write(self, ledger: Ledger, row: int) -> None:
        """Do the frontend's and the tokenizer's part."""
        self.row, self.generation = row, int(ledger.generation[row]) + 1
        ledger.generation[row] = self.generation
        ledger.arrival_ns[row] = time.monotonic_ns()
        ledger.prompt_len[row] = len(self.prompt)
        ledger.tokens[row, : len(self.prompt)] = self.prompt
        ledger.max_new[row] = self.max_new
        ledger.seed[row] = self.seed
        ledger.ignore_eos[row] = self.ignore_eos
        ledger.stop_ids[row] = -1
        ledger.stop_ids[row, : len(self.stop_ids)] = self.stop_ids
        ledger.ready[row] = self.generation

    def natural_end(self, max_len: int, salt: int = 0) -> tuple[list[int], int]:
        """Its output if nobody interferes, and why it ends."""
        limit = min(self.max_new, max_len - len(self.prompt))
        outputs = reference(self.prompt, self.seed, limit, salt)
        stops = set(self.stop_ids) | (set() if self.ignore_eos else {EOS})
        for index, token in enumerate(outputs):
            if token in stops:
                return outputs[: index + 1], FINISH_STOP
        return outputs, FINISH_LENGTH


def new_ledger(config: ServerConfig) -> Ledger:
    return Ledger(Segment.create("ledger", Ledger.size(config.rows, config.max_len)), config.rows, config.max_len)


class SimulatedServer:
    def __init__(self, config: ServerConfig, requests: list[Request], lazy: str = "0", salt: int = 0) -> None:
        """`lazy` is a pattern of 0 and 1, one per step: run it as soon as it is queued, or only when waited for."""
        self.config = config
        self.requests = requests
        self.lazy = lazy
        self.salt = salt
        self.ledger = new_ledger(config)
        self.stats = Stats(Segment.create("stats", Stats.size()))
        self.device = SimulatedDevice(config, self.ledger, salt)
        self.tables = BatchTables.private(config.entries, config.pages_per_row)
        self.memory = 1  # of the device, see `Control.memory`
        self.streak = 0  # of either's deaths, see `Control.streak`
        self.in_a_row = False  # whether all of them are, or none
        self.start_scheduler()
        self.turn = 0
        self.step = 0
        self.descriptors: list[bytes] = []
        self.queued: deque[tuple[Flight, StepView, ResultView]] = deque()
        self.stale: deque[tuple[Flight, StepView, ResultView]] = deque()  # queued by a scheduler that is dead
        self.results: deque[ResultView] = deque()
        self.to_arrive = deque(sorted(requests, key=lambda request: request.arrival))
        self.by_row: dict[int, Request] = {}
        self.intake: list[Request] = []
        self.first_admissions: list[Request] = []

    def start_scheduler(self) -> None:
        self.rows = Rows(self.config, self.ledger, self.stats.writer("scheduler"), self.tables)
        self.steps = Steps(self.rows)
        adopt(self.rows, self.memory)

    def restart_scheduler(self, at_work: bool = True) -> None:
        """Kill the scheduler, wherever it is, and start another. The device still has to run what it was given: at once
        or, where steps are lazy, only when the new one waits for one of its own.

        at_work: as `recover` has it; rows are blamed for deaths at work.
        """
        self.stale.extend(self.queued)
        self.queued.clear()
        while self.stale and self.lazy[self.step % len(self.lazy)] == "0":
            self._run_stale()
        self.results.clear()  # of the earlier scheduler's steps: dropped by their numbers
        self.streak += not self.in_a_row
        self.start_scheduler()
        self._audit()  # what was adopted holds what it should, before anything else happens
        recover(self.rows, self.streak, at_work)
        self._read_progress()

    def total(self, name: str) -> Any:
        return self.stats.read_stage("scheduler")[name]

    def run(self) -> "SimulatedServer":
        """Run until every request has ended as it must."""
        work = sum(len(request.prompt) + request.max_new for request in self.requests)
        arrived = max((request.arrival for request in self.requests), default=0)
        while any(request.finish == FINISH_NONE for request in self.requests) or self.steps.in_flight:
            assert self.turn < arrived + 10 * work + 100, "a request starves"
            self.one_turn()
        assert not self.rows.waiting and self.rows.state.running == 0
        assert self.rows.pool.free + self.rows.cache.cached == self.rows.pool.usable
        return self

    def one_turn(self) -> None:
        self._arrive_and_abort()
        for request in self.intake:
            self.rows.enqueue(request.row, request.generation)
        self.intake.clear()  # the ring is released last: after a crash, records come again
        self.rows.observe()
        self._read_progress()
        self._check_flags()
        depth = STEPS_IN_FLIGHT if self.config.overlap else 1
        in_flight = self.steps.in_flight
        pushed = len(in_flight) < depth and self._plan()
        if len(in_flight) == depth or (in_flight and not pushed):
            while not self.results:
                self._run_step()
            self.steps.apply(self.results.popleft())
            self._read_progress()
        self._audit()
        self.turn += 1

    # ------------------------------------------------------------------ the others

    def _arrive_and_abort(self) -> None:
        free = [row for row in range(self.config.rows) if row not in self.by_row]
        while self.to_arrive and self.to_arrive[0].arrival <= self.turn and free:
            request = self.to_arrive.popleft()
            request.arrival = self.turn
            request.write(self.ledger, free.pop())
            self.by_row[request.row] = request
            self.intake.append(request)
        for request in self.by_row.values():
            if request.abort_after is not None and self.turn >= request.arrival + request.abort_after:
                self.ledger.abort[request.row] = request.generation

    def _read_progress(self) -> None:
        """The detokenizer: what it is told must be in the ledger already, grow, and end once."""
        ledger = self.ledger
        for record in self.rows.outbox:
            for row, generation, count, finish in np.stack(read_progress(record), axis=1).tolist():
                request = self.by_row.get(row)
                if request is None:  # told again after a restart
                    assert finish and any(
                        (r.row, r.generation, r.finish) == (row, generation, finish) for r in self.requests
                    )
                    continue
                assert generation == request.generation and count >= request.count
                request.count = count
                begin = len(request.prompt)
                request.outputs = ledger.tokens[row, begin : begin + count].tolist()
                if finish:
                    assert ledger.done[row] == generation and ledger.finish[row] == finish
                    assert ledger.count[row] == count
                    request.finish = finish
                    self._check_end(request)
                    del self.by_row[row]
                elif request.text_stop is not None and count >= request.text_stop:
                    ledger.text_stop_count[row] = request.text_stop
                    ledger.text_stop[row] = generation
        self.rows.outbox.clear()

    def _check_end(self, request: Request) -> None:
        outputs, finish = request.natural_end(self.config.max_len, self.salt)
        assert request.outputs == outputs[: request.count], "a token differs from the one computed alone"
        if request.count == len(outputs):
            assert request.finish in (finish, FINISH_ABORT, FINISH_STOP)
        if request.abort_after is None and request.text_stop is None:
            assert request.count == len(outputs) and request.finish == finish
        elif request.count < len(outputs):
            aborted = request.finish == FINISH_ABORT and request.abort_after is not None
            stopped = request.finish == FINISH_STOP and request.text_stop is not None
            assert aborted or stopped
            if request.text_stop is not None:
                assert request.count <= request.text_stop + 2 * self.config.window, "stopped later than late by one"

    def _check_flags(self) -> None:
        for request in self.by_row.values():
            assert self.ledger.abort[request.row] != request.generation, "an aborted request goes on"
            assert self.ledger.text_stop[request.row] != request.generation, "a stopped request goes on"

    # ------------------------------------------------------------------ steps

    def _plan(self) -> bool:
        payload = np.full(StepLayout(self.config).nbytes // 4, UNWRITTEN, dtype=np.int32)
        view = StepLayout(self.config).view(payload)
        flight = self.steps.plan(view, self.step + 1)
        if flight is None:
            return False
        self.step += 1
        assert view.n_decode + view.n_chunks > 0
        in_step = [*view.decode_entries[: view.n_decode].tolist(), *view.chunks[0, : view.n_chunks].tolist()]
        assert len(set(in_step)) == len(in_step) <= self.config.max_running, "a row is in a step twice"
        assert view.chunks[3, : view.n_chunks].sum() <= self.config.prefill_chunk
        self.descriptors.append(payload[: view.used_nbytes // 4].tobytes())
        admitted = set(view.sampling[0, : view.n_sampling].tolist())
        for entry, row in view.chunks[:2, : view.n_chunks].T.tolist():
            request = self.by_row[row]
            if entry in admitted and request not in self.first_admissions:
                assert all(other.arrival <= request.arrival for other in self.first_admissions), "the queue was jumped"
                self.first_admissions.append(request)
        result = ResultLayout(self.config).view(
            np.full(ResultLayout(self.config).nbytes // 4, UNWRITTEN, dtype=np.int32)
        )
        self.queued.append((flight, view, result))
        if self.lazy[self.step % len(self.lazy)] == "0":
            while self.queued:
                self._run_step()
        return True

    def _run_stale(self) -> None:
        """A step of an earlier scheduler: in front of all others, and nobody takes its result."""
        _, view, result = self.stale.popleft()
        self.device.run(view, result)

    def _run_step(self, check: bool = True) -> None:
        if self.stale:
            self._run_stale()
            return
        flight, view, result = self.queued.popleft()
        ran = self.device.run(view, result)
        self.results.append(result)
        if not check:
            return
        state = self.rows.state
        cached = set(self.rows.cache.pages().tolist())
        for written in ran.written:
            assert not written & cached, "a shared page was written"
        incarnations = dict(zip(flight.entries.tolist(), flight.incarnations.tolist(), strict=True))
        incarnations |= zip(flight.chunk_entries.tolist(), flight.chunk_incarnations.tolist(), strict=True)
        for entry, written in zip(ran.entries, ran.written, strict=True):
            if state.incarnation[entry] == incarnations[entry]:
                assert written <= set(state.private_pages(entry).tolist()), "a row wrote to a page that is not its own"
                tokens = self.ledger.tokens[state.row[entry], : state.counted[entry]].tolist()
                self.device.check_contents(entry, tokens)

    def _audit(self) -> None:
        rows, content = self.rows, self.device.content
        check_conservation(rows)
        for page, (parent, raw) in rows.cache._key_of.items():
            value = content[parent][-1] if parent != ROOT else 0
            for offset, token in enumerate(np.frombuffer(raw, dtype=np.int32).tolist()):
                value = chain(value, token, self.salt)
                assert content[page][offset] == value, "a cached page holds another token than its key says"
