"""Draws what overlap does: three steps with and without it, the CPU's share of a step, and the gain in tokens/s.

Owns the drawing, as SVG text: for each model one block, after the article's figures 2 and 11, 3, and 12, with the
article's own gains as marks. Pure: it is given what the tables are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tools.article_figures import ARTICLE
from tools.clocked_model import PRESETS
from tools.overlap_figures import Row, gain_of, pairs_of
from tools.svg_document import document

WIDTH, LEFT, STEPS_WIDTH = 1100, 84, 560  # of all; of the steps' labels and of the steps
GAINS_LEFT, GAINS_WIDTH, GAINS_HEIGHT = 720, 360, 120
BLOCK, LANE, TRACK = 236, 16, 52  # heights: of a model's block, of a lane, of the two lanes of one mode
GAIN_LEAST, GAIN_MOST = 0.15, 0.5  # what the scale of gains shows at least, and at most
PARTS = (("prepare", ("plan", "push")), ("launch", ("launch",)), ("process", ("process",)))
STYLE = """
text { font: 12px sans-serif; fill: #202124; } .title { font-weight: bold; } .small { font-size: 10px; fill: #5f6368; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .axis { stroke: #dadce0; }
.step { fill: #1a73e8; } .gap { fill: none; stroke: #d93025; stroke-dasharray: 3 2; }
.prepare { fill: #f9ab00; } .launch { fill: #9334e6; } .process { fill: #1e8e3e; } .rest { fill: #e8eaed; }
.gain { fill: #1a73e8; } .article { stroke: #202124; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .small { fill: #9aa0a6; } .axis { stroke: #3c4043; } .step, .gain { fill: #8ab4f8; }
  .gap { stroke: #f28b82; } .rest { fill: #3c4043; } .article { stroke: #e8eaed; }
}
"""
NOTE = (
    "blue: the device runs a step; dashed: it waits; amber, violet, green: the CPU prepares, launches, processes; "
    "black marks: the gain in the article"
)


def picture(rows: Sequence[Row], drawn: Mapping[str, Mapping[str, Any]]) -> str:
    """SVG. drawn: of each model and mode ("overlap", "without"), what was when, see `step_figures.typical`."""
    parts = [f'<text class="small" x="8" y="16">{NOTE}</text>']
    y = 24
    for name in dict.fromkeys(row.preset for row in rows):
        parts += _block(name, [row for row in rows if row.preset == name], drawn.get(name, {}), y)
        y += BLOCK
    return document(WIDTH, y, STYLE, parts)


def _block(name: str, rows: Sequence[Row], drawn: Mapping[str, Any], top: int) -> list[str]:
    least = min(row.at_once for row in rows)
    parts = [f'<text class="title" x="8" y="{top + 18}">{escape(PRESETS[name].title)}</text>']
    parts.append(f'<text class="small" x="{LEFT}" y="{top + 34}">three steps, {least} at once</text>')
    ends_us = [end for mode in drawn.values() for _, end in mode.get("step", ())]
    if ends_us:
        scale = STEPS_WIDTH / max(ends_us)
        for number, mode in enumerate(("without", "overlap")):
            parts += _steps(mode, drawn.get(mode, {}), scale, top + 44 + number * (TRACK + 8))
    for on in (row for row in rows if row.overlap and row.at_once == least):
        parts += _share(on, top + 44 + 2 * (TRACK + 8) + 18)
    return parts + _gains(name, rows, top + 34)


def _steps(mode: str, drawn: Mapping[str, Any], scale: float, y: int) -> list[str]:
    """The CPU's lane above the device's, from the begin of the first step on."""
    end = LEFT + STEPS_WIDTH
    parts = [f'<text class="end" x="{LEFT - 8}" y="{y + LANE + 8}">{mode}</text>']

    def bar(kind: str, begin_us: float, end_us: float, lane: int) -> None:
        left, right = max(LEFT, LEFT + begin_us * scale), min(end, LEFT + end_us * scale)
        if right > left:
            box = f'x="{left:.1f}" y="{y + lane * (LANE + 2)}" width="{max(0.7, right - left):.1f}" height="{LANE}"'
            parts.append(f'<rect class="{kind}" {box}><title>{kind} {end_us - begin_us:.0f} us</title></rect>')

    for kind, names in PARTS:
        for name in names:
            for begin_us, end_us in drawn.get(name, ()):
                bar(kind, begin_us, end_us, 0)
    steps = sorted(drawn.get("step", ()))
    for begin_us, end_us in steps:
        bar("step", begin_us, end_us, 1)
    for (_, before_us), (behind_us, _) in itertools.pairwise(steps):
        bar("gap", before_us, behind_us, 1)
        middle = LEFT + (before_us + behind_us) / 2 * scale
        label = f"{(behind_us - before_us) / 1e3:.2f} ms"
        parts.append(f'<text class="small middle" x="{middle:.1f}" y="{y + 2 * LANE + 14}">{label}</text>')
    return parts


def _share(on: Row, y: int) -> list[str]:
    """How much of a step the CPU is busy with it: the bar is a step, its coloured part the CPU's work."""
    parts = [f'<text class="end" x="{LEFT - 8}" y="{y + 12}">CPU a step</text>']
    width = STEPS_WIDTH / max(on.steps.step_us, 1.0)
    parts.append(f'<rect class="rest" x="{LEFT}" y="{y}" width="{STEPS_WIDTH}" height="{LANE}"/>')
    x = float(LEFT)
    for kind, _ in PARTS:
        us: float = getattr(on.steps, f"{kind}_us")
        box = f'x="{x:.1f}" y="{y}" width="{us * width:.1f}" height="{LANE}"'
        parts.append(f'<rect class="{kind}" {box}><title>{kind} {us:.0f} us</title></rect>')
        x += us * width
    told = ", ".join(f"{kind} {getattr(on.steps, f'{kind}_us') / 1e3:.2f}" for kind, _ in PARTS)
    article = " + ".join(f"{us / 1e3:.2f}" for us in ARTICLE[on.preset].cpu_us)
    text = f"{told} of {on.steps.step_us / 1e3:.1f} ms (article: {article} ms)"
    parts.append(f'<text class="small" x="{LEFT}" y="{y + LANE + 13}">{text}</text>')
    return parts


def _gains(name: str, rows: Sequence[Row], top: int) -> list[str]:
    """A bar for each number of requests at once."""
    pairs = pairs_of(rows)
    article = ARTICLE[name].gains
    shown = [gain_of(*pair) for pair in pairs] + [high for _, high in article.values()]
    scale, base = GAINS_HEIGHT / min(GAIN_MOST, max(GAIN_LEAST, *shown)), top + 12 + GAINS_HEIGHT
    parts = [f'<text class="small" x="{GAINS_LEFT}" y="{top}">gain in tokens/s, by requests at once</text>']
    parts.append(f'<line class="axis" x1="{GAINS_LEFT}" y1="{base}" x2="{GAINS_LEFT + GAINS_WIDTH}" y2="{base}"/>')
    width = GAINS_WIDTH / max(1, len(pairs))
    for number, (on, off) in enumerate(pairs):
        gain, x = gain_of(on, off), GAINS_LEFT + number * width
        height = min(max(0.0, gain), GAIN_MOST) * scale
        box = f'x="{x + width / 4:.1f}" y="{base - height:.1f}" width="{width / 2:.1f}" height="{height:.1f}"'
        middle = f'class="middle" x="{x + width / 2:.1f}"'
        parts.append(f'<rect class="gain" {box}/>')
        parts.append(f'<text {middle} y="{base + 16}">{on.at_once}</text>')
        parts.append(f'<text {middle} y="{base + 32}">{gain:+.1%}</text>')
        for share in dict.fromkeys(article.get(on.at_once, ())):
            line = f'x1="{x + width / 6:.1f}" y1="{base - share * scale:.1f}" x2="{x + width * 5 / 6:.1f}"'
            parts.append(f'<line class="article" {line} y2="{base - share * scale:.1f}"/>')
    return parts
