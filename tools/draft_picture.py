"""Draws what drafts brought: `python -m tools.draft_picture FIGURES.json FILE.svg`, from what the benchmark wrote.

A bar for each server that drafted: the tokens that a row gained in a step, the target's own one first, behind it each
draft by how often it was right. Beside it stands what that was worth, against the first server of the file. Pure text
in, text out; it measures nothing.
"""

import argparse
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import orjson

from tools.bench_figures import Figures

WIDTH, LEFT, TOP, ROW, BAR, UNIT = 680, 92, 44, 40, 22, 110  # UNIT: pixels for a token
STYLE = """
text { font: 13px sans-serif; fill: #202124; } .name { text-anchor: end; font-weight: bold; }
.small { font-size: 11px; }
.in { fill: #fff; text-anchor: middle; } .own { fill: #5f6368; } .draft { fill: #4c8bf5; stroke: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #e8eaed; } .draft { stroke: #202124; } }
"""


def runs_of(document: Mapping[str, Any]) -> dict[str, list[Figures]]:
    """What the benchmark has written, server by server. Raises KeyError or TypeError for anything else."""
    return {
        name: [Figures(**{**one, "windows": tuple(one["windows"])}) for one in levels]
        for name, levels in document["medians"].items()
    }


def short(name: str) -> str:
    """What drafts, of a server's name."""
    return name.partition("--speculate ")[2].split(" ")[0] or name


def picture(results: Mapping[str, Sequence[Figures]]) -> str:
    """SVG. results: medians by server, level by level; the first server is what the others are compared with."""
    parts: list[str] = []
    y = TOP
    for name, levels in results.items():
        drafted = [one for one in levels if one.accept_length is not None]
        if not drafted:
            continue
        parts += _bar(short(name), drafted[0], y)
        ratios = ", ".join("-" if one.ratio is None else f"{one.ratio:.2f}x" for one in levels)
        parts.append(f'<text x="{WIDTH - 10}" y="{y + 16}" text-anchor="end">{ratios}</text>')
        y += ROW
    at_once = ", ".join(str(one.concurrency) for one in next(iter(results.values())))
    head = (
        f'<text x="{LEFT}" y="24">tokens that a request gains in a step with drafts</text>'
        f'<text x="{WIDTH - 10}" y="24" text-anchor="end">tokens/s at {at_once} at once</text>'
    )
    size = f'viewBox="0 0 {WIDTH} {y + 6}" width="{WIDTH}" height="{y + 6}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{head}{"".join(parts)}</svg>\n'


def _bar(name: str, figures: Figures, y: int) -> list[str]:
    """The target's own token, and each draft as wide as it was often right."""
    parts = [f'<text class="name" x="{LEFT - 8}" y="{y + 16}">{escape(name)}</text>']
    x = float(LEFT)
    for place, share in enumerate([1.0, *figures.accepted_shares]):
        kind = "draft" if place else "own"
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{share * UNIT:.1f}" height="{BAR}"/>')
        if share * UNIT > 30:
            told = f"{share:.0%}" if place else "1"
            parts.append(f'<text class="in small" x="{x + share * UNIT / 2:.1f}" y="{y + 15}">{told}</text>')
        x += share * UNIT
    parts.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{figures.accept_length:.2f}</text>')
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Read the figures, write the picture."""
    parser = argparse.ArgumentParser("draft_picture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("figures", type=Path, help="what bench_serve --json has written")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(argv)
    options.picture.write_text(picture(runs_of(orjson.loads(options.figures.read_bytes()))))


if __name__ == "__main__":
    main()
