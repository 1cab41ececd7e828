"""A streaming HTTP client that costs almost nothing, for measuring servers that share the machine with it.

One keep-alive connection per lane, parsed by httptools; while a request runs, an event costs one time stamp and one
split, and its JSON is read only after the measurement. It speaks to any OpenAI-compatible server and never to anything
else of this project: what it knows, it learned over the wire.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson


@dataclass
class Answer:
    """What came back for one request. Times are perf_counter nanoseconds; `events` are raw SSE events, one per time."""

    start_ns: int = 0
    status: int = 0
    times_ns: list[int] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    error: str | None = None

    def parsed(self) -> "Timing":
        """Reads the events. A status other than 200, an error event or a stream without [DONE] sets `error`."""
        timing = Timing(self.start_ns, error=self.error)
        done = False
        for at_ns, event in zip(self.times_ns, self.events, strict=True):
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                done = True
                timing.end_ns = at_ns
                continue
            if not event.startswith(b"data:"):
                continue
            message: dict[str, Any] = orjson.loads(data)
            if "error" in message:
                timing.error = str(message["error"])
            usage = message.get("usage")
            if usage:
                timing.tokens = int(usage.get("completion_tokens") or 0)
            if any(text_of(choice) for choice in message.get("choices", ())):
                timing.text_times_ns.append(at_ns)
        if self.status != 200:
            timing.error = timing.error or f"status {self.status}: {self.rest[:200].decode(errors='replace')}"
        elif not done:
            timing.error = timing.error or "the stream ended without [DONE]"
        timing.tokens = timing.tokens or len(timing.text_times_ns)
        return timing


@dataclass
class Timing:
    """One request's times in perf_counter nanoseconds, and the output tokens that the server counted."""

    start_ns: int
    text_times_ns: list[int] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None
    end_ns: int = 0  # 0: never

    def whole_ms(self) -> float:
        """Returns the time until the answer was complete in milliseconds. Only for requests that got some text."""
        return ((self.end_ns or self.text_times_ns[-1]) - self.start_ns) / 1e6

    def first_ms(self) -> float:
        """Returns the time to the first text in milliseconds. Only for requests that got some."""
        return (self.text_times_ns[0] - self.start_ns) / 1e6

    def gaps_ms(self) -> list[float]:
        """Returns the times between consecutive pieces of text in milliseconds."""
        pairs = zip(self.text_times_ns, self.text_times_ns[1:], strict=False)
        return [(later - earlier) / 1e6 for earlier, later in pairs]


def text_of(choice: dict[str, Any]) -> str:
    """Returns the text that one choice of a completion or chat chunk brings ("" for role and finish chunks)."""
    delta = choice.get("delta") or choice
    return delta.get("content") or delta.get("reasoning_content") or delta.get("text") or ""


class Lane(asyncio.Protocol):
    """One connection that carries one request after another. Used by one task; connects when it needs to."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's base, such as http://127.0.0.1:8000; a path in front of /v1 is kept."""
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None

    async def ask(self, path: str, body: dict[str, Any], timeout_s: float) -> Answer:
        """Posts `body` as JSON and returns when the response is complete. Faults end up in the answer's `error`."""
        payload = orjson.dumps(body)
        head = (
            f"POST {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._key}"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        self._answer = answer = Answer(start_ns=time.perf_counter_ns())
        self._parser = httptools.HttpResponseParser(self)
        self._ended = loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                if self._transport is None or self._transport.is_closing():
                    await loop.create_connection(lambda: self, self._host, self._port, ssl=self._tls or None)
                assert self._transport is not None
                answer.start_ns = time.perf_counter_ns()
                self._transport.write(head.encode() + payload)
                await self._ended
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            self.close()
        return answer

    def close(self) -> None:
        """Closes the connection; a request that runs ends with an error."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(exc if isinstance(exc, OSError) else ConnectionError("the server closed the connection"))

    # httptools callbacks

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        now_ns = time.perf_counter_ns()
        *events, answer.rest = (answer.rest + body).split(b"\n\n")
        for event in events:
            answer.times_ns.append(now_ns)
            answer.events.append(event)

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self._end()
