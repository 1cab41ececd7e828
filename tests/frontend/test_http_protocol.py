"""Raw bytes against the protocol on a real socket: clients that leave, flood, stall, or do not speak HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from frontend import http_protocol, server
from frontend.http_protocol import HEAD_BYTES_MAX

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\nab"
GET = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
WAIT_S = 10.0


class App:
    """Reads the body, then waits for `go` or the end of the client, then answers with the body's length."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started: list[str] = []
        self.left: list[str] = []
        self.streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.started.append(path)
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(path)
                return
            size, more = size + len(message["body"]), message["more_body"]
        if self.streaming:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
        going, gone = asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(_disconnect(receive))
        await asyncio.wait((going, gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (going, gone):
            task.cancel()
        if not self.go.is_set():
            self.left.append(path)
            return
        body = str(size).encode()
        if not self.streaming:
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Test = Callable[[App, Callable[[], Awaitable[Client]]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[App, Callable[[], Awaitable[Client]]]]:
    app, state, writers = App(), ServerState(), []
    config = server.server_config(app)  # type: ignore[arg-type]
    config.load()
    assert isinstance(config.http_protocol_class, type)

    def protocol() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]

    async def connect() -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    yield app, connect
    for writer in writers:
        writer.close()
    listener.close()


def run(test: Test) -> None:
    async def whole() -> None:
        async with serving() as (app, connect):
            await asyncio.wait_for(test(app, connect), WAIT_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


async def refusal(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """The last answer on the connection, which the server has closed: status and OpenAI's error object."""
    head, _, body = (await reader.read()).rpartition(b"\r\n\r\n")
    last = head[head.rindex(b"HTTP/1.1") :].decode()
    assert "connection: close" in last and "content-type: application/json" in last
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return int(last.split()[1]), error


@pytest.mark.parametrize("behind", [b"G", GET, GET * 3, WHOLE, b"\x00garbage\r\n\r\n", b"\r\n", GET * 2000])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_is_noticed_whatever_it_sent_behind(
    behind: bytes, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(app: App, connect: Any) -> None:
        app.streaming = streaming
        _, writer = await connect()
        writer.write(WHOLE + behind)
        await until(lambda: app.started == ["/x"])
        await asyncio.sleep(0.02)
        assert not app.left
        writer.close()
        await until(lambda: app.left == ["/x"])
        await asyncio.sleep(0.02)
        assert app.started == ["/x"], "nothing behind it is begun for nobody"

    with caplog.at_level(logging.ERROR):
        run(test)
    assert not caplog.records


def test_what_is_pipelined_is_answered_in_order() -> None:
    async def test(app: App, connect: Any) -> None:
        reader, writer = await connect()
        writer.write(WHOLE + GET + HEAD + b"content-length: 70000\r\n\r\n")
        await until(lambda: bool(app.started))
        writer.write(b"b" * 50_000)
        await asyncio.sleep(0.02)
        app.go.set()
        writer.write(b"b" * 20_000)
        for body in (b"2", b"0", b"70000"):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(body)) == body

    run(test)


@pytest.mark.parametrize("behind", [GET * 10_000, HEAD + b"content-length: 4000000\r\n\r\n" + b"b" * 200_000, b"\x00"])
def test_too_much_behind_a_request_costs_the_rest_but_not_its_answer(behind: bytes) -> None:
    async def test(app: App, connect: Any) -> None:
        reader, writer = await connect()
        writer.write(WHOLE + behind)
        await until(lambda: bool(app.started))
        await writer.drain()
        await asyncio.sleep(0.05)
        app.go.set()
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"\r\n\r\n2") and b"connection: close" in answer

    run(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 1_000_000, 414),
        (HEAD + b"x-long: " + b"a" * 1_000_000, 431),
        (HEAD + b"x-many: a\r\n" * 100_000, 431),
        (b"\r\n" * 500_000, 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"x-trailer: a\r\n" * 100_000, 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 1_000_000, 431),
    ],
    ids=["url", "one header", "many headers", "blank lines", "trailers", "chunk extension"],
)
def test_heads_are_bounded(sent: bytes, status: int) -> None:
    async def test(_: App, connect: Any) -> None:
        reader, writer = await connect()
        writer.write(sent)
        assert (await refusal(reader))[0] == status

    run(test)


def test_the_longest_head_that_fits_and_a_body_in_small_chunks() -> None:
    async def test(app: App, connect: Any) -> None:
        app.go.set()
        reader, writer = await connect()
        long = HEAD + b"transfer-encoding: chunked\r\nx: "
        writer.write(
            long.ljust(HEAD_BYTES_MAX - 4, b"a") + b"\r\n\r\n" + b"1\r\na\r\n" * 100_000 + b"0\r\nt: x\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(6) == b"100000"

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /ä HTTP/1.1\r\n\r\n".encode(),
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\nab",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
        HEAD + b"bad header\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_the_api_s_shape(sent: bytes) -> None:
    async def test(_: App, connect: Any) -> None:
        reader, writer = await connect()
        writer.write(sent)
        status, error = await refusal(reader)
        assert status == 400 and error["code"] == "bad_http"

    run(test)


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"", False), (b"GET / HT", True), (HEAD, True), (HEAD + b"content-length: 9\r\n\r\nab", True)],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_what_stalls_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes, answered: bool) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.2)

    async def test(app: App, connect: Any) -> None:
        reader, writer = await connect()
        writer.write(sent)
        if answered:
            assert (await refusal(reader))[0] == 408
        else:
            assert await reader.read() == b""
        await until(lambda: app.left == app.started)

    run(test)


def test_a_head_in_drops_is_closed_but_a_slow_body_and_a_long_answer_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.3)

    async def drip(writer: asyncio.StreamWriter, sent: bytes) -> None:
        with suppress(ConnectionError):
            for i in range(len(sent)):
                writer.write(sent[i : i + 1])
                await asyncio.sleep(0.05)

    async def test(app: App, connect: Any) -> None:
        reader, writer = await connect()
        dripping = asyncio.ensure_future(drip(writer, GET))
        assert (await refusal(reader))[0] == 408
        await dripping
        reader, writer = await connect()
        writer.write(HEAD + b"content-length: 10\r\n\r\n")
        await drip(writer, b"0123456789")
        await asyncio.sleep(0.4)  # the answer takes its time
        app.go.set()
        assert (await reader.read(1000)).endswith(b"10")
        await asyncio.sleep(0.4)  # and the client, too, with its next request
        writer.write(GET)
        assert (await reader.read(1000)).endswith(b"0")

    run(test)


def test_half_a_request_behind_one_that_runs_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)

    async def test(app: App, connect: Any) -> None:
        reader, writer = await connect()
        writer.write(WHOLE + b"GET /ha")
        await until(lambda: bool(app.started))
        await asyncio.sleep(0.3)
        app.go.set()
        assert (await reader.read()).endswith(b"\r\n\r\n2")

    run(test)
