"""The memory of the KV caches: a memfd that the supervisor holds, so that they outlive the gpu process that fills them.

Owns the memfd, the record at its start, and the mapping. What a page holds is known to the scheduler alone; what is
known here is whether the bytes mean the same to this process as to the one before. It may hold no lock. Its writer is
the gpu process that serves; one that only gets ready may map it, and write to the padding page.

Memory is taken page by page as the caches fill, and put into huge pages where it has been. Nothing is ever cleared:
attention uses no key that is not a row's own, whatever lies behind.

The record is little-endian words of 8 bytes: magic, version, state, and 32 bytes of digest.

    EMPTY --state stored last--> LAID_OUT, for the digest that stands there
"""

from __future__ import annotations

import errno
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from shm import huge_memory
from shm.huge_memory import HUGE_BYTES, HugeMapping
from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES
from shm.segment import LayoutError, check_sealed

VERSION = 1
EMPTY, LAID_OUT = range(2)
DIGEST_BYTES = 32
# Words of the record.
MAGIC_AT, VERSION_AT, STATE_AT, DIGEST_AT = range(4)
RECORD_WORDS = DIGEST_AT + DIGEST_BYTES // 8
# Of the thread that puts memory into huge pages.
PAUSE_SECONDS, REST_SECONDS = 0.1, 5.0
REFUSED_MAX = 8  # in a row: memory is in pieces
MAGIC = int.from_bytes(b"kvcache\0", "little")


def create_fd(nbytes: int) -> tuple[int, int]:
    """Return a memfd for `nbytes` of caches, its size sealed, and that size. It takes no memory yet."""
    return huge_memory.create_fd("kv", HEADER_BYTES + nbytes)


class KvMemory:
    """One process's view of the memfd `fd` of `size` bytes; the descriptor stays its caller's.

    digest: of everything that says what the bytes mean. Raises LayoutError if `fd` is no sealed memfd of that size,
    MemoryError if it cannot be mapped.
    """

    def __init__(self, fd: int, size: int, digest: bytes) -> None:
        assert len(digest) == DIGEST_BYTES
        check_sealed(fd, size, "the memory of the KV caches")
        self._digest = digest
        self._taken = HEADER_BYTES
        self._mapping = HugeMapping(fd, size, writable=True)
        self._bytes = np.asarray(self._mapping)
        self._words = self._bytes[: 8 * RECORD_WORDS].view(np.uint64)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The next piece, in an order that is always the same: it begins on a cache line and holds whatever is there.

        Raises MemoryError if the memory is used up.
        """
        begin = self._taken
        end = begin + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if end > len(self._bytes):
            raise MemoryError(f"the KV caches are larger than the {len(self._bytes)} bytes that were made for them")
        self._taken = -(-end // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        made: npt.NDArray[Any] = self._bytes[begin:end].view(dtype).reshape(shape)
        return made

    def settle(self, is_kept: bool) -> None:
        """From here on this process is the writer. is_kept: what its predecessor left counts on, see `Control.memory`.

        Raises LayoutError if that was laid out otherwise. The scheduler relies on it by now, so only another start can
        help: an end by an error is one that nothing is kept of.
        """
        if not is_kept or self._words[STATE_AT] != LAID_OUT:  # nobody has served from it yet: there is nothing to keep
            self._store(STATE_AT, EMPTY)  # first
            self._store(MAGIC_AT, MAGIC)
            self._store(VERSION_AT, VERSION)
            for number, word in enumerate(np.frombuffer(self._digest, np.uint64)):
                self._store(DIGEST_AT + number, int(word))
            self._store(STATE_AT, LAID_OUT)  # last
        wanted = MAGIC.to_bytes(8, "little") + VERSION.to_bytes(8, "little")
        if self._words[:STATE_AT].tobytes() != wanted or self._words[DIGEST_AT:].tobytes() != self._digest:
            raise LayoutError("the KV caches that the gpu process before this one left are laid out otherwise")

    def tend(self, pause_s: float = PAUSE_SECONDS, rest_s: float = REST_SECONDS) -> None:
        """Put what has come into use into huge pages, a stretch after the other, in a thread of its own.

        It returns when all is, or when there are no huge pages. One call of the kernel takes milliseconds, and who
        touches the stretch meanwhile waits: so there is a pause behind each, and a long rest behind a round for
        nothing.
        """
        small, refused = list(range(0, len(self._bytes), HUGE_BYTES)), 0
        while small:
            left: list[int] = []
            for begin in small:
                failed = self._mapping.collapse(begin, HUGE_BYTES)
                left += [begin] if failed else []
                if failed == errno.EINVAL:  # nothing is there yet
                    continue
                refused = refused + 1 if failed == errno.ENOMEM else 0
                if refused == REFUSED_MAX:
                    return
                time.sleep(pause_s)
            if len(left) == len(small):
                time.sleep(rest_s)
            small = left

    def _store(self, index: int, value: int) -> None:
        """One aligned store of 8 bytes into the record."""
        self._words[index] = value
