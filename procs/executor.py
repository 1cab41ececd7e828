"""The gpu process: takes steps from the step ring, queues them on the device, and never waits for it.

Owns the device, the model and the launch loop. It decides nothing: what a step computes is in its descriptor. The
loop waits for the next descriptor (and for a free result slot) and for nothing else; a step's end is the business of
the copy stream, which writes the result straight into the result ring and only then gives the step ring's slot back,
because that slot is the pinned descriptor that the device may still read.

Two threads, each with its own words: the launch loop (heartbeat, launch spans) and the copy stream (result head, step
tail, all other counters). The heartbeat is the device's too: the loop gives none once the device does not get on. A
third thread looks after the memory of the caches and has no words.

What belongs to the device is imported once the stage has booted, so that whatever is wrong with it (a broken numba, a
library that is missing) reaches the supervisor as the reason.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from procs.device_watch import PATIENCE, DeviceTime, DeviceWatch
from shm import child
from shm.config import ServerConfig
from shm.doorbell import STORES_ARE_ORDERED, Doorbell, fence
from shm.faults import fault, wrong
from shm.records import RESULT_DROPPED, SAMPLING_ENTRY, ResultLayout, ResultView, StepLayout, StepView
from shm.ring import RingConsumer, RingProducer
from shm.stats import StatsWriter
from shm.tensor_map import ModelError
from shm.trace import TraceWriter, What

if TYPE_CHECKING:
    from gpu.backend import Backend
    from gpu.device.protocol import Completion
    from gpu.lanes import ResultSlot

SWITCH_INTERVAL_S = 5e-5  # how long a stream may have to wait for the interpreter lock, see gpu.device.host
LAUNCH_LANE, RESULT_LANE = 0, 1  # trace lanes


class Results:
    """The copy stream's part of a step's end: publish, give back, count. Runs on that stream's thread alone."""

    def __init__(
        self,
        steps: RingConsumer,
        results: RingProducer,
        stats: StatsWriter,
        trace: TraceWriter,
        queued_ns: Sequence[int],
    ) -> None:
        """queued_ns: for each slot of the step ring, when its step had been queued; 0 while that goes on."""
        self._queued_ns = queued_ns
        self._steps = steps
        self._results = results
        self._stats = stats
        self._trace = trace
        self._last_end_ns = 0

    def drop(self, slot: ResultSlot, seq: int, step: int) -> None:
        """Answer step ring record `seq` without having run it. Only while no step is in flight."""
        view = slot.view
        view.n_rows, view.window, view.step, view.fault = 0, 1, step, 0
        view.begin_ns = view.end_ns = time.monotonic_ns()
        self._results.publish(slot.buffer.nbytes, RESULT_DROPPED, source_seq=seq)
        fault("gpu.drop_published")
        self._steps.release()
        self._stats.add("dropped_steps_total")

    def complete(self, slot: ResultSlot, seq: int, pushed_ns: int, decode_rows: int) -> None:
        """Publish the result in `slot` of step ring record `seq`, which was pushed at `pushed_ns`."""
        begin_ns = time.monotonic_ns()
        fault("gpu.after_forward")
        self._results.publish(slot.buffer.nbytes, source_seq=seq)
        fault("gpu.result_published")
        queued_ns = self._queued_ns[seq % len(self._queued_ns)]
        self._steps.release()  # last: the scheduler may fill it again from here on
        fault("gpu.step_released")
        view = slot.view
        self._count(view, pushed_ns, queued_ns, decode_rows)
        self._trace.span(What.STEP, view.step, view.begin_ns, view.end_ns)
        self._trace.span(What.RESULT, view.step, begin_ns, time.monotonic_ns())

    def _count(self, view: ResultView, pushed_ns: int, queued_ns: int, decode_rows: int) -> None:
        """Busy and idle time. Idle counts where there was something to do: the step was queued, or a row was running.

        Starved: a row was running, and its next step was pushed only after the one before had ended. Starved time is
        all of the idle time until the step was queued on the device; what is left of a gap is the device's own.
        queued_ns: 0 if it began before all of it was queued.
        """
        stats, begin_ns, end_ns = self._stats, view.begin_ns, view.end_ns
        stats.add("steps_total")
        stats.add("device_busy_ns_total", end_ns - begin_ns)
        stats.observe("step_s", (end_ns - begin_ns) / 1e9)
        late = pushed_ns > self._last_end_ns
        if self._last_end_ns and (decode_rows or not late):
            gap_ns = max(0, begin_ns - self._last_end_ns)
            self._trace.span(What.GAP, view.step, self._last_end_ns, self._last_end_ns + gap_ns)
            stats.add("gaps_total")
            stats.add("device_idle_ns_total", gap_ns)
            stats.observe("step_gap_s", gap_ns / 1e9)
            stats.add("starved_ns_total", min(gap_ns, max(0, (queued_ns or begin_ns) - self._last_end_ns)))
            if late:
                stats.add("starved_total")
        self._last_end_ns = end_ns


class Executor:
    """The launch loop. All of its calls come from one thread."""

    def __init__(
        self,
        config: ServerConfig,
        backend: Backend,
        rings: tuple[RingConsumer, RingProducer],
        stats: StatsWriter,
        traces: tuple[TraceWriter, TraceWriter],
        epoch: int,
        helpers: Sequence[threading.Thread] = (),
    ) -> None:
        """rings: step and result. traces: the lanes of the launch loop and of the copy stream. epoch: of this process;
        what was planned for an earlier one counts on pages and entries that died with it, and is dropped. helpers:
        threads whose work is no sign that the device gets on.
        """
        from gpu.lanes import ResultSlot, StepSlot

        steps, results = rings
        steps.resume_after(results.last_source_seq)  # a predecessor may have died between its two stores
        device = backend.device
        self._device = device
        self._program = backend.program
        self._checks = backend.checks
        self._steps, self._results = steps, results
        self._stats = stats
        self._trace = traces[LAUNCH_LANE]
        # One writer, the launch loop; the copy stream reads a slot's word before it gives the slot back.
        self._queued_ns = [0] * len(steps.ring.payloads)
        self._end = Results(steps, results, stats, traces[RESULT_LANE], self._queued_ns)
        step_layout, result_layout = StepLayout(config), ResultLayout(config)
        self._step_slots = [
            StepSlot.on(device, step_layout, payload, f"step ring {i}") for i, payload in enumerate(steps.ring.payloads)
        ]
        self._result_slots = [
            ResultSlot.on(device, result_layout, payload, f"result ring {i}", i)
            for i, payload in enumerate(results.ring.payloads)
        ]
        self._next = steps.tail  # seq of the next step to launch; the ring's own tail follows as steps end
        self._next_result = results.head
        self._in_flight: deque[Completion] = deque()
        self._epoch = epoch
        self._watch = DeviceWatch(PATIENCE[config.device], worked_s=DeviceTime(*helpers))
        self._seeds_of: dict[int, int] = {}  # by entry; kept only where a fault asks for them

    def serve(self, bell: Doorbell, beat: Callable[[], None], stopping: Callable[[], bool]) -> None:
        """Launch steps until `stopping()` and nothing is queued.

        Raises DeviceError once the device has failed, Hung once it does not get on.
        """
        with self._checks.launch_loop():
            while True:
                if not self._watch.gets_on(self._oldest()):
                    raise child.Hung(f"a step on the device has not ended for {self._watch.waited_s:.1f} s")
                beat()
                self._device.check()
                if bell.wait(self._ready):
                    self.launch_next()
                elif stopping():
                    return

    def launch_next(self) -> None:
        """Queue the next step on the device. Call only when one is there."""
        begin_ns = time.monotonic_ns()
        assert self._credit() > 0, "a step is launched only with its result slot reserved"
        record = self._steps.ring.read(self._next)
        step = self._step_slots[self._next % len(self._step_slots)]
        result = self._result_slots[self._next_result % len(self._result_slots)]
        number, decode_rows = step.view.step, step.view.n_decode
        if step.view.gpu_epoch != self._epoch and not wrong("gpu.runs_old_steps"):
            assert not self._in_flight, f"step {number} is older than those before it"
            self._end.drop(result, self._next, number)
            self._next += 1
            self._next_result += 1
            return
        complete = partial(self._end.complete, result, self._next, record.time_ns, decode_rows)
        mixed = step.view.n_chunks > 0
        fault("gpu.step_seen", partial(_seeds, step.view))
        self._checks.descriptor(step.view)
        place = self._next % len(self._queued_ns)
        self._queued_ns[place] = 0
        self._in_flight.append(self._program.enqueue(step, result, complete))
        end_ns = time.monotonic_ns()
        self._queued_ns[place] = end_ns
        fault("gpu.step_launched", partial(self._seeds_in, step.view))
        self._next += 1
        self._next_result += 1
        self._stats.add("mixed_steps_total" if mixed else "decode_steps_total")
        if not mixed:
            self._stats.add("graph_replays_total")
        self._stats.add("launch_ns_total", end_ns - begin_ns)
        self._trace.span(What.LAUNCH, number, begin_ns, end_ns)

    def _ready(self) -> bool:
        if self._steps.ring.head == self._next or self._credit() <= 0:  # SYNC ring-published
            return False
        if not STORES_ARE_ORDERED:
            fence()
        return True

    def _credit(self) -> int:
        """Free result slots that no step in flight has a claim on.

        Completions are looked at before `space`: a result published in between is then counted against us, never for
        us.
        """
        self._oldest()
        return self._results.space() - len(self._in_flight)

    def _oldest(self) -> Completion | None:
        """The oldest step that has not ended; those that have are forgotten."""
        while self._in_flight and self._in_flight[0].query():
            self._in_flight.popleft()
        return self._in_flight[0] if self._in_flight else None

    def _seeds_in(self, view: StepView) -> list[int]:
        """The seeds of all rows in a step. A row's seed is only in the step that begins it."""
        begun = view.sampling[SAMPLING_ENTRY, : view.n_sampling].tolist()
        self._seeds_of |= dict(zip(begun, _seeds(view), strict=True))
        entries = [*view.decode_entries[: view.n_decode].tolist(), *view.chunks[0, : view.n_chunks].tolist()]
        return [self._seeds_of[entry] for entry in entries if entry in self._seeds_of]


def _seeds(view: StepView) -> list[int]:
    return list(view.seeds().tolist())


def open_backend(stage: child.Child) -> Backend:
    """Open the device and the model; a standby waits for the word first where that cannot be done beside another gpu
    process. Raises StartupError for what the user can mend.
    """
    from gpu import backend
    from gpu.device.protocol import DeviceError

    config = stage.config
    try:
        shared = stage.boot.weights, stage.boot.kv
        return backend.open_backend(config, stage.ledger.tokens, stage.progress, *shared, stage.take_over)
    except MemoryError as error:
        raise child.StartupError(
            f"not enough memory for {config.model.name} and a KV cache of {config.kv_tokens} tokens; lower --kv-tokens"
        ) from error
    except DeviceError as error:
        raise child.StartupError(f"device {config.device}: {error}") from error
    except (OSError, ModelError, ValueError) as error:
        raise child.StartupError(f"{config.model.path}: {error}") from error


def main() -> None:
    """Run the stage until SIGTERM."""
    with child.start() as stage:
        gc.disable()  # a start makes much that stays, and a collection would look at all of it
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        stage.progress(f"loading {stage.config.model.name}")
        opened = open_backend(stage)
        from gpu.warm_up import WarmUp

        device, program = opened.device, opened.program
        stage.progress("warming up")
        begin_ns = time.monotonic_ns()
        # A standby leaves the passes out: they would write to the KV cache, and make memory resident twice.
        with opened.rehearsal() if stage.is_standby else nullcontext():
            graphs = WarmUp(device, stage.config, program).run()
        stage.take_over()
        stats = stage.stats_writer()
        traces = stage.trace(LAUNCH_LANE), stage.trace(RESULT_LANE)
        traces[LAUNCH_LANE].span(What.CAPTURE, 0, begin_ns, time.monotonic_ns())
        stats.add("captures_total", graphs)
        stats.set("graphs", graphs)
        stats.set("kv_bytes", program.kv_bytes)
        rings = stage.ring_consumer("step"), stage.ring_producer("result")
        tender = threading.Thread(target=opened.tend, name="tend caches", daemon=True)
        executor = Executor(stage.config, opened, rings, stats, traces, stage.epoch, (tender,))
        opened.settle(is_kept=stage.control.memory("gpu") < stage.epoch)
        gc.freeze()  # what is here now stays: no collection needs to look at it again
        gc.enable()
        tender.start()
        stage.ready(f"{graphs} graphs")
        executor.serve(stage.own_doorbell, stage.beat, lambda: stage.stopping)
        device.close()


if __name__ == "__main__":
    main()
