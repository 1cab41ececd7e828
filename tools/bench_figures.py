"""Turns timings and counter differences into the figures of one run, medians over runs, and a table with ratios.

Pure functions over values: no clock, no socket, no printing.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tools.openai_stream import Timing

WINDOWS = "stepahead_windows_total"


@dataclass(frozen=True)
class Figures:
    """One run (or the medians of several) against one server. Times in milliseconds, shares 0..1, None = not told."""

    concurrency: int
    requests: int
    failed: int
    output_tokens: float
    seconds: float
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    inter_token_ms_p50: float
    inter_token_ms_p99: float
    steps_per_s: float | None
    device_idle_share: float | None
    client_cpu_share: float
    gap_us: float | None = None  # of the device between two steps, in the mean
    windows: tuple[float, ...] = ()  # rows of steps with drafts, by how many drafts were accepted
    ratio: float | None = None  # of tokens/s to those of the first server in the same repeat
    rate: float | None = None  # requests a second that were sent, whatever came back; None in a closed loop
    late_ms_p99: float | None = None  # that they left after their time: the client's own fault
    requests_per_s: float | None = None
    ttft_ms_p90: float | None = None
    inter_token_ms_p90: float | None = None
    whole_ms_p50: float | None = None  # until the answer is complete
    whole_ms_p90: float | None = None
    whole_ms_p99: float | None = None
    ttft_ratio: float | None = None  # of the medians, as `ratio`; here less is better
    inter_token_ratio: float | None = None
    whole_ratio: float | None = None

    @property
    def load(self) -> str:
        """What was asked of the server: requests at once, or requests a second."""
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"

    @property
    def accept_length(self) -> float | None:
        """Tokens that a row gained in a step with drafts; None where there were none."""
        rows = sum(self.windows)
        return sum(n * (1 + drafts) for drafts, n in enumerate(self.windows)) / rows if rows else None

    @property
    def accepted_shares(self) -> list[float]:
        """How often the first draft was accepted, the first two, and so on, up to the last one that ever was."""
        behind = np.cumsum(self.windows[::-1])[::-1]
        return [float(share) for share in behind[1:] / behind[0] if share > 0] if sum(self.windows) else []


@dataclass(frozen=True)
class Counters:
    """The server's counters at one moment: steps, seconds that the device was busy and idle between steps, windows."""

    steps: float
    busy: float
    idle: float
    windows: tuple[float, ...] = ()  # see Figures


def read_counters(exposition: str) -> Counters | None:
    """Reads the Prometheus text of /metrics. Returns None when the server does not expose the counters of a step."""
    sums: dict[str, float] = {}
    windows: dict[int, float] = {}
    for line in exposition.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            base = name.partition("{")[0]
            if base == WINDOWS:
                windows[int(name.split('"')[1])] = float(value)
            sums[base] = sums.get(base, 0.0) + float(value)

    def find(word: str) -> float | None:
        own = [(name, value) for name, value in sums.items() if name.startswith("stepahead_gpu_") and word in name]
        found = [value * (1e-9 if "_ns_" in name else 1.0) for name, value in own]
        return found[0] if found else None

    steps, busy, idle = sums.get("stepahead_gpu_steps_total"), find("device_busy"), find("device_idle")
    if steps is None or busy is None or idle is None:
        return None
    return Counters(steps, busy, idle, tuple(windows.get(i, 0.0) for i in range(len(windows))))


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the percentile `share` (0..100) of `values`, or nan for none."""
    return float(np.percentile(values, share)) if len(values) else float("nan")


def figures(
    concurrency: int,
    timings: Sequence[Timing],
    seconds: float,
    cpu_seconds: float,
    before: Counters | None = None,
    after: Counters | None = None,
    rate: float | None = None,
    late_s: Sequence[float] = (),
) -> Figures:
    """Sums up one run: `timings` of all its requests, `seconds` from the first request to the last answer.

    concurrency: of an open loop (of that `rate`), the most requests that were under way.
    """
    good = [timing for timing in timings if timing.error is None and timing.text_times_ns]
    first = [timing.first_ms() for timing in good]
    gaps = [gap for timing in good for gap in timing.gaps_ms()]
    whole = [timing.whole_ms() for timing in good]
    tokens = sum(timing.tokens for timing in good)
    steps_per_s = idle_share = gap_us = None
    windows: tuple[float, ...] = ()
    if before is not None and after is not None:
        busy, idle = after.busy - before.busy, after.idle - before.idle
        steps_per_s = (after.steps - before.steps) / seconds
        idle_share = idle / (busy + idle) if busy + idle > 0 else None
        gap_us = 1e6 * idle / (after.steps - before.steps) if after.steps > before.steps else None
        windows = tuple(b - a for a, b in zip(before.windows, after.windows, strict=True))
    return Figures(
        concurrency=concurrency,
        requests=len(timings),
        failed=len(timings) - len(good),
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        ttft_ms_p50=percentile(first, 50),
        ttft_ms_p99=percentile(first, 99),
        inter_token_ms_p50=percentile(gaps, 50),
        inter_token_ms_p99=percentile(gaps, 99),
        steps_per_s=steps_per_s,
        device_idle_share=idle_share,
        client_cpu_share=cpu_seconds / seconds,
        gap_us=gap_us,
        windows=windows,
        rate=rate,
        late_ms_p99=1e3 * percentile(late_s, 99) if len(late_s) else None,
        requests_per_s=len(good) / seconds,
        ttft_ms_p90=percentile(first, 90),
        inter_token_ms_p90=percentile(gaps, 90),
        whole_ms_p50=percentile(whole, 50),
        whole_ms_p90=percentile(whole, 90),
        whole_ms_p99=percentile(whole, 99),
    )


def paired(runs: Mapping[str, Sequence[Figures]]) -> dict[str, list[Figures]]:
    """Gives each run of one level its ratios to the first server's run of the same repeat.

    A machine that others use as well is fast at one time and slow at another; within a repeat all servers meet the
    same.
    """
    first = next(iter(runs.values()))
    return {
        name: [
            replace(
                one,
                ratio=_ratio(one.tokens_per_s, base.tokens_per_s),
                ttft_ratio=_ratio(one.ttft_ms_p50, base.ttft_ms_p50),
                inter_token_ratio=_ratio(one.inter_token_ms_p50, base.inter_token_ms_p50),
                whole_ratio=_ratio(one.whole_ms_p50, base.whole_ms_p50),
            )
            for one, base in zip(of_server, first, strict=True)
        ]
        for name, of_server in runs.items()
    }


def _ratio(one: float | None, base: float | None) -> float | None:
    """None where there is none: a run without answers, or without a second token."""
    if one is None or not base or math.isnan(one) or math.isnan(base):
        return None
    return one / base


def medians(runs: Sequence[Figures]) -> Figures:
    """Returns the median of every figure over the runs of one setting; failures are summed, never averaged away, and
    so are windows.
    """
    assert runs
    values: dict[str, Any] = {}
    for name in (entry.name for entry in fields(Figures) if entry.name != "windows"):
        told = [value for run in runs if (value := getattr(run, name)) is not None]
        values[name] = statistics.median(told) if told else None
    values["failed"] = sum(run.failed for run in runs)
    values["concurrency"], values["requests"] = max(run.concurrency for run in runs), runs[0].requests
    values["windows"] = tuple(map(sum, zip(*(run.windows for run in runs), strict=True)))
    return Figures(**values)


HEADINGS = ("server", "load", "tokens/s", "ratio", "requests/s", "steps/s", "gap us", "idle", "client", "failed")
LATENCIES = ("server", "load", "TTFT", "p90", "p99", "x", "between", "p90", "p99", "x", "whole", "p90", "p99", "x")
LEGEND = """load: requests at once, or a second; ratio, x: to the first server in the same repeat, median
gap: of the device between two steps, mean; idle: share of time that it waited so
client: CPU of this benchmark"""
LATENCY_LEGEND = (
    """ms, p50 p90 p99; TTFT: to the first token; between: between tokens; whole: until the answer is complete"""
)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def in_turn(results: Mapping[str, Sequence[Figures]]) -> list[tuple[str, Figures]]:
    """The medians with their servers, level by level."""
    levels = zip(*results.values(), strict=True)
    return [(name, one) for level in levels for name, one in zip(results, level, strict=True)]


def table_rows(results: Mapping[str, Sequence[Figures]]) -> list[tuple[str, ...]]:
    """Lays out the medians per server, level by level: what was done."""
    return [
        (
            name,
            one.load,
            f"{one.tokens_per_s:.1f}",
            _number(one.ratio, ".2f"),
            _number(one.requests_per_s, ".2f"),
            _number(one.steps_per_s, ".1f"),
            _number(one.gap_us, ".0f"),
            _number(one.device_idle_share, ".2%"),
            f"{one.client_cpu_share:.1%}",
            str(one.failed),
        )
        for name, one in in_turn(results)
    ]


def latency_rows(results: Mapping[str, Sequence[Figures]]) -> list[tuple[str, ...]]:
    """The same for how long it took."""
    return [
        (
            name,
            one.load,
            *(_number(ms, ".0f") for ms in (one.ttft_ms_p50, one.ttft_ms_p90, one.ttft_ms_p99)),
            _number(one.ttft_ratio, ".2f"),
            *(_number(ms, ".1f") for ms in (one.inter_token_ms_p50, one.inter_token_ms_p90, one.inter_token_ms_p99)),
            _number(one.inter_token_ratio, ".2f"),
            *(_number(ms, ".0f") for ms in (one.whole_ms_p50, one.whole_ms_p90, one.whole_ms_p99)),
            _number(one.whole_ratio, ".2f"),
        )
        for name, one in in_turn(results)
    ]


def late_text(results: Mapping[str, Sequence[Figures]]) -> str:
    """A line for each open loop: how many requests were under way at most, and how late they left."""
    return "\n".join(
        f"{name}, {one.load}: at most {one.concurrency} under way; left {one.late_ms_p99:.1f} ms late (p99)"
        for name, one in in_turn(results)
        if one.late_ms_p99 is not None
    )


def drafts_text(results: dict[str, list[Figures]]) -> str:
    """A line for each setting in which there were drafts: how many tokens a row gained, and how often which draft."""
    lines = []
    for name, levels in results.items():
        for one in levels:
            if one.accept_length is not None:
                shares = " ".join(f"{share:.0%}" for share in one.accepted_shares) or "none"
                load = f"{one.load} at once" if one.rate is None else one.load
                lines.append(f"{name}, {load}: {one.accept_length:.2f} tokens a window; {shares}")
    return "\n".join(["drafts accepted, first, second, ...:", *lines]) if lines else ""


def table_text(results: dict[str, list[Figures]]) -> str:
    """Lays out both tables in columns of plain text, with their legends, about 90 wide."""
    done = [*aligned([HEADINGS, *table_rows(results)]), LEGEND, drafts_text(results), late_text(results)]
    took = ["", *aligned([LATENCIES, *latency_rows(results)]), LATENCY_LEGEND]
    return "\n".join([*filter(None, done), *took])


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lays out rows of equal length in columns of plain text, the first `left` of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
