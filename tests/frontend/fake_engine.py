"""Tokenizer, scheduler and detokenizer in one thread, for tests of the frontend: real channels and ledger, no model.

Text is its UTF-8 bytes as ids. A request is answered with its prompt, over and over, a byte a token, until max_tokens;
what a token's text is follows from the bytes so far, so that characters are split as a real tokenizer splits them.
The first words of a prompt are orders: see `Job`.
"""

from __future__ import annotations

import codecs
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from shm.channel import Receiver, Sender
from shm.config import ServerConfig
from shm.ledger import Ledger

EOS = 256


@dataclass
class Job:
    """One row. Orders: `/reject`, `/hang` (never accepted), `/slow` (paced), `/error N`, `/abort N`, `/stop N` (text
    stop after N tokens, released later), `/eos N` (the end token is the Nth), `/crash` (a message that is wrong)."""

    row: int
    gen: int
    prompt: bytes
    params: dict[str, Any]
    kind: str
    limit: int
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    count: int = 0
    told: str | None = None
    next_s: float = 0.0

    @property
    def order(self) -> str:
        text = self.prompt.decode("utf-8", "replace")
        return text.split()[0][1:] if text.startswith("/") else ""

    @property
    def number(self) -> int:
        return int(self.prompt.split()[1])


class FakeEngine(threading.Thread):
    """Runs until `stop`. `gate` cleared = nothing is answered; `batch` = tokens put into one message."""

    def __init__(self, config: ServerConfig, ledger: Ledger, tokenizer: str, frontend: str) -> None:
        super().__init__(daemon=True)
        self.config = config
        self.ledger = ledger
        self.context: zmq.Context[Any] = zmq.Context()
        self.receiver = Receiver.bind(tokenizer, 0, self.context)
        self.sender = Sender(self.context, frontend, 1)
        self.sender.mark = {"epoch": 0, "to": 1}  # see LiveFrontend: nobody has ever been started, but the frontend
        self.gate = threading.Event()
        self.gate.set()
        self.release_gate = threading.Event()
        self.release_gate.set()
        self.pace_s = 0.0
        self.step_tokens = 1
        self.seen: list[dict[str, Any]] = []
        self.running: list[Job] = []
        self.ended: list[Job] = []  # waiting for release
        self.aborted = 0
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self.join(5)
        assert not self.is_alive()

    def run(self) -> None:
        while not self._stopped:
            for message in self.receiver.recv_all():
                self.seen.append(message)
                self.take(message)
            if self.gate.is_set():
                self.step()
            if not (self.running or self.ended) or not self.gate.is_set():
                self.receiver.wait(2)
        self.receiver.close()
        self.sender.close()
        self.context.term()

    def take(self, message: dict[str, Any]) -> None:
        if message["op"] == "cancel" or message.get("prompt") == "/unanswered":
            return
        if message["op"] == "tokenize":
            text = message.get("prompt")
            if text is None:
                text = "".join(f"<{m['role']}>{m['content']}" for m in message["messages"])
            if text.startswith("/reject"):
                answer = {"ev": "failed", "id": message["id"], "status": 400, "message": "no", "param": "prompt"}
            else:
                ids = list(text.encode())
                answer = {"ev": "tokenized", "id": message["id"], "tokens": ids, "count": len(ids)}
            self.sender.send(answer)
        elif message["op"] == "detokenize":
            text = bytes(i for i in message["tokens"] if i < EOS).decode("utf-8", "replace")
            self.sender.send({"ev": "detokenized", "id": message["id"], "text": text})
        else:
            self.generate(message)

    def generate(self, message: dict[str, Any]) -> None:
        row, gen, params = message["row"], message["gen"], message["params"]
        assert self.ledger.generation[row] == gen
        if message["kind"] == "chat":
            prompt = message["messages"][-1]["content"].encode()
        elif message["kind"] == "text":
            prompt = message["prompt"].encode()
        else:
            prompt = bytes(i % 256 for i in message["prompt"])
        room = self.config.max_len - len(prompt)
        wanted = params["max_tokens"] or message["default_max_tokens"] or room
        job = Job(row, gen, prompt, params, message["kind"], min(wanted, room))
        error = "the prompt is empty" if not prompt else "too long" if room < 1 or wanted > max(room, 16) else None
        if job.order == "reject":
            error = "rejected as ordered"
        if error is not None:
            told = {"status": 400, "message": error, "param": "prompt", "code": None}
            self.sender.send({"ev": "rejected", "row": row, "gen": gen, **told})
            return
        self.ledger.prompt_len[row] = len(prompt)
        self.ledger.tokens[row, : len(prompt)] = list(prompt)
        if job.order != "hang":
            self.sender.send({"ev": "accepted", "row": row, "gen": gen, "prompt_tokens": len(prompt)})
        self.running.append(job)

    def step(self) -> None:
        items: list[list[Any]] = []
        now = time.monotonic()
        for job in list(self.running):
            if self.ledger.abort[job.row] == job.gen:
                self.aborted += 1
                self.end(job, "abort", items)
            elif job.order != "hang" and now >= job.next_s:
                job.next_s = now + (0.02 if job.order == "slow" else self.pace_s)
                for _ in range(self.step_tokens):
                    if job.told is None:
                        self.advance(job, items)
        if self.release_gate.is_set():
            for job in self.ended:
                items.append([job.row, job.gen, job.count, job.count, "", None, True])
            self.ended.clear()
        if items:
            self.sender.send({"ev": "text", "items": items})

    def advance(self, job: Job, items: list[list[Any]]) -> None:
        first = job.count
        eos = job.order == "eos" and job.count + 1 == job.number
        token = EOS if eos else job.prompt[job.count % len(job.prompt)]
        self.ledger.tokens[job.row, len(job.prompt) + job.count] = token
        job.count += 1
        text = "" if eos else job.decoder.decode(bytes([token]))
        finish = "stop" if eos else "length" if job.count == job.limit else None
        if job.order in ("error", "abort", "stop") and job.count == job.number:
            finish = job.order
        if job.order == "crash":
            first += 1  # a gap in the text
            text = "x"
        if finish is None:
            items.append([job.row, job.gen, first, job.count, text, None, False])
        else:
            self.end(job, finish, items, text, first)

    def end(self, job: Job, finish: str, items: list[list[Any]], text: str = "", first: int | None = None) -> None:
        self.running.remove(job)
        job.told = finish
        text += job.decoder.decode(b"", True)
        # A text stop is told at once and released by the scheduler later; everything else in one item.
        later = finish == "stop" or not self.release_gate.is_set()
        items.append([job.row, job.gen, job.count if first is None else first, job.count, text, finish, not later])
        if later:
            self.ended.append(job)
