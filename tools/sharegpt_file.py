"""Reads ShareGPT's file of conversations, one JSON list of hundreds of megabytes, as a stream.

Copies of it are often cut off somewhere: what is whole is read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHARS_READ = 1 << 20  # of the file at a time


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the list, one by one. The file may be cut off anywhere."""
    decoder, text, at = json.JSONDecoder(), "", 0
    with path.open(encoding="utf-8") as file:
        while True:
            start = text.find("{", at)
            try:
                if start < 0:
                    raise ValueError("more is needed")
                entry, at = decoder.raw_decode(text, start)
            except ValueError:
                more = file.read(CHARS_READ)
                if not more:
                    return
                text, at = text[at:] + more, 0
                continue
            yield entry
