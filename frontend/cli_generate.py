"""One answer on the terminal: a client of the server's own HTTP interface, in a thread beside the supervisor.

Owns the request and what is printed on stdout. It knows the server by its URL only, and it may never outlive it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError

from frontend.cli_config import CliError, flag
from frontend.log_writer import put
from frontend.schema import ChatBody, CompletionBody

SECONDS_MAX = 3600.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to ask. `raw`: the text is continued as it stands, without a chat template."""

    text: str
    system: str | None
    raw: bool
    max_tokens: int
    temperature: float
    seed: int | None

    def request(self, model: str) -> tuple[str, dict[str, Any]]:
        """Return the path and the body that ask for it."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.raw:
            return "/v1/completions", {**body, "prompt": self.text}
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return "/v1/chat/completions", {**body, "messages": [*system, {"role": "user", "content": self.text}]}

    def check(self) -> None:
        """Raises CliError for what the server would refuse, by the server's own rules."""
        path, body = self.request("any")
        try:
            (CompletionBody if path == "/v1/completions" else ChatBody).model_validate({**body, "model": None})
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise CliError(f"{flag(str(first['loc'][0]))}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def piece_of(event: dict[str, Any]) -> str:
    """Return the text that one event brings."""
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"])


class Asker:
    """Asks in a thread; calls `when_done` there at the end, whatever the end was."""

    def __init__(self, question: Question, url: str, model: str, api_key: str, when_done: Callable[[], None]) -> None:
        self._question = question
        self._url = url
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._when_done = when_done
        self._thread = threading.Thread(target=self._run, name="asker", daemon=True)
        self.complete = False
        self.error = ""

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread; the server is gone, so it has nothing more to wait for."""
        if self._thread.ident is not None:
            self._thread.join(5)

    def _run(self) -> None:
        try:
            self._ask()
        except (httpx.HTTPError, OSError) as error:
            self.error = f"the answer broke off: {error}"
        finally:
            self._when_done()

    def _ask(self) -> None:
        path, body = self._question.request(self._model)
        with (
            httpx.Client(base_url=self._url, headers=self._headers, timeout=SECONDS_MAX, trust_env=False) as client,
            client.stream("POST", path, json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                self.error = response.json()["error"]["message"]
                return
            for line in response.iter_lines():
                if not self._take(line):
                    break
        if self.complete:
            put(sys.stdout, "\n")

    def _take(self, line: str) -> bool:
        """Print what a line of the stream brings; return whether more may come."""
        data = line.removeprefix("data: ")
        if data == line:
            return True
        if data == "[DONE]":
            self.complete = not self.error
            return False
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["message"]
            return True
        put(sys.stdout, piece_of(event))
        return True
