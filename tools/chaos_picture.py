"""Draws a run under faults: a line for each client over time, its requests, silences and faults, and the kills.

Owns the drawing, as SVG text. Pure: it is given what the report is given. A panel shows one phase, from just before its
first kill on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from html import escape

from tools.chaos_report import Phase, Story

WIDTH, LEFT, RIGHT = 1100, 96, 12
HEAD, LANE, FOOT = 34, 7, 24  # heights: above a panel's lanes, of each lane, below them
BEFORE_S, SHOWN_S = 1.0, 12.0  # of a panel: ahead of the first kill, and in all
SILENCE_STEPS, SILENCE_S = 8, 0.2  # a gap of so many steps, and at least so long, is drawn as a silence
STYLE = """
text { font: 12px sans-serif; fill: #202124; } .small { font-size: 10px; fill: #5f6368; } .axis { stroke: #dadce0; }
.request { fill: #d2e3fc; } .left { fill: #e8eaed; } .cut { fill: #feefc3; } .faulty { fill: #f6aea9; }
.silence { stroke: #9aa0a6; stroke-width: 1; } .event { stroke: #1a73e8; stroke-width: 1.2; fill: none; }
.kill { stroke: #d93025; stroke-width: 1.5; } .back { stroke: #1e8e3e; stroke-width: 1.5; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; } .small { fill: #9aa0a6; } .axis { stroke: #3c4043; } .request { fill: #28405f; }
  .left { fill: #3c4043; } .cut { fill: #5b4a1c; } .faulty { fill: #7d2b26; } .event { stroke: #8ab4f8; }
  .kill { stroke: #f28b82; } .back { stroke: #81c995; }
}
"""
NOTE = (
    "a band is a request, a tick an event, a grey line a silence; red: a kill, green: served again; "
    "yellow: its connection was cut, grey: its client left, red band: something is wrong with it"
)


def picture(phases: Sequence[Phase], step_ms: float, panels: int = 2) -> str:
    """SVG of the first `panels` phases. step_ms: of the server in calm."""
    shown = [phase for phase in phases if phase.stories][:panels]
    parts: list[str] = []
    y = 24
    for phase in shown:
        drawn, height = _panel(phase, y, step_ms)
        parts += drawn
        y += height
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    head = f'<text class="small" x="8" y="16">{NOTE}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{head}{"".join(parts)}</svg>\n'


def _panel(phase: Phase, top: int, step_ms: float) -> tuple[list[str], int]:
    """One phase from y = `top` on, and its height."""
    first_ns = min(story.told.sent_ns for story in phase.stories)
    last_ns = max(story.told.ended_ns for story in phase.stories)
    if phase.strikes:
        first_ns = max(first_ns, phase.strikes[0].at_ns - int(BEFORE_S * 1e9))
    seconds = min(SHOWN_S, max(0.001, (last_ns - first_ns) / 1e9))
    scale = (WIDTH - LEFT - RIGHT) / seconds

    def x_of(at_ns: int) -> float:
        return LEFT + min(max((at_ns - first_ns) / 1e9, 0.0), seconds) * scale

    lanes = sorted({story.told.lane for story in phase.stories})
    y_of = {lane: top + HEAD + LANE * i for i, lane in enumerate(lanes)}
    bottom = top + HEAD + LANE * len(lanes)
    name = phase.name if phase.cells else "no kills"
    parts = [f'<text x="8" y="{top + 18}">{escape(name)}</text>']
    for second in range(int(seconds) + 1):
        x = LEFT + second * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{top + HEAD}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">{second} s</text>')
    least_ns = int(max(SILENCE_S * 1e9, SILENCE_STEPS * step_ms * 1e6))
    shown_until_ns = first_ns + int(seconds * 1e9)
    for story in phase.stories:
        if story.told.ended_ns > first_ns and story.told.sent_ns < shown_until_ns:
            parts += _request(story, y_of[story.told.lane], x_of, least_ns)
    for strike in phase.strikes:
        marks = [("kill", death.struck_ns, f"{death.stage} {death.how}") for death in strike.deaths]
        for kind, at_ns, label in [*marks, ("back", strike.recovered_ns, "")]:
            if first_ns <= at_ns <= shown_until_ns:
                x = x_of(at_ns)
                parts.append(f'<line class="{kind}" x1="{x:.1f}" y1="{top + HEAD - 4}" x2="{x:.1f}" y2="{bottom}"/>')
                parts.append(f'<text class="small" x="{x:.1f}" y="{top + HEAD - 8}">{escape(label)}</text>')
    return parts, HEAD + LANE * len(lanes) + FOOT


def _request(story: Story, y: int, x_of: Callable[[int], float], least_ns: int) -> list[str]:
    """A band from the request to its end, the silences in it, and a tick for each event."""
    told = story.told
    kind = "faulty" if story.faults else {"left": "left", "cut": "cut"}.get(told.end, "request")
    begin, end = x_of(told.sent_ns), x_of(told.ended_ns)
    title = escape(f"{told.request.number} {told.request.kind}: {story.faults[0].detail if story.faults else told.end}")
    width, height = max(0.5, end - begin), LANE - 2
    box = f'x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
    parts = [f'<rect class="{kind}" {box}><title>{title}</title></rect>']
    middle = y + height / 2
    moments = told.moments_ns()
    for earlier, later in itertools.pairwise(moments):
        if told.request.is_patient and later - earlier >= least_ns and x_of(later) > x_of(earlier):
            line = f'x1="{x_of(earlier):.1f}" y1="{middle}" x2="{x_of(later):.1f}" y2="{middle}"'
            parts.append(f'<line class="silence" {line}/>')
    ticks = sorted({round(x_of(at_ns)) for at_ns in told.answer.times_ns})
    inside = [x for x in ticks if LEFT < x < WIDTH - RIGHT]
    if inside:
        parts.append(f'<path class="event" d="{"".join(f"M{x},{y}v{height}" for x in inside)}"/>')
    return parts
