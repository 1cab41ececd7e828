"""The memory of the packed weights: a memfd that the supervisor holds, so that they outlive the one that packed them.

Owns the memfd, the record at its start, and the mapping. The first process that opens it packs into it and says so with
its last store; a later one finds the weights complete and maps them read-only. It may hold no lock, and it knows
nothing of what a weight is: what it holds is told by a digest. Whoever packs is the only writer; there is never more
than one gpu process, because a dead one is reaped before the next is started.

The record is little-endian words of 8 bytes: magic, version, state, bytes of the data behind the record, and 32 bytes
of digest.

    EMPTY --first store--> PACKING --last store--> COMPLETE
    PACKING: whoever packed died. COMPLETE with another digest: not what this program would pack. Both: packed anew
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from shm import huge_memory
from shm.huge_memory import HUGE_BYTES, HugeMapping
from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES
from shm.segment import LayoutError, check_sealed, memory_available_bytes

VERSION = 1
EMPTY, PACKING, COMPLETE = range(3)
DIGEST_BYTES = 32
# Words of the record.
MAGIC_AT, VERSION_AT, STATE_AT, BYTES_AT, DIGEST_AT = range(5)
RECORD_WORDS = DIGEST_AT + DIGEST_BYTES // 8
MAGIC = int.from_bytes(b"weights\0", "little")


def create_fd(nbytes: int) -> tuple[int, int]:
    """Return a memfd for `nbytes` of packed weights, its size sealed, and that size.

    It takes no memory yet: whoever packs allocates it.
    """
    return huge_memory.create_fd("weights", HEADER_BYTES + nbytes)


def is_packed(fd: int, size: int, digest: bytes) -> bool:
    """Whether `WeightsMemory` of the same would find the weights complete, and so write nothing."""
    record = np.frombuffer(os.pread(fd, 8 * RECORD_WORDS, 0), np.uint64)
    return _is_complete(record, size, digest)


class WeightsMemory:
    """One process's view of the memfd `fd` of `size` bytes; the descriptor stays its caller's.

    digest: of everything that says what the packed bytes are. `is_complete`: they are there, mapped read-only. Else
    they are to be packed: `take` gives room, in an order that is always the same, and `complete` declares it done.

    Raises LayoutError if `fd` is no sealed memfd of that size, MemoryError if there is too little memory to pack.
    """

    def __init__(self, fd: int, size: int, digest: bytes) -> None:
        assert len(digest) == DIGEST_BYTES
        check_sealed(fd, size, "the memory of the weights")
        if not size or size % HUGE_BYTES:
            raise LayoutError(f"the memory of the weights has {size} bytes, not whole huge pages")
        self.size = size
        self._digest = digest
        self._taken = HEADER_BYTES
        record = np.frombuffer(os.pread(fd, 8 * RECORD_WORDS, 0), np.uint64)
        self.is_complete = _is_complete(record, size, digest)
        self._is_clean = int(record[STATE_AT]) == EMPTY
        if not self.is_complete:
            _allocate(fd, size)
        self._mapping = HugeMapping(fd, size, writable=not self.is_complete, populate=self.is_complete)
        if not self.is_complete:
            self._mapping.collapse(0, size)  # where that fails, pages are small
        self._bytes = np.asarray(self._mapping)
        self._words = self._bytes[: 8 * RECORD_WORDS].view(np.uint64)
        if not self.is_complete:
            self._store(STATE_AT, PACKING)  # first: from here on nothing in it can be relied on

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The next uint8[nbytes], beginning on a cache line: zeroed, or read-only with what was packed.

        Raises MemoryError if the memory is used up.
        """
        begin = self._taken
        end = begin + nbytes
        if end > self.size:
            raise MemoryError(f"the packed weights are larger than the {self.size} bytes that were made for them")
        self._taken = -(-end // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        made: npt.NDArray[np.uint8] = self._bytes[begin:end]
        if not (self.is_complete or self._is_clean):
            made[:] = 0  # what a predecessor left
        return made

    def complete(self) -> None:
        """Everything has been taken, and what was to be packed is: say so, and let nobody write to it any more."""
        used = self._taken - HEADER_BYTES
        if self.is_complete:
            assert used == self._words[BYTES_AT], "the same digest, and other sizes"
            return
        self._store(MAGIC_AT, MAGIC)
        self._store(VERSION_AT, VERSION)
        self._store(BYTES_AT, used)
        for number, word in enumerate(np.frombuffer(self._digest, np.uint64)):
            self._store(DIGEST_AT + number, int(word))
        self._store(STATE_AT, COMPLETE)  # last
        self._mapping.protect()
        self._bytes.flags.writeable = False
        self.is_complete = True

    def _store(self, index: int, value: int) -> None:
        """One aligned store of 8 bytes into the record."""
        self._words[index] = value


def _is_complete(record: npt.NDArray[np.uint64], size: int, digest: bytes) -> bool:
    wanted = (MAGIC, VERSION, COMPLETE)
    return (
        tuple(record[: STATE_AT + 1].tolist()) == wanted
        and int(record[BYTES_AT]) <= size - HEADER_BYTES
        and record[DIGEST_AT:].tobytes() == digest
    )


def _allocate(fd: int, size: int) -> None:
    """Now, so that too little memory is an error here, and not the out-of-memory killer or a SIGBUS later."""
    missing = size - 512 * os.fstat(fd).st_blocks
    if missing > memory_available_bytes():
        raise MemoryError(f"the packed weights need {size >> 20} MiB")
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise MemoryError(f"the packed weights need {size >> 20} MiB: {error.strerror}") from error
