"""The wires that `stepahead bench ring` compares: our ring, ZeroMQ with raw bytes and with JSON, and a pipe.

Owns both ends of each wire: what connects two processes, and how each sends and receives one message of int32 numbers.
No end pickles anything, and every receiver has the numbers themselves, whatever form they travel in.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import zmq

from shm.doorbell import Doorbell
from shm.limits import PAGE_BYTES
from shm.ring import Ring
from shm.segment import Segment

Message = npt.NDArray[np.int32] | Sequence[int]  # what a receiver has: JSON gives it lists
Numbers = npt.NDArray[np.int32]
SLOTS = 64  # messages under way that a wire holds, if nothing else is said
WAIT_SECONDS_MAX = 10.0  # for the other end
FLAGS = (0, 8)  # words of the two waiting flags: a cache line for each


class WireError(Exception):
    """The other end does not answer, or said something else than was sent."""


class Wire(Protocol):
    """One end. What `receive` gives is valid until the next call. Both wait, and raise WireError after some seconds."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> Message: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Ends:
    """A wire that was made: our end, and what the other process needs to open its own."""

    here: Wire
    there: dict[str, Any]
    fds: tuple[int, ...] = ()  # to hand to the other process, under the same numbers


class RingWire:
    """Two rings, and a doorbell for each process, as between two stages of the server."""

    def __init__(self, rings: Sequence[Segment], flags: Segment, bells: Sequence[int], side: int) -> None:
        """rings: to the other process, and back, seen from side 0; bells: eventfds by side."""
        self._segments = [*rings, flags]
        self._bells = bells
        ours, theirs = (Doorbell(bells[i], flags.words, FLAGS[i]) for i in (side, 1 - side))
        self._bell = ours
        self._out = Ring(rings[side], theirs, ours).attach_producer()
        self._in = Ring(rings[1 - side], ours, theirs).attach_consumer()
        self._most = self._in.ring.slots // 4
        self._seen = self._read = 0  # records that were there when we looked, and those of them that were received

    def send(self, message: Message) -> None:
        out = self._out
        if not out.space():
            self._wait(out.space)
        out.slot()[: len(message)] = message
        out.publish(4 * len(message))

    def receive(self) -> Message:
        if self._read in (self._seen, self._most):  # many at a time, and before the ring is full
            self._in.release(self._read)
            self._read, self._seen = 0, self._in.available()
            if not self._seen:
                self._wait(self._in.available)
                self._seen = self._in.available()
        payload = self._in.peek(self._read).payload
        self._read += 1
        return payload

    def _wait(self, ready: Any) -> None:
        end_s = time.monotonic() + WAIT_SECONDS_MAX
        while not self._bell.wait(ready):
            if time.monotonic() > end_s:
                raise WireError("the other end does not answer")

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        for bell in self._bells:
            os.close(bell)


class ZmqWire:
    """Two pairs of sockets over abstract unix sockets, as the server's channels are; the numbers as raw bytes."""

    def __init__(self, addresses: Sequence[str], side: int, slots: int) -> None:
        """slots: messages that each side's queue holds; the socket between them holds some more."""
        self._ctx = zmq.Context()
        self._out, self._in = self._ctx.socket(zmq.PUSH), self._ctx.socket(zmq.PULL)
        for socket, address in ((self._out, addresses[side]), (self._in, addresses[1 - side])):
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, slots)
            socket.set(zmq.RCVHWM, slots)
            socket.set(zmq.SNDTIMEO, int(1000 * WAIT_SECONDS_MAX))
            socket.set(zmq.RCVTIMEO, int(1000 * WAIT_SECONDS_MAX))
            (socket.connect if side else socket.bind)(address)

    def send(self, message: Message) -> None:
        self._put(np.asarray(message))

    def receive(self) -> Message:
        return np.frombuffer(self._take(), np.int32)

    def _put(self, data: Any) -> None:
        try:
            self._out.send(data)
        except zmq.Again as error:
            raise WireError("the other end does not answer") from error

    def _take(self) -> bytes:
        try:
            return self._in.recv()
        except zmq.Again as error:
            raise WireError("the other end does not answer") from error

    def close(self) -> None:
        self._ctx.destroy(linger=0)


class JsonWire(ZmqWire):
    """The same sockets, the numbers as a JSON list. The receiver keeps the list: an array would cost it more."""

    def send(self, message: Message) -> None:
        self._put(orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY))

    def receive(self) -> Message:
        numbers: list[int] = orjson.loads(self._take())
        return numbers


class PipeWire:
    """multiprocessing's Pipe, both ways, with send_bytes and recv_bytes: nothing is pickled."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        self._connection.send_bytes(np.asarray(message).data)

    def receive(self) -> Message:
        try:
            return np.frombuffer(self._connection.recv_bytes(), np.int32)
        except EOFError as error:
            raise WireError("the other end is gone") from error

    def close(self) -> None:
        self._connection.close()


NAMES = {"ring": "ring", "zmq": "zmq, raw bytes", "json": "zmq, orjson", "pipe": "Pipe, send_bytes"}


def make(kind: str, numbers: int, slots: int = SLOTS) -> Ends:
    """Make a wire for messages of so many numbers. slots: messages under way; a pipe holds what the kernel lets it."""
    if kind == "ring":
        size = Ring.size(slots, 4 * numbers)
        rings = [Segment.create(name, size) for name in ("there", "back")]
        for segment in rings:
            Ring.create(segment, slots, 4 * numbers)
        flags = Segment.create("flags", PAGE_BYTES)
        bells = [Doorbell.create_fd() for _ in range(2)]
        segments = [(segment.fd, segment.size) for segment in (*rings, flags)]
        there = {"kind": kind, "segments": segments, "bells": bells}
        return Ends(RingWire(rings, flags, bells, 0), there, (*(fd for fd, _ in segments), *bells))
    if kind == "pipe":
        ours, theirs = Pipe()
        fd = os.dup(theirs.fileno())
        theirs.close()
        return Ends(PipeWire(ours), {"kind": kind, "fd": fd}, (fd,))
    addresses = [f"ipc://@stepahead-{secrets.token_hex(16)}-bench" for _ in range(2)]
    return Ends(_zmq_class(kind)(addresses, 0, slots), {"kind": kind, "addresses": addresses, "slots": slots})


def open_end(there: dict[str, Any]) -> Wire:
    """Open the other end, in the other process."""
    kind = there["kind"]
    if kind == "ring":
        *rings, flags = (Segment.attach(fd, size, "bench") for fd, size in there["segments"])
        return RingWire(rings, flags, there["bells"], 1)
    if kind == "pipe":
        return PipeWire(Connection(there["fd"]))
    return _zmq_class(kind)(there["addresses"], 1, there["slots"])


def _zmq_class(kind: str) -> type[ZmqWire]:
    return {"zmq": ZmqWire, "json": JsonWire}[kind]
