"""Processes that die behind any one of their stores into shared memory, or of their sends: all in one thread.

    life = Life(7)                   it dies behind its 7th store or send; 0: never
    ledger_of(ledger, life)          shared memory as this process sees it: what it stores is counted
    ring_of(ring, life), control_of(control, life), segment_of(segment, life), Wire().sender(life)

Every store of an element, or of a range, is one: planes of the ledger, arrays of a segment, payloads, headers and
cursors of rings, words of the control segment; payloads only of a life that is `fine`. What a dead process still does
while its calls unwind is stopped at its first store.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shm import ring as ring_module
from shm.control import Control
from shm.ledger import PLANES, Ledger
from shm.ring import Ring
from shm.segment import Segment


class Died(Exception):
    """A process has ended, between two instructions."""


class Life:
    """What one process stores, counted."""

    running: Life | None = None  # whose turn it is

    def __init__(self, dies_at: int = 0, fine: bool = True) -> None:
        self.fine = fine
        self.stores = 0
        self.dead = False
        self._dies_at = dies_at

    def before(self) -> None:
        """It is about to store. Raises Died for one that has died."""
        if self.dead:
            raise Died

    def stored(self) -> None:
        """It has. Raises Died if that was the last."""
        self.stores += 1
        if self.stores == self._dies_at:
            self.dead = True
            raise Died

    @contextmanager
    def turn(self) -> Iterator[None]:
        """It runs until the end of the block."""
        before, Life.running = Life.running, self
        try:
            yield
        finally:
            Life.running = before


class Plane(np.ndarray[Any, Any]):
    """Shared memory as an array: views of it count as well."""

    life: Life | None = None

    def __array_finalize__(self, base: Any) -> None:
        self.life = getattr(base, "life", None)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.life is not None:
            self.life.before()
        super().__setitem__(key, value)
        if self.life is not None:
            self.life.stored()


class Words:
    """Shared memory as words."""

    def __init__(self, words: Any, life: Life) -> None:
        self._words = words
        self._life = life

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._life.before()
        self._words[index] = value
        self._life.stored()


class SlotHeader:
    """In place of the struct that writes the header of a ring's slot, for whoever runs."""

    def __init__(self, plain: struct.Struct) -> None:
        self.unpack_from, self._plain = plain.unpack_from, plain

    def pack_into(self, buf: Any, offset: int, *fields: int) -> None:
        life = Life.running or Life()
        life.before()
        self._plain.pack_into(buf, offset, *fields)
        life.stored()


@contextmanager
def headers_counted() -> Iterator[None]:
    plain = ring_module._SLOT_HEADER
    ring_module._SLOT_HEADER = SlotHeader(plain)  # type: ignore[assignment]
    try:
        yield
    finally:
        ring_module._SLOT_HEADER = plain


def plane_of(array: Any, life: Life) -> Any:
    view = array.view(Plane)
    view.life = life
    return view


def ledger_of(ledger: Ledger, life: Life) -> Ledger:
    mine = copy.copy(ledger)
    for plane in PLANES:
        setattr(mine, plane.name, plane_of(getattr(ledger, plane.name), life))
    return mine


def control_of(control: Control, life: Life) -> Control:
    mine = copy.copy(control)
    mine.words = Words(control.words, life)  # type: ignore[assignment]
    return mine


def ring_of(ring: Ring, life: Life) -> Ring:
    mine = copy.copy(ring)
    mine.words = Words(ring.words, life)  # type: ignore[assignment]
    if life.fine:
        mine.payloads = [plane_of(payload, life) for payload in ring.payloads]
    return mine


def segment_of(segment: Segment, life: Life) -> MortalSegment:
    return MortalSegment(segment, life)


class MortalSegment:
    """Its arrays and words are counted; whoever finds it new formats it."""

    def __init__(self, segment: Segment, life: Life) -> None:
        self._segment = segment
        self._life = life
        self.words = Words(segment.words, life)
        self.format, self.check = segment.format, segment.check

    @property
    def formatted(self) -> bool:
        return self._segment.formatted

    def array(self, dtype: Any, count: int, offset: int = 0) -> Any:
        return plane_of(self._segment.array(dtype, count, offset), self._life)


class Wire:
    """A channel: what has been sent and not been received."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def sender(self, life: Life) -> WireSender:
        return WireSender(self, life)

    def take(self) -> list[dict[str, Any]]:
        taken, self.messages = self.messages, []
        return taken


class WireSender:
    """The sending end, see `shm.channel.Sender`."""

    def __init__(self, wire: Wire, life: Life) -> None:
        self._wire = wire
        self._life = life
        self.mark: dict[str, int] = {}

    def turn_to(self, _epoch: int) -> None:
        pass

    def send(self, message: dict[str, Any]) -> None:
        self._life.before()
        self._wire.messages.append({**message, **self.mark})
        self._life.stored()


class Deaths:
    """The lives of one stage, one after the other: each dies at the number that is said, the ones behind them never."""

    def __init__(self, numbers: Sequence[int] = (), fine: bool = True) -> None:
        self._left = list(numbers)
        self._fine = fine
        self.lives: list[Life] = []

    def next(self) -> Life:
        self.lives.append(Life(self._left.pop(0) if self._left else 0, self._fine))
        return self.lives[-1]
