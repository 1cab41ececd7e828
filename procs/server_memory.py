"""What the processes of one server share: segments, rings, doorbells and the addresses of the channels.

Owns the descriptors and hands their numbers out in boot records. The supervisor makes it before any child exists and
closes it after the last one is gone; it may never look into a request.
"""

from __future__ import annotations

import errno
import os

from procs.model_memory import cache_bytes, packed_bytes
from shm.batch_tables import BatchTables
from shm.channel import new_secret
from shm.child import Boot, StartupError
from shm.config import ServerConfig
from shm.control import STAGES, Control
from shm.doorbell import Doorbell
from shm.kv_memory import create_fd as create_kv_fd
from shm.ledger import Ledger
from shm.limits import CACHE_LINE_BYTES
from shm.records import ring_specs
from shm.ring import Ring
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace
from shm.weights_memory import create_fd

CACHES_MAX = 4  # arrays of all models, each of which begins on a cache line
_RECEIVERS = ("tokenizer", "frontend")  # stages that receive on a channel


class ServerMemory:
    """All shared memory of one server. Raises StartupError when there is too little of it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._rings = ring_specs(config)
        sizes = {
            "control": Control.size(),
            "stats": Stats.size(),
            "trace": Trace.size(),
            "ledger": Ledger.size(config.rows, config.max_len),
            "batch": BatchTables.size(config.entries, config.pages_per_row),
            **{name: Ring.size(ring.slots, ring.payload_bytes) for name, ring in self._rings.items()},
        }
        packed, cached = (packed_bytes(config), cache_bytes(config)) if config.device == "host" else (0, 0)
        self.segments: dict[str, Segment] = {}
        self.doorbell_fds: dict[str, int] = {}
        self.weights: tuple[int, int] | None = None  # descriptor and size
        self.kv: tuple[int, int] | None = None  # the same of the KV caches
        try:
            self._create(sizes)
            if packed:
                self.weights = create_fd(packed)
            if cached:
                self.kv = create_kv_fd(cached + CACHES_MAX * CACHE_LINE_BYTES)
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EMFILE):
                raise
            megabytes = sum(sizes.values()) / 1e6
            raise StartupError(f"cannot get {megabytes:.0f} MB of shared memory: {error.strerror}") from error
        self.channels = {stage: new_secret(stage) for stage in _RECEIVERS}

    def _create(self, sizes: dict[str, int]) -> None:
        for name, size in sizes.items():
            self.segments[name] = Segment.create(name, size)
        for stage in STAGES:
            self.doorbell_fds[stage] = Doorbell.create_fd()
        for name, ring in self._rings.items():
            Ring.create(self.segments[name], ring.slots, ring.payload_bytes, ring.schema)
        self.control = Control(self.segments["control"])
        self.stats = Stats(self.segments["stats"])
        self.trace = Trace(self.segments["trace"])
        Ledger(self.segments["ledger"], self.config.rows, self.config.max_len)

    def boot_record(self, stage: str, ready_fd: int, listen_fd: int | None, word_fd: int | None = None) -> Boot:
        """Return what the child of `stage` needs to start, in the epoch that the control segment holds for it.

        word_fd: of a standby, which has no epoch yet.
        """
        own_rings = {name for name, ring in self._rings.items() if stage in (ring.producer, ring.consumer)}
        shared = {"control", "stats", "trace", "ledger"} | ({"batch"} if stage == "scheduler" else set())
        return Boot(
            stage=stage,
            epoch=self.control.epoch(stage) if word_fd is None else 0,
            config=self.config,
            segments={name: (s.fd, s.size) for name, s in self.segments.items() if name in shared | own_rings},
            doorbells=self.doorbell_fds,
            ready_fd=ready_fd,
            listen_fd=listen_fd,
            channels=self.channels,
            supervisor_pid=os.getpid(),
            weights=self.weights if stage == "gpu" else None,
            kv=self.kv if stage == "gpu" else None,
            word_fd=word_fd,
        )

    def open_rows(self) -> int:
        """Requests that the frontend has not answered, as it says itself."""
        frontend = self.stats.read_stage("frontend")
        return max(int(frontend[name]) for name in ("open_rows", "open_streams"))  # type: ignore[arg-type]

    def given_up(self) -> int:
        """Requests that were given up because stages die of them, so far."""
        stages = ("frontend", "scheduler", "detokenizer")
        return sum(int(self.stats.read_stage(stage)["poison_total"]) for stage in stages)  # type: ignore[arg-type, misc]

    def kick_all(self) -> None:
        """Wake every stage, so that it looks at the state of the server."""
        for stage, fd in self.doorbell_fds.items():
            self.control.doorbell(stage, fd).kick()

    def close(self) -> None:
        """Close every descriptor; the kernel frees the memory with the last process that maps it."""
        for segment in self.segments.values():
            segment.close()
        for fd in self.doorbell_fds.values():
            os.close(fd)
        for memory in (self.weights, self.kv):
            if memory is not None:
                os.close(memory[0])
        self.weights = self.kv = None
        self.segments.clear()
        self.doorbell_fds.clear()
