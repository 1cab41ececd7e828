"""Draws the search for the shortest step: how long the device starved, by the time that a step takes.

Owns the drawing, as SVG text: a panel for each number of requests at once, a dot for each run. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.floor_figures import Floor
from tools.svg_document import document

WIDTH, LEFT, PANEL, HEIGHT, FOOT = 760, 96, 150, 96, 34
LEAST_SHARE = 1e-4  # what is drawn at the bottom of the scale
STYLE = """
text { font: 12px sans-serif; fill: #202124; } .small { font-size: 10px; fill: #5f6368; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .axis { stroke: #dadce0; } .limit { stroke: #d93025; stroke-dasharray: 4 3; }
.run { fill: #9aa0a6; } .floor { fill: #1a73e8; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .small { fill: #9aa0a6; } .axis { stroke: #3c4043; } .floor { fill: #8ab4f8; }
}
"""


def picture(floors: Sequence[Floor], starved_most: float) -> str:
    """SVG. Both scales are logarithmic."""
    times = [probe.pass_us for floor in floors for probe in floor.tried]
    low, high = math.log(min(times, default=1.0) * 0.9), math.log(max(times, default=10.0) * 1.1)
    note = "share of the time in which the device was starved, by what a pass takes; blue: the shortest that is enough"
    parts = [f'<text class="small" x="8" y="16">{note}</text>']

    def x_of(us: float) -> float:
        return LEFT + (math.log(us) - low) / (high - low) * (WIDTH - LEFT - 24)

    for number, floor in enumerate(floors):
        top = 30 + number * PANEL

        def y_of(share: float, top: int = top) -> float:
            return top + HEIGHT * math.log(max(share, LEAST_SHARE)) / math.log(LEAST_SHARE)

        parts.append(f'<text class="end" x="{LEFT - 12}" y="{top + HEIGHT / 2:.0f}">{floor.at_once} at once</text>')
        for share, kind in ((1.0, "axis"), (0.1, "axis"), (starved_most, "limit"), (LEAST_SHARE, "axis")):
            y = y_of(share)
            parts.append(f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 24}" y2="{y:.1f}"/>')
            parts.append(f'<text class="small" x="{WIDTH - 22}" y="{y + 3:.1f}">{share:.4g}</text>')
        for probe in floor.tried:
            kind, radius = ("floor", 5) if probe is floor.found or probe == floor.found else ("run", 3)
            told = f"{probe.pass_us:.0f} us, starved {probe.starved:.2%}"
            at = f'cx="{x_of(probe.pass_us):.1f}" cy="{y_of(probe.starved):.1f}" r="{radius}"'
            parts.append(f'<circle class="{kind}" {at}><title>{told}</title></circle>')
        for us in sorted({probe.pass_us for probe in floor.tried})[::2]:
            parts.append(f'<text class="small middle" x="{x_of(us):.1f}" y="{top + HEIGHT + 16}">{us:.0f}</text>')
    return document(WIDTH + 24, 30 + PANEL * len(floors), STYLE, parts)
