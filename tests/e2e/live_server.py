"""A real `stepahead serve` as a subprocess for end-to-end tests: starts it, waits for /ready, reads /metrics, ends."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests import plain_http

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS_MAX = 240.0
ALONE = ("--no-standby",)  # where nobody dies, a start costs little more than half as much


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, from /proc (zombies left out)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        rest = stat.rsplit(")", 1)[1].split()
        if rest[0] != "Z":
            parents.setdefault(int(rest[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        for child in parents.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def process_titles(pid: int) -> dict[str, int]:
    """Stage name -> pid for the processes of the server whose supervisor is `pid`."""
    titles: dict[str, int] = {}
    for p in [pid, *descendants(pid)]:
        try:
            title = Path(f"/proc/{p}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        match = re.fullmatch(r"stepahead: (\w+)", title)  # a standby's has one more word
        if match:
            titles[match.group(1)] = p
    return titles


@dataclass
class LiveServer:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    args: list[str] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """The key, if the server wants one: /ready and /metrics are behind it."""
        if "--api-key" not in self.args:
            return {}
        return {"authorization": f"Bearer {self.args[self.args.index('--api-key') + 1]}"}

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Unlabelled samples of /metrics by name."""
        found: dict[str, float] = {}
        for line in plain_http.get(self.url + "/metrics", headers=self.headers, timeout=10).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found

    def wait_idle(self, seconds: float = 60.0) -> dict[str, float]:
        """Metrics once nothing runs or waits; fails if that is not so within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            m = self.metrics()
            if m["stepahead_running_requests"] == 0 and m["stepahead_queued_requests"] == 0:
                return m
            assert time.monotonic() < end, f"still busy after {seconds} s: {m}"
            time.sleep(0.05)

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 20.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def spawn(
    *args: str, env: dict[str, str] | None = None, stderr: int = subprocess.STDOUT, redirect: str = ""
) -> LiveServer:
    """Start a server whose stdout is its log; redirect: what a shell is told of its descriptors, such as `2>&-`.

    With one thread for the host's kernels unless `args` say otherwise: other tests run beside this one, and threads
    that wait for each other on busy processors only lose time.
    """
    port = free_port()
    log = Path(tempfile.mkstemp(prefix="stepahead-test-", suffix=".log")[1])
    atexit.register(log.unlink, missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "frontend.cli",
        "serve",
        "--check-order",
        "--threads",
        "1",
        "--port",
        str(port),
        *args,
    ]
    if redirect:
        command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=stderr, cwd=ROOT, env={**os.environ, **(env or {})}, close_fds=True
        )
    return LiveServer(process, f"http://127.0.0.1:{port}", log, list(args))


def wait_ready(server: LiveServer, seconds: float = START_SECONDS_MAX) -> LiveServer:
    end = time.monotonic() + seconds
    while True:
        assert server.process.poll() is None, f"server ended with {server.process.returncode}:\n{server.text()}"
        assert time.monotonic() < end, f"not ready after {seconds} s:\n{server.text()}"
        try:
            if plain_http.get(server.url + "/ready", headers=server.headers, timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.05)


@contextmanager
def live_server(*args: str, env: dict[str, str] | None = None) -> Iterator[LiveServer]:
    server = spawn(*args, env=env)
    try:
        yield wait_ready(server)
    finally:
        if server.process.poll() is None:
            code = server.stop()
            assert code == 0, f"exit code {code}:\n{server.text()}"
        server.log.unlink(missing_ok=True)


def complete(
    server: LiveServer, bodies: list[dict[str, Any]], path: str = "/v1/completions", apart_s: float = 0.0
) -> list[dict[str, Any]]:
    """POST all bodies, `apart_s` one after the other; the answers in their order. Any status but 200 fails."""

    async def run() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with plain_http.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:

            async def one(index: int, body: dict[str, Any]) -> dict[str, Any]:
                await asyncio.sleep(index * apart_s)
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
                return dict(answer.json())

            return list(await asyncio.gather(*(one(i, b) for i, b in enumerate(bodies))))

    return asyncio.run(run())


def ids_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any] | str]:
    """The events of a stream: parsed JSON, or the string "[DONE]"."""
    for line in lines:
        if line.startswith("data: "):
            data = line[6:]
            yield data if data == "[DONE]" else json.loads(data)
