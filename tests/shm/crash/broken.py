"""Roles that break one rule of the ring each. The crash tests must find every one of them."""

from __future__ import annotations

import struct

from shm import ring as ring_module
from shm.ring import Int32Array, Ring, RingProducer
from tests.shm.crash.pipeline import Source, Stage


class HeadFirst(RingProducer):
    """Publishes the cursor before the payload."""

    def push(self, payload: Int32Array, kind: int = 0, source_seq: int = 0) -> int:
        seq = self.head
        slot = self.slot()
        self._words[ring_module._HEAD] = seq + 1
        slot[: payload.size] = payload
        self._words[ring_module._HEAD] = seq  # publish() repeats it properly
        return self.publish(payload.nbytes, kind, source_seq)


class HeadFirstSource(Source):
    def attach(self, ring: Ring) -> RingProducer:
        return HeadFirst(ring)


class ReleaseFirstStage(Stage):
    """Releases the input before the output is published."""

    def hand_over(self, nbytes: int, kind: int, seq: int) -> None:
        self.input.release()
        self.out.publish(nbytes, kind, source_seq=seq)


class InputCursorStage(Stage):
    """Goes on where the input cursor stands, whatever was published."""

    def resume(self) -> None:
        return


def store_whole(words: memoryview, value: int) -> None:
    """What the ring does."""
    words[1] = value


def store_in_pieces(words: memoryview, value: int) -> None:
    """What struct does: it zeroes the bytes and then fills them in."""
    struct.pack_into("<Q", words, 8, value)
