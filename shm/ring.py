"""A ring carries fixed-size records from one producer to one consumer through a segment.

    0     magic | version | schema hash                                      written once, by who creates the ring
    64    slots | payload bytes
    128   head | producer epoch | producer pid                               written by the producer
    192   tail | consumer epoch | consumer pid                               written by the consumer
    4096  slot 0: 64 B header (seq + 1, nbytes, source seq, epoch, kind, crc, time) and payload, then slot 1 ...

Owns the order of the stores. Published is what lies before the head: payload, then slot header, then the head in one
aligned 8-byte store. Cursors are absolute and never wrap. A stage that turns records of one ring into records of
another stores its output's head first and its input's tail second; after a crash it goes on behind the source seq of
its last output, so nothing is lost and nothing done twice, whatever instruction it died at. A ring never overwrites a
slot that the consumer still holds, never blocks, and never stores a cursor in pieces (struct.pack_into zeroes first:
readers see it).
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shm.doorbell import STORES_ARE_ORDERED, Doorbell, fence
from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES
from shm.segment import LayoutError, Segment

_KIND = "ring"
# u64 words of the header
_SLOTS, _PAYLOAD_BYTES = 8, 9
_HEAD, _PRODUCER_EPOCH, _PRODUCER_PID = 16, 17, 18
_TAIL, _CONSUMER_EPOCH, _CONSUMER_PID = 24, 25, 26
_SLOT_HEADER = struct.Struct("<7Q")  # seq + 1 (0 = never written), nbytes, source seq, epoch, kind, crc, time_ns
_SLOT_HEADER_BYTES = CACHE_LINE_BYTES
_CRC_PIECE_BYTES = 4096  # zlib gives the GIL away above 5 KiB, and getting it back may take milliseconds

Int32Array = npt.NDArray[np.int32]

assert _SLOT_HEADER.size <= _SLOT_HEADER_BYTES
assert _HEAD // 8 != _TAIL // 8, "producer and consumer write different cache lines"
assert _CONSUMER_PID * 8 < HEADER_BYTES


class RingCorrupt(AssertionError):
    """A published slot does not hold what its header says: a bug, the stage must die."""


class RingFull(AssertionError):
    """A record was published without space: the caller did not look at space() first."""


class Slot(NamedTuple):
    """One published record. `payload` is an int32 view of `nbytes` bytes of the ring, valid until it is released."""

    kind: int
    nbytes: int
    source_seq: int
    epoch: int
    seq: int
    time_ns: int
    payload: Int32Array


class Ring:
    """A mapped ring. `consumer_bell` is rung on publish, `producer_bell` on release; None where nobody waits."""

    def __init__(
        self,
        segment: Segment,
        consumer_bell: Doorbell | None = None,
        producer_bell: Doorbell | None = None,
        schema: int = 0,
    ) -> None:
        segment.check(_KIND, schema)
        self.segment = segment
        self.words = segment.words
        self.consumer_bell = consumer_bell
        self.producer_bell = producer_bell
        self.slots: int = self.words[_SLOTS]
        self.payload_bytes: int = self.words[_PAYLOAD_BYTES]
        if segment.size < Ring.size(self.slots, self.payload_bytes):
            raise LayoutError(f"segment {segment.name}: {segment.size} bytes are too few for {self.slots} slots")
        stride = _stride(self.payload_bytes)
        self.offsets = [HEADER_BYTES + i * stride for i in range(self.slots)]
        self.bytes = [segment.buf[o + _SLOT_HEADER_BYTES : o + stride] for o in self.offsets]
        self.payloads: list[Int32Array] = [
            segment.array(np.int32, self.payload_bytes // 4, o + _SLOT_HEADER_BYTES) for o in self.offsets
        ]

    @staticmethod
    def size(slots: int, payload_bytes: int) -> int:
        """Return the bytes a ring needs; payload_bytes is that of the largest record."""
        return HEADER_BYTES + slots * _stride(payload_bytes)

    @staticmethod
    def create(segment: Segment, slots: int, payload_bytes: int, schema: int = 0) -> None:
        """Format a zeroed segment as an empty ring. `schema` is the hash of what the records mean."""
        assert slots >= 2, "the last published slot must outlive the next write"
        assert payload_bytes > 0 and payload_bytes % 4 == 0, payload_bytes
        assert segment.size >= Ring.size(slots, payload_bytes)
        segment.words[_SLOTS] = slots
        segment.words[_PAYLOAD_BYTES] = payload_bytes
        segment.format(_KIND, schema)

    def attach_producer(self) -> RingProducer:
        """Become the producer, in place of any earlier one, which must be dead."""
        return RingProducer(self)

    def attach_consumer(self) -> RingConsumer:
        """Become the consumer, in place of any earlier one, which must be dead."""
        return RingConsumer(self)

    @property
    def head(self) -> int:
        """Number of records ever published."""
        return self.words[_HEAD]

    @property
    def tail(self) -> int:
        """Number of records ever released."""
        return self.words[_TAIL]

    @property
    def producer_epoch(self) -> int:
        return self.words[_PRODUCER_EPOCH]

    @property
    def consumer_epoch(self) -> int:
        return self.words[_CONSUMER_EPOCH]

    def read(self, seq: int) -> Slot:
        """Return the published record `seq`; raise RingCorrupt unless it is whole and the one asked for."""
        index = seq % self.slots
        base = self.offsets[index]
        found_seq, nbytes, source_seq, epoch, kind, crc, time_ns = _SLOT_HEADER.unpack_from(self.segment.buf, base)
        if found_seq != seq + 1 or nbytes > self.payload_bytes:
            raise RingCorrupt(f"{self.segment.name}: slot of {seq} holds record {found_seq - 1} of {nbytes} bytes")
        if crc != _crc(self.bytes[index], nbytes):
            raise RingCorrupt(f"{self.segment.name}: record {seq} of {nbytes} bytes does not match its checksum")
        return Slot(kind, nbytes, source_seq, epoch, seq, time_ns, self.payloads[index][: nbytes // 4])

    def kick(self) -> None:
        """Wake both sides in any case: the one that died may have stored a cursor and not rung."""
        for bell in (self.consumer_bell, self.producer_bell):
            if bell is not None:
                bell.kick()


class RingProducer:
    """The writing end. One thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._words = ring.words
        self._slots = ring.slots
        self.epoch = self._words[_PRODUCER_EPOCH] + 1
        self._words[_PRODUCER_EPOCH] = self.epoch
        self._words[_PRODUCER_PID] = os.getpid()
        self.head: int = self._words[_HEAD]  # seq of the next record
        ring.kick()

    def space(self) -> int:
        """Return how many records can be published now."""
        return self._slots - (self.head - self._words[_TAIL])  # SYNC ring-released

    def slot(self, seq: int | None = None) -> Int32Array:
        """Return the payload, int32[payload_bytes // 4], of the record to be published as `seq` (default: the next)."""
        seq = self.head if seq is None else seq
        if not self.head <= seq < self._words[_TAIL] + self._slots:
            raise RingFull(f"{self.ring.segment.name}: slot of {seq} is not free")
        return self.ring.payloads[seq % self._slots]

    def publish(self, nbytes: int, kind: int = 0, source_seq: int = 0) -> int:
        """Publish the next slot, whose first `nbytes` were written, and return its seq. The rest of it is not carried.

        `source_seq` says which input this record comes from, so that the next producer can go on behind it.
        """
        ring, words, seq = self.ring, self._words, self.head
        assert 0 <= nbytes <= ring.payload_bytes and nbytes % 4 == 0, nbytes
        if seq - words[_TAIL] >= self._slots:
            raise RingFull(f"{ring.segment.name}: {self._slots} records are not released")
        index = seq % self._slots
        crc, now_ns = _crc(ring.bytes[index], nbytes), time.monotonic_ns()
        # In pieces, which is no harm: nobody reads this slot before the head says so.
        fields = (seq + 1, nbytes, source_seq, self.epoch, kind, crc, now_ns)
        _SLOT_HEADER.pack_into(ring.segment.buf, ring.offsets[index], *fields)
        if not STORES_ARE_ORDERED:
            fence()
        words[_HEAD] = self.head = seq + 1  # SYNC ring-published
        if ring.consumer_bell is not None:
            ring.consumer_bell.ring()
        return seq

    def push(self, payload: Int32Array, kind: int = 0, source_seq: int = 0) -> int:
        """Copy a C-contiguous int32 array of any shape into the next slot and publish it. Raises RingFull."""
        assert payload.dtype == np.int32, payload.dtype
        flat = payload.reshape(-1)
        self.slot()[: flat.size] = flat
        return self.publish(flat.nbytes, kind, source_seq)

    @property
    def last(self) -> Slot | None:
        """The last published record, by this producer or an earlier one; None if there is none yet."""
        return self.ring.read(self.head - 1) if self.head else None

    @property
    def last_source_seq(self) -> int | None:
        """The source seq of the last published record: where a restarted stage goes on behind. None: from the start."""
        last = self.last
        return None if last is None else last.source_seq


class RingConsumer:
    """The reading end. One thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._words = ring.words
        self.epoch = self._words[_CONSUMER_EPOCH] + 1
        self._words[_CONSUMER_EPOCH] = self.epoch
        self._words[_CONSUMER_PID] = os.getpid()
        self.tail: int = self._words[_TAIL]  # seq of the oldest record held
        ring.kick()

    def available(self) -> int:
        """Return how many records are published and not released."""
        return self._words[_HEAD] - self.tail  # SYNC ring-published

    def peek(self, i: int = 0) -> Slot:
        """Return the i-th oldest record held, 0 <= i < available(). Its payload is valid until it is released."""
        assert 0 <= i < self._words[_HEAD] - self.tail, (i, self.tail)
        if not STORES_ARE_ORDERED:
            fence()
        return self.ring.read(self.tail + i)

    def release(self, n: int = 1) -> None:
        """Give the n oldest records back. Whatever they led to must be published before."""
        assert 0 <= n <= self._words[_HEAD] - self.tail, (n, self.tail)
        if not STORES_ARE_ORDERED:
            fence()
        before = self.tail
        self._words[_TAIL] = self.tail = before + n  # SYNC ring-released
        if self.ring.producer_bell is not None:
            fence()  # tail stored before, head read after: a producer that fills the ring later sees this tail
            # A producer that waits for space() finds the ring full. One that has promised slots to records still to
            # come may run out of others in a ring that is not full: this does not ring it, so whoever lets it come to
            # that must. Ringing for less than a full ring would cost a needless wake-up a step.
            if self._words[_HEAD] - before >= self.ring.slots:
                self.ring.producer_bell.ring()

    def resume_after(self, source_seq: int | None) -> None:
        """Release every record up to and including `source_seq`, the last one whose output was published."""
        if source_seq is not None and source_seq >= self.tail:
            self.release(source_seq + 1 - self.tail)


def _stride(payload_bytes: int) -> int:
    return _SLOT_HEADER_BYTES + -(-payload_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


def _crc(payload: memoryview, nbytes: int) -> int:
    if nbytes <= _CRC_PIECE_BYTES:
        return zlib.crc32(payload[:nbytes])
    crc = 0
    for start in range(0, nbytes, _CRC_PIECE_BYTES):
        crc = zlib.crc32(payload[start : min(start + _CRC_PIECE_BYTES, nbytes)], crc)
    return crc
