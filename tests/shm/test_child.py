"""What every stage does first, in real processes."""

import contextlib
import dataclasses
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm.child import CORE_DUMPS, WORD_BYTES, Boot
from shm.control import STAGES, Control
from shm.doorbell import Doorbell
from shm.ledger import Ledger
from shm.records import intake_record, ring_specs
from shm.ring import Ring
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace
from tests.shm.small import config

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


class Nest:
    """The segments and doorbells of a server, and stages that run code given as text."""

    def __init__(self) -> None:
        self.config = config()
        rows, max_len = self.config.rows, self.config.max_len
        sizes = {
            "control": Control.size(),
            "stats": Stats.size(),
            "trace": Trace.size(),
            "ledger": Ledger.size(rows, max_len),
        }
        self.specs = ring_specs(self.config)
        sizes |= {name: Ring.size(spec.slots, spec.payload_bytes) for name, spec in self.specs.items()}
        self.segments = {name: Segment.create(name, size) for name, size in sizes.items()}
        for name, spec in self.specs.items():
            Ring.create(self.segments[name], spec.slots, spec.payload_bytes, spec.schema)
        self.control = Control(self.segments["control"])
        self.stats = Stats(self.segments["stats"])
        self.trace = Trace(self.segments["trace"])
        self.ledger = Ledger(self.segments["ledger"], rows, max_len)
        self.bells = {stage: self.control.doorbell(stage, Doorbell.create_fd()) for stage in STAGES}
        self.ready_fd, self.ready_write_fd = os.pipe()
        self.lines = os.fdopen(self.ready_fd, "rb", buffering=0)  # else a line that came with another would not be seen

    def boot(self, stage: str = "gpu", supervisor_pid: int | None = None) -> Boot:
        return Boot(
            stage=stage,
            epoch=3,
            config=self.config,
            segments={name: (segment.fd, segment.size) for name, segment in self.segments.items()},
            doorbells={name: bell.fileno() for name, bell in self.bells.items()},
            ready_fd=self.ready_write_fd,
            listen_fd=None,
            channels={"tokenizer": "ipc://@a", "frontend": "ipc://@b"},
            supervisor_pid=supervisor_pid or os.getpid(),
        )

    def start(self, code: str, boot: Boot | None = None, via: list[str] | None = None) -> subprocess.Popen[str]:
        boot = boot or self.boot()
        fd = boot.to_memfd()
        argv = [sys.executable, *(via or []), "-c", textwrap.dedent(code), "--boot-fd", str(fd)]
        process = subprocess.Popen(
            argv,
            pass_fds=[fd, *boot.fds],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(fd)
        return process

    def line(self) -> dict[str, str]:
        assert select.select([self.ready_fd], [], [], DEADLINE_S)[0], "no line on the ready pipe"
        return json.loads(self.lines.readline())  # type: ignore[no-any-return]


@pytest.fixture
def nest() -> Iterator[Nest]:
    nest = Nest()
    yield nest
    nest.lines.close()
    with contextlib.suppress(OSError):
        os.close(nest.ready_write_fd)
    for segment in nest.segments.values():
        segment.close()
    for bell in nest.bells.values():
        os.close(bell.fileno())


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_stage_boots_works_and_stops_on_sigterm(nest: Nest) -> None:
    nest.bells["gpu"].arm()  # the predecessor died waiting
    process = nest.start("""
        import os, subprocess, sys
        from shm import child
        with child.start() as c:
            c.progress("loading")
            c.take_over()
            assert (c.stage, c.epoch, c.listen_fd) == ("gpu", 3, None)
            assert c.channels["frontend"] == "ipc://@b"
            assert not c.control.waiting("gpu")
            assert not any(os.get_inheritable(fd) for fd in c.boot.fds)
            c.ring_producer("result").push(c.ledger.tokens[:1, :4], kind=5, source_seq=6)
            steps = c.ring_consumer("step")
            c.stats_writer().add("steps_total", 2)
            c.trace(1).span(30, 7, 8, 9)
            try:
                c.ring_producer("step")
            except AssertionError:
                c.ready("up")
            waits = 0
            while not c.stopping:
                c.own_doorbell.wait(lambda: False, 60_000)
                waits += 1
            assert waits == 2, waits  # the kick of the rings' attach, and SIGTERM's
        """)
    assert nest.line() == {"event": "progress", "text": "loading"}
    assert nest.line() == {"event": "ready", "text": "up"}
    assert nest.control.heartbeat_ns("gpu") > 0
    assert Path(f"/proc/{process.pid}/cmdline").read_text().startswith("stepahead: gpu")
    spec = nest.specs["result"]
    slot = Ring(nest.segments["result"], schema=spec.schema).attach_consumer().peek()
    assert (slot.kind, slot.source_seq, slot.payload.tolist()) == (5, 6, [0, 0, 0, 0])
    assert nest.stats.read_stage("gpu")["steps_total"] == 2
    assert [span.step for span in nest.trace.read()] == [7]
    wait_for(lambda: nest.control.waiting("gpu"))
    process.send_signal(signal.SIGINT)  # not the stage's affair
    time.sleep(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("body", "reason", "trace"),
    [
        ("with child.start() as c: c.ledger.count[10**9]", "IndexError: index 1000000000 is out of bounds.*", True),
        ("with child.start() as c: assert c.epoch == 4", "AssertionError", True),
        ("with child.start(): raise child.StartupError('model.gguf: no GGUF file')", "model.gguf: no GGUF file", False),
        ("child.boot(); raise child.StartupError('too little memory')", "too little memory", False),
        ("child.boot(); 1 / 0", "ZeroDivisionError: division by zero", True),
        (
            "from threading import Thread; import time\n"
            "with child.start(): Thread(target=lambda: {}['x']).start(); time.sleep(60)",
            "KeyError: 'x'",
            True,
        ),
        (
            "from threading import Thread; import time\n"
            "with child.start(): Thread(target=time.sleep, args=(60,)).start(); 1 / 0",
            "ZeroDivisionError: division by zero",
            True,
        ),
        ("with child.start(): raise ValueError('\\ud800' + '\\n€' * 4000)", "ValueError: \\?\n€(.|\n)*", True),
    ],
)
def test_an_error_is_one_line_and_status_1_whoever_raises_it(nest: Nest, body: str, reason: str, trace: bool) -> None:
    process = nest.start(f"from shm import child\n{body}")
    line = nest.line()
    assert line["event"] == "error"
    assert re.fullmatch(reason, line["text"]), line
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert ("Traceback" in errors) == trace


@pytest.mark.parametrize("how", ["1 / 0", "Thread(target=lambda: 1 / 0).start(); time.sleep(600)"])
def test_a_stage_dies_of_an_error_that_it_cannot_print(nest: Nest, how: str) -> None:
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
    head = f"import os, time; from threading import Thread; from shm import child; {full}"
    process = nest.start(f"{head}\nwith child.start(): {how}")
    assert nest.line()["text"] == "ZeroDivisionError: division by zero"
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1


HARD = resource.getrlimit(resource.RLIMIT_CORE)[1]
CORES = """
    import resource
    from shm import child
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with child.start() as c:
        with open("/proc/self/coredump_filter") as filter:
            c.progress(f"{resource.getrlimit(resource.RLIMIT_CORE)[0]} {int(filter.read(), 16) > 0}")
    """


@pytest.mark.parametrize(("wish", "told"), [("", "0 False"), ("0", "0 False"), ("1", f"{HARD} True")])
def test_a_stage_leaves_no_core_unless_asked_to(
    nest: Nest, monkeypatch: pytest.MonkeyPatch, wish: str, told: str
) -> None:
    monkeypatch.setenv(CORE_DUMPS, wish)
    process = nest.start(CORES)
    assert nest.line()["text"] == told
    assert process.communicate(timeout=DEADLINE_S) == ("", "")


def test_where_the_kernel_knows_of_no_filter_a_stage_starts(nest: Nest) -> None:
    process = nest.start("""
        from pathlib import Path
        from shm import child
        def refuse(*_):
            raise OSError
        Path.write_text = refuse
        with child.start() as c:
            c.progress("up")
        """)
    assert nest.line()["text"] == "up"
    process.communicate(timeout=DEADLINE_S)


def test_a_boot_that_fails_has_its_reason_told(nest: Nest) -> None:
    nest.segments["control"].words[2] ^= 1
    process = nest.start("from shm import child\nwith child.start(): pass")
    assert nest.line()["text"].startswith("LayoutError: segment control: layout")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1


def test_a_stage_dies_with_its_supervisor(nest: Nest) -> None:
    """The supervisor here is a process of its own that starts the stage and is killed."""
    middle = nest.start(
        '''
        import dataclasses, os, subprocess, sys, textwrap, time
        from shm.child import Boot
        stage = """
        import os, time
        from shm import child
        with child.start() as c:
            c.take_over()
            c.ready(str(os.getpid()))
            time.sleep(600)
        """
        boot = dataclasses.replace(Boot.from_fd(int(sys.argv[-1])), supervisor_pid=os.getpid())
        fd = boot.to_memfd()
        argv = [sys.executable, "-c", textwrap.dedent(stage), "--boot-fd", str(fd)]
        subprocess.Popen(argv, pass_fds=[fd, *boot.fds])
        time.sleep(600)
        '''
    )
    pidfd = os.pidfd_open(int(nest.line()["text"]))
    assert not select.select([pidfd], [], [], 0.05)[0]
    middle.kill()
    middle.communicate(timeout=DEADLINE_S)
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "the stage outlived its supervisor"
    os.close(pidfd)


def test_a_stage_whose_supervisor_is_already_gone_ends_at_once(nest: Nest) -> None:
    process = nest.start("from shm import child\nchild.boot()\nprint('up')", nest.boot(supervisor_pid=1))
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (1, "")


def test_a_stage_started_by_hand_says_so() -> None:
    code = "from shm import child\nchild.boot()"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip() == "this module is a stage of the server and is started by it: --boot-fd N is missing"


def test_the_boot_record_round_trips(nest: Nest) -> None:
    boot = nest.boot("scheduler")
    fd = boot.to_memfd()
    assert Boot.from_fd(fd) == boot
    assert set(boot.fds) == {s.fd for s in nest.segments.values()} | {b.fileno() for b in nest.bells.values()} | {
        nest.ready_write_fd
    }
    os.pwrite(fd, b'{"stage": "gpu"', 0)
    with pytest.raises(ValueError):
        Boot.from_fd(fd)
    os.close(fd)


def test_importing_everything_in_shm_is_light() -> None:
    code = """
        import sys
        from shm import channel, child, config, control, doorbell, ledger, limits, records, ring, segment, stats, trace
        print(sorted({"torch", "numba", "asyncio", "tokenizers", "fastapi"} & set(sys.modules)))
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_intake_record_reaches_the_stage_that_waits_for_it(nest: Nest) -> None:
    process = nest.start(
        """
        from shm import child
        from shm.records import read_intake
        with child.start() as c:
            c.take_over()
            intake = c.ring_consumer("intake")
            c.ready()
            while not c.own_doorbell.wait(lambda: intake.available() > 0, 60_000):
                pass
            rows, generations = read_intake(intake.peek().payload)
            c.fail(f"{rows.tolist()} {generations.tolist()} {c.ledger.tokens[rows[0], :3].tolist()}")
        """,
        nest.boot("scheduler"),
    )
    assert nest.line()["event"] == "ready"
    wait_for(lambda: nest.control.waiting("scheduler"))
    nest.ledger.tokens[5, :3] = [7, 8, 9]
    ring = Ring(nest.segments["intake"], nest.bells["scheduler"], None, schema=nest.specs["intake"].schema)
    ring.attach_producer().push(intake_record(np.array([5]), np.array([1])))
    assert nest.line() == {"event": "error", "text": "[5] [1] [7, 8, 9]"}
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


STANDBY = """
    from shm import child
    with child.start() as c:
        assert c.is_standby
        for early in (c.stats_writer, c.trace, c.ready, lambda: c.ring_consumer("step")):
            try:
                early()
            except AssertionError:
                continue
            raise SystemExit("too early")
        c.take_over()
        assert not c.is_standby and c.epoch == 7
        c.ring_consumer("step")
        c.take_over()  # once is enough
        c.ready("up")
        while not c.stopping:
            c.own_doorbell.wait(lambda: False, 60_000)
    """


def title_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def test_a_standby_touches_nothing_before_the_word(nest: Nest) -> None:
    nest.bells["gpu"].arm()
    word_fd, say_fd = os.pipe()
    process = nest.start(STANDBY, dataclasses.replace(nest.boot(), epoch=0, word_fd=word_fd))
    os.close(word_fd)
    before = {name: bytes(segment.buf) for name, segment in nest.segments.items()}
    assert nest.line() == {"event": "prepared", "text": ""}
    assert title_of(process.pid) == "stepahead: gpu (standby)"
    assert {name: bytes(segment.buf) for name, segment in nest.segments.items()} == before
    assert nest.control.waiting("gpu"), "the stage that lives waits"
    os.write(say_fd, (7).to_bytes(WORD_BYTES, "little"))
    os.close(say_fd)
    assert nest.line() == {"event": "ready", "text": "up"}
    assert title_of(process.pid) == "stepahead: gpu"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("how", ["SIGTERM", "nobody is left"])
def test_a_standby_ends_without_having_been_the_stage(nest: Nest, how: str) -> None:
    word_fd, say_fd = os.pipe()
    process = nest.start(STANDBY, dataclasses.replace(nest.boot(), epoch=0, word_fd=word_fd))
    os.close(word_fd)
    assert nest.line()["event"] == "prepared"
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    else:
        os.close(say_fd)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    assert nest.control.heartbeat_ns("gpu") == 0
    with contextlib.suppress(OSError):
        os.close(say_fd)


def test_the_word_may_come_before_the_standby_is_prepared(nest: Nest) -> None:
    word_fd, say_fd = os.pipe()
    os.write(say_fd, (7).to_bytes(WORD_BYTES, "little"))
    os.close(say_fd)
    process = nest.start(STANDBY, dataclasses.replace(nest.boot(), epoch=0, word_fd=word_fd))
    os.close(word_fd)
    assert [nest.line()["event"] for _ in range(2)] == ["prepared", "ready"]
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=DEADLINE_S)[1] == ""
