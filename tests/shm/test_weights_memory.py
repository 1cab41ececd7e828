"""The memory of the packed weights: packed once, found by whoever comes later, never taken for what it is not."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm import weights_memory
from shm.limits import HEADER_BYTES
from shm.segment import LayoutError
from shm.weights_memory import (
    BYTES_AT,
    COMPLETE,
    DIGEST_AT,
    HUGE_BYTES,
    MAGIC_AT,
    PACKING,
    RECORD_WORDS,
    STATE_AT,
    VERSION_AT,
    WeightsMemory,
    create_fd,
)

DIGEST, OTHER = bytes(range(32)), bytes(range(1, 33))
PIECES = (100, 64, 1, 5000)
Made = tuple[int, int]


@pytest.fixture
def made() -> Iterator[Made]:
    fd, size = create_fd(sum(PIECES) + 64 * len(PIECES))
    yield fd, size
    os.close(fd)


def pack(made: Made, digest: bytes = DIGEST) -> WeightsMemory:
    """Pack pieces of ones, twos, ..."""
    memory = WeightsMemory(*made, digest)
    assert not memory.is_complete
    for number, nbytes in enumerate(PIECES):
        piece = memory.take(nbytes)
        assert piece.ctypes.data % 64 == 0 and not piece.any()
        piece[:] = number + 1
    memory.complete()
    return memory


def record(fd: int) -> list[int]:
    return np.frombuffer(os.pread(fd, 8 * RECORD_WORDS, 0), np.uint64).tolist()


def write(fd: int, index: int, value: int) -> None:
    os.pwrite(fd, value.to_bytes(8, "little"), 8 * index)


def test_the_memory_is_sealed_and_takes_nothing_until_somebody_packs(made: Made) -> None:
    fd, size = made
    assert size == HUGE_BYTES and os.fstat(fd).st_blocks == 0
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, size // 2)
    pack(made)
    assert os.fstat(fd).st_blocks * 512 == size, "all of it, so that no page is missing later"


def test_whoever_comes_later_finds_it_packed(made: Made) -> None:
    first = pack(made)
    assert first.is_complete
    for _ in range(2):
        later = WeightsMemory(*made, DIGEST)
        assert later.is_complete
        pieces = [later.take(nbytes) for nbytes in PIECES]
        assert [piece.tolist() for piece in pieces] == [[n + 1] * size for n, size in enumerate(PIECES)]
        assert not any(piece.flags.writeable for piece in pieces)
        with pytest.raises(ValueError, match="read-only"):
            pieces[0][0] = 9
        later.complete()


BROKEN: dict[str, Callable[[int, int], None]] = {
    "another magic": lambda fd, _size: write(fd, MAGIC_AT, 1),
    "another version": lambda fd, _size: write(fd, VERSION_AT, weights_memory.VERSION + 1),
    "packing": lambda fd, _size: write(fd, STATE_AT, PACKING),
    "no state that there is": lambda fd, _size: write(fd, STATE_AT, COMPLETE + 1),
    "more bytes than there are": lambda fd, size: write(fd, BYTES_AT, size - HEADER_BYTES + 1),
    "another digest": lambda fd, _size: write(fd, DIGEST_AT + 3, 7),
    "cut behind the state": lambda fd, _size: [write(fd, i, 0) for i in range(BYTES_AT, RECORD_WORDS)] and None,
    "nothing at all": lambda fd, _size: [write(fd, i, 0) for i in range(RECORD_WORDS)] and None,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_not_whole_is_packed_anew(made: Made, broken: str) -> None:
    pack(made)
    BROKEN[broken](*made)
    if broken == "nothing at all":  # as new: whoever made it gave it zeros
        os.pwrite(made[0], bytes(made[1] - HEADER_BYTES), HEADER_BYTES)
    pack(made)
    assert WeightsMemory(*made, DIGEST).is_complete


def test_another_digest_is_packed_anew(made: Made) -> None:
    pack(made)
    pack(made, OTHER)
    assert WeightsMemory(*made, OTHER).is_complete
    pack(made, DIGEST)


def test_a_death_at_any_store_of_the_record_leaves_nothing_that_is_taken_for_whole(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over memory that was complete for something else: the state must go before anything else changes."""
    states: list[bytes] = []
    store = WeightsMemory._store

    def kept(self: WeightsMemory, index: int, value: int) -> None:
        states.append(os.pread(*made, 0))
        store(self, index, value)
        states.append(os.pread(*made, 0))

    pack(made, OTHER)
    monkeypatch.setattr(WeightsMemory, "_store", kept)
    pack(made, DIGEST)
    monkeypatch.undo()
    assert len(states) == 2 * (RECORD_WORDS + 1)  # the state is stored twice
    found = []
    for state in states:
        fd, size = create_fd(made[1] - HEADER_BYTES)
        try:
            os.pwrite(fd, state, 0)
            whole = [d for d in (DIGEST, OTHER) if weights_memory._is_complete(*_header(fd), d)]
            found.append(whole)
            if not whole:
                pack((fd, size))
        finally:
            os.close(fd)
    assert found[0] == [OTHER] and found[-1] == [DIGEST] and found[1:-1] == [[]] * (len(states) - 2)


def _header(fd: int) -> tuple[Any, int]:
    return np.frombuffer(os.pread(fd, 8 * RECORD_WORDS, 0), np.uint64), os.fstat(fd).st_size


def test_what_is_no_such_memory_is_refused(made: Made) -> None:
    fd, size = made
    with pytest.raises(LayoutError, match=f"has {size} bytes, expected {2 * size}"):
        WeightsMemory(fd, 2 * size, DIGEST)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    pipe = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(LayoutError, match="has 0 bytes"):
            WeightsMemory(pipe, size, DIGEST)
        os.ftruncate(loose, size)
        with pytest.raises(LayoutError, match="not sealed"):
            WeightsMemory(loose, size, DIGEST)
    finally:
        os.close(loose)
        os.close(pipe)


def test_more_than_there_is_room_for_is_an_error(made: Made) -> None:
    memory = WeightsMemory(*made, DIGEST)
    memory.take(made[1] - HEADER_BYTES)
    with pytest.raises(MemoryError, match="larger than"):
        memory.take(1)


def test_too_little_memory_is_told_before_anything_is_packed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_memory, "memory_available_bytes", lambda: made[1] - 1)
    with pytest.raises(MemoryError, match="need 2 MiB"):
        WeightsMemory(*made, DIGEST)
    assert record(made[0])[STATE_AT] == weights_memory.EMPTY


def test_the_bytes_stay_as_long_as_anybody_looks_at_them(made: Made) -> None:
    piece = pack(made).take(0)
    memory = WeightsMemory(*made, DIGEST)
    piece = memory.take(PIECES[0])
    address = piece.ctypes.data
    del memory
    gc.collect()
    assert piece.tolist() == [1] * PIECES[0]
    assert mapped(address)
    del piece
    gc.collect()
    assert not mapped(address)


def mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as lines:
        spans = [line.split(maxsplit=1)[0].split("-") for line in lines if "stepahead-weights" in line]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


PROGRAM = """
import ctypes, sys
from shm.weights_memory import WeightsMemory
fd, size, begin = map(int, sys.argv[1:])
memory = WeightsMemory(fd, size, bytes(range(32)))
assert memory.is_complete == bool(begin)
piece = memory.take(100)
if not begin:
    ctypes.memset(piece.ctypes.data, 3, 100)
    memory.complete()
print("here", flush=True)
ctypes.memset(piece.ctypes.data, 4, 1)
"""


def test_native_code_that_writes_to_what_is_packed_ends_its_process(made: Made) -> None:
    """Whether it has packed itself, or found it: a stray write would stay for every process that comes later."""
    for found in (0, 1):
        run = [sys.executable, "-c", PROGRAM, *map(str, made), str(found)]
        ended = subprocess.run(run, pass_fds=[made[0]], capture_output=True, text=True, check=False)
        assert (ended.stdout, ended.returncode) == ("here\n", -signal.SIGSEGV), ended.stderr
    assert WeightsMemory(*made, DIGEST).take(100).tolist() == [3] * 100
