"""What a live server holds in shared memory while it works: the descriptors of a whole run, spans of every process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from frontend.cli_config import Wanted, make_config
from shm.config import ServerConfig
from shm.control import STAGES
from shm.records import STEP_DECODE, StepLayout, ring_specs
from shm.ring import Ring
from shm.segment import Segment
from shm.trace import Trace
from tests.e2e.live_server import ALONE, LiveServer, complete, live_server

pytestmark = pytest.mark.model
ENTRIES = 8


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--max-len", "512", "--max-running", str(ENTRIES), "--prefill-chunk", "64", *ALONE) as s:
        yield s


@pytest.fixture(scope="module")
def config() -> ServerConfig:
    wanted = Wanted(
        model="smollm2-135m-instruct",
        host="127.0.0.1",
        port=1,
        device="host",
        dtype="int8",
        max_len=512,
        max_running=ENTRIES,
        prefill_chunk=64,
        overlap=True,
        max_queued=1024,
        kv_tokens=None,
        page_size=16,
        drain_seconds=30,
    )
    return make_config(wanted, lambda *_: None)


def segment(server: LiveServer, name: str) -> Segment:
    """A segment of the running server, by the descriptor that its supervisor holds."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    for fd in folder.iterdir():
        if os.readlink(fd).startswith(f"/memfd:stepahead-{name}"):
            return Segment.attach(os.open(fd, os.O_RDWR), fd.stat().st_size, name)
    raise AssertionError(f"no segment {name}")


class Listener:
    """Copies every record of a ring, from beside it."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.seen: dict[int, np.ndarray] = {}
        self.running = True
        self.thread = threading.Thread(target=self.listen)
        self.thread.start()

    def listen(self) -> None:
        following = self.ring.head
        while self.running:
            while following < self.ring.head:
                self.seen[following] = self.ring.payloads[following % self.ring.slots].copy()
                assert self.ring.head - following < self.ring.slots - 1, "overtaken"
                following += 1
            time.sleep(0.0005)

    def stop(self) -> list[np.ndarray]:
        self.running = False
        self.thread.join()
        assert list(self.seen) == list(range(min(self.seen), max(self.seen) + 1))
        return list(self.seen.values())


def test_descriptors_of_a_whole_run_hold_entries_and_no_tokens_or_lengths(
    server: LiveServer, config: ServerConfig
) -> None:
    spec = ring_specs(config)["step"]
    listener = Listener(Ring(segment(server, "step"), schema=spec.schema))
    bodies = [
        {"prompt": [504 + i] * (5 + 30 * i), "max_tokens": 60 - i, "ignore_eos": True, "temperature": i % 2, "seed": i}
        for i in range(12)
    ]
    complete(server, bodies)
    layout = StepLayout(config)
    alike: dict[bytes, set[bytes]] = {}
    decodes = 0
    for payload in listener.stop():
        view = layout.view(payload)
        assert view.gpu_epoch == 1 and np.count_nonzero(view.header[7:]) == 1
        entries = view.decode_entries[: view.n_decode]
        assert len(set(entries.tolist())) == view.n_decode and view.n_decode <= ENTRIES
        assert ((entries >= 1) & (entries <= ENTRIES)).all()
        writes = view.slot_writes[:, : view.n_slot_writes]
        assert ((writes[0] >= 1) & (writes[0] <= ENTRIES)).all()
        assert ((writes[1] >= 0) & (writes[1] < config.pages_per_row)).all()
        assert ((writes[2] >= 1) & (writes[2] < config.pages)).all()
        if view.kind == STEP_DECODE:
            decodes += 1
            assert view.n_chunks == view.n_sampling == 0
            if view.n_slot_writes == 0:
                used = view.header.copy()
                used[5:7] = 0  # the number of the step
                alike.setdefault(entries.tobytes(), set()).add(used.tobytes() + entries.tobytes())
        else:
            # A chunk names its range of a prompt; its row takes part in no decode step until that is done.
            chunks = view.chunks[:, : view.n_chunks]
            assert not set(chunks[0].tolist()) & set(entries.tolist())
            assert ((chunks[3] >= 1) & (chunks[2] + chunks[3] <= 5 + 30 * 11)).all()
    # Between two such steps every row has grown by a token, and not one bit of what was queued for it has changed.
    assert decodes > 50 and max(map(len, alike.values())) == 1
    assert len(alike) < decodes / 4


def test_every_process_writes_spans(server: LiveServer) -> None:
    complete(server, [{"prompt": "Once upon a time", "max_tokens": 4, "stream": False}])
    spans = Trace(segment(server, "trace")).read()
    assert {span.stage for span in spans} == set(STAGES)
    assert all(0 < span.begin_ns <= span.end_ns for span in spans)
