"""Batch sizes and the key that capture and replay share."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.device.host import HostDevice
from gpu.graphs import DecodeGraphs, GraphKey, batch_sizes


def test_the_sizes_that_a_cpu_needs() -> None:
    assert batch_sizes(64) == (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
    assert batch_sizes(1) == (1,)
    assert batch_sizes(5) == (1, 2, 3, 4, 5)
    assert batch_sizes(256)[15:] == (64, 80, 96, 112, 128, 160, 192, 224, 256)


@given(st.integers(1, 4096))
def test_sizes_ascend_to_the_largest_batch_and_no_step_is_large(max_running: int) -> None:
    sizes = batch_sizes(max_running)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_running
    for below, size in itertools.pairwise(sizes):
        assert size - below <= max(1, below // 2)


def test_every_key_is_captured_and_a_batch_takes_the_next_size() -> None:
    device = HostDevice()
    stream = device.stream("s")
    graphs = DecodeGraphs(device, stream, 8, windows=(1, 4), lanes=3)
    seen: list[GraphKey] = []
    ran: list[GraphKey] = []

    def issue(key: GraphKey) -> None:
        seen.append(key)
        device.launch(stream, lambda: ran.append(key), reads=(), writes=(), name="pass")

    assert graphs.capture(issue) == 36 == len(set(seen))
    for live, rows in ((1, 1), (4, 4), (5, 6), (7, 8), (8, 8)):
        for lane, window in enumerate((1, 4, 1)):
            assert graphs.key(live, window, lane) == GraphKey(rows, window, lane)
            graphs.launch(graphs.key(live, window, lane))
    device.synchronize()
    assert ran == [GraphKey(rows, (1, 4, 1)[lane], lane) for rows in (1, 4, 6, 8, 8) for lane in range(3)]
    for live in (0, 9):
        with pytest.raises(AssertionError):
            graphs.key(live, 1, 0)
    for absent in (GraphKey(5, 1, 0), GraphKey(4, 2, 0)):
        with pytest.raises(KeyError):
            graphs.launch(absent)
    device.close()
