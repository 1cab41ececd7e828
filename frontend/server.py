"""The frontend process: the HTTP application on the listening socket it was handed, and the loop around it.

Owns the event loop, the receiving end of the frontend's channel, and the end of the process: when it was told to and no
row is open, or, if the server has failed, when every open request has heard of it. It may never import a model, a
tokenizer or another process's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import uvicorn
import uvloop
import zmq
from fastapi import FastAPI

from frontend.engine import Engine
from frontend.http_protocol import BoundedProtocol
from frontend.metrics import Exposition, Meter
from frontend.routes import build_app
from shm import child
from shm.channel import Receiver, Sender
from shm.child import Child
from shm.limits import WAIT_MS_MAX

DRAIN_FLUSH_SECONDS = 5  # for clients that are slow to take the last of their answer
FAIL_FLUSH_SECONDS = 0.6  # the supervisor gives up after about a second
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn without its signal handling (the process has its own) and with a word when it listens."""

    def __init__(self, config: uvicorn.Config, child_: Child) -> None:
        super().__init__(config)
        self._child = child_

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._child.ready()


class Process:
    """The parts of a running frontend, tied to the loop."""

    def __init__(self, c: Child) -> None:
        assert c.listen_fd is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tokenizer = Sender(self._context, c.channels["tokenizer"], c.control.epoch("tokenizer"))
        meter = Meter(c.stats_writer())
        self._child = c
        self._receiver = Receiver.bind(c.channels["frontend"], c.epoch, self._context)
        self._kicked = asyncio.Event()
        self._broken: BaseException | None = None
        ring = c.doorbells["scheduler"].ring
        self.engine = Engine(c.config, c.control, c.ledger, meter, self._tokenizer, ring, c.trace(), c.epoch)
        app = build_app(self.engine, Exposition(c.stats, c.control))
        self._server = _Server(server_config(app), c)
        self._listening = socket.socket(fileno=c.listen_fd)

    async def run(self) -> None:
        """Serves until the process has to end. Raises what broke the receiver, if anything did."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._receiver.fileno, self._receive)
        loop.add_reader(self._child.own_doorbell.fileno(), self._on_kick)
        watch = loop.create_task(self._watch())
        watch.add_done_callback(self._on_watch_end)
        self._receive()  # the descriptor tells of changes only: what came before has to be looked for
        await self._server.serve(sockets=[self._listening])
        watch.cancel()
        loop.remove_reader(self._receiver.fileno)
        loop.remove_reader(self._child.own_doorbell.fileno())
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        self._receiver.close()
        self._tokenizer.close()
        self._context.term()

    def _receive(self) -> None:
        try:
            self.engine.receive(self._receiver.recv_all())
        except BaseException as error:  # noqa: BLE001 - not swallowed: run() raises it, and the process dies of it
            self._break(error)

    def _on_kick(self) -> None:
        self._child.own_doorbell.drain()
        self._kicked.set()

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is not None:
            self._break(watch.exception())

    def _break(self, error: BaseException | None) -> None:
        self._broken = self._broken or error
        self.engine.fail("the frontend met a bug")
        self._end(FAIL_FLUSH_SECONDS)

    def _end(self, flush_seconds: float) -> None:
        # From here on a client that does not take its answer is cut off, which is not worth a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        # uvicorn says int and passes it to asyncio.wait_for, which takes fractions.
        self._server.config.timeout_graceful_shutdown = flush_seconds  # type: ignore[assignment]
        self._server.should_exit = True

    async def _watch(self) -> None:
        """Looks at the state of the server whenever the doorbell rings, and every WAIT_MS_MAX in any case."""
        while not self._server.should_exit:
            self._child.beat()
            self.engine.look_around()
            if self.engine.failed:
                self.engine.fail(self.engine.failure)
                self._end(FAIL_FLUSH_SECONDS)
            elif self._child.stopping and self.engine.idle:
                self._end(DRAIN_FLUSH_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._kicked.wait(), WAIT_MS_MAX / 1000)
            self._kicked.clear()


def server_config(app: FastAPI) -> uvicorn.Config:
    """uvicorn on uvloop and httptools, silent, without websockets."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=BACKLOG,
    )


def rehearse(c: Child) -> None:
    """Make an application that serves nobody: the first one of a process takes a hundred times as long as the next."""
    engine = SimpleNamespace(config=c.config)
    server_config(build_app(cast(Engine, engine), Exposition(c.stats, c.control))).load()


async def _run(c: Child) -> None:
    process = Process(c)
    await process.run()
    process.close()


def main() -> None:
    with child.start() as c, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rehearse(c)
        c.take_over()
        runner.run(_run(c))


if __name__ == "__main__":
    main()
