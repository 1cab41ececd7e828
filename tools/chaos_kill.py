"""Who dies, when and how: the plan of a run from its seed, and the killing of one process with a clock beside it.

Owns signals to stages and the watching of their end. The plan is pure. What is known of a death is what the kernel
shows to anybody: when the process was dead, when its parent had collected it, when its successor was there.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shm.limits import DEATHS_IN_A_ROW, STABLE_SECONDS
from tools.chaos_exit import exit_now
from tools.chaos_processes import STAGES, SUPERVISOR, stages_below, stat_of

EXIT = "exit"
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("KILL", "STOP", "ABRT", "SEGV", "TERM", "BUS", "ILL")}
HOWS = (*SIGNALS, EXIT)
TOGETHER = "+"  # between stages that are killed together, or one while the other comes back
APART_S = 0.5  # at most, between two that are killed together; half of them in the same breath
KILLS_A_PHASE = 100  # of all cells in turn: many are better than few for what repeats, few for what is left behind
# A stage that dies so often in a row, having served for less than so long each time, is given that long once.
IN_A_ROW_MAX, STABLE_S = DEATHS_IN_A_ROW - 1, STABLE_SECONDS + 0.2
LOOK_S = 0.001  # between two looks at a process that is about to be collected


class KillError(Exception):
    """Something that the person at the terminal can mend; its text is the one line to show."""


@dataclass(frozen=True)
class Cell:
    """One line of the report: what is killed, and how."""

    target: str
    how: str

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(self.target.split(TOGETHER))


@dataclass(frozen=True)
class Kill:
    """A planned kill: so long after the server has recovered from the last one, each stage so long after the first."""

    cell: Cell
    wait_s: float
    apart_s: tuple[float, ...]


def cells_of(stages: str, hows: str) -> list[Cell]:
    """All pairs, stage by stage. stages: names with commas, joined by + where they die together, or `all`."""
    targets = [part for name in stages.split(",") for part in (STAGES if name == "all" else [name] if name else [])]
    for target in targets:
        for stage in target.split(TOGETHER):
            if stage not in (*STAGES, SUPERVISOR) or (stage == SUPERVISOR != target):
                raise KillError(f"--stage: {target} is none of all, {', '.join(STAGES)}, {SUPERVISOR}, or some with +")
    for how in hows.split(","):
        if how not in HOWS:
            raise KillError(f"--signal: {how} is none of {', '.join(HOWS)}")
    return [Cell(target, how) for target in targets for how in hows.split(",")]


def plan(seed: int, cells: Sequence[Cell], kills: int, wait_s: tuple[float, float]) -> Iterator[list[Kill]]:
    """The kills of each phase, in all `kills` of each cell; their order and all instants are the seed's choice.

    wait_s: the least and the most from recovery to kill, longer where a stage has died often in a row. A server whose
    supervisor dies has one kill only.
    """
    rng = random.Random(seed)
    mixed = [cell for cell in cells if SUPERVISOR not in cell.stages]
    each = max(1, KILLS_A_PHASE // max(1, len(mixed)))
    rows = _Rows()
    for done in range(0, kills if mixed else 0, each):
        some = mixed * min(each, kills - done)
        rng.shuffle(some)
        yield [rows.spaced(_kill(rng, cell, wait_s)) for cell in some]
    for cell in cells:
        if cell not in mixed:
            yield from ([_kill(rng, cell, wait_s)] for _ in range(kills))


class _Rows:
    """How often each stage has died in a row. A server gives up on too many of them, which is no fault of its own."""

    def __init__(self) -> None:
        self._now = 0
        self._deaths: dict[str, tuple[int, int]] = {}  # by stage: how many in a row, and in which kill the last

    def spaced(self, kill: Kill) -> Kill:
        """The kill, late enough for its stages to have served for a while if they have died often."""
        self._now += 1
        before = {stage: self._in_a_row(stage) for stage in kill.cell.stages}
        late = any(count + kill.cell.stages.count(stage) > IN_A_ROW_MAX for stage, count in before.items())
        for stage, count in before.items():
            self._deaths[stage] = ((0 if late else count) + kill.cell.stages.count(stage), self._now)
        return replace(kill, wait_s=kill.wait_s + STABLE_S) if late else kill

    def _in_a_row(self, stage: str) -> int:
        count, at = self._deaths.get(stage, (0, 0))
        return count if self._now - at <= 2 else 0  # two other kills take the second that ends a row


def _kill(rng: random.Random, cell: Cell, wait_s: tuple[float, float]) -> Kill:
    apart_s = (0.0, *(rng.choice((0.0, rng.uniform(0, APART_S))) for _ in cell.stages[1:]))
    return Kill(cell, rng.uniform(*wait_s), apart_s)


@dataclass
class Death:
    """One process that was killed. Times: perf_counter nanoseconds, 0 = not seen."""

    stage: str
    how: str
    pid: int
    struck_ns: int = 0
    dead_ns: int = 0
    collected_ns: int = 0  # by its parent, which must have noticed
    replaced_ns: int = 0  # its successor was there, not ready yet

    @property
    def detection_ms(self) -> float | None:
        """From the signal until the supervisor had collected the process: the kernel's time to end it is part of it,
        and for what does not die by itself somebody's time to notice.
        """
        return (self.collected_ns - self.struck_ns) / 1e6 if self.struck_ns and self.collected_ns else None


@dataclass
class Strike:
    """One kill that was carried out. Times: perf_counter nanoseconds, 0 = not seen."""

    kill: Kill
    deaths: list[Death]
    recovered_ns: int = 0  # a request that was sent behind the last death had its first token, by new processes

    @property
    def at_ns(self) -> int:
        return self.deaths[0].struck_ns

    @property
    def replaced_ns(self) -> int:
        """When the last of the successors was there."""
        times_ns = [death.replaced_ns for death in self.deaths]
        return max(times_ns) if all(times_ns) else 0

    @property
    def recovery_ms(self) -> float | None:
        """From the last death to the first token of a request that was sent behind it."""
        return (self.recovered_ns - self.deaths[-1].struck_ns) / 1e6 if self.recovered_ns else None


class Victim:
    """One process that is about to be killed: its number cannot come to mean another one meanwhile."""

    def __init__(self, stage: str, pid: int) -> None:
        """Raises OSError if it is gone already."""
        self.stage = stage
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        stat = stat_of(pid)
        self._start = stat.start if stat else -1

    def strike(self, death: Death) -> None:
        """Kill it, as `death` says. Raises OSError if it is gone, or may not be traced."""
        death.struck_ns = time.perf_counter_ns()
        if death.how == EXIT:
            exit_now(self.pid)
        else:
            signal.pidfd_send_signal(self._pidfd, SIGNALS[death.how])

    def watch(self, death: Death, seconds: float) -> None:
        """Wait until it is dead and collected; what does not happen within `seconds` stays 0.

        For a thread that waits already when the process is struck, or its clock would start late.
        """
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(seconds * 1000):
            return
        death.dead_ns = time.perf_counter_ns()
        while (stat := stat_of(self.pid)) is not None and stat.start == self._start:
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)
        death.collected_ns = time.perf_counter_ns()

    def close(self) -> None:
        os.close(self._pidfd)


def find(supervisor: int, stage: str, other_than: int = 0) -> int | None:
    """The pid of a stage that lives and is not `other_than`, or None."""
    pid = stages_below(supervisor).get(stage)
    return None if pid == other_than else pid
