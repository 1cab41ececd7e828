"""What every instrument says and writes: its table, its document, its picture, and a line that moves meanwhile.

Owns the options for it. It measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """What every instrument that starts servers takes and can write."""
    parser.add_argument("--start", default="", metavar="ARGS", help="more options of `stepahead serve`")
    add_files(parser)


def add_files(parser: argparse.ArgumentParser) -> None:
    """What every instrument can write."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures (- = stdout, without the table)")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw them")


def put_out(options: argparse.Namespace, document: dict[str, object], table: str, drawn: Callable[[], str]) -> None:
    """Print the table or the JSON, write the files that were asked for."""
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n"
    if str(options.json) == "-":
        sys.stdout.buffer.write(text)
    else:
        print(table)
        if options.json:
            options.json.write_bytes(text)
    if options.picture:
        options.picture.write_text(drawn())


def about_of(options: argparse.Namespace) -> dict[str, object]:
    """The options of a run, for its document; without the key, which is a secret."""
    told = {name: value for name, value in vars(options).items() if name not in ("json", "picture", "api_key")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in told.items()}


def shown_progress() -> Progress:
    """A line on stderr that moves."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=1)


def levels_of(text: str) -> list[int]:
    """Requests at once, ascending."""
    levels = sorted({int(number) for number in text.split(",")})
    if not 1 <= levels[0] <= levels[-1] <= 1024:
        raise argparse.ArgumentTypeError("must be numbers from 1 to 1024")
    return levels
