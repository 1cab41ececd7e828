"""One answer on one connection: waits until the engine has accepted the request, then writes the stream or the whole.

Owns the grammar of a stream: pieces, one finish_reason for each choice, usage on request, an error event if it fails,
and one [DONE], always. May never start a 200 before the request is accepted, queue chunks (what a slow client has not
taken waits as text in its row), or leave a row running behind a client that has gone.
"""

from __future__ import annotations

import asyncio

import orjson
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.engine import Engine
from frontend.errors import json_response
from frontend.rows import Exchange, Row
from frontend.schema import Work
from frontend.shapes import Shape, shape_of

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """A response that carries `work` through the engine while it is sent."""

    def __init__(self, engine: Engine, work: Work) -> None:
        super().__init__()
        self._engine = engine
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._engine
        exchange = engine.open(self._work)
        watch = asyncio.create_task(_watch(receive, engine, exchange))
        try:
            await _accepted(exchange)
            shape = shape_of(self._work, engine.config.served_model_name)
            if exchange.gone:
                return
            if self._work.stream:
                await _stream(exchange, shape, self._work.include_usage, send)
            else:
                await _finished(exchange)
                if not exchange.gone:
                    await json_response(shape.whole(exchange))(scope, receive, send)
        finally:
            watch.cancel()
            engine.close(exchange)


async def _watch(receive: Receive, engine: Engine, exchange: Exchange) -> None:
    """Runs beside the handler and aborts as soon as the connection is gone, also while the handler waits to write."""
    await until_gone(receive)
    engine.abandon(exchange)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _accepted(exchange: Exchange) -> None:
    """Returns when all rows are accepted or the client is gone. Raises ApiError if one is rejected or all failed."""
    while not exchange.accepted and not exchange.gone and exchange.error is None:
        await exchange.wake.wait()
        exchange.wake.clear()
    if exchange.error is not None:
        raise exchange.error


async def _finished(exchange: Exchange) -> None:
    while not exchange.finished and not exchange.gone and exchange.error is None:
        await exchange.wake.wait()
        exchange.wake.clear()
    if exchange.error is not None:
        raise exchange.error


async def _stream(exchange: Exchange, shape: Shape, include_usage: bool, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    open_rows = list(exchange.rows)
    events = [_event(chunk) for row in open_rows if (chunk := shape.opening(row)) is not None]
    while not exchange.gone:
        exchange.wake.clear()
        for row in open_rows:
            events += _news(row, shape)
        open_rows = [row for row in open_rows if row.finish is None]
        if exchange.error is not None:
            events.append(_event(exchange.error.body()))
            break
        if not open_rows:
            break
        if events:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            events = []
        await exchange.wake.wait()
    if exchange.gone:
        return
    if include_usage and exchange.error is None:
        events.append(_event(shape.usage(exchange)))
    events.append(DONE)
    await send({"type": "http.response.body", "body": b"".join(events), "more_body": False})


def _news(row: Row, shape: Shape) -> list[bytes]:
    """What has come for `row` since the last look, as one piece, and the end if it has come. Never an empty piece."""
    events = []
    failed = row.finish in ("abort", "error")
    if row.text:
        text, ids = "".join(row.text), row.ids
        row.text, row.ids = [], []
        events.append(_event(shape.piece(row, text, ids)))
    if row.finish is not None and not failed:
        events.append(_event(shape.closing(row, row.ids)))
    return events


def _event(chunk: object) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
