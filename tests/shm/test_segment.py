"""Segments: sealed, nameless, checked on attach."""

import fcntl
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from shm.segment import LayoutError, Segment, memory_available_bytes, schema_hash


def test_a_segment_is_zeroed_whole_pages_and_sealed() -> None:
    segment = Segment.create("test", 5000)
    assert segment.size == 8192 == os.fstat(segment.fd).st_size
    assert os.fstat(segment.fd).st_blocks * 512 >= segment.size, "allocated now, so that a store cannot be a SIGBUS"
    assert not any(segment.buf)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & wanted == wanted
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_nothing_gets_a_name_even_if_the_owner_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    pid = os.fork()
    if pid == 0:
        Segment.create("test", 1 << 20).buf[0] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    segment = Segment.create("test", 1 << 20)
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:stepahead-test")
    assert set(os.listdir("/dev/shm")) <= before
    segment.close()


def test_another_process_sees_stores() -> None:
    segment = Segment.create("test", 4096)
    pid = os.fork()
    if pid == 0:
        other = Segment.attach(segment.fd, segment.size, "test")
        other.words[3] = 2**64 - 1
        other.array(np.int32, 4, 64)[:] = [1, -2, 3, -4]
        other.floats[4] = 0.5
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert segment.words[3] == 2**64 - 1
    assert segment.array(np.int32, 4, 64).tolist() == [1, -2, 3, -4]
    assert segment.floats[4] == 0.5
    segment.close()


def test_views_outlive_the_descriptor() -> None:
    segment = Segment.create("test", 4096)
    view = segment.array(np.int64, 2, 8)
    segment.close()
    view[:] = 7
    assert segment.words[1] == 7


def test_attach_refuses_what_is_no_such_segment(tmp_path: Path) -> None:
    segment = Segment.create("test", 4096)
    with pytest.raises(LayoutError, match="expected 8192 bytes"):
        Segment.attach(segment.fd, 8192, "test")
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.truncate(4096)
        with pytest.raises(LayoutError, match=r"not sealed|no memfd"):
            Segment.attach(file.fileno(), 4096, "test")
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(LayoutError, match="not sealed"):
        Segment.attach(unsealed, 4096, "test")
    os.close(unsealed)
    segment.close()


def test_what_it_holds_is_checked() -> None:
    segment = Segment.create("test", 4096)
    assert not segment.formatted
    with pytest.raises(LayoutError, match="expected 'ring', found ''"):
        segment.check("ring", 5)
    segment.format("ring", 5)
    assert segment.formatted
    segment.check("ring", 5)
    with pytest.raises(LayoutError, match="expected 'ledger', found 'ring'"):
        segment.check("ledger", 5)
    with pytest.raises(LayoutError, match="layout 00000005, this program has 00000006"):
        segment.check("ring", 6)
    segment.words[1] += 1
    with pytest.raises(LayoutError, match="layout version 2"):
        segment.check("ring", 5)
    segment.close()


def test_too_large_a_segment_is_an_error_that_names_it() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"segment ledger needs .* MiB of memory"):
        Segment.create("ledger", memory_available_bytes() * 4)
    with pytest.raises(ValueError, match="positive"):
        Segment.create("ledger", 0)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_schema_hash_depends_on_the_text() -> None:
    assert schema_hash("a") != schema_hash("b")
    assert 0 <= schema_hash("a") < 2**32


def test_misaligned_views_are_refused() -> None:
    segment = Segment.create("test", 4096)
    with pytest.raises(AssertionError):
        segment.array(np.int64, 1, 4)
    segment.close()


def test_a_dropped_segment_gives_its_descriptor_back_and_a_closed_one_only_once() -> None:
    fd = Segment.create("test", 4096).fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    segment = Segment.create("test", 4096)
    segment.close()
    other = os.eventfd(0)  # takes the lowest free number: what the segment had
    del segment
    os.fstat(other)
    os.close(other)
