"""Producer -> ring -> stage -> ring -> checker: the pipeline that the crash tests kill, and what they kill it with.

Every record can be told from its number alone, and every output depends on all inputs before it, so that the checker
sees a record that is lost, doubled, torn or computed from the wrong state.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from shm.control import Control
from shm.doorbell import Doorbell
from shm.launch import die_with
from shm.ring import Int32Array, Ring, RingConsumer, RingCorrupt, RingProducer
from shm.segment import Segment

INTS_MAX = 600
STALL_S = 20.0
NOISE = np.random.default_rng(7).integers(-(2**31), 2**31, 2 * INTS_MAX).astype(np.int32)
TRACED = ("shm/ring.py", "shm/doorbell.py", "crash/pipeline.py", "crash/broken.py")


def record(seq: int) -> Int32Array:
    """Return input record `seq`: a length of 2 to INTS_MAX ints, and contents, that both follow from its number."""
    length = 2 + (seq * 2654435761 >> 7) % (INTS_MAX - 1)
    values = NOISE[seq % INTS_MAX :][:length].copy()
    values[0] = seq
    return values


def fold(state: int, values: Int32Array) -> int:
    """Return the state of the stage after one more input; 64 bits."""
    return (state * 6364136223846793005 + zlib.crc32(values) + 1) & (2**64 - 1)


class Pipe:
    """The two rings and three doorbells, as the supervisor would make them."""

    def __init__(self, slots_in: int = 4, slots_out: int = 8) -> None:
        payload_bytes = (INTS_MAX + 2) * 4
        self.segments = []
        for name, slots in (("in", slots_in), ("out", slots_out)):
            segment = Segment.create(name, Ring.size(slots, payload_bytes))
            Ring.create(segment, slots, payload_bytes)
            self.segments.append(segment)
        self.control = Control(Segment.create("control", Control.size()))
        self.bells = [self.control.doorbell(s, Doorbell.create_fd()) for s in ("tokenizer", "scheduler", "detokenizer")]

        # Mapped once and inherited: what differs between one process and the next begins with the attach.
        self.input = Ring(self.segments[0], self.bells[1], self.bells[0])
        self.output = Ring(self.segments[1], self.bells[2], self.bells[1])

    def close(self) -> None:
        for segment in [*self.segments, self.control.segment]:
            segment.close()
        for bell in self.bells:
            os.close(bell.fileno())


class Source:
    """The producer. Its only state is the head of its ring."""

    def __init__(self, pipe: Pipe) -> None:
        self.bell = pipe.bells[0]
        self.out = self.attach(pipe.input)

    def attach(self, ring: Ring) -> RingProducer:
        return ring.attach_producer()

    def step(self) -> None:
        while not self.bell.wait(lambda: self.out.space() > 0):
            pass
        seq = self.out.head
        self.out.push(record(seq), kind=seq % 5, source_seq=seq)


class Stage:
    """The consumer-producer. Its state is in its last output, and so is how far it came."""

    def __init__(self, pipe: Pipe) -> None:
        self.bell = pipe.bells[1]
        self.out = pipe.output.attach_producer()
        self.input = pipe.input.attach_consumer()
        last = self.out.last
        self.state = 0 if last is None else int(last.payload[:2].view(np.uint64)[0])
        self.resume()

    def resume(self) -> None:
        self.input.resume_after(self.out.last_source_seq)

    def step(self) -> None:
        while not self.bell.wait(lambda: self.input.available() > 0 and self.out.space() > 0):
            pass
        slot = self.input.peek()
        self.state = fold(self.state, slot.payload)
        payload = self.out.slot()
        payload[:2].view(np.uint64)[0] = self.state
        payload[2 : 2 + slot.payload.size] = slot.payload
        self.hand_over(8 + slot.nbytes, slot.kind, slot.seq)

    def hand_over(self, nbytes: int, kind: int, seq: int) -> None:
        self.out.publish(nbytes, kind, source_seq=seq)
        self.input.release()


class Checker:
    """Reads the outputs and counts what is wrong with them."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.input: RingConsumer = pipe.output.attach_consumer()
        self.records = 0
        self.state = 0
        self.epochs: set[int] = set()
        self.errors: Counter[str] = Counter()

    def restart(self) -> None:
        self.input = self.pipe.output.attach_consumer()

    def drain(self) -> None:
        while self.input.available():
            self.check()
            self.input.release()

    def wait_and_drain(self, timeout_ms: float) -> None:
        self.pipe.bells[2].wait(lambda: self.input.available() > 0, timeout_ms)
        self.drain()

    def check(self) -> None:
        try:
            slot = self.input.peek()
        except RingCorrupt:
            self.errors["torn"] += 1
            return
        self.epochs.add(slot.epoch)
        if slot.source_seq != self.records:
            self.errors["lost" if slot.source_seq > self.records else "doubled"] += 1
            self.records = slot.source_seq
            self.state = -1
        values = record(slot.source_seq)
        if slot.kind != slot.source_seq % 5 or not np.array_equal(slot.payload[2:], values):
            self.errors["torn"] += 1
        state = int(slot.payload[:2].view(np.uint64)[0])
        if self.state >= 0 and fold(self.state, values) != state:
            self.errors["wrong state"] += 1
        self.state = state
        self.records += 1


Role = Callable[[Pipe], Any]


def spawn(role: Role, pipe: Pipe, steps: int | None = None, kill_at: int | None = None) -> int:
    """Fork a process that plays a role for some steps (None: for ever), and dies before its `kill_at`-th bytecode."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if kill_at is not None:
            sys.settrace(_killer(kill_at))
        _play(role, pipe, steps)
        status = 0
    except BaseException as error:  # noqa: BLE001 - told, and the status is 1
        sys.settrace(None)
        os.write(2, f"{role}: {error!r}\n".encode())
    finally:
        os._exit(status)


def _play(role: Role, pipe: Pipe, steps: int | None) -> None:
    actor = role(pipe)
    done = 0
    while steps is None or done < steps:
        actor.step()
        done += 1


def _killer(kill_at: int) -> Any:
    """Return a trace function that counts the bytecodes of the pipeline and the ring, and kills the process at one."""
    seen = 0

    def local(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal seen
        if event == "opcode":
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return local

    def enter(frame: FrameType, _event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return local

    return enter


def kill_at_every_bytecode(role: Role, stride: int = 1) -> tuple[Checker, int]:
    """Kill a role at its 1st, 1 + stride-th ... bytecode, each time a new process on the same rings.

    The other role is played here, between the deaths, so that the victim never waits. Ends when a victim attaches and
    does a whole step unkilled, or at the first error. Returns the checker and the number of kills.
    """
    pipe = Pipe()
    checker = Checker(pipe)
    source = Source(pipe) if issubclass(role, Stage) else None  # type: ignore[arg-type]
    stage = None if source else Stage(pipe)
    kills = 0
    for kill_at in itertools.count(1, stride):
        while source and source.out.space():
            source.step()
        _, status = os.waitpid(spawn(role, pipe, steps=1, kill_at=kill_at), 0)
        kills += os.WIFSIGNALED(status)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            checker.errors["gave up"] += 1
        try:
            while stage and stage.input.available():
                stage.step()
        except RingCorrupt:
            checker.errors["torn"] += 1
        checker.drain()
        if checker.errors or os.WIFEXITED(status):
            break
    pipe.close()
    return checker, kills


def kill_at_random(kills: int, seed: int, source: Role = Source, stage: Role = Stage) -> tuple[Checker, int, int]:
    """Run both roles as processes, kill them `kills` times, some while stopped; then both must still get on.

    Returns the checker, the number of kills, and how many records came through after the last one.
    """
    rng = random.Random(seed)
    pipe = Pipe()
    checker = Checker(pipe)
    roles = {"source": source, "stage": stage}
    pids = {name: spawn(role, pipe) for name, role in roles.items()}
    try:
        done = 0
        while done < kills and not checker.errors:
            _run(checker, rng.expovariate(1 / 0.005))
            if rng.random() < 0.1:
                checker.restart()
            for name in rng.choice([["source"], ["stage"], ["source", "stage"]]):
                if rng.random() < 0.3:
                    os.kill(pids[name], signal.SIGSTOP)
                    _run(checker, 0.002)
                os.kill(pids[name], signal.SIGKILL)
                _, status = os.waitpid(pids[name], 0)
                if os.WIFEXITED(status):
                    checker.errors["gave up"] += 1
                pids[name] = spawn(roles[name], pipe)
                done += 1
        before, end = checker.records, time.monotonic() + STALL_S
        while checker.records < before + 200 and time.monotonic() < end and not checker.errors:
            checker.wait_and_drain(50)
        return checker, done, checker.records - before
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        pipe.close()


def _run(checker: Checker, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not checker.errors:
        checker.wait_and_drain(left * 1000)
