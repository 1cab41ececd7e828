"""Full, starting, draining, failing, and clients that leave: from a real process, over real sockets."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from frontend.engine import QUESTION_BYTES_MAX, QUESTIONS_MAX
from shm.control import DRAINING, READY, STARTING
from shm.limits import BODY_BYTES_MAX
from tests import plain_http
from tests.frontend.live_frontend import LiveFrontend, chat, live_frontend, text
from tests.frontend.sse import parse_stream


@pytest.fixture(scope="module")
def live() -> Iterator[LiveFrontend]:
    with live_frontend(max_running=4, max_queued=0) as frontend:
        yield frontend


def raw_connection(live: LiveFrontend) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1])))


def post_head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


class Call(threading.Thread):
    """One request in a thread of its own."""

    def __init__(self, live: LiveFrontend, body: dict[str, Any], path: str = "/v1/completions") -> None:
        super().__init__(daemon=True)
        self.live, self.body, self.path = live, body, path
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = self.live.post(self.path, self.body)

    def result(self) -> httpx.Response:
        self.join(10)
        assert self.answer is not None
        return self.answer


def test_no_row_is_free(live: LiveFrontend) -> None:
    live.engine.gate.clear()
    calls = [Call(live, text("/slow", max_tokens=3)) for _ in range(4)]
    live.wait_rows(4)
    started = time.monotonic()
    for stream in (True, False):
        refused = live.post("/v1/completions", text("x", stream=stream))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
    assert time.monotonic() - started < 2.0, "refused at once, not after a wait"
    assert live.get("/health").status_code == 200
    live.engine.gate.set()
    assert all(call.result().status_code == 200 for call in calls)
    live.wait_rows(0)
    assert live.post("/v1/completions", text("x")).status_code == 200


def test_a_row_is_free_only_when_it_is_released(live: LiveFrontend) -> None:
    live.engine.release_gate.clear()
    for _ in range(4):
        assert live.post("/v1/completions", text("/stop 1", max_tokens=9)).status_code == 200
    assert live.figures()["open_rows"] == 4
    assert live.post("/v1/completions", text("x")).status_code == 429
    live.engine.release_gate.set()
    live.wait_rows(0)


@pytest.mark.parametrize("body", [text("/slow", max_tokens=1000), text("/hang")], ids=["running", "not accepted"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_hangs_up(live: LiveFrontend, stream: bool, body: dict[str, Any]) -> None:
    aborted = live.engine.aborted
    with pytest.raises(httpx.ReadTimeout):
        live.client.post("/v1/completions", json=body | {"stream": False}, timeout=0.3)
    if stream and "hang" not in body["prompt"]:
        with plain_http.stream("POST", live.url + "/v1/completions", json=body | {"stream": True}) as answer:
            next(answer.iter_lines())
    live.wait_rows(0, seconds=3.0)
    assert live.engine.aborted > aborted
    assert live.figures()["open_streams"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_hangs_up_behind_a_pipelined_request(live: LiveFrontend, stream: bool) -> None:
    raw = json.dumps(text("/slow", max_tokens=1000, stream=stream)).encode()
    aborted = live.engine.aborted
    with raw_connection(live) as s:
        s.sendall(post_head("/v1/completions", len(raw)) + raw + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        live.wait_rows(1)
    live.wait_rows(0, seconds=3.0)
    assert live.engine.aborted == aborted + 1 and live.figures()["open_streams"] == 0


def test_a_question_whose_client_hangs_up_is_cancelled(live: LiveFrontend) -> None:
    raw = json.dumps({"prompt": "/unanswered"}).encode()
    with raw_connection(live) as s:
        s.sendall(post_head("/tokenize", len(raw)) + raw)
        live.wait(lambda: live.engine.seen[-1].get("prompt") == "/unanswered")
        key = live.engine.seen[-1]["id"]
    live.wait(lambda: live.engine.seen[-1] == {"op": "cancel", "id": key})


def test_questions_are_bounded_in_number_and_bytes(live: LiveFrontend) -> None:
    def ask(size: int) -> socket.socket:
        raw = json.dumps({"prompt": "/unanswered"}).encode().ljust(size)
        s = raw_connection(live)
        before = len(live.engine.seen)
        s.sendall(post_head("/tokenize", len(raw)) + raw)
        live.wait(lambda: len(live.engine.seen) > before)
        return s

    for size, most in ((100, QUESTIONS_MAX), (BODY_BYTES_MAX, QUESTION_BYTES_MAX // BODY_BYTES_MAX)):
        asked = [ask(size) for _ in range(most)]
        refused = live.post("/tokenize", {"prompt": "x"})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert live.post("/v1/completions", text("x")).status_code == 200, "generations are not in their way"
        before = len(live.engine.seen)
        for s in asked:
            s.close()
        live.wait(lambda before=before, most=most: len(live.engine.seen) == before + most)
        assert live.post("/tokenize", {"prompt": "x"}).status_code == 200


def test_a_client_that_does_not_read(live: LiveFrontend) -> None:
    raw = b'{"prompt": "%s", "stream": true, "max_tokens": 1000}' % (b"xyz" * 300)
    head = post_head("/v1/completions", len(raw))
    port = int(live.url.rsplit(":", 1)[1])
    stuck = []
    for _ in range(8):
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", port))
        stuck.append(s)
        before = live.figures()["requests_total"]
        s.sendall(head + raw)
        live.wait(lambda before=before: live.figures()["requests_total"] > before)
        live.wait_rows(0, seconds=5.0)  # the row is free although nothing is taken
    assert live.post("/v1/completions", text("x")).status_code == 200
    whole = b""
    stuck[0].settimeout(5)
    while b"0\r\n\r\n" not in whole[-10:]:
        whole += stuck[0].recv(65536)
    assert whole.count(b"[DONE]") == 1 and whole.count(b'"finish_reason":"length"') == 1
    for s in stuck:
        s.close()
    live.wait(lambda: live.figures()["open_streams"] == 0)


def test_starting_and_draining(live: LiveFrontend) -> None:
    assert live.get("/ready").status_code == 200
    call = Call(live, chat("/slow", max_tokens=30, stream=True), "/v1/chat/completions")
    live.wait_rows(1)
    for state, word in ((STARTING, "starting"), (DRAINING, "draining")):
        live.control.state = state
        ready = live.get("/ready")
        assert ready.status_code == 503 and ready.json()["status"] == word and ready.json()["reason"]
        assert live.get("/health").status_code == 200
        for path, body in (("/v1/completions", text("x", stream=True)), ("/tokenize", {"prompt": "x"})):
            refused = live.post(path, body)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == word
    assert parse_stream(call.result().content).choices[0].finish == "length", "what runs goes on"
    live.control.state = READY


def test_sigterm_waits_for_open_rows() -> None:
    with live_frontend() as live:
        call = Call(live, text("/slow", max_tokens=40, stream=True))
        live.wait_rows(1)
        live.control.state = DRAINING
        live.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert live.post("/v1/completions", text("x")).status_code == 503
        assert live.process.poll() is None
        assert parse_stream(call.result().content).choices[0].finish == "length"
        assert live.end() == (0, "")


def test_an_idle_process_ends_at_once() -> None:
    with live_frontend() as live, plain_http.Client() as client:
        client.get(live.url + "/health")  # an idle connection stays open
        live.control.state = DRAINING
        live.process.send_signal(signal.SIGTERM)
        assert live.end(4.5) == (0, "")


def test_the_drain_deadline_is_an_error_event() -> None:
    with live_frontend() as live:
        live.engine.pace_s = 0.02
        calls = [Call(live, text("/abort 9", max_tokens=20, stream=s)) for s in (True, False)]
        stream = parse_stream(calls[0].result().content)
        assert stream.error is not None and stream.error["code"] == "aborted"
        assert calls[1].result().status_code == 503


def test_failure_reaches_every_client_and_ends_the_process() -> None:
    with live_frontend() as live:
        streams = [Call(live, text("/slow", max_tokens=1000, stream=True)) for _ in range(3)]
        others = [Call(live, text("/slow", max_tokens=1000)), Call(live, text("/hang", stream=True))]
        live.wait_rows(5)
        live.wait_streamed(4)  # the three streams and the whole one: a stream that has not begun would be a plain 500
        with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1]))):  # an idle one is in nobody's way
            started = time.monotonic()
            live.fail("the gpu process was killed")
            for call in streams:
                error = parse_stream(call.result().content).error
                assert error is not None and "gpu" in error["message"] and error["type"] == "server_error"
            for call in others:
                answer = call.result()
                assert answer.status_code == 500 and "gpu" in answer.json()["error"]["message"]
            assert time.monotonic() - started < 1.5
            code, stderr = live.end()
            assert time.monotonic() - started < 3.0
        assert (code, stderr) == (0, "")


def test_failure_does_not_wait_for_a_client_that_does_not_read() -> None:
    with live_frontend() as live, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", int(live.url.rsplit(":", 1)[1])))
        s.sendall(post_head("/v1/completions", 44))
        s.sendall(b'{"prompt": "/slow", "stream": true}'.ljust(44))
        live.wait_rows(1)
        started = time.monotonic()
        live.fail("over")
        assert live.end() == (0, "")
        assert time.monotonic() - started < 3.0


def test_a_wrong_message_ends_the_process_with_its_reason() -> None:
    with live_frontend() as live:
        call = Call(live, text("/slow", max_tokens=1000, stream=True))
        live.wait_streamed(1)  # one that has not begun would be a plain 500
        answer = live.post("/v1/completions", text("/crash"))
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "failed"
        assert parse_stream(call.result().content).error is not None
        told = live.hear()
        assert told["event"] == "error" and "AssertionError" in told["text"]
        code, stderr = live.end()
        assert code == 1 and "Traceback" in stderr
