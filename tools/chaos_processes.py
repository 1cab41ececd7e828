"""The processes of a running server from outside: which stage is which, and what they hold.

Owns the reading of /proc. It sees a server through its supervisor's process id and through the text of its /metrics; it
sends no signal and changes nothing.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from procs.child_specs import CHILD_SPECS, STANDBY_WORD

PROC = Path("/proc")
TITLE = re.compile(r"^stepahead: (\w+)\s*$")  # a standby's has one more word
ANY_TITLE = re.compile(r"^stepahead: (.*?)\s*$")
MODULES = {spec.module: spec.stage for spec in CHILD_SPECS}  # how a stage is called before it has a title
SUPERVISOR = "supervisor"
STAGES = tuple(sorted(MODULES.values()))


class Stat(NamedTuple):
    """Of /proc/PID/stat: state letter, parent, start in ticks since boot. Pid and start name one process for ever."""

    state: str
    parent: int
    start: int


def stat_of(pid: int) -> Stat | None:
    """None for a process that is gone."""
    try:
        fields_ = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(fields_[0], int(fields_[1]), int(fields_[19]))


def below(pid: int) -> dict[int, Stat]:
    """All processes below `pid`, zombies among them."""
    everything = {
        int(path.name): stat for path in PROC.iterdir() if path.name.isdigit() if (stat := stat_of(int(path.name)))
    }
    found: dict[int, Stat] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child, stat in everything.items():
            if stat.parent == parent and child not in found:
                found[child] = stat
                todo.append(child)
    return found


def stage_of(pid: int) -> str | None:
    """Which stage a process is, by its title, or by its command line while it starts. A standby is none."""
    line = _command_line(pid)
    title = TITLE.match(line)
    if title:
        return title[1]
    starts = (stage for module, stage in MODULES.items() if f"-m {module} --boot-fd" in line)
    return None if line.rstrip().endswith(STANDBY_WORD) else next(starts, None)


def _command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def stages_below(supervisor: int) -> dict[str, int]:
    """Stage -> pid of those that live; the supervisor among them."""
    found: dict[str, int] = {}
    for pid in [supervisor, *_children(supervisor)]:
        stat, stage = stat_of(pid), stage_of(pid)
        if stat and stat.state not in "ZX" and stage:
            found[stage] = pid
    return found


def _children(pid: int) -> Iterable[int]:
    """All children; from the kernel's list of them, where it keeps one, since it may be asked for often."""
    try:
        lists = [path.read_text() for path in (PROC / str(pid) / "task").glob("*/children")]
    except OSError:
        return ()
    return [int(child) for text in lists for child in text.split()] if lists else below(pid)


@dataclass(frozen=True)
class Holdings:
    """What a server holds at one moment. pages: of the KV cache that are neither free nor cached."""

    processes: int = 0
    fds: Mapping[str, int] = field(default_factory=dict)  # by title, standbys among them
    memfd_bytes: int = 0
    zombies: int = 0
    pages: int = 0
    rows: int = 0


@dataclass
class Leaks:
    """By how much a server holds more than it did before, when idle. Never negative."""

    processes: int = 0
    fds: int = 0
    memfd_bytes: int = 0
    pages: int = 0
    zombies: int = 0
    rows: int = 0

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))

    def __iadd__(self, other: Leaks) -> Leaks:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        return self


def leaks_between(before: Holdings, after: Holdings) -> Leaks:
    """What `after` has more, stage by stage where it is known: what one lets go does not make up for another."""
    fds = sum(max(0, count - before.fds.get(stage, 0)) for stage, count in after.fds.items())
    return Leaks(
        fds=fds,
        **{
            name: max(0, getattr(after, name) - getattr(before, name))
            for name in ("processes", "memfd_bytes", "pages", "zombies", "rows")
        },
    )


def holdings_of(supervisor: int, metrics: Mapping[str, float]) -> Holdings:
    """Count now. metrics: the samples of /metrics."""
    children = below(supervisor)
    fds: dict[str, int] = {}
    memfds: dict[int, int] = {}  # inode -> bytes: every process has descriptors of the same segments
    for pid in (supervisor, *children):
        title = ANY_TITLE.match(_command_line(pid))
        with contextlib.suppress(OSError):
            links = list((PROC / str(pid) / "fd").iterdir())
            if title:
                fds[title[1]] = len(links)
            for link in links:
                _note_memfd(link, memfds)
    return Holdings(
        processes=sum(stat.state not in "ZX" for stat in children.values()),
        fds=fds,
        memfd_bytes=sum(memfds.values()),
        zombies=sum(stat.state == "Z" for stat in children.values()),
        pages=int(
            metrics.get("stepahead_pages", 0)
            - metrics.get("stepahead_pages_free", 0)
            - metrics.get("stepahead_pages_cached", 0)
        ),
        rows=int(metrics.get("stepahead_open_rows", 0)),
    )


def _note_memfd(path: Path, memfds: dict[int, int]) -> None:
    with contextlib.suppress(OSError):
        if str(path.readlink()).startswith("/memfd:"):
            stat = path.stat()
            memfds[stat.st_ino] = stat.st_size


def samples(exposition: str) -> dict[str, float]:
    """The samples of a Prometheus text by name, labels included as they are written."""
    lines = (line.rpartition(" ") for line in exposition.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def is_idle(metrics: Mapping[str, float]) -> bool:
    """Whether nothing runs, waits or is being answered."""
    names = ("running_requests", "queued_requests", "open_rows", "open_requests")
    return not any(metrics.get(f"stepahead_{name}", 0) for name in names)


def is_complete(metrics: Mapping[str, float]) -> bool:
    """Whether every standby that is wanted is prepared."""
    return metrics.get("stepahead_standbys", 0) >= metrics.get("stepahead_standbys_wanted", 0)


def restarts_of(metrics: Mapping[str, float]) -> dict[str, int]:
    """How often each stage was started again."""
    return {stage: int(metrics.get(f'stepahead_stage_restarts_total{{stage="{stage}"}}', 0)) for stage in STAGES}


def living(processes: Mapping[int, Stat]) -> list[int]:
    """Those that are still there and not merely dead and not yet collected."""
    now = {pid: stat_of(pid) for pid in processes}
    return [pid for pid, stat in now.items() if stat and stat.state not in "ZX" and stat.start == processes[pid].start]


def is_free(url: str) -> bool:
    """Whether a server could listen where that one did."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were open do not count
        try:
            probe.bind(("127.0.0.1", urlsplit(url).port or 0))
        except OSError:
            return False
    return True
