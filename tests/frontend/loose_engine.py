"""An Engine in this process, with real shared memory and a list in place of the channel to the tokenizer."""

from __future__ import annotations

from typing import Any

from frontend.engine import Engine
from frontend.metrics import Meter
from frontend.stream import Answer
from shm.control import READY, Control
from shm.ledger import Ledger
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace
from tests.frontend.live_frontend import server_config


class Sent(list[dict[str, Any]]):
    def turn_to(self, epoch: int) -> None:
        pass

    def send(self, message: dict[str, Any]) -> None:
        self.append(message)


class LooseEngine(Engine):
    def __init__(self, before: LooseEngine | None = None, **changes: Any) -> None:
        """before: the engine that died, whose shared memory this one finds."""
        config = server_config(**changes)
        self.state = before.state if before else Control(Segment.create("control", Control.size()))
        self.state.state = READY
        self.stats = before.stats if before else Stats(Segment.create("stats", Stats.size()))
        self.ledger = (
            before.ledger
            if before
            else Ledger(Segment.create("ledger", Ledger.size(config.rows, config.max_len)), config.rows, config.max_len)
        )
        self.sent = Sent()
        self.rings = 0
        trace = Trace(Segment.create("trace", Trace.size())).writer("frontend")
        meter = Meter(self.stats.writer("frontend"))
        super().__init__(config, self.state, self.ledger, meter, self.sent, self.ring, trace)  # type: ignore[arg-type]

    def ring(self) -> None:
        self.rings += 1

    def figures(self) -> dict[str, Any]:
        return self.stats.read_stage("frontend")

    def accept(self, n: int = -1, prompt_tokens: int = 3) -> tuple[int, int]:
        """Accepts the n-th request that was sent; its (row, generation)."""
        row, gen = self.sent[n]["row"], self.sent[n]["gen"]
        self.receive([{"ev": "accepted", "row": row, "gen": gen, "prompt_tokens": prompt_tokens}])
        return row, gen

    def receive(self, messages: list[dict[str, Any]]) -> None:
        """As from the processes that live, unless they say otherwise."""
        super().receive([{"epoch": 0, "to": 0, **message} for message in messages])

    def text(self, *items: tuple[Any, ...]) -> None:
        self.receive([{"ev": "text", "items": [list(item) for item in items]}])


class Connection:
    """The two callables of an ASGI connection. `write_allowed` cleared = the client takes nothing more."""

    def __init__(self) -> None:
        import asyncio

        self.messages: list[dict[str, Any]] = []
        self.write_allowed = asyncio.Event()
        self.write_allowed.set()
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        await self.write_allowed.wait()

    async def run(self, answer: Answer) -> None:
        await answer({"type": "http"}, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages)
