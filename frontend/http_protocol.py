"""HTTP on one connection: uvicorn's protocol with bounds on what a client may send and how long it may take.

Owns the limits of a request's head, of what may wait behind a request that runs, and the time for both head and body.
May never stop reading while a request runs (the end of the connection would go unseen, and the request with it), never
lets a client's mistake end an answer that is under way, and never holds more of a client's bytes than its limits say.
"""

from __future__ import annotations

import asyncio
import http
from typing import Any, Literal

import orjson
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.errors import ApiError

HEAD_BYTES_MAX = 64 * 1024  # request line and headers, counted in slices
URL_BYTES_MAX = 32 * 1024  # beyond this a head is refused for its URL
BEHIND_BYTES_MAX = 128 * 1024  # sent while an earlier request of the connection is not answered
BEHIND_REQUESTS_MAX = 16
FRAMING_PER_BYTE = 8  # of a chunked body: a chunk of one byte takes six
HEAD_SECONDS = 30.0
BODY_SECONDS = 60.0  # without any byte of it
LINGER_SECONDS = 2.0  # for a client to take its refusal while it still sends
SLICE_BYTES = 8 * 1024  # the limits are looked at this often

assert BEHIND_BYTES_MAX > HEAD_BYTES_MAX


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Requests behind one that runs are parsed, and begin when it is answered.

    Once `_deaf`, whatever still comes is dropped, but it is read: the end of the connection comes behind it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase: Literal["idle", "head", "body"] = "idle"  # of the request that is being received
        self._running: RequestResponseCycle | None = None
        self._deaf = False
        self._head_bytes = 0
        self._framing_bytes = 0  # of the body: what is not content. Below 0: as much more is allowed
        self._behind_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self.pipeline.clear()
        if self._running is not None:
            # The base class tells the newest request only, which need not be the one that runs.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            if self._deaf or self.transport.is_closing():
                return
            self._take(data[start : start + SLICE_BYTES])
        if not self._deaf and not self.transport.is_closing():
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Called by the base class for what is not HTTP."""
        self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request", code="bad_http"))

    def on_message_begin(self) -> None:
        self._phase = "head"
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == "head":  # and not behind the body, where a header could pass for one of the head
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = "body"
        self._head_bytes = self._framing_bytes = 0
        self._clear_deadline()
        super().on_headers_complete()
        if self._behind:
            self.flow.resume_reading()  # the base class paused it

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) * (1 + FRAMING_PER_BYTE)
        if self.cycle is self._running:
            super().on_body(body)
        else:
            self.cycle.body += body  # the base class would stop reading

    def on_message_complete(self) -> None:
        self._phase = "idle"
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._behind_bytes = 0
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _behind(self) -> bool:
        """Whether what comes now belongs to a later request than the one that runs."""
        return self._answering and not (self._phase == "body" and self.cycle is self._running)

    def _take(self, data: bytes) -> None:
        before = self._phase, self.cycle
        if self._behind:
            self._behind_bytes += len(data)
        super().data_received(data)
        if before == (self._phase, self.cycle):  # and no head came to its end
            if self._phase == "body":
                self._framing_bytes += len(data)
            else:
                self._head_bytes += len(data)
        if len(self.pipeline) > BEHIND_REQUESTS_MAX or self._behind_bytes > BEHIND_BYTES_MAX:
            self._refuse(ApiError(400, "too much was sent behind a request that is not answered", code="bad_http"))
        elif max(self._head_bytes, self._framing_bytes) > HEAD_BYTES_MAX:
            long_url = self._phase == "head" and len(self.url) > URL_BYTES_MAX
            what, status = ("URL", 414) if long_url else ("headers", 431)
            self._refuse(ApiError(status, f"the {what} may have at most {HEAD_BYTES_MAX} bytes", code="head_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Hears no more of this client. It is told `error` unless an answer is under way, which is not disturbed."""
        if self._deaf or self.transport.is_closing():
            return
        self._deaf = True
        self._clear_deadline()
        self.pipeline.clear()
        running = self._running
        if running is not None and self._behind:
            running.keep_alive = False  # the connection is closed behind the answer
            self.flow.resume_reading()
            return
        if running is not None and self._phase == "body":  # the body will never be whole
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.close()
                return
        self.transport.write(_response(error))
        # Not closed at once: with bytes unread, that would be a reset, which takes the answer away from the client.
        self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _watch(self) -> None:
        """Sets the time for what has to come next: all of a head, or some of a body."""
        if self._phase == "body":
            self._set_deadline(BODY_SECONDS)
        elif self._phase == "idle" and self._answering:
            self._clear_deadline()
        elif self._deadline is None:  # bytes of a head do not give it more time
            self._set_deadline(HEAD_SECONDS)

    def _set_deadline(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self._phase == "body" and self.flow.read_paused:
            self._set_deadline(BODY_SECONDS)  # it is this side that does not read
        elif self._phase == "idle":
            self.transport.close()  # no request was begun
        else:
            self._refuse(ApiError(408, "the rest of the request did not come in time", code="request_timeout"))


def _response(error: ApiError) -> bytes:
    body = orjson.dumps(error.body())
    return (
        b"HTTP/1.1 %d %s\r\n" % (error.status, http.HTTPStatus(error.status).phrase.encode())
        + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        + body
    )
