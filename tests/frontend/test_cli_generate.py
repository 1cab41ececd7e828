"""`generate` as a client: what it asks, what it prints, and how it tells an answer from half of one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from frontend.cli_generate import Asker, Question, piece_of
from frontend.cli_report import QuietReport, StartLine, curl_line, tell, url_of
from frontend.log_writer import LOG
from tests.procs.fake_server import config

QUESTION = Question(text="Hi", system=None, raw=False, max_tokens=7, temperature=0.5, seed=None)


def test_a_chat_by_default_and_bare_text_when_raw() -> None:
    from dataclasses import replace

    path, body = replace(QUESTION, system="Be brief.", seed=3).request("m")
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("m", 7, 0.5, 3)
    path, body = replace(QUESTION, raw=True).request("m")
    assert (path, body["prompt"]) == ("/v1/completions", "Hi")
    assert "seed" not in body and "messages" not in body


def test_pieces_of_both_kinds() -> None:
    assert piece_of({"choices": [{"delta": {"content": "a"}}]}) == "a"
    assert piece_of({"choices": [{"text": "b"}]}) == "b"
    assert piece_of({"choices": [{"delta": {"role": "assistant", "content": None}}]}) == ""
    assert piece_of({"choices": []}) == ""


class Canned(BaseHTTPRequestHandler):
    status = 200
    lines: tuple[str, ...] = ()
    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).seen.append({**body, "authorization": self.headers["authorization"]})
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write("\n".join(self.lines).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def canned() -> Iterator[type[Canned]]:
    class Handler(Canned):
        seen: list[dict[str, Any]] = []  # noqa: RUF012 - one per test

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


def ask(canned: Any) -> tuple[Asker, list[str]]:
    done: list[str] = []
    asker = Asker(QUESTION, canned.url, "m", "key", lambda: done.append("done"))
    asker.start()
    asker.join()
    return asker, done


def event(**message: Any) -> str:
    return f"data: {json.dumps(message)}\n"


def test_pieces_are_printed_as_they_come(canned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [event(choices=[{"delta": {"content": text}}]) for text in ("Bon", "jour", " \u00e9")]
    canned.lines = (*pieces, ": a comment", "data: [DONE]\n")
    asker, done = ask(canned)
    assert (asker.complete, asker.error, done) == (True, "", ["done"])
    assert capsys.readouterr().out == "Bonjour \u00e9\n"
    assert canned.seen[0]["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("status", "lines", "error"),
    [
        (200, (event(choices=[{"delta": {"content": "a"}}]),), ""),
        (200, (event(error={"message": "gpu is gone"}), "data: [DONE]\n"), "gpu is gone"),
        (400, (json.dumps({"error": {"message": "too long"}}),), "too long"),
    ],
)
def test_half_an_answer_is_none(canned: Any, status: int, lines: tuple[str, ...], error: str) -> None:
    canned.status, canned.lines = status, lines
    asker, done = ask(canned)
    assert (asker.complete, asker.error, done) == (False, error, ["done"])


def test_a_server_that_is_gone_is_an_error_and_an_end(canned: Any) -> None:
    canned.url = "http://127.0.0.1:9"
    asker, done = ask(canned)
    assert asker.error.startswith("the answer broke off") and done == ["done"]


def test_the_address_and_the_curl_line() -> None:
    from dataclasses import replace

    assert url_of(config(8000)) == "http://127.0.0.1:8000"
    assert url_of(replace(config(8000), host="0.0.0.0")) == "http://127.0.0.1:8000"
    assert url_of(replace(config(8000), host="::1")) == "http://[::1]:8000"
    assert "/v1/chat/completions" in curl_line(config(8000)) and "Authorization" not in curl_line(config(8000))
    keyed = curl_line(replace(config(8000), api_key="secret"))
    assert "secret" not in keyed and "Bearer $STEPAHEAD_API_KEY" in keyed


def test_a_told_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell("two\nlines")
    LOG.flush()
    assert capsys.readouterr().err == "stepahead: two lines\n"


def test_without_a_terminal_a_start_is_silent_and_a_failure_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[bool] = []
    report = QuietReport(StartLine(), lambda: called.append(True))
    report.progress("gpu", "loading")
    report.ready()
    report.note("nothing")
    assert called == [True]
    assert capsys.readouterr() == ("", "")
    report.failed("gpu: boom")
    LOG.flush()
    assert capsys.readouterr().err == "stepahead: gpu: boom\n"
