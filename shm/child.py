"""What every stage does first: read its boot record, tie its life to the supervisor's, and say how it is getting on.

Owns the boot record, the signals and the lines on the ready pipe. It knows nothing of what a stage does, and it may
never let a stage end by an error without having written the reason to the pipe.

A standby is a process that was started before it is needed. Until `take_over` it has no epoch: another process is the
stage, so it may write nothing that others read, take no end of a ring, and rely on nothing that changes.

The ready pipe carries one JSON object a line: {"event": "progress" | "prepared" | "ready" | "error", "text": ...}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import orjson
import setproctitle

from shm.config import ServerConfig
from shm.control import DRAINING, FAILED, STAGES, Control
from shm.faults import FAULTS
from shm.launch import die_with
from shm.ledger import Ledger
from shm.records import RingSpec, ring_specs
from shm.ring import Ring, RingConsumer, RingProducer
from shm.segment import Segment
from shm.stats import Stats, StatsWriter
from shm.trace import Trace, TraceWriter

WORD_BYTES = 8
CORE_DUMPS = "STEPAHEAD_CORE_DUMPS"  # a variable of the environment; 1: stages may leave cores
STANDBY_TITLE = " (standby)"  # behind the title of its stage
SAME_BREATH_SECONDS = 0.2  # between one signal to the supervisor and to a stage, for the supervisor to take notice

_TEXT_CHARS_MAX = 600


class Hung(Exception):
    """What the stage waits for does not come: it ends itself. Told in one line, without a traceback."""


class StartupError(Exception):
    """The user can mend this (a broken model file, too little memory): told in one line, without a traceback."""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """Everything a stage needs to start, by value or as the number of an inherited descriptor."""

    stage: str
    epoch: int  # 0 = a standby's: it comes with the word
    config: ServerConfig
    segments: dict[str, tuple[int, int]]  # name: descriptor, bytes
    doorbells: dict[str, int]  # stage: eventfd
    ready_fd: int
    listen_fd: int | None
    channels: dict[str, str]  # receiving stage: address
    supervisor_pid: int
    # Descriptor and bytes of what outlives the gpu process on the host device.
    weights: tuple[int, int] | None = None
    kv: tuple[int, int] | None = None
    word_fd: int | None = None  # a standby's: the pipe on which the word to take over comes, an epoch of WORD_BYTES

    def to_memfd(self) -> int:
        """Return a memfd that holds the record; the child gets its number as `--boot-fd`. Close it after the spawn."""
        fd = os.memfd_create(f"stepahead-boot-{self.stage}", os.MFD_CLOEXEC)
        raw = orjson.dumps(self)
        assert os.pwrite(fd, raw, 0) == len(raw)
        return fd

    @classmethod
    def from_fd(cls, fd: int) -> Boot:
        """Read the record that a memfd holds."""
        value = orjson.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        assert set(value) == {field.name for field in dataclasses.fields(cls)}, sorted(value)
        value["config"] = ServerConfig.from_dict(value["config"])
        value["segments"] = {name: (fd, size) for name, (fd, size) in value["segments"].items()}
        for name in ("weights", "kv"):
            value[name] = value[name] and tuple(value[name])
        return cls(**value)

    @property
    def fds(self) -> list[int]:
        """Every descriptor that the record names: what the child must inherit, beside the record's own."""
        fds = [fd for fd, _ in self.segments.values()] + list(self.doorbells.values()) + [self.ready_fd]
        fds += [memory[0] for memory in (self.weights, self.kv) if memory is not None]
        fds += [] if self.word_fd is None else [self.word_fd]
        return fds if self.listen_fd is None else [*fds, self.listen_fd]


class Child:
    """A process that has booted, and is the stage from `take_over` on: before it, nothing shared may be written.

    `stopping` turns True on the supervisor's SIGTERM, which also kicks the stage's own doorbell. Before `take_over`
    SIGTERM is the end.
    """

    def __init__(self, record: Boot) -> None:
        self.boot = record
        self.stage = record.stage
        self.epoch = 0
        self._is_stage = False
        self.config = record.config
        self.channels = record.channels
        self.listen_fd = record.listen_fd
        self.stopping = False
        self.segments = {name: Segment.attach(fd, size, name) for name, (fd, size) in record.segments.items()}
        self.control = Control(self.segments["control"])
        self.stats = Stats(self.segments["stats"])
        self.ledger = Ledger(self.segments["ledger"], self.config.rows, self.config.max_len)
        self.doorbells = {stage: self.control.doorbell(stage, fd) for stage, fd in record.doorbells.items()}
        self.own_doorbell = self.doorbells[self.stage]
        self._trace = Trace(self.segments["trace"])
        self._ring_specs = ring_specs(self.config)

    @property
    def is_standby(self) -> bool:
        """Whether another process is the stage, or is dead and this one has not heard of it."""
        return not self._is_stage and self.boot.word_fd is not None

    def take_over(self) -> None:
        """Become the stage: a standby once it has the word, for which it waits as long as it takes.

        Whoever is the stage already is left alone.
        """
        if self._is_stage:
            return
        word_fd = self.boot.word_fd
        self.epoch = self.boot.epoch if word_fd is None else self._await_word(word_fd)
        self._is_stage = True
        FAULTS.epoch = self.epoch
        self.own_doorbell.disarm()  # the predecessor may have died waiting

    def _await_word(self, word_fd: int) -> int:
        self._tell("prepared", "")
        word = os.read(word_fd, WORD_BYTES)
        if not word:  # nobody is left who could say it
            os._exit(0)
        os.close(word_fd)
        setproctitle.setproctitle(f"stepahead: {self.stage}")
        return int.from_bytes(word, "little")

    def ring_producer(self, name: str) -> RingProducer:
        """Become the producer of a ring; only its stage may, once."""
        self._require_stage()
        spec = self._ring_specs[name]
        assert spec.producer == self.stage, (name, self.stage)
        return self._ring(name, spec).attach_producer()

    def ring_consumer(self, name: str) -> RingConsumer:
        """Become the consumer of a ring; only its stage may, once."""
        self._require_stage()
        spec = self._ring_specs[name]
        assert spec.consumer == self.stage, (name, self.stage)
        return self._ring(name, spec).attach_consumer()

    def _ring(self, name: str, spec: RingSpec) -> Ring:
        bells = self.doorbells[spec.consumer], self.doorbells[spec.producer]
        return Ring(self.segments[name], *bells, schema=spec.schema)

    def trace(self, lane: int = 0) -> TraceWriter:
        """Return the writer of one of the stage's lanes, for one thread."""
        self._require_stage()
        return self._trace.writer(self.stage, lane)

    def stats_writer(self) -> StatsWriter:
        """Return the writer of the stage's own block."""
        self._require_stage()
        return self.stats.writer(self.stage)

    def _require_stage(self) -> None:
        assert self._is_stage, "not before the take-over: another process may be the stage"

    def beat(self) -> None:
        """Give a sign of life."""
        self.control.beat(self.stage)

    def progress(self, text: str) -> None:
        """Tell the supervisor what the start is busy with."""
        self._tell("progress", text)

    def ready(self, text: str = "") -> None:
        """Tell the supervisor that the stage serves."""
        self._require_stage()
        self.beat()
        self._tell("ready", text)

    def fail(self, reason: str) -> None:
        """Tell the supervisor why the stage is about to end. The caller ends it."""
        self._tell("error", reason)

    def _tell(self, event: str, text: str) -> None:
        _write_line(self.boot.ready_fd, event, text)

    def _on_sigterm(self, _signum: int, _frame: FrameType | None) -> None:
        if not self._is_stage:
            os._exit(0)  # it has nothing to finish
        if not self._server_ends():
            # Whoever finished its work at leisure would be missing for as long as that takes. A death is what the
            # others know how to deal with.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.stopping = True
        self.own_doorbell.kick()

    def _server_ends(self) -> bool:
        """Whether it was the supervisor that sent SIGTERM: it says that the server ends before it asks anybody. Who
        signals all processes of a server at once sends it one as well, and it may be the last to take notice.
        """
        until_s = time.monotonic() + SAME_BREATH_SECONDS
        while self.control.state not in (DRAINING, FAILED):
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.01)
        return True


def boot(argv: Sequence[str] | None = None) -> Child:
    """Turn this process into the one that its boot record names (argv: ... --boot-fd N): a stage, or its standby.

    From here on the process dies with the supervisor, SIGINT is ignored (the supervisor decides), and an uncaught
    exception in any thread is an error line and exit status 1.
    """
    if os.environ.get(CORE_DUMPS) != "1":
        _leave_no_core()
    boot_fd = _boot_fd(sys.argv[1:] if argv is None else argv)
    record = Boot.from_fd(boot_fd)
    os.close(boot_fd)
    sys.excepthook = _excepthook(record.ready_fd)
    threading.excepthook = _thread_excepthook(record.ready_fd)
    assert record.stage in STAGES, record.stage
    for fd in record.fds:
        os.set_inheritable(fd, False)  # a process that the stage starts gets none of them
    die_with(record.supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = Child(record)
    signal.signal(signal.SIGTERM, child._on_sigterm)
    # Last: who goes by its title sends it signals.
    setproctitle.setproctitle(f"stepahead: {record.stage}" + ("" if record.word_fd is None else STANDBY_TITLE))
    return child


@contextlib.contextmanager
def start(argv: Sequence[str] | None = None) -> Iterator[Child]:
    """Boot, and end the process at once, with the reason on the ready pipe, if the body raises.

    Ending at once means that no thread, hung or not, can keep a broken stage alive.
    """
    child = boot(argv)
    try:
        yield child
    except Exception as error:  # noqa: BLE001 - not swallowed: the stage dies of it
        _die_of(child.boot.ready_fd, error)


def _boot_fd(argv: Sequence[str]) -> int:
    for option, value in itertools.pairwise(argv):
        if option == "--boot-fd":
            return int(value)
    raise SystemExit("this module is a stage of the server and is started by it: --boot-fd N is missing")


def _leave_no_core() -> None:
    """Have the kernel write nothing of this process when a signal ends it.

    Its memory is all that the server shares, and until it is written the process is not dead: nobody takes its place.
    The limit does not count where cores go to a program; there the filter leaves nothing to be handed over.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")


def _write_line(ready_fd: int, event: str, text: str) -> None:
    # A pipe takes up to 4 KiB in one piece, and JSON needs at most 6 bytes for a character. The supervisor may have
    # stopped listening: that is its affair.
    text = text[:_TEXT_CHARS_MAX].encode("utf-8", "replace").decode()
    line = orjson.dumps({"event": event, "text": text}) + b"\n"
    with contextlib.suppress(BrokenPipeError):
        os.write(ready_fd, line)


def _reason(error: BaseException) -> str:
    if isinstance(error, StartupError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _die_of(ready_fd: int, error: BaseException) -> NoReturn:
    try:
        _write_line(ready_fd, "error", _reason(error))
        if not isinstance(error, StartupError | Hung):
            traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:  # nobody may be left to read it
        os._exit(1)


def _excepthook(ready_fd: int) -> Any:
    def hook(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> NoReturn:
        _die_of(ready_fd, error)

    return hook


def _thread_excepthook(ready_fd: int) -> Any:
    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            _die_of(ready_fd, args.exc_value)

    return hook
