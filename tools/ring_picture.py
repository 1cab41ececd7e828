"""Draws what a message costs on each wire: the time of a round trip, and how many messages a second go through.

Owns the drawing, as SVG text: a row of bars for each wire and place. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tools.ring_figures import PLACES, Row
from tools.ring_wires import NAMES
from tools.svg_document import document

WIDTH, LEFT, PANEL, GAP, ROW, BAR = 900, 132, 290, 114, 26, 16
SCALE_MOST = 3  # how many times the slowest p50 is drawn: one p99 shall not flatten all bars
STYLE = """
text { font: 12px sans-serif; fill: #202124; } .title { font-weight: bold; } .small { font-size: 10px; fill: #5f6368; }
.end { text-anchor: end; } .bar { fill: #9aa0a6; } .ring { fill: #1a73e8; } .p99 { stroke: #202124; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .small { fill: #9aa0a6; } .ring { fill: #8ab4f8; } .p99 { stroke: #e8eaed; }
}
"""


def picture(rows: Sequence[Row]) -> str:
    """SVG: a block for each place."""
    slowest = max((row.medians.round_trip_us_p50 for row in rows), default=1.0)
    times = min(SCALE_MOST * slowest, max((row.medians.round_trip_us_p99 for row in rows), default=1.0))
    rates = max((row.medians.messages_per_s for row in rows), default=1.0)
    right = LEFT + PANEL + GAP
    parts = [
        f'<text class="small" x="{LEFT}" y="16">round trip, us: p50, line to p99 or the edge; less is better</text>',
        f'<text class="small" x="{right}" y="16">messages a second; more is better</text>',
    ]
    y = 24
    for cores in dict.fromkeys(row.cores for row in rows):
        parts.append(f'<text class="title" x="8" y="{y + 14}">{PLACES[cores]}</text>')
        y += 22
        for row in (one for one in rows if one.cores == cores):
            one, kind = row.medians, "ring" if row.wire == "ring" else "bar"
            parts.append(f'<text class="end" x="{LEFT - 8}" y="{y + 13}">{escape(NAMES[row.wire])}</text>')
            p50, p99 = (min(1.0, us / times) * PANEL for us in (one.round_trip_us_p50, one.round_trip_us_p99))
            parts += _bar(kind, LEFT, y, p50)
            middle, told = y + BAR / 2, f"{one.round_trip_us_p50:.1f} / {one.round_trip_us_p99:.0f}"
            parts.append(f'<line class="p99" x1="{LEFT}" y1="{middle}" x2="{LEFT + p99:.1f}" y2="{middle}"/>')
            parts.append(f'<text x="{LEFT + p99 + 6:.1f}" y="{y + 13}">{told}</text>')
            rate = one.messages_per_s / rates * PANEL
            parts += _bar(kind, right, y, rate)
            parts.append(f'<text x="{right + rate + 6:.1f}" y="{y + 13}">{one.messages_per_s / 1e3:,.0f}k</text>')
            y += ROW
    return document(WIDTH, y + 8, STYLE, parts)


def _bar(kind: str, x: float, y: float, width: float) -> list[str]:
    return [f'<rect class="{kind}" x="{x}" y="{y}" width="{max(0.7, width):.1f}" height="{BAR}"/>']
