"""The supervisor: parent of all stages. Creates what they share, starts, watches and stops them, and buries them.

Owns the life and death of every process and the state word of the server. It opens no model, parses no request, and
never returns while anything that it started is alive. Its signal handlers only enqueue.

    STARTING --all ready--> READY --SIGTERM, SIGINT--> DRAINING --no open rows--> stopped in reverse: exit 0
        drained too slowly: FAILED, the clients are told, the rest is killed: exit 0
        a stage ends by itself, with whatever status, or hangs: it alone is started again, in a new epoch; its standby
            takes its place if there is one (`standbys`)
        it cannot start at all, or dies too often in a row: FAILED, the clients are told, the rest is killed: exit 1
        a second signal, not in the same breath: everything is killed at once: exit 128 + its number
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from procs.burials import END_SECONDS, Burials
from procs.child_specs import CHILD_SPECS, ChildSpec, child_environment
from procs.log_line import LogLine
from procs.report import Report
from procs.restarts import LOOK_SECONDS, Deaths, Obituaries, is_sound
from procs.server_memory import ServerMemory
from procs.signal_pipe import ASKED, SignalPipe
from procs.stage_process import LAST_WORDS_SECONDS, StageProcess
from procs.standbys import Standbys
from procs.verdicts import Verdict, Verdicts
from shm.config import ServerConfig
from shm.control import DRAINING, READY, STARTING
from shm.faults import fault
from shm.trace import What

TELL_CLIENTS_SECONDS = 1.0  # after a death, for the frontend to send its error events and end
SAME_BREATH_SECONDS = 0.1  # `timeout` and others signal a process and its group: one wish, two signals
LOOK_AGAIN_SECONDS = 0.02  # between two looks at the open rows

assert TELL_CLIENTS_SECONDS + LAST_WORDS_SECONDS < 2, "from a death to the end of the server"


class StageFailed(Exception):
    """A stage ended, or did not get ready, by itself."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage


class EndAtOnce(Exception):
    """A second signal came."""

    def __init__(self, caught: int) -> None:
        super().__init__(signal.Signals(caught).name)
        self.status = 128 + caught


class Supervisor:
    """One server, from its start to its end. `listener` is bound already and is closed by whoever opened it.

    `interrupted_by` is the signal that ended it, 0 if none did.
    """

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        specs: Sequence[ChildSpec] = CHILD_SPECS,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._specs = specs
        self._environ = os.environ if environ is None else environ
        self._children: list[StageProcess] = []
        self._deaths = {spec.stage: Deaths(spec) for spec in specs}
        self._obituaries = Obituaries(self._counter)
        self._due_s: dict[str, float] = {}  # stages that wait for their next start, and until when
        self._sound: set[str] = set()  # stages whose last process left its memory as it should be
        self._burials = Burials()
        self._looked_s = 0.0  # at the stages
        self._signals = SignalPipe()
        self._stopping = False
        self.interrupted_by = 0
        self._interrupted_s = 0.0

    def run(self, report: Report) -> int:
        """Serve until told to stop, in the main thread. Return the exit status of the program.

        Raises StartupError when there is too little shared memory. Nothing is left behind, however it ends.
        """
        self._report = report
        self._memory = ServerMemory(self._config)
        self._stats = self._memory.stats.writer("supervisor")
        self._line = LogLine(self._memory.stats, self._config.log_seconds)
        specs = self._specs if self._config.standby else ()
        spawn = partial(self._spawn, standby=True)
        self._standbys = Standbys(specs, spawn, self._stats, report.note, self._burials)
        self._verdicts = Verdicts(self._memory.control.heartbeat_ns)
        failure: StageFailed | None = None
        status = 0
        try:
            with self._signals, selectors.DefaultSelector() as self._selector:
                self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
                self._standbys.watch_with(self._selector)
                try:
                    self._serve()
                except StageFailed as error:
                    failure, status = error, 1
                    self._tell_clients(error.stage, str(error))
                except EndAtOnce as end:
                    status = end.status
                    self._report.note(f"{end}: ended at once")
                finally:
                    self._bury()
        finally:
            self._note(self._obituaries.rest())
            self._memory.close()
        if failure is not None:
            self._report.failed(str(failure))
        return status

    def stop(self) -> None:
        """Do as on a first SIGTERM. Safe in any thread, at any time, any number of times."""
        self._signals.ask()

    def _serve(self) -> None:
        control = self._memory.control
        begin_ns = time.monotonic_ns()
        control.set_epoch("supervisor", 1)
        control.set_pid("supervisor", os.getpid())
        control.set_serves("supervisor", 1)
        for spec in self._specs:
            try:
                self._children.append(self._start(spec))
            except OSError as error:
                raise StageFailed(spec.stage, f"it cannot be started: {error.strerror}") from error
        self._until(lambda: self._stopping or all(child.is_ready for child in self._children), self._look_after)
        if not self._stopping:
            control.state = READY
            self._memory.kick_all()
            self._memory.trace.writer("supervisor").span(What.START, 0, begin_ns, time.monotonic_ns())
            self._report.ready()
            self._until(lambda: self._stopping, lambda: _soonest(self._log(), self._look_after()))
            if not self._drain():
                return  # the clients were told, and nothing is left to be finished: the burial kills, hung or not
        control.state = DRAINING  # before anybody is asked to end: who is asked by somebody else dies of it
        for child in reversed(self._children):
            self._stop(child)

    def _start(self, spec: ChildSpec) -> StageProcess:
        control = self._memory.control
        epoch = control.epoch(spec.stage) + 1
        if spec.stage not in self._sound:
            control.set_memory(spec.stage, epoch)  # before the epoch: whoever sees that knows what is left
        control.set_epoch(spec.stage, epoch)
        standby = self._standbys.take(spec.stage)
        if standby is not None:
            standby.take_over(epoch)
        child = standby or self._spawn(spec)
        control.set_pid(spec.stage, child.pid)
        self._verdicts.watch(child, spec.asleep_seconds if epoch > 1 else math.inf)
        child.watch(self._selector, partial(self._hear, child), partial(self._died, child))
        return child

    def _spawn(self, spec: ChildSpec, standby: bool = False) -> StageProcess:
        env = child_environment(spec, self._config, self._environ)
        return StageProcess(spec, self._memory, env, self._listener.fileno(), standby)

    def _until(self, condition: Callable[[], bool], look: Callable[[], float | None] = lambda: None) -> None:
        """Handle what comes until `condition()`. `look` is called every turn; it returns the seconds to the next."""
        while not condition():
            for key, _ in self._selector.select(look()):
                if self._selector.get_map().get(key.fd) is key:  # not forgotten because of one before it
                    key.data()

    def _take_signals(self) -> None:
        for caught in self._signals.take():
            now_s = time.monotonic()
            if caught != ASKED and not self.interrupted_by:
                self.interrupted_by, self._interrupted_s = caught, now_s
            elif caught != ASKED and now_s - self._interrupted_s > SAME_BREATH_SECONDS:
                raise EndAtOnce(caught)
            self._stopping = True

    def _hear(self, child: StageProcess) -> None:
        for event, text in child.listen():
            if event == "progress":
                self._report.progress(child.stage, text)
            if event == "ready":
                self._serves(child)
        if child.silent:
            self._selector.unregister(child.ready_fd)

    def _died(self, child: StageProcess) -> None:
        """A stage is dead: bury it, and have it started again. Raises StageFailed where that is no use: for what it
        says itself before the server is ready, and for deaths that are too many.
        """
        assert child.wait_exit(0)
        self._stats.add("deaths_total")
        child.unwatch(self._selector)
        stage, reason, now_s = child.stage, child.how_it_ended(), time.monotonic()
        sound = is_sound(stage, self._config.device, self._burials.take(child), child.error, hung=child.verdict)
        # One that never served may not have looked at what its predecessor left: that is as sound as it was.
        sound = sound and (child.is_ready or stage in self._sound)
        (self._sound.add if sound else self._sound.discard)(stage)
        self._memory.control.died(stage, reason)
        fault("supervisor.stage_buried")
        if child.error and self._memory.control.state == STARTING:
            raise StageFailed(stage, reason)
        served_s = self._memory.control.heartbeat_ns(stage) / 1e9 - child.ready_s if child.is_ready else 0.0
        self._try_later(stage, reason, served_s)  # a hang is no service, however long it takes to be noticed
        self._note(self._obituaries.died(stage, reason, now_s))

    def _try_later(self, stage: str, reason: str, served_s: float = 0.0) -> None:
        """Have a stage started again when it is due. Raises StageFailed where it has been tried too often."""
        deaths, now_s = self._deaths[stage], time.monotonic()
        delay_s = deaths.died(now_s, served_s, self._memory.given_up())
        if deaths.in_a_row == 1:
            self._memory.control.set_streak(stage, self._memory.control.deaths(stage))
        if delay_s is None:
            raise StageFailed(stage, f"{reason}; it has died too often, {deaths.told}")
        self._due_s[stage] = now_s + delay_s

    def _restart(self, stage: str) -> None:
        del self._due_s[stage]
        place = next(i for i, child in enumerate(self._children) if child.stage == stage)
        try:
            self._children[place] = self._start(self._children[place].spec)
        except OSError as error:  # no room for a process, or for a descriptor: there may be some soon
            self._try_later(stage, f"it cannot be started: {error.strerror}")
            return
        self._stats.add("restarts_total")
        control = self._memory.control
        control.set_restarts(stage, control.restarts(stage) + 1)
        fault("supervisor.stage_started")
        self._memory.kick_all()  # whoever heard the one that died looks at the epoch, and hears it no more

    def _serves(self, child: StageProcess) -> None:
        """It is ready, perhaps again: then whoever has to know of it looks at its epoch."""
        control = self._memory.control
        epoch = control.epoch(child.stage)
        control.set_serves(child.stage, epoch)
        self._obituaries.is_back(child.stage, epoch, time.monotonic())
        if epoch > 1:
            self._memory.kick_all()

    def _look_after(self) -> float:
        """Start what is due, find who hangs. Return the seconds until the next look. May raise StageFailed."""
        now_s = time.monotonic()
        for stage in [stage for stage, due_s in self._due_s.items() if due_s <= now_s]:
            self._restart(stage)
        if now_s - self._looked_s >= LOOK_SECONDS:
            self._looked_s = now_s
            for child in self._children:
                if verdict := self._verdicts.of(child, now_s):
                    self._kill(child, verdict)
            self._note(self._burials.look(now_s))
            self._note(self._obituaries.due(now_s))
            self._standbys.look(now_s, self._calm_since_s())
        return max(0.0, min(self._looked_s + LOOK_SECONDS, *self._due_s.values(), now_s + LOOK_SECONDS) - now_s)

    def _calm_since_s(self) -> float | None:
        """Since when every stage serves; None while one does not, and while the server starts or ends."""
        serve = self._memory.control.state == READY and all(c.is_ready and c.lives for c in self._children)
        return max(child.ready_s for child in self._children) if serve else None

    def _kill(self, child: StageProcess, verdict: Verdict) -> None:
        """End a stage. `_died` is called once it is dead, and only then somebody may take its place."""
        if self._memory.control.state == STARTING and not verdict.hangs:
            raise StageFailed(child.stage, verdict.reason)
        self._stats.add("hangs_total", int(verdict.hangs))
        self._burials.kill(child, verdict.reason)
        self._memory.control.set_pid(child.stage, 0)  # whatever it may still do, it is down
        if not child.silent:  # nobody listens to it any more
            self._selector.unregister(child.ready_fd)

    def _note(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._report.note(line)

    def _counter(self, stage: str, name: str) -> int:
        return int(self._memory.stats.read_stage(stage)[name])  # type: ignore[arg-type]

    def _log(self) -> float | None:
        """Say what the server does, once per interval; return the seconds to the next time."""
        if not self._config.log_seconds:
            return None
        line, seconds = self._line.next(time.monotonic())
        if line is not None:
            self._report.log(line)
        return seconds

    def _drain(self) -> bool:
        """Stop admission, and wait until no request is open or the time for it is over. Return whether all are done."""
        self._memory.control.state = DRAINING
        self._memory.kick_all()
        seconds = self._config.drain_seconds
        deadline_s = time.monotonic() + seconds
        if open_rows := self._memory.open_rows():
            self._report.note(
                f"finishing {open_rows} open requests, at most {seconds:g} s; a second signal ends at once"
            )
        # The frontend may have looked at the state just before and be about to open a row: look more than once.
        empty_looks = 0

        def finished() -> bool:
            nonlocal empty_looks
            empty_looks = 0 if self._memory.open_rows() else empty_looks + 1
            return empty_looks > 2 or time.monotonic() >= deadline_s

        self._until(finished, lambda: _soonest(LOOK_AGAIN_SECONDS, self._look_after()))
        if open_rows := self._memory.open_rows():
            self._report.note(f"{open_rows} requests were not finished after {seconds:g} s")
            self._forget_all()
            self._tell_clients("supervisor", f"it was shut down, and {seconds:g} s did not suffice for this request")
        return not open_rows

    def _stop(self, child: StageProcess) -> None:
        """Ask a child to end, kill it if it takes too long, and say so. From here on nobody's end is a failure."""
        self._forget_all()
        asked = child.is_ready and child.lives  # others have nothing to finish
        if asked:
            child.terminate()
            deadline_s = time.monotonic() + child.spec.stop_seconds
            self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: None)
            self._until(
                lambda: child.wait_exit(0) or time.monotonic() >= deadline_s,
                lambda: max(0.0, deadline_s - time.monotonic()),
            )
            self._selector.unregister(child.pidfd)
        late = asked and not child.exited
        child.collect()  # or kill it: `_bury` waits for it
        if late:
            self._report.note(f"{child.stage} did not stop within {child.spec.stop_seconds:g} s and was killed")
        elif child.status and child.is_ready:
            self._report.note(f"{child.stage} stopped with status {child.status}")

    def _forget_all(self) -> None:
        """Watch the signals only."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._signals:
                self._selector.unregister(key.fileobj)

    def _tell_clients(self, stage: str, reason: str) -> None:
        """Publish why `stage` ends the server, and give the frontend, if it lives, its time to tell every client."""
        self._memory.control.fail(reason)
        self._memory.kick_all()
        for child in self._children:
            if child.spec.listens and child.is_ready and child.stage != stage:
                child.wait_exit(TELL_CLIENTS_SECONDS)

    def _bury(self) -> None:
        self._standbys.bury()
        self._note(self._burials.end(self._children, END_SECONDS))


def _soonest(*seconds: float | None) -> float | None:
    return min((s for s in seconds if s is not None), default=None)
