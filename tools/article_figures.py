"""The figures of the article that this project answers, to stand beside what is measured here.

Owns the numbers alone; they were measured with SGLang on B300 GPUs and are another machine's. None is ever compared by
a test. Where the article gives a range, it is the range.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ArticleFigures:
    """Of one model. Times in microseconds at 1 request; gains of overlap by requests at once, lowest and highest."""

    step_us: tuple[float, float]  # with overlap, without
    period_us: tuple[float, float]  # from step to step
    gap_us: tuple[float | None, float]
    cpu_us: tuple[float, ...]  # in all; or to prepare, to launch and to process
    gains: dict[int, tuple[float, float]] = field(default_factory=dict)
    ttft_ms: dict[int, tuple[float, float]] = field(default_factory=dict)


ARTICLE = {
    "qwen3-8b": ArticleFigures(
        step_us=(3420.0, 3590.0),
        period_us=(3430.0, 3870.0),
        gap_us=(None, 280.0),
        cpu_us=(190.0, 370.0, 80.0),
        gains={1: (0.125, 0.125), 8: (0.11, 0.13), 32: (0.134, 0.134)},
    ),
    "glm-5.3": ArticleFigures(
        step_us=(6100.0, 6300.0),
        period_us=(6100.0, 6700.0),
        gap_us=(None, 400.0),
        cpu_us=(900.0,),
        gains={1: (0.10, 0.10), 8: (0.08, 0.08), 32: (0.06, 0.06), 64: (0.06, 0.06)},
    ),
    "glm-5.3-mtp": ArticleFigures(
        step_us=(8200.0, 8600.0),
        period_us=(8300.0, 9000.0),
        gap_us=(10.0, 300.0),
        cpu_us=(1800.0,),
        gains={1: (0.08, 0.08), 8: (0.04, 0.05), 32: (0.04, 0.05), 64: (0.04, 0.05)},
        ttft_ms={1: (39.0, 34.0), 64: (104.0, 95.0)},
    ),
}
