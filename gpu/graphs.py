"""Graphs of the decode step: one per padded batch size, window and lane, captured at start, replayed by a single call.

Owns the sizes, the key and the captured graphs. A batch is padded to the next size. Never captures while serving: a key
without a graph is an error, not a reason to stop and record one.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from gpu.device.protocol import Device, Graph, Stream

# (up to rows, in steps of): dense where a padded row is dear, because on a CPU it costs as much time as a real one
_SPACING = ((4, 1), (8, 2), (32, 4), (64, 8), (128, 16), (256, 32), (1 << 20, 64))


@dataclass(frozen=True)
class GraphKey:
    """All that a captured decode step depends on, for capture and for replay alike."""

    rows: int  # padded batch size
    window: int  # tokens of each row
    lane: int  # the rotating buffers and events that it uses


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """The padded batch sizes in ascending order, the last one `max_running` itself."""
    assert max_running >= 1
    sizes: list[int] = []
    for limit, spacing in _SPACING:
        first = sizes[-1] + spacing if sizes else spacing
        sizes.extend(range(first, min(limit, max_running) + 1, spacing))
    return (*(size for size in sizes if size < max_running), max_running)


class DecodeGraphs:
    """The captured decode steps of one program."""

    def __init__(self, device: Device, stream: Stream, max_running: int, windows: tuple[int, ...], lanes: int) -> None:
        self._device = device
        self._stream = stream
        self.windows = windows
        self._graphs: dict[GraphKey, Graph] = {}
        self.sizes = batch_sizes(max_running)
        self.lanes = lanes

    def capture(self, issue: Callable[[GraphKey], None]) -> int:
        """Record what `issue` queues on the stream, for every key. Returns how many graphs that makes."""
        for key in itertools.starmap(GraphKey, itertools.product(self.sizes, self.windows, range(self.lanes))):
            with self._device.capture(self._stream) as graph:
                issue(key)
            self._graphs[key] = graph
        return len(self._graphs)

    def key(self, live: int, window: int, lane: int) -> GraphKey:
        """The key that serves `live` rows. Asserts 1 <= live <= max_running."""
        assert 1 <= live <= self.sizes[-1], live
        return GraphKey(self.sizes[bisect_left(self.sizes, live)], window, lane)

    def launch(self, key: GraphKey) -> None:
        """Queue one replay. Raises KeyError for a key that was never captured."""
        self._graphs[key].launch(self._stream)
