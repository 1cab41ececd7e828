"""The server's log line: what it has done since the last one, from the counters that every stage keeps.

Owns the wording and the differences. It reads the stats segment and nothing else, costs the stages nothing, and says
nothing while nothing happens.
"""

from typing import Any

from shm.limits import WINDOW_MAX
from shm.stats import Stats, accepted_runs


class LogLine:
    """What has happened from one call of `next` to the other."""

    def __init__(self, stats: Stats, seconds: float) -> None:
        """seconds: between two lines."""
        self._stats = stats
        self._seconds = seconds
        self._due_s = float("-inf")
        self._last_s = 0.0
        self._last: dict[str, dict[str, Any]] = {}

    def next(self, now_s: float) -> tuple[str | None, float]:
        """A line if one is due and there is something to say; and the seconds until the next is due."""
        if now_s < self._due_s:
            return None, self._due_s - now_s
        values = {stage: self._stats.read_stage(stage) for stage in ("scheduler", "gpu")}
        line = self._line(values, now_s - self._last_s) if self._last else None
        self._last, self._last_s, self._due_s = values, now_s, now_s + self._seconds
        return line, self._seconds

    def _line(self, values: dict[str, dict[str, Any]], seconds: float) -> str | None:
        def gained(stage: str, name: str) -> float:
            return float(values[stage][name]) - float(self._last[stage][name])

        scheduler = values["scheduler"]
        if not gained("scheduler", "steps_total"):
            return None
        parts = [f"running {scheduler['running']:.0f}", f"queued {scheduler['queued']:.0f}"]
        parts.append(f"{gained('scheduler', 'decode_tokens_total') / seconds:.1f} tokens/s")
        prefill = gained("scheduler", "prefill_tokens_total")
        if prefill:
            parts.append(f"prefill {prefill / seconds:.0f} tokens/s")
        runs = [gained("scheduler", accepted_runs(drafts)) for drafts in range(WINDOW_MAX)]
        if sum(runs):
            length = sum(rows * (1 + drafts) for drafts, rows in enumerate(runs)) / sum(runs)
            parts.append(f"accept length {length:.2f}")
        parts.append(f"cache {1 - scheduler['pages_free'] / max(1.0, scheduler['pages_total']):.0%}")
        if gained("scheduler", "retractions_total"):
            parts.append(f"retracted {gained('scheduler', 'retractions_total'):.0f}")
        gaps = gained("gpu", "gaps_total")
        if gaps:
            parts.append(f"gap {gained('gpu', 'device_idle_ns_total') / gaps / 1e6:.2f} ms")
        return ", ".join(parts)
