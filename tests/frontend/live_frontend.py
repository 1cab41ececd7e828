"""The frontend as it runs, a process on 127.0.0.1 with a boot record, beside a fake engine in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shm.channel import new_secret
from shm.child import Boot
from shm.config import ModelInfo, ServerConfig
from shm.control import READY, STAGES, Control
from shm.doorbell import Doorbell
from shm.ledger import Ledger
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace
from tests import plain_http
from tests.frontend.fake_engine import EOS, FakeEngine

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"


def server_config(**changes: Any) -> ServerConfig:
    model = ModelInfo(
        name="tiny", path="/nowhere", format="gguf", vocab_size=EOS + 1, context_len=8192, hidden_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=8, rope_theta=1e4, rope_scaling=None, rms_eps=1e-5,
        tie_word_embeddings=True, qk_norm=False, eos_token_ids=(EOS,), bos_token_id=None,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "model": model, "served_model_name": MODEL, "host": "127.0.0.1", "port": 0, "max_running": 4,
        "max_queued": 12, "kv_tokens": 65536, "max_len": 2048, "threads": 1,
    }  # fmt: skip
    return ServerConfig(**(settings | changes))


class LiveFrontend:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        sizes = {
            "control": Control.size(),
            "stats": Stats.size(),
            "ledger": Ledger.size(config.rows, config.max_len),
            "trace": Trace.size(),
        }
        self.segments = {name: Segment.create(name, size) for name, size in sizes.items()}
        self.control = Control(self.segments["control"])
        self.stats = Stats(self.segments["stats"])
        Trace(self.segments["trace"])
        self.ledger = Ledger(self.segments["ledger"], config.rows, config.max_len)
        self.control.state = READY
        channels = {stage: new_secret(stage) for stage in ("tokenizer", "frontend")}
        self.engine = FakeEngine(config, self.ledger, channels["tokenizer"], channels["frontend"])
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.client = plain_http.Client(base_url=self.url, timeout=20)
        ready_read, ready_write = os.pipe()
        self._doorbell_fds = {stage: Doorbell.create_fd() for stage in STAGES}
        boot = Boot(
            stage="frontend",
            epoch=1,
            config=config,
            segments={name: (s.fd, s.size) for name, s in self.segments.items()},
            doorbells=self._doorbell_fds,
            ready_fd=ready_write,
            listen_fd=listener.fileno(),
            channels=channels,
            supervisor_pid=os.getpid(),
        )
        boot_fd = boot.to_memfd()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend.server", "--boot-fd", str(boot_fd)],
            pass_fds=[boot_fd, *boot.fds],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for fd in (boot_fd, ready_write):
            os.close(fd)
        listener.close()
        self._told = os.fdopen(ready_read)
        assert self.hear()["event"] == "ready"
        self.engine.start()

    def hear(self) -> dict[str, Any]:
        """The next line that the process tells its supervisor."""
        return dict(json.loads(self._told.readline()))

    def kick(self) -> None:
        os.eventfd_write(self._doorbell_fds["frontend"], 1)

    def fail(self, reason: str) -> None:
        self.control.fail(reason)
        self.kick()

    def figures(self) -> dict[str, Any]:
        return self.stats.read_stage("frontend")

    def wait_rows(self, rows: int, seconds: float = 5.0) -> None:
        """Returns once exactly `rows` rows are open."""
        self.wait(lambda: self.figures()["open_rows"] == rows, seconds)

    def wait_streamed(self, rows: int) -> None:
        """Returns once at least `rows` rows have text that the process has taken."""
        self.wait(lambda: int((self.ledger.delivered > 0).sum()) >= rows)

    def wait(self, true: Any, seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, (self.figures(), self.engine.running)
            time.sleep(0.005)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def close(self) -> None:
        self.client.close()
        self.engine.gate.set()
        self.engine.release_gate.set()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._told.close()
        if self.engine.is_alive():
            self.engine.stop()
        for fd in self._doorbell_fds.values():
            os.close(fd)
        for segment in self.segments.values():
            segment.close()

    def end(self, seconds: float = 15.0) -> tuple[int, str]:
        """Waits for the process to end by itself; exit status and stderr."""
        code = self.process.wait(seconds)
        assert self.process.stderr is not None
        return code, self.process.stderr.read().decode()


@contextmanager
def live_frontend(**changes: Any) -> Iterator[LiveFrontend]:
    live = LiveFrontend(server_config(**changes))
    try:
        yield live
    finally:
        live.close()


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def text(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **more}
