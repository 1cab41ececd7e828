"""Draws what servers did under load: tokens a second, and how long requests took, level by level beside each other.

Owns the drawing, as SVG text: a line for each level and server. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

from tools.bench_figures import Figures, in_turn
from tools.svg_document import document

WIDTH, LEFT, PANEL, GAP, ROW, BAR, TOP = 1180, 250, 180, 48, 22, 14, 30
COLOURS = ("#1a73e8", "#f9ab00", "#1e8e3e", "#9334e6", "#d93025", "#5f6368")
STYLE = """
text { font: 12px sans-serif; fill: #202124; } .title { font-weight: bold; } .small { font-size: 10px; fill: #5f6368; }
.end { text-anchor: end; } .range { stroke-width: 2; }
@media (prefers-color-scheme: dark) { text { fill: #e8eaed; } .small { fill: #9aa0a6; } }
"""
TIMES = (("to the first token", "ttft_ms"), ("between tokens", "inter_token_ms"), ("whole answer", "whole_ms"))


def picture(results: Mapping[str, Sequence[Figures]]) -> str:
    """SVG. results: medians by server, level by level."""
    colours = dict(zip(results, itertools.cycle(COLOURS), strict=False))
    shown = in_turn(results)
    most = max([1e-9, *(one.tokens_per_s for _, one in shown)])
    parts = [f'<text class="small" x="{LEFT}" y="16">tokens a second</text>']
    for number, (told, name) in enumerate(TIMES, 1):
        x, longest = LEFT + number * (PANEL + GAP), _longest(shown, name)
        parts.append(f'<text class="small" x="{x}" y="16">{told}, ms: p50, p90, p99</text>')
        for place, (server, one) in enumerate(shown):
            parts += _times(one, name, x, TOP + place * ROW, longest, colours[server])
    for place, (server, one) in enumerate(shown):
        y, width = TOP + place * ROW, one.tokens_per_s / most * PANEL
        label = f"{_short(server)}, {one.load}"
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{y + 12}">{escape(label)}</text>')
        box = f'x="{LEFT}" y="{y}" width="{max(0.7, width):.1f}" height="{BAR}"'
        parts.append(f'<rect class="rate" fill="{colours[server]}" {box}><title>{escape(server)}</title></rect>')
        parts.append(f'<text class="small" x="{LEFT + width + 4:.1f}" y="{y + 11}">{one.tokens_per_s:.0f}</text>')
    return document(WIDTH, TOP + ROW * len(shown) + 8, STYLE, parts)


def _short(server: str) -> str:
    return server if len(server) <= 30 else f"...{server[-27:]}"


def _longest(shown: Sequence[tuple[str, Figures]], name: str) -> float:
    return max([1e-9, *(ms for _, one in shown for ms in _told(one, name))])


def _told(one: Figures, name: str) -> list[float]:
    """p50, p90, p99, those that there are."""
    values = [getattr(one, f"{name}_p{share}") for share in (50, 90, 99)]
    return [float(ms) for ms in values if ms is not None and not math.isnan(ms)]


def _times(one: Figures, name: str, x: float, y: float, longest: float, colour: str) -> list[str]:
    """A line from p50 to p99 with a mark at each, and the p50 in figures."""
    told = _told(one, name)
    if not told:
        return []
    at = [x + ms / longest * PANEL for ms in told]
    middle = y + BAR / 2
    line = f'x1="{at[0]:.1f}" y1="{middle}" x2="{at[-1]:.1f}" y2="{middle}"'
    parts = [f'<line class="range" stroke="{colour}" {line}/>']
    for place, (ms, left) in enumerate(zip(told, at, strict=True)):
        radius = 4 - place
        parts.append(
            f'<circle fill="{colour}" cx="{left:.1f}" cy="{middle}" r="{radius}"><title>{ms:.1f}</title></circle>'
        )
    parts.append(f'<text class="small" x="{at[-1] + 6:.1f}" y="{y + 11}">{told[0]:.4g}</text>')
    return parts
