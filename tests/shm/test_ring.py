"""The ring against a deque, with either side restarted at any point."""

import select
from collections import deque
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shm.doorbell import Doorbell
from shm.ring import Ring, RingConsumer, RingCorrupt, RingFull, RingProducer
from shm.segment import LayoutError, Segment

PAYLOAD_INTS = 1500  # above one piece of the checksum


class Record(NamedTuple):
    seq: int
    kind: int
    source_seq: int
    epoch: int
    values: list[int]


def make(slots: int = 4, payload_bytes: int = 256, schema: int = 0) -> tuple[Segment, RingProducer, RingConsumer]:
    segment = Segment.create("ring", Ring.size(slots, payload_bytes))
    Ring.create(segment, slots, payload_bytes, schema)
    return segment, Ring(segment, schema=schema).attach_producer(), Ring(segment, schema=schema).attach_consumer()


class RingMachine(RuleBasedStateMachine):
    """Everything a producer and a consumer may do, and their deaths. The model is a deque and two counters."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = 3  # does not divide the number of records, so that all slots meet all positions
        self.segment, self.producer, self.consumer = make(self.slots, PAYLOAD_INTS * 4)
        self.model: deque[Record] = deque()
        self.published = self.released = 0
        self.producer_epoch = self.consumer_epoch = 1
        self.last: Record | None = None
        self.rng = np.random.default_rng(0)

    def teardown(self) -> None:
        self.segment.close()

    @rule(
        n=st.sampled_from([0, 1, 5, 1024, 1025, PAYLOAD_INTS]),
        kind=st.integers(0, 2**64 - 1),
        source_seq=st.integers(0, 2**64 - 1),
        by_slot=st.booleans(),
    )
    def publish(self, n: int, kind: int, source_seq: int, by_slot: bool) -> None:
        values = self.rng.integers(-(2**31), 2**31, n).astype(np.int32)
        if len(self.model) == self.slots:
            with pytest.raises(RingFull):
                self.producer.push(values, kind, source_seq)
            with pytest.raises(RingFull):
                self.producer.publish(0)
            return
        if by_slot:
            self.producer.slot(self.published)[:n] = values
            seq = self.producer.publish(n * 4, kind, source_seq)
        else:
            seq = self.producer.push(values, kind, source_seq)
        assert seq == self.published
        self.last = Record(seq, kind, source_seq, self.producer_epoch, values.tolist())
        self.model.append(self.last)
        self.published += 1

    @rule(n=st.integers(0, 4))
    def release(self, n: int) -> None:
        if n > len(self.model):
            with pytest.raises(AssertionError):
                self.consumer.release(n)
            return
        self.consumer.release(n)
        self.released += n
        for _ in range(n):
            self.model.popleft()

    @precondition(lambda self: self.model)
    @rule(back=st.integers(0, 2))
    def resume_after(self, back: int) -> None:
        seq = self.released + len(self.model) - 1 - back
        self.consumer.resume_after(seq if seq >= 0 else None)
        while self.model and self.model[0].seq <= seq:
            self.model.popleft()
            self.released += 1

    @rule(garbage=st.integers(-(2**31), 2**31 - 1))
    def producer_dies_while_writing(self, garbage: int) -> None:
        if self.producer.space():
            self.producer.slot()[:] = garbage
        self.restart_producer()

    @rule()
    def restart_producer(self) -> None:
        self.producer = Ring(Segment.attach(self.segment.fd, self.segment.size, "ring")).attach_producer()
        self.producer_epoch += 1
        assert self.producer.head == self.published

    @rule()
    def restart_consumer(self) -> None:
        self.consumer = Ring(Segment.attach(self.segment.fd, self.segment.size, "ring")).attach_consumer()
        self.consumer_epoch += 1
        assert self.consumer.tail == self.released

    @invariant()
    def agrees_with_the_model(self) -> None:
        ring = self.producer.ring
        assert (ring.head, ring.tail) == (self.published, self.released)
        assert (ring.producer_epoch, ring.consumer_epoch) == (self.producer_epoch, self.consumer_epoch)
        assert self.producer.space() == self.slots - len(self.model)
        assert self.consumer.available() == len(self.model)
        times = []
        for i, record in enumerate(self.model):
            slot = self.consumer.peek(i)
            assert Record(slot.seq, slot.kind, slot.source_seq, slot.epoch, slot.payload.tolist()) == record
            assert slot.nbytes == len(record.values) * 4
            times.append(slot.time_ns)
        assert times == sorted(times)
        with pytest.raises(AssertionError):
            self.consumer.peek(len(self.model))
        last = self.producer.last
        assert self.producer.last_source_seq == (None if self.last is None else self.last.source_seq)
        if self.last is None:
            assert last is None
        else:
            assert last is not None and (last.kind, last.payload.tolist()) == (self.last.kind, self.last.values)


RingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestRingAgainstModel = RingMachine.TestCase


def test_a_slot_that_is_held_or_published_cannot_be_taken() -> None:
    _, producer, consumer = make()
    for seq in range(4):
        producer.slot(seq)
    with pytest.raises(RingFull):
        producer.slot(4)
    producer.push(np.zeros(1, np.int32))
    with pytest.raises(RingFull):
        producer.slot(0)
    with pytest.raises(RingFull):
        producer.slot(4)
    consumer.release()
    producer.slot(4)


@pytest.mark.parametrize("byte", [0, 7, 63])
def test_a_changed_payload_is_found(byte: int) -> None:
    _, producer, consumer = make()
    producer.push(np.arange(16, dtype=np.int32))
    producer.ring.bytes[0][byte] ^= 1
    with pytest.raises(RingCorrupt, match="checksum"):
        consumer.peek()


@pytest.mark.parametrize("n", [0, 15, 1023, 1024, 1400])
def test_what_lies_behind_the_record_does_not_matter(n: int) -> None:
    _, producer, consumer = make(payload_bytes=PAYLOAD_INTS * 4)
    producer.push(np.arange(n, dtype=np.int32))
    producer.ring.bytes[0][n * 4] ^= 1
    assert consumer.peek().payload.tolist() == list(range(n))


@pytest.mark.parametrize(("word", "value"), [(0, 0), (0, 2), (1, 260)])
def test_a_changed_slot_header_is_found(word: int, value: int) -> None:
    segment, producer, consumer = make()
    producer.push(np.zeros(0, np.int32))
    segment.words[producer.ring.offsets[0] // 8 + word] = value
    with pytest.raises(RingCorrupt, match="slot of 0 holds record"):
        consumer.peek()


def test_a_zeroed_slot_is_no_record() -> None:
    segment, producer, consumer = make()
    segment.words[16] = 1  # the head, before anything was written
    with pytest.raises(RingCorrupt):
        consumer.peek()
    assert producer.ring.head == 1


def test_attach_checks_kind_schema_and_size() -> None:
    segment, _, _ = make(schema=7)
    with pytest.raises(LayoutError, match="layout 00000007, this program has 00000008"):
        Ring(segment, schema=8)
    with pytest.raises(LayoutError, match="expected 'ring', found ''"):
        Ring(Segment.create("new", 4096))
    segment.words[8] = 1000  # slots
    with pytest.raises(LayoutError, match="too few for 1000 slots"):
        Ring(segment, schema=7)


def test_only_int32_is_carried() -> None:
    _, producer, _ = make()
    with pytest.raises(AssertionError):
        producer.push(np.zeros(3, np.int64))  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        producer.publish(260)
    with pytest.raises(AssertionError):
        producer.publish(3)


def test_bells_are_rung_for_a_waiting_side_and_kicked_on_attach() -> None:
    words = Segment.create("control", 4096).words
    bells = [Doorbell(Doorbell.create_fd(), words, i) for i in range(2)]
    segment = Segment.create("ring", Ring.size(2, 64))
    Ring.create(segment, 2, 64)

    def took(bell: Doorbell) -> bool:
        ready = bool(select.select([bell.fileno()], [], [], 0)[0])
        bell.drain()
        return ready

    ring = Ring(segment, bells[0], bells[1])
    producer = ring.attach_producer()
    assert took(bells[0]) and took(bells[1])
    consumer = ring.attach_consumer()
    assert took(bells[0]) and took(bells[1])
    producer.push(np.zeros(1, np.int32))
    consumer.release()
    assert not took(bells[0]) and not took(bells[1]), "nobody waits"
    bells[0].arm()
    bells[1].arm()
    producer.push(np.zeros(1, np.int32))
    assert took(bells[0]) and not took(bells[1])
    consumer.release()
    assert not took(bells[1]), "the ring was not full: no producer can be waiting for space"
    while producer.space():
        producer.push(np.zeros(1, np.int32))
    assert took(bells[0])
    consumer.release()
    assert took(bells[1]) and not took(bells[0])


def test_cursors_go_beyond_32_bits() -> None:
    segment, _, _ = make(slots=4)
    start = 2**33 + 1
    segment.words[16] = segment.words[24] = start
    producer, consumer = Ring(segment).attach_producer(), Ring(segment).attach_consumer()
    for i in range(9):
        assert producer.push(np.full(2, i, np.int32), source_seq=start + i) == start + i
        slot = consumer.peek()
        assert (slot.seq, slot.payload.tolist()) == (start + i, [i, i])
        consumer.release()
