"""Progress of a download on stderr: a bar on a terminal, a line now and then elsewhere.

Owns nothing but the display. Never writes to stdout, which belongs to the answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from procs.model_download import Progress as ProgressFunction

LINE_EVERY_PERCENT = 10


@contextlib.contextmanager
def show_progress(console: Console | None = None) -> Iterator[ProgressFunction]:
    """Gives a function (what, bytes done, bytes in all) that shows how far a download is; nothing is shown until it
    is called.

    console: where to; stderr if None.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {}

        def show(what: str, bytes_done: int, bytes_total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=bytes_total)
            bars.update(tasks[what], completed=bytes_done)

        yield show


class _Lines:
    """One line at the start of each thing and at every tenth of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[str, int] = ("", -1)

    def __call__(self, what: str, bytes_done: int, bytes_total: int) -> None:
        tenth = bytes_done * 100 // max(bytes_total, 1) // LINE_EVERY_PERCENT
        if (what, tenth) == self._shown:
            return
        self._shown = (what, tenth)
        total = f"{bytes_total / 1e6:.0f} MB"
        self._console.print(f"{what}: {tenth * LINE_EVERY_PERCENT}% of {total}", highlight=False, soft_wrap=True)
