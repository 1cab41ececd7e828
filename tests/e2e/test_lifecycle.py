"""Start, drain, death and refusal of the whole server, as an operator meets them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import plain_http
from tests.e2e.live_server import (
    ALONE,
    ROOT,
    LiveServer,
    descendants,
    live_server,
    process_titles,
    spawn,
    sse_events,
    wait_ready,
)
from tests.e2e.stories import exhaust
from tests.model_factory import TinyLlama

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
END_SECONDS: list[float] = []
STAGES = ("frontend", "tokenizer", "scheduler", "gpu", "detokenizer")
TOLD_OF = ("frontend", "detokenizer")  # the scheduler's deaths are in `test_deaths`


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [504, 3575, 282], "max_tokens": tokens, "ignore_eos": True, **more}


class Streams:
    """n streams in threads; what each has received so far."""

    def __init__(self, server: LiveServer, n: int, tokens: int) -> None:
        self.events: list[list[Any]] = [[] for _ in range(n)]
        self.broken: list[bool] = [False] * n
        self.threads = [threading.Thread(target=self.read, args=(server, i, tokens), daemon=True) for i in range(n)]
        for t in self.threads:
            t.start()

    def read(self, server: LiveServer, i: int, tokens: int) -> None:
        try:
            with plain_http.stream(
                "POST", server.url + "/v1/completions", json=body(tokens, stream=True), timeout=60
            ) as answer:
                for event in sse_events(answer.iter_lines()):
                    self.events[i].append(event)
        except httpx.TransportError:
            self.broken[i] = True

    def wait_running(self) -> None:
        end = time.monotonic() + 30
        while not all(len(e) >= 2 for e in self.events):
            assert time.monotonic() < end, [len(e) for e in self.events]
            time.sleep(0.01)

    def join(self) -> None:
        for t in self.threads:
            t.join(60)
            assert not t.is_alive()


def runs(pid: int) -> bool:
    """Not merely dead and waiting for init to collect it, which may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


BEFORE: set[str] = set()


def names_of_sockets() -> dict[str, str]:
    """Those of channels: what a descriptor links to -> abstract name."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {f"socket:[{line[6]}]": line[-1] for line in lines if line[-1].startswith("@stepahead-")}


def held(pids: list[int]) -> set[str]:
    """The names whose sockets these processes hold."""
    names, found = names_of_sockets(), set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it is gone
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(names.get(os.readlink(f"/proc/{pid}/fd/{fd}"), ""))
    return found - {""}


def abstract_sockets() -> set[str]:
    """All names, but for those of servers that live: another one may be tested beside this one."""
    names = set(names_of_sockets().values())
    supervisors = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and is_supervisor(int(entry))]
    return names - held([pid for supervisor in supervisors for pid in descendants(supervisor)])


def is_supervisor(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ") == b"stepahead: supervisor"
    return False


@pytest.fixture(autouse=True)
def sockets_before() -> None:
    BEFORE.clear()
    BEFORE.update(abstract_sockets())


def nothing_left(pids: list[int], server: LiveServer) -> None:
    end = time.monotonic() + 1.0
    # The first thread of a process may be gone while others still hold its sockets.
    while left := [p for p in pids if runs(p)] or sorted(abstract_sockets() - BEFORE):
        assert time.monotonic() < end, f"left: {left}"
        time.sleep(0.02)
    assert not [n for n in os.listdir("/dev/shm") if "stepahead" in n]
    port = int(server.url.rsplit(":", 1)[1])
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))


def test_six_processes_with_their_titles() -> None:
    with live_server("--max-len", "512") as server:
        assert set(process_titles(server.process.pid)) == {"supervisor", *STAGES}
        assert held(descendants(server.process.pid)), "the channels were meant to be seen here"


def test_sigterm_finishes_what_runs() -> None:
    server = wait_ready(spawn("--max-len", "512", *ALONE))
    pids = descendants(server.process.pid)
    streams = Streams(server, 4, 150)
    streams.wait_running()
    server.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 2
    while plain_http.get(server.url + "/ready").status_code != 503:
        assert time.monotonic() < end
    refused = plain_http.post(server.url + "/v1/completions", json=body(4))
    assert refused.status_code == 503 and refused.json()["error"]["message"]
    streams.join()
    assert server.process.wait(20) == 0, server.text()
    for events in streams.events:
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    nothing_left(pids, server)


def test_drain_deadline_and_second_sigterm() -> None:
    server = wait_ready(spawn("--max-len", "4096", "--drain-seconds", "1", *ALONE))
    pids = descendants(server.process.pid)
    streams = Streams(server, 2, 4000)
    streams.wait_running()
    t = time.monotonic()
    assert server.stop() == 0, server.text()
    assert time.monotonic() - t < 5
    streams.join()
    for events in streams.events:
        assert events[-1] == "[DONE]" and "error" in events[-2], events[-2:]
    nothing_left(pids, server)
    server = wait_ready(spawn("--max-len", "4096", "--drain-seconds", "600", *ALONE))
    pids = descendants(server.process.pid)
    streams = Streams(server, 2, 4000)
    streams.wait_running()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    t = time.monotonic()
    assert server.stop() != 0
    assert time.monotonic() - t < 2
    streams.join()
    nothing_left(pids, server)


def end_of(server: LiveServer, stage: str) -> None:
    """Kill a stage until the server gives up; it ends with status 1 and names the stage last."""
    t = exhaust(server, stage)
    code = server.process.wait(10)
    END_SECONDS.append(time.monotonic() - t)
    assert code == 1, code
    assert stage in server.text().splitlines()[-1], server.text()


def test_deaths_past_the_budget_tell_queued_and_whole_answers_too() -> None:
    server = wait_ready(spawn("--max-len", "4096", "--max-running", "2"))
    pids = descendants(server.process.pid)
    streams = Streams(server, 2, 4000)
    streams.wait_running()
    answers: list[httpx.Response] = []
    ask = lambda: answers.append(plain_http.post(server.url + "/v1/completions", json=body(100), timeout=60))  # noqa: E731
    waiting = [threading.Thread(target=ask) for _ in range(3)]
    for thread in waiting:
        thread.start()
    end = time.monotonic() + 10
    while server.metrics()["stepahead_queued_requests"] < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    end_of(server, "gpu")
    for thread in waiting:
        thread.join(10)
    streams.join()
    for events in streams.events:
        assert events[-1] == "[DONE]" and "gpu" in events[-2]["error"]["message"]
    assert [a.status_code for a in answers] == [500] * 3
    assert all("gpu" in a.json()["error"]["message"] for a in answers)
    nothing_left(pids, server)


@pytest.mark.parametrize("stage", TOLD_OF)
def test_deaths_past_the_budget_tell_every_client(stage: str) -> None:
    server = wait_ready(spawn("--max-len", "4096"))
    pids = descendants(server.process.pid)
    streams = Streams(server, 4, 4000)
    streams.wait_running()
    end_of(server, stage)
    streams.join()
    for i, events in enumerate(streams.events):
        if stage == "frontend":
            assert streams.broken[i]
        else:
            assert events[-1] == "[DONE]" and stage in events[-2]["error"]["message"]
    nothing_left(pids, server)


def test_after_a_death_the_server_ends_within_two_seconds() -> None:
    """From the last death. The median over those above: a machine that is busy elsewhere may hold up a single one."""
    print("seconds from a death to the end of the server:", [round(s, 2) for s in END_SECONDS])
    assert len(END_SECONDS) == len(TOLD_OF) + 1, "and that of the gpu"
    assert statistics.median(END_SECONDS) < 2.0


def test_death_of_the_supervisor_takes_everything_along() -> None:
    server = wait_ready(spawn("--max-len", "512"))
    pids = descendants(server.process.pid)
    server.process.kill()
    server.process.wait()
    nothing_left(pids, server)


def fails(*args: str, **env: str) -> str:
    """Runs `serve` with arguments that must be refused; its one line on stderr."""
    server = spawn(*args, env=env)
    code = server.process.wait(60)
    lines = [line for line in server.text().splitlines() if line.strip()]
    assert code not in (0, None), lines
    assert len(lines) == 1 and "Traceback" not in lines[0], lines
    return lines[0]


def test_refusals_are_one_clear_line(tmp_path: Path) -> None:
    assert "no-such-model" in fails("no-such-model")
    assert "missing.gguf" in fails(str(tmp_path / "missing.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    assert "broken.gguf" in fails(str(broken))
    (tmp_path / "folder").mkdir()
    assert "folder" in fails(str(tmp_path / "folder"))
    assert "memory" in fails("--kv-tokens", str(10**9))
    assert "max-len" in fails("--max-len", "100000")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in fails("--port", str(port))


def test_a_benchmark_that_is_ended_ends_its_servers(tmp_path: Path) -> None:
    """As by `kill`, while it measures and while it waits for a server."""
    folder = TinyLlama().write_hf(tmp_path / "tiny")
    command = [sys.executable, "-m", "tools.bench_serve", "--start", f"{folder} --threads 1", "--rounds", "1000"]
    for moment in ("scheduler", "supervisor"):
        bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        end = time.monotonic() + 60
        while moment not in process_titles(bench.pid) and time.monotonic() < end:
            time.sleep(0.02)
        ours = descendants(bench.pid)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(30) == 130
        assert ours and not [pid for pid in ours if Path(f"/proc/{pid}").exists()]
