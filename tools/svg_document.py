"""The frame of every picture that an instrument draws: one SVG with its style."""

from __future__ import annotations

from collections.abc import Sequence


def document(width: int, height: int, style: str, parts: Sequence[str]) -> str:
    """A whole SVG."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'
