"""What every part of the check does at its start and end: read its options, run, write its figures.

Owns the form in which `tools.gpu_check` and its parts talk: a name and JSON on the command line, JSON in a file. What
was found is written as it comes, so that a part that fails late still tells of it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.device.guard import LaunchGuard
from gpu.device.protocol import Device, Observer
from tools.gpu_check import SKIPPED, Options


class Skipped(Exception):
    """Raised by a part that finds nothing to check here; the text says why."""


class Figures:
    """What a part has found so far, by name; every new figure is written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Note a figure: JSON values only."""
        self._values[name] = value
        self._path.write_text(json.dumps(self._values))


def run(parts: dict[str, Callable[[Options, Figures], None]]) -> None:
    """Run the part that the command line names. A part fails by raising, and is skipped by raising Skipped."""
    name, options, path = sys.argv[1:]
    try:
        parts[name](Options(**json.loads(options)), Figures(Path(path)))
    except Skipped as reason:
        print(" ".join(str(reason).split()))
        sys.exit(SKIPPED)


def open_device(kind: str, observer: Observer | None = None, guard: LaunchGuard | None = None) -> Device:
    """A fresh device of the kind that is checked."""
    if kind == "cuda":
        from gpu.device.cuda import CudaDevice

        return CudaDevice(observer, guard)
    from gpu.device.host import HostDevice

    return HostDevice(observer, guard)
