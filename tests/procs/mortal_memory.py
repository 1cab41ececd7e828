"""The shared memory of a server whose processes are all in one thread, and each one's own view of it.

`seat(stage, life, wait)` is what a stage gets in place of a `shm.child.Child`: the same calls, over memory in which
every store of that life is counted. A wait is a call of the test's, which lets the others run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shm.batch_tables import BatchTables
from shm.config import ServerConfig
from shm.control import Control
from shm.ledger import Ledger
from shm.records import ring_specs
from shm.ring import Ring
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace
from tests.procs.mortal import Life, control_of, ledger_of, ring_of, segment_of

Ready = Callable[[], bool]
Wait = Callable[[Ready], None]

# What no process looks at, for all servers together.
STATS = Stats(Segment.create("stats", Stats.size()))
TRACE = Trace(Segment.create("trace", Trace.size()))


class Bell:
    """In place of a doorbell: who waits lets the others run."""

    def __init__(self, wait: Wait | None = None) -> None:
        self._wait = wait

    def ring(self) -> None:
        pass

    kick = ring

    def wait(self, ready: Ready, _timeout_ms: float = 0) -> bool:
        if not ready() and self._wait is not None:
            self._wait(ready)
        return ready()


class Memory:
    """Control segment, ledger, batch tables and rings; nobody has died yet."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.control = Control(Segment.create("control", Control.size()))
        size = Ledger.size(config.rows, config.max_len)
        self.ledger = Ledger(Segment.create("ledger", size), config.rows, config.max_len)
        self.batch = Segment.create("batch", BatchTables.size(config.entries, config.pages_per_row))
        self.rings: dict[str, Ring] = {}
        for name, spec in ring_specs(config).items():
            segment = Segment.create(name, Ring.size(spec.slots, spec.payload_bytes))
            Ring.create(segment, spec.slots, spec.payload_bytes, spec.schema)
            self.rings[name] = Ring(segment, schema=spec.schema)

    def seat(self, stage: str, life: Life, wait: Wait | None = None, sound: bool = False) -> Seat:
        """For the process that takes the place of the one before: its epoch is stored. sound: it goes on with what that
        one left in its memory.
        """
        epoch = self.control.epoch(stage) + 1
        if not sound or epoch == 1:
            self.control.set_memory(stage, epoch)
        self.control.set_epoch(stage, epoch)
        return Seat(self, stage, life, wait)

    def serves(self, stage: str) -> None:
        """It is ready: the supervisor says so."""
        self.control.set_serves(stage, self.control.epoch(stage))

    def left_in_rings(self) -> dict[str, int]:
        """Records that were published and not released, where there are any."""
        return {name: ring.head - ring.tail for name, ring in self.rings.items() if ring.head != ring.tail}


class Seat:
    """See `shm.child.Child`."""

    def __init__(self, memory: Memory, stage: str, life: Life, wait: Wait | None) -> None:
        self.stage = stage
        self.config = memory.config
        self.epoch = memory.control.epoch(stage)
        self.life = life
        self.ledger = ledger_of(memory.ledger, life)
        self.control = control_of(memory.control, life)
        self.segments = {"batch": segment_of(memory.batch, life)}
        self.stopping = False
        self.own_doorbell: Any = Bell(wait)
        self.doorbells: dict[str, Any] = dict.fromkeys(("scheduler", "gpu", "detokenizer"), Bell())
        self._memory = memory

    def ring_producer(self, name: str) -> Any:
        return ring_of(self._memory.rings[name], self.life).attach_producer()

    def ring_consumer(self, name: str) -> Any:
        return ring_of(self._memory.rings[name], self.life).attach_consumer()

    def stats_writer(self) -> Any:
        return STATS.writer(self.stage)

    def trace(self, lane: int = 0) -> Any:
        return TRACE.writer(self.stage, lane)

    def beat(self) -> None:
        pass

    def ready(self, _text: str = "") -> None:
        self._memory.serves(self.stage)
