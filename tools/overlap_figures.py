"""The figures of `stepahead bench overlap`: a row for each run, medians over runs, tables beside the article's figures.

Pure functions over values: no clock, no process, no printing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shm.limits import WINDOW_MAX
from shm.stats import accepted_runs
from tools.article_figures import ARTICLE, ArticleFigures
from tools.bench_figures import aligned
from tools.bench_run import Load
from tools.bench_serve import BenchError
from tools.bench_watch import Seen
from tools.clocked_model import PRESETS
from tools.step_figures import StepFigures, figures


@dataclass(frozen=True)
class Row:
    """One setting: a run, or the medians of several. passes_us: what the passes of a step are to take. cpu_us:
    processor time of a stage, all its threads, for each step; what the host device costs is part of the gpu process'.
    core_wait_us: how long threads of the scheduler and of the gpu process waited for a core, for each step.
    """

    preset: str
    at_once: int
    overlap: bool
    passes_us: float
    steps: StepFigures
    cpu_us: dict[str, float]
    core_wait_us: float
    tokens_per_s: float
    ttft_ms: float | None  # mean, from the complete request to the first token, as the frontend sees it
    accept_length: float | None
    client_cpu_share: float
    requests: int
    wrong: int
    failed: int
    missed: int  # spans that were overwritten before anybody saw them


def row_of(preset: str, at_once: int, overlap: bool, passes_us: float, load: Load, seen: Seen) -> Row:
    """Sums up one run. Raises BenchError, with the first failure, for one that saw no steps."""
    steps = figures(seen.spans)
    if steps is None:
        raise BenchError(f"{preset}, {at_once} at once: no steps were seen ({load.error})")
    number = max(1.0, seen.counted("gpu", "steps_total"))
    ttft_s = seen.mean_s("frontend", "ttft_s")
    ttft_ms = load.ttft_ms if ttft_s is None else 1e3 * ttft_s
    return Row(
        preset=preset,
        at_once=at_once,
        overlap=overlap,
        passes_us=passes_us,
        steps=steps,
        cpu_us={stage: ns / number / 1e3 for stage, ns in sorted(seen.cpu_ns.items())},
        core_wait_us=core_wait_us(seen),
        tokens_per_s=load.tokens_per_s,
        ttft_ms=ttft_ms,
        accept_length=accept_length(seen),
        client_cpu_share=load.client_cpu_s / load.seconds if load.seconds else 0.0,
        requests=load.requests,
        wrong=load.wrong,
        failed=load.failed,
        missed=seen.missed,
    )


def core_wait_us(seen: Seen) -> float:
    """How long those who work for the step waited for a core, for each step: what others on the machine took."""
    waited_ns = sum(seen.core_wait_ns.get(stage, 0) for stage in ("scheduler", "gpu"))
    return waited_ns / max(1.0, seen.counted("gpu", "steps_total")) / 1e3


def accept_length(seen: Seen) -> float | None:
    """Tokens that a row gained in a step with drafts; None where there were none."""
    windows = [seen.counted("scheduler", accepted_runs(drafts)) for drafts in range(WINDOW_MAX)]
    rows = sum(windows)
    return sum((1 + drafts) * number for drafts, number in enumerate(windows)) / rows if rows else None


def median_row(rows: Sequence[Row]) -> Row:
    """The medians of a setting's runs; what went wrong is summed."""
    first = rows[0]
    values: dict[str, Any] = {name: getattr(first, name) for name in ("preset", "at_once", "overlap", "passes_us")}
    for name in ("tokens_per_s", "core_wait_us", "ttft_ms", "accept_length", "client_cpu_share"):
        told = [value for row in rows if (value := getattr(row, name)) is not None]
        values[name] = statistics.median(told) if told else None
    for name in ("requests", "wrong", "failed", "missed"):
        values[name] = sum(getattr(row, name) for row in rows)
    steps = {f.name: statistics.median(getattr(row.steps, f.name) for row in rows) for f in fields(StepFigures)}
    stages = sorted({stage for row in rows for stage in row.cpu_us})
    cpu = {stage: statistics.median(row.cpu_us.get(stage, 0.0) for row in rows) for stage in stages}
    return Row(**values, steps=StepFigures(**steps), cpu_us=cpu)  # type: ignore[arg-type]


def pairs_of(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each setting with overlap and without."""
    without = {(row.preset, row.at_once): row for row in rows if not row.overlap}
    return [(row, without[row.preset, row.at_once]) for row in rows if row.overlap]


def gain_of(on: Row, off: Row) -> float:
    """By what share overlap makes more tokens a second."""
    return on.tokens_per_s / off.tokens_per_s - 1 if off.tokens_per_s else 0.0


def table_text(rows: Sequence[Row]) -> str:
    """All tables as plain text."""
    return "\n\n".join((steps_table(rows), gains_table(rows), article_table(rows)))


STEP_HEADINGS = (
    *("model", "at once", "overlap", "passes", "step", "period", "gap p50", "p99", "starved", "steps", "time"),
    *("prepare", "launch", "process", "cpu sched", "cpu gpu", "core wait"),
)
STEP_LEGEND = """us, medians but for gap p99 and cpu; passes: what so many rows are to take; period: step to step
starved: mean a step, until the next one was queued; steps, time: share of either; what is left of a gap is the device's
prepare, launch, process: wall time of the thread that does it; cpu: processor time of the whole process a step
core wait: a step, that threads of these two processes could have run but had no core: other work on the machine"""


def steps_table(rows: Sequence[Row]) -> str:
    """What the device waited, and what the CPU's parts of a step cost."""
    lines: list[Sequence[str]] = [STEP_HEADINGS]
    for row in rows:
        steps = row.steps
        lines.append(
            (
                *(row.preset, str(row.at_once), "on" if row.overlap else "off"),
                *(f"{us:.0f}" for us in (row.passes_us, steps.step_us, steps.period_us)),
                *(f"{us:.0f}" for us in (steps.gap_us_p50, steps.gap_us_p99, steps.starved_us_mean)),
                *(f"{steps.starved_steps:.1%}", f"{steps.starved_time:.2%}"),
                *(f"{us:.0f}" for us in (steps.prepare_us, steps.launch_us, steps.process_us)),
                *(f"{row.cpu_us.get(stage, 0.0):.0f}" for stage in ("scheduler", "gpu")),
                f"{row.core_wait_us:.0f}",
            )
        )
    return "\n".join([*aligned(lines), STEP_LEGEND])


def gains_table(rows: Sequence[Row]) -> str:
    """What overlap brings, as the article's figure 12."""
    headings = (
        "model",
        "at once",
        "tokens/s on",
        "off",
        "gain",
        "article",
        "TTFT on",
        "off",
        "article",
        "accept",
        "bad",
    )
    lines: list[Sequence[str]] = [headings]
    for on, off in pairs_of(rows):
        article = ARTICLE[on.preset]
        ttft = article.ttft_ms.get(on.at_once)
        lines.append(
            (
                *(on.preset, str(on.at_once), f"{on.tokens_per_s:.0f}", f"{off.tokens_per_s:.0f}"),
                *(f"{gain_of(on, off):+.1%}", span_text(article.gains.get(on.at_once))),
                *("-" if row.ttft_ms is None else f"{row.ttft_ms:.0f}" for row in (on, off)),
                "-" if ttft is None else f"{ttft[0]:.0f}/{ttft[1]:.0f}",
                "-" if on.accept_length is None else f"{on.accept_length:.2f}/{off.accept_length or 0.0:.2f}",
                str(on.wrong + on.failed + off.wrong + off.failed),
            )
        )
    return "\n".join(
        [*aligned(lines), "TTFT: mean in ms; accept: tokens a window; bad: answers that were wrong or failed"]
    )


def article_table(rows: Sequence[Row]) -> str:
    """One request, as the article's figures 2, 3 and 11."""
    headings = ("model", "what", "here on", "off", "article on", "off")
    lines: list[Sequence[str]] = [headings]
    for on, off in pairs_of(rows):
        if on.at_once == 1:
            article = ARTICLE[on.preset]
            for what, name, told in (
                ("step", "step_us", article.step_us),
                ("step to step", "period_us", article.period_us),
                ("gap", "gap_us_p50", article.gap_us),
            ):
                here = (f"{getattr(row.steps, name):.0f}" for row in (on, off))
                lines.append((on.preset, what, *here, *("-" if us is None else f"{us:.0f}" for us in told)))
            for what, names, us in _cpu_parts(article):
                ours = (f"{sum(getattr(row.steps, one) for one in names):.0f}" for row in (on, off))
                lines.append((on.preset, what, *ours, f"{us:.0f}", "-"))
    return (
        "\n".join([*aligned(lines, 2), "1 at once, us; the article's are SGLang's on B300 GPUs"]) if lines[1:] else ""
    )


def _cpu_parts(article: ArticleFigures) -> list[tuple[str, tuple[str, ...], float]]:
    """What the article tells of the CPU's work for a step: its name, the figures of ours that it is, and how long."""
    names = ("prepare", "launch", "process")
    parts: list[tuple[str, tuple[str, ...], float]] = []
    if len(article.cpu_us) == len(names):
        parts = [(f"CPU, {name}", (f"{name}_us",), us) for name, us in zip(names, article.cpu_us, strict=True)]
    return [*parts, ("CPU a step", tuple(f"{name}_us" for name in names), sum(article.cpu_us))]


def span_text(span: tuple[float, float] | None) -> str:
    """A gain, or the range of it."""
    if span is None:
        return "-"
    low, high = (f"{share:+.0%}" for share in span)
    return low if low == high else f"{low}..{high}"


def document_of(rows: Sequence[Row], drawn: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, object]:
    """All of it, for JSON."""
    return {
        "about": dict(about),
        "rows": [asdict(row) for row in rows],
        "gains": [{"preset": on.preset, "at_once": on.at_once, "gain": gain_of(on, off)} for on, off in pairs_of(rows)],
        "article": {name: asdict(ARTICLE[name]) for name in PRESETS if name in ARTICLE},
        "typical_steps": dict(drawn),
    }
