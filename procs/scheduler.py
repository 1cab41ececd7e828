"""The scheduler process: one step ahead of the device.

Owns the loop and its I/O: intake in, steps out, results in, progress out. It never imports torch, never sees a token
before the device has finished it, and never waits for the detokenizer: what that has no room for goes out later
(`sched_progress`). It waits for the oldest step in flight, and, with nothing in flight, for something to do; only after
SIGTERM, when all else is done, it gives the detokenizer a moment to make room. What to run is decided in `policy`, what
becomes of rows in `sched_rows`, of steps in `sched_steps`.

    receive -> plan step N+1, push it while step N runs -> wait for step N -> work its result in -> tell the detokenizer

With overlap two steps are in flight while it waits; without, one.
"""

import gc
import time
from collections.abc import Callable

from procs.sched_adoption import adopt
from procs.sched_audit import check_conservation
from procs.sched_progress import ProgressOut
from procs.sched_recovery import recover
from procs.sched_rows import Rows
from procs.sched_steps import Steps
from shm import child
from shm.batch_tables import BatchTables
from shm.faults import fault, wrong
from shm.limits import STEPS_IN_FLIGHT
from shm.records import RESULT_DROPPED, ResultLayout, StepLayout, progress_rows_max, read_intake
from shm.trace import What

EPOCH_STEPS = 1 << 40  # steps that one scheduler may number: those of a later one are higher, whatever this one did
LAST_WORDS_S = 1.0  # after SIGTERM, for the detokenizer to make room; well within the stage's time to stop


class Scheduler:
    def __init__(self, stage: child.Child) -> None:
        config = stage.config
        self._stage = stage
        self._bell = stage.own_doorbell
        self._stats = stage.stats_writer()
        self._trace = stage.trace()
        self._intake = stage.ring_consumer("intake")
        self._queue = stage.ring_producer("step")
        self._results = stage.ring_consumer("result")
        self._progress = ProgressOut(stage.ring_producer("progress"), config.rows, progress_rows_max(config))
        # One view per slot, made once: a payload stays where it is.
        step_layout, result_layout = StepLayout(config), ResultLayout(config)
        self._step_views = [step_layout.view(payload) for payload in self._queue.ring.payloads]
        self._result_views = [result_layout.view(payload) for payload in self._results.ring.payloads]
        self._depth = STEPS_IN_FLIGHT if config.overlap else 1
        self._first_step = self._next_step = (stage.epoch - 1) * EPOCH_STEPS + 1
        self._audited = False
        self._gpu_epoch = stage.control.epoch("gpu")  # for whom steps are planned
        tables = BatchTables(stage.segments["batch"], config.entries, config.pages_per_row)
        self.rows = Rows(config, stage.ledger, self._stats, tables)
        self.steps = Steps(self.rows)

    def run(self) -> None:
        """Serve until SIGTERM; then end the steps in flight, tell what came of them, and return."""
        control = self._stage.control
        # Behind the epoch, which is stored behind the memory: what is seen here is no older than what is seen there.
        adopt(self.rows, control.memory("gpu"), control.memory("scheduler") < self._stage.epoch)
        recover(self.rows, control.streak("scheduler"), control.at_work("scheduler"))
        control.set_at_work("scheduler", True)
        self._tell()
        self._export()
        gc.freeze()  # what is alive now stays: a collection need not look at it again
        self._stage.ready()
        while self.steps.in_flight or not self._stage.stopping:
            self.turn()
        self._say_last_words()

    def turn(self) -> None:
        """One round of the loop: at most one step out and at most one result in."""
        self._stage.beat()
        self._receive()
        in_flight = self.steps.in_flight
        may_push = len(in_flight) < self._depth and not self._stage.stopping and self._queue.space() > 0
        pushed = may_push and self._push()
        self._tell()  # whom `_receive` ended: they need not wait for the device
        if len(in_flight) == self._depth or (in_flight and not pushed):
            self._await_result()
        elif not pushed:
            self._idle()
        self._tell()

    # ------------------------------------------------------------------ in

    def _receive(self) -> None:
        """Queue what the tokenizer made ready; end what the frontend aborted or a stop string ended."""
        begin = time.monotonic_ns()
        received = self._intake.available()
        for _ in range(received):
            rows, generations = read_intake(self._intake.peek().payload)
            for row, generation in zip(rows.tolist(), generations.tolist(), strict=True):
                self.rows.enqueue(row, generation)
            fault("scheduler.intake_taken")
            self._intake.release()
        self.rows.observe()
        if received:
            self._trace.span(What.INTAKE, 0, begin, time.monotonic_ns())

    # ------------------------------------------------------------------ out

    def _push(self) -> bool:
        """Plan the next step straight into the ring and publish it. False if there is nothing to run."""
        begin = time.monotonic_ns()
        if not self.steps.in_flight:
            self._meet_new_gpu()
        step = self._next_step
        view = self._step_views[self._queue.head % len(self._step_views)]
        flight = self.steps.plan(view, step)
        planned = time.monotonic_ns()
        if flight is None:
            return False
        self._next_step += 1
        view.gpu_epoch = self._gpu_epoch
        fault("scheduler.step_planned")
        self._queue.publish(view.used_nbytes, view.kind, source_seq=step)
        fault("scheduler.step_pushed")
        end = time.monotonic_ns()
        self._trace.span(What.PLAN, step, begin, planned)
        self._trace.span(What.PUSH, step, planned, end)
        stats = self._stats
        stats.add("steps_total")
        stats.add("mixed_steps_total" if view.kind else "decode_steps_total")
        stats.add("prepare_ns_total", end - begin)
        stats.observe("prepare_s", (end - begin) * 1e-9)
        self._export()  # who was admitted shows while the step runs, not only once it is done
        self._audited = False
        return True

    def _tell(self) -> None:
        """Tell the detokenizer what rows gained or ended: tokens, count, finish and done are in the ledger by now."""
        told = len(self.rows.outbox)
        self._progress.send(self.rows.outbox, self._next_step - 1)
        self.rows.outbox.clear()
        if told:
            fault("scheduler.progress_told")

    # ------------------------------------------------------------------ waiting

    def _await_result(self) -> None:
        """Wait for the oldest step in flight and work its result in.

        With room for another step, a request that comes meanwhile ends the wait: it need not wait for the device. So
        does room in the progress ring if something is late.
        """
        results, intake, progress = self._results, self._intake, self._progress
        begin = time.monotonic_ns()
        if len(self.steps.in_flight) < self._depth:
            self._wait(lambda: results.available() > 0 or intake.available() > 0 or progress.can_send)
        else:
            self._wait(lambda: results.available() > 0 or progress.can_send)
        end = time.monotonic_ns()
        self._stats.add("wait_ns_total", end - begin)
        self._trace.span(What.WAIT, self.steps.in_flight[0].step, begin, end)
        if results.available() == 0 or self._drop_stale():
            return
        slot = results.peek()
        fault("scheduler.result_seen")
        expected = self._queue.head - len(self.steps.in_flight)  # place of the oldest step in flight in the step ring
        view = self._result_views[slot.seq % len(self._result_views)]
        if slot.kind == RESULT_DROPPED:
            self._meet_new_gpu()
            flight = self.steps.drop()
        else:
            flight = self.steps.apply(view)
        is_next = view.step == flight.step and slot.source_seq == expected
        assert is_next or wrong("scheduler.takes_old_results"), (
            f"result of step {view.step}, record {slot.source_seq}; expected step {flight.step}, record {expected}"
        )
        fault("scheduler.result_worked_in")
        results.release()
        fault("scheduler.result_released")
        processed = time.monotonic_ns()
        self._trace.span(What.PROCESS, flight.step, end, processed)
        self._stats.add("process_ns_total", processed - end)
        self._stats.observe("process_s", (processed - end) * 1e-9)
        self._export()

    def _meet_new_gpu(self) -> None:
        """Let all rows begin anew, from the ledger, if the gpu process is another one than before.

        Epoch first, then the memory, which is stored before it. If that is of a later epoch already, the process of the
        one that was seen is dead and has run nothing of what is planned for it: nothing is counted until the next call.
        """
        control = self._stage.control
        epoch = control.epoch("gpu")
        if epoch != self._gpu_epoch:
            self._gpu_epoch = epoch
            self.steps.lose_device(control.memory("gpu"), control.streak("gpu"))

    def _drop_stale(self) -> bool:
        """Drop the oldest result if a scheduler that died had queued its step: the rows in it were queued again."""
        slot = self._results.peek()
        stale: bool = self._result_views[slot.seq % len(self._result_views)].step < self._first_step
        if wrong("scheduler.takes_old_results") and self.steps.in_flight:
            stale = False
        if stale:
            self._results.release()
            # The device may wait for this very slot, the others being promised to steps that run. A release rings for
            # a full ring only, and this one need not be; the results of the steps of one scheduler never fill it.
            self._stage.doorbells["gpu"].ring()
            self._stats.add("stale_results_total")
        return stale

    def _idle(self) -> None:
        """Nothing runs and nothing can: check that no page was lost, then wait on the doorbell."""
        rows, results, queue, progress = self.rows, self._results, self._queue, self._progress
        if results.available() > 0:
            assert self._drop_stale(), "a result of a step that nobody queued"
            return
        if queue.space() == 0:  # after restarts in a row: what the ones before queued is still to be run
            self._wait(lambda: queue.space() > 0 or results.available() > 0 or progress.can_send)
            return
        if not self._audited and not self._stage.stopping:
            assert not rows.waiting and not rows.state.running, "work is waiting, and nothing runs"
            check_conservation(rows)
            self._audited = True
            self._export()
        intake, stage = self._intake, self._stage
        self._wait(lambda: intake.available() > 0 or results.available() > 0 or progress.can_send or stage.stopping)

    def _say_last_words(self) -> None:
        """Give the detokenizer a moment to take what it has not been told. If it is gone, so is whom it would tell."""
        end_s = time.monotonic() + LAST_WORDS_S
        while self._progress.behind and time.monotonic() < end_s:
            self._bell.wait(lambda: self._progress.can_send)
            self._stage.beat()
            self._tell()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait at the doorbell; whoever dies here has died of no request."""
        control = self._stage.control
        control.set_at_work("scheduler", False)
        self._bell.wait(ready)
        control.set_at_work("scheduler", True)

    def _export(self) -> None:
        rows, stats = self.rows, self._stats
        stats.set("running", rows.state.running)
        stats.set("queued", len(rows.waiting))
        stats.set("pages_free", rows.pool.free)
        stats.set("pages_cached", rows.cache.cached)
        stats.set("pages_rows", rows.pages_in_rows)
        stats.set("pages_total", rows.pool.usable)


def main() -> None:
    with child.start() as stage:
        stage.take_over()
        Scheduler(stage).run()


if __name__ == "__main__":
    main()
