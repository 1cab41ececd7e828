"""Turns timings and counter differences into the figures of one run, medians over runs, and a table with ratios.

Pure functions over values: no clock, no socket, no printing.
"""

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
) -> Figures:
    """Sums up one run: `timings` of all its requests, `seconds` from the first request to the last answer."""
    good = [timing for timing in timings if timing.error is None and timing.text_times_ns]
    first = [timing.first_ms() for timing in good]
    gaps = [gap for timing in good for gap in timing.gaps_ms()]
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
    )


def paired(runs: Mapping[str, Sequence[Figures]]) -> dict[str, list[Figures]]:
    """Gives each run of one level its ratio to the first server's run of the same repeat.

    A machine that others use as well is fast at one time and slow at another; within a repeat all servers meet the
    same.
    """
    first = next(iter(runs.values()))
    return {
        name: [
            replace(one, ratio=one.tokens_per_s / base.tokens_per_s if base.tokens_per_s else None)
            for one, base in zip(of_server, first, strict=True)
        ]
        for name, of_server in runs.items()
    }


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
    values["concurrency"], values["requests"] = runs[0].concurrency, runs[0].requests
    values["windows"] = tuple(map(sum, zip(*(run.windows for run in runs), strict=True)))
    return Figures(**values)


HEADINGS = (
    "server",
    "at once",
    "tokens/s",
    "ratio",
    "TTFT",
    "between",
    "steps/s",
    "gap us",
    "idle",
    "client",
    "failed",
)
LEGEND = """TTFT: to the first token; between: between tokens; each p50/p99 in ms
gap: of the device between two steps, mean; idle: share of time that it waited so
client: CPU of this benchmark; ratio: to the first server in the same repeat, median"""


def table_rows(results: dict[str, list[Figures]]) -> list[tuple[str, ...]]:
    """Lays out the medians per server, level by level."""
    rows: list[tuple[str, ...]] = []
    for level in [one.concurrency for one in next(iter(results.values()), [])]:
        for name, levels in results.items():
            for one in (entry for entry in levels if entry.concurrency == level):
                rows.append(
                    (
                        name,
                        str(level),
                        f"{one.tokens_per_s:.1f}",
                        "-" if one.ratio is None else f"{one.ratio:.2f}",
                        f"{one.ttft_ms_p50:.0f}/{one.ttft_ms_p99:.0f}",
                        f"{one.inter_token_ms_p50:.1f}/{one.inter_token_ms_p99:.1f}",
                        "-" if one.steps_per_s is None else f"{one.steps_per_s:.1f}",
                        "-" if one.gap_us is None else f"{one.gap_us:.0f}",
                        "-" if one.device_idle_share is None else f"{one.device_idle_share:.2%}",
                        f"{one.client_cpu_share:.1%}",
                        str(one.failed),
                    )
                )
    return rows


def drafts_text(results: dict[str, list[Figures]]) -> str:
    """A line for each setting in which there were drafts: how many tokens a row gained, and how often which draft."""
    lines = []
    for name, levels in results.items():
        for one in levels:
            if one.accept_length is not None:
                shares = " ".join(f"{share:.0%}" for share in one.accepted_shares) or "none"
                lines.append(f"{name}, {one.concurrency} at once: {one.accept_length:.2f} tokens a window; {shares}")
    return "\n".join(["drafts accepted, first, second, ...:", *lines]) if lines else ""


def table_text(results: dict[str, list[Figures]]) -> str:
    """Lays out the table in columns of plain text, with its legend, about 90 wide."""
    return "\n".join(filter(None, [*aligned([HEADINGS, *table_rows(results)]), LEGEND, drafts_text(results)]))


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
