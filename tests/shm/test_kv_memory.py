"""The memory of the KV caches: whoever comes later finds what is in it, and never takes it for what it is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest

from shm import huge_memory, kv_memory
from shm.huge_memory import HUGE_BYTES
from shm.kv_memory import DIGEST_AT, LAID_OUT, RECORD_WORDS, STATE_AT, KvMemory, create_fd
from shm.limits import HEADER_BYTES
from shm.segment import LayoutError

DIGEST, OTHER = bytes(range(32)), bytes(range(1, 33))
SHAPES = ((3, 5), (2, 64), (1000,))
Made = tuple[int, int]


@pytest.fixture
def made() -> Iterator[Made]:
    fd, size = create_fd(sum(4 * int(np.prod(shape)) + 64 for shape in SHAPES))
    yield fd, size
    os.close(fd)


def serve(made: Made, digest: bytes = DIGEST, is_kept: bool = False) -> list[np.ndarray]:
    memory = KvMemory(*made, digest)
    pieces = [memory.array(shape, np.float32) for shape in SHAPES]
    memory.settle(is_kept)
    return pieces


def test_the_memory_is_sealed_and_taken_page_by_page(made: Made) -> None:
    fd, size = made
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, size // 2)
    assert os.fstat(fd).st_blocks == 0
    serve(made)[0][:] = 1
    assert 0 < os.fstat(fd).st_blocks * 512 < size == HUGE_BYTES


@pytest.mark.parametrize("is_kept", [False, True])
def test_whoever_comes_later_finds_what_was_left(made: Made, is_kept: bool) -> None:
    for number, piece in enumerate(serve(made)):
        assert piece.ctypes.data % 64 == 0 and piece.flags.writeable
        piece[...] = number + 1
    again = serve(made, is_kept=is_kept)
    assert [(piece == number + 1).all() for number, piece in enumerate(again)] == [True] * 3


def test_what_is_kept_has_to_mean_the_same(made: Made) -> None:
    serve(made)
    with pytest.raises(LayoutError, match="laid out otherwise"):
        serve(made, OTHER, is_kept=True)
    serve(made, DIGEST, is_kept=True)
    serve(made, OTHER)  # nobody counts on it
    with pytest.raises(LayoutError, match="laid out otherwise"):
        serve(made, DIGEST, is_kept=True)


@pytest.mark.parametrize("word", range(RECORD_WORDS))
def test_a_record_that_was_written_over_is_no_such_memory(made: Made, word: int) -> None:
    serve(made)
    os.pwrite(made[0], (99).to_bytes(8, "little"), 8 * word)
    if word == STATE_AT:  # as if it had been laid out only now
        serve(made, OTHER, is_kept=True)
        return
    with pytest.raises(LayoutError, match="laid out otherwise"):
        serve(made, is_kept=True)


def test_a_death_at_any_store_of_the_record_says_nothing_of_the_content(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever died there has served nobody, so the next one may lay the memory out as it likes."""

    class Killed(Exception):
        pass

    store = KvMemory._store
    for at in range(RECORD_WORDS + 1):  # the state is stored twice
        left = [at]

        def dying(self: KvMemory, index: int, value: int, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            store(self, index, value)

        serve(made, OTHER)
        monkeypatch.setattr(KvMemory, "_store", dying)
        with pytest.raises(Killed):
            serve(made, DIGEST)
        monkeypatch.undo()
        if at:
            serve(made, DIGEST, is_kept=True)
        else:  # nothing was stored: it is what it was
            with pytest.raises(LayoutError):
                serve(made, DIGEST, is_kept=True)


def test_what_is_no_such_memory_is_refused(made: Made) -> None:
    fd, size = made
    with pytest.raises(LayoutError, match=f"has {size} bytes, expected {2 * size}"):
        KvMemory(fd, 2 * size, DIGEST)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(loose, size)
        with pytest.raises(LayoutError, match="not sealed"):
            KvMemory(loose, size, DIGEST)
    finally:
        os.close(loose)


def test_more_than_there_is_room_for_is_an_error(made: Made) -> None:
    memory = KvMemory(*made, DIGEST)
    memory.array((made[1] - HEADER_BYTES,), np.uint8)
    with pytest.raises(MemoryError, match="larger than"):
        memory.array((1,), np.uint8)


def test_a_mapping_that_is_refused_is_told_as_too_little_memory(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_given: object) -> None:
        raise MemoryError("mmap of 9 bytes: Cannot allocate memory")

    monkeypatch.setattr(huge_memory, "_map", refused)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        KvMemory(*made, DIGEST)


def test_what_is_in_use_comes_into_huge_pages_and_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    collapse = huge_memory.HugeMapping.collapse

    def heard(self: huge_memory.HugeMapping, begin: int, nbytes: int) -> int:
        asked.append((begin, collapse(self, begin, nbytes)))
        return asked[-1][1]

    def stop(_seconds: float) -> None:
        if len(asked) > 3:
            raise Stopped

    class Stopped(Exception):
        pass

    monkeypatch.setattr(huge_memory.HugeMapping, "collapse", heard)
    monkeypatch.setattr(kv_memory.time, "sleep", stop)
    fd, size = create_fd(3 * HUGE_BYTES)
    try:
        memory = KvMemory(fd, size, DIGEST)
        piece = memory.array((2 * HUGE_BYTES,), np.uint8)
        piece[::1000] = 7
        with pytest.raises(Stopped):
            memory.tend()
        assert [begin for begin, _ in asked[:4]] == [0, HUGE_BYTES, 2 * HUGE_BYTES, 3 * HUGE_BYTES]
        assert asked[3][1] == errno.EINVAL, "nothing is there"
        assert (piece[::1000] == 7).all() and not piece[1::1000].any()
    finally:
        os.close(fd)


def test_where_there_are_no_huge_pages_nobody_goes_on_asking(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(huge_memory.HugeMapping, "collapse", lambda _self, begin, _size: asked.append(begin) or 12)
    KvMemory(*made, DIGEST).tend(0, 0)
    assert len(asked) == kv_memory.REFUSED_MAX


def test_the_record_holds_what_it_says(made: Made) -> None:
    serve(made)
    record = np.frombuffer(os.pread(made[0], 8 * RECORD_WORDS, 0), np.uint64)
    assert record[STATE_AT] == LAID_OUT and record[DIGEST_AT:].tobytes() == DIGEST
