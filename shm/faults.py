"""Fault points: named places at which a test lets a stage die, stop, hang, dawdle or fail.

Off, and no more than the call of an empty function, unless the variable STEPAHEAD_FAULTS names some when the process
starts. Owns the names and the actions; what must happen at each place is a table in ARCHITECTURE.md. It may never
change anything by itself.

    STEPAHEAD_FAULTS="gpu.after_forward=crash  scheduler.tokens_stored=stop@3  tokenizer.row_taken=crash#*?77"

    NAME=ACTION[@N][+SECONDS][#EPOCH][?VALUE]   or   WRONG

ACTION is crash, abort, segv, stop, hang, exit, raise or delay:SECONDS. It happens at the N-th pass (1 if not said) of
the process that has this epoch (1 if not said, * = every one); if VALUE is said, of those passes that concern it; if
SECONDS are said, of those that come so long after the process' first pass anywhere.
A WRONG is a rule of the recovery that a stage then breaks, for whoever has to find out whether that would be noticed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

VARIABLE = "STEPAHEAD_FAULTS"

NAMES = (
    "tokenizer.row_taken",
    "tokenizer.planes_written",
    "tokenizer.row_ready",
    "tokenizer.intake_told",
    "tokenizer.accepted_told",
    "tokenizer.question_taken",
    "tokenizer.question_answered",
    "scheduler.intake_taken",
    "scheduler.row_admitted",
    "scheduler.step_planned",
    "scheduler.step_pushed",
    "scheduler.result_seen",
    "scheduler.tokens_stored",
    "scheduler.count_stored",
    "scheduler.finish_stored",
    "scheduler.done_stored",
    "scheduler.result_worked_in",
    "scheduler.result_released",
    "scheduler.progress_told",
    "gpu.step_seen",
    "gpu.step_launched",
    "gpu.after_forward",
    "gpu.result_published",
    "gpu.step_released",
    "gpu.drop_published",
    "detokenizer.records_read",
    "detokenizer.row_in_hand",
    "detokenizer.stop_counted",
    "detokenizer.stop_stored",
    "detokenizer.text_sent",
    "detokenizer.records_released",
    "detokenizer.rebuilding",
    "frontend.row_opened",
    "frontend.row_sent",
    "frontend.text_taken",
    "frontend.delivered_stored",
    "frontend.row_freed",
    "supervisor.stage_buried",
    "supervisor.stage_started",
)
# Rules that can be broken.
WRONGS = (
    "scheduler.counts_before_tokens",
    "scheduler.takes_old_results",
    "gpu.runs_old_steps",
    "text.ignores_delivered",
)
_PLAN = re.compile(
    r"([\w.]+)=(crash|abort|segv|stop|hang|exit|raise|delay:[\d.]+)(?:@(\d+))?(?:\+([\d.]+))?(?:#(\d+|\*))?(?:\?(\d+))?"
)
_SIGNALS = {"crash": signal.SIGKILL, "abort": signal.SIGABRT, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}

Values = Callable[[], Iterable[int]]


class Fault(Exception):
    """What the action raise raises."""


@dataclass
class Plan:
    """One entry of the variable."""

    action: str
    left: int  # passes until it happens
    after_s: float
    epoch: int | None
    value: int | None

    def meets(self, epoch: int, served_s: float, values: Values | None) -> bool:
        """Whether it happens at this pass."""
        if self.epoch not in (None, epoch) or served_s < self.after_s:
            return False
        if self.value is not None and (values is None or self.value not in values()):
            return False
        self.left -= 1
        return self.left == 0

    def happen(self, name: str) -> None:
        """Do it."""
        if self.action == "exit":
            os._exit(0)
        if self.action == "raise":
            raise Fault(name)
        while self.action == "hang":
            time.sleep(3600)  # one thread of the process; the others go on
        if self.action.startswith("delay:"):
            time.sleep(float(self.action.removeprefix("delay:")))
        else:
            os.kill(os.getpid(), _SIGNALS[self.action])


def parse(text: str) -> dict[str, list[Plan]]:
    """The plans of the variable, by name. Raises ValueError for what it cannot mean."""
    plans: dict[str, list[Plan]] = {}
    for word in text.split():
        if word in WRONGS:
            continue
        match = _PLAN.fullmatch(word)
        if match is None or match[1] not in NAMES:
            raise ValueError(f"{VARIABLE}: {word!r} is no fault")
        name, action, passes, after, epoch, value = match.groups()
        which = None if epoch == "*" else int(epoch or 1)
        plans.setdefault(name, []).append(
            Plan(action, int(passes or 1), float(after or 0), which, int(value) if value else None)
        )
    return plans


class Faults:
    """The faults of one process."""

    def __init__(self, text: str) -> None:
        """text: of the variable. Raises ValueError for what it cannot mean."""
        self._plans = parse(text)
        self._wrongs = frozenset(text.split()) & frozenset(WRONGS)
        self.epoch = 1
        self._first_s = 0.0

    def point(self, name: str, values: Values | None = None) -> None:
        """A process passes here."""
        assert name in NAMES, name
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        met = [plan for plan in self._plans.get(name, ()) if plan.meets(self.epoch, now_s - self._first_s, values)]
        for plan in met:
            plan.happen(name)

    def does_wrong(self, name: str) -> bool:
        """Whether the rule is to be broken."""
        assert name in WRONGS, name
        return name in self._wrongs


def _off(_name: str, _values: Values | None = None) -> None:
    """No fault is wanted."""


def _right(_name: str) -> bool:
    """No rule is to be broken."""
    return False


FAULTS = Faults(os.environ.get(VARIABLE, ""))
# Call it with a name of NAMES; `values` gives the numbers that are concerned, such as seeds, if somebody asks.
fault: Callable[..., None] = FAULTS.point if os.environ.get(VARIABLE) else _off
wrong: Callable[[str], bool] = FAULTS.does_wrong if os.environ.get(VARIABLE) else _right
