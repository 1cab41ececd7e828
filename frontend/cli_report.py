"""What a person sees of a server at the terminal: one moving line while it starts, then where it is and how to ask it.

Owns stdout and stderr of the supervisor's process, and writes to them through the log alone, since the supervisor may
never wait for a reader. It decides nothing, and it may never print the API key.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

from rich.console import Console
from rich.status import Status

from frontend.log_writer import LOG, LogFile
from shm.config import ServerConfig

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def tell(text: str) -> None:
    """Print one line on stderr, whatever line breaks the text has. Never waits."""
    LOG.line(sys.stderr, f"stepahead: {' '.join(text.split())}")


def log_console() -> Console:
    """Return a console on stderr that never waits for its reader, and never fails."""
    return Console(file=cast(TextIO, LogFile(sys.stderr, LOG)))


def url_of(config: ServerConfig) -> str:
    """Return the address at which this machine reaches the server."""
    host = ANY_ADDRESS.get(config.host, config.host)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def curl_line(config: ServerConfig) -> str:
    """Return a command that asks the server something."""
    body = {
        "model": config.served_model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    parts = ["curl", f"{url_of(config)}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command = shlex.join([*parts, "-d", json.dumps(body, ensure_ascii=False)])
    return command + ' -H "Authorization: Bearer $STEPAHEAD_API_KEY"' if config.api_key else command


class StartLine:
    """A line on stderr that moves while the server starts; silent where stderr is no terminal."""

    def __init__(self) -> None:
        self._console = log_console()
        self._status: Status | None = None
        self._began_s = time.monotonic()

    def show(self, text: str) -> None:
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(f"starting: {text}")

    def end(self) -> float:
        """Take the line away; return the seconds since the first."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        return time.monotonic() - self._began_s


class ServeReport:
    """The report of `stepahead serve`."""

    def __init__(self, config: ServerConfig, line: StartLine) -> None:
        self._config = config
        self._line = line

    def progress(self, stage: str, text: str) -> None:
        self._line.show(f"{stage}: {text}")

    def ready(self) -> None:
        seconds = self._line.end()
        config = self._config
        what = f"{config.served_model_name} in {config.dtype}"
        LOG.line(sys.stdout, f"{what} is ready after {seconds:.1f} s at {url_of(config)}")
        LOG.line(sys.stdout, f"try: {curl_line(config)}")

    def note(self, text: str) -> None:
        self._line.end()
        tell(text)

    def log(self, text: str) -> None:
        tell(text)

    def failed(self, text: str) -> None:
        self._line.end()
        tell(text)


class QuietReport:
    """The report of `stepahead generate`: nothing but the start and a failure; `on_ready` is called when all serve."""

    def __init__(self, line: StartLine, on_ready: Callable[[], None]) -> None:
        self._line = line
        self._on_ready = on_ready
        self.has_failed = False

    def progress(self, stage: str, text: str) -> None:
        self._line.show(f"{stage}: {text}")

    def ready(self) -> None:
        self._line.end()
        self._on_ready()

    def log(self, text: str) -> None:
        """Nothing: one answer needs no log."""

    def note(self, text: str) -> None:
        pass

    def failed(self, text: str) -> None:
        self._line.end()
        self.has_failed = True
        tell(text)
