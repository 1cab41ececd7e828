"""Processes that have to go and do not yet: killed and still there, or dead and not to be collected.

Owns them until they are gone. It waits for none of them while the server runs, and at its end for a bounded time. Whose
place is free is not decided here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from procs.stage_process import StageProcess

GONE_SECONDS = 1.0  # after it was killed; then it is told
END_SECONDS = 2.0  # at the end of the server, for all of them


class Burials:
    """Calls come from the supervisor's thread."""

    def __init__(self) -> None:
        self._dying: list[StageProcess] = []  # of which nobody has been told yet that they stay
        self._left: list[StageProcess] = []

    def kill(self, child: StageProcess, reason: str) -> None:
        """End a stage, in whose place nobody may be before its pidfd says so."""
        child.condemn(reason)
        self._dying.append(child)

    def take(self, child: StageProcess) -> int | None:
        """Collect one that is nobody's any more, now or later, and kill it if it lives. Returns its status, None if
        that is not known yet.
        """
        if not child.collect() and child not in self._left:
            self._left.append(child)
        return child.status

    def look(self, now_s: float) -> Iterator[str]:
        """Collect who can be; lines about who was killed and is not gone. Never waits."""
        self._left = [child for child in self._left if not child.collect()]
        for child in list(self._dying):
            late = now_s - child.killed_s >= GONE_SECONDS
            if late or child.exited:
                self._dying.remove(child)
            if late and not child.wait_exit(0):
                yield (
                    f"{child.stage} was killed ({child.verdict}), but is not gone: process {child.pid} is held by the "
                    "kernel or a tracer; nobody takes its place before"
                )

    def end(self, rest: Sequence[StageProcess], seconds: float) -> list[str]:
        """Kill and collect them and `rest` within so many seconds, all together; lines about those that are left."""
        left = list(dict.fromkeys([*self._left, *rest]))
        for child in left:
            child.kill()
        deadline_s = time.monotonic() + seconds
        lines = []
        for child in left:
            if child.reap(deadline_s - time.monotonic()) is None:
                why = "which is dead, but its tracer has" if child.exited else "of which the kernel or a tracer has"
                lines.append(f"left behind: {child.stage}, process {child.pid}, {why} not let go")
                child.close()
        self._left, self._dying = [], []
        return lines
