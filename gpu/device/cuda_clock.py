"""The clock of the CUDA device: turns what timing events measure into CLOCK_MONOTONIC ns.

CUDA tells only how long after one event another one was reached, in float32 milliseconds: exact between neighbours,
worthless over minutes. So the distance from each host function's event to the next is added up in whole ns, and any
other moment is told by its distance from the newest of them. Owns that sum, and how far it is from the host's clock:
the least by which the thread that waits for the events was ever late, of late, because the two clocks drift apart.
What it tells is therefore late by the shortest wake-up of that thread (some us), and never later than the moment at
which the thread saw the event.

Belongs to that thread, and may never be asked by another one.
"""

from typing import Any

GAP_MS_MAX = 1000.0  # beyond it float32 is no longer exact to 0.1 us: the sum starts anew
WINDOW_NS = 1_000_000_000  # the least lateness is that of this window and the one before


class CudaClock:
    """Hears of every event that the waiting thread has seen reached, in order."""

    def __init__(self) -> None:
        self._newest: Any = None  # event of the newest host function
        self._device_ns = 0  # its time in the sum
        self._ns = 0  # its time in the host's clock
        self._window_ns = 0  # where the current window began
        self._offsets = (0, 0)  # host time less device time: the least of the window before, and of this one

    def reached(self, event: Any, now_ns: int) -> Any:
        """`event` was seen reached at `now_ns`. Returns the event that it replaces, or None."""
        before, self._newest = self._newest, event
        gap_ms = GAP_MS_MAX if before is None else before.elapsed_time(event)
        if gap_ms < GAP_MS_MAX:
            self._device_ns += round(gap_ms * 1e6)
            offset = now_ns - self._device_ns
            if now_ns - self._window_ns > WINDOW_NS:
                self._offsets = (self._offsets[1], offset)
                self._window_ns = now_ns
            self._offsets = (self._offsets[0], min(self._offsets[1], offset))
        else:
            self._offsets = (now_ns - self._device_ns,) * 2
            self._window_ns = now_ns
        self._ns = self._device_ns + min(self._offsets)
        return before

    def ns(self, event: Any) -> int:
        """CLOCK_MONOTONIC ns at which `event` was reached: one shortly before the newest."""
        before_ms: float = event.elapsed_time(self._newest)
        return self._ns - round(before_ms * 1e6)
