"""The rest of the server as the routes see it: opens exchanges, passes work to the tokenizer, hears what comes back.

Owns the row table, the questions to the tokenizer that are still open, and the channel to it. May never wait: all of
it runs between two turns of the event loop, and all messages of one turn are brought before any handler wakes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from frontend.errors import ApiError
from frontend.metrics import Meter, Outcome
from frontend.rows import Exchange, RowTable
from frontend.schema import Work
from shm.channel import Sender
from shm.config import ServerConfig
from shm.control import DRAINING, FAILED, READY, STARTING, Control
from shm.ledger import Ledger
from shm.limits import BODY_BYTES_MAX
from shm.trace import TraceWriter, What

# In flight, of all clients: the tokenizer has more to do than to answer these.
QUESTIONS_MAX = 16
QUESTION_BYTES_MAX = 2 * BODY_BYTES_MAX


class Engine:
    def __init__(
        self,
        config: ServerConfig,
        control: Control,
        ledger: Ledger,
        meter: Meter,
        tokenizer: Sender,
        ring_scheduler: Callable[[], None],
        trace: TraceWriter,
    ) -> None:
        self.config = config
        self.meter = meter
        self.stopping = False  # this process was told to end
        self._control = control
        self._tokenizer = tokenizer
        self._trace = trace
        self._rows = RowTable(ledger, config.rows, ring_scheduler, meter)
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._question_bytes = 0
        self._asked = 0
        self._asks: dict[int, dict[str, Any]] = {}  # the questions themselves
        # The process of each stage whose messages are taken, by epoch, and the tokenizer that has been told all.
        self._hears = {"tokenizer": 0, "detokenizer": 0}
        self._told = 0
        self.look_around()

    @property
    def idle(self) -> bool:
        return self._rows.open_count == 0 and not self._questions

    @property
    def refusal(self) -> ApiError | None:
        """Why no request is taken at present (503), or None."""
        state = self._control.state
        if state == FAILED:
            return ApiError(503, f"the server has failed: {self.failure}", code="failed")
        if state == DRAINING or self.stopping:
            return ApiError(503, "the server is shutting down", code="draining")
        if state == STARTING:
            return ApiError(503, "the server is starting", code="starting")
        assert state == READY, state
        return None

    @property
    def failed(self) -> bool:
        return bool(self._control.state == FAILED)

    @property
    def failure(self) -> str:
        return str(self._control.failure) or "a stage has ended"

    def open(self, work: Work) -> Exchange:
        """Sends all prompts of `work` on their way. Raises ApiError 429 or 503, and then nothing was sent."""
        refusal = self.refusal
        if refusal is not None:
            self.meter.outcome("refused")
            raise refusal
        exchange = Exchange(work.stream, work.return_token_ids)
        try:
            self._rows.open(exchange, len(work.prompts))
        except ApiError:
            self.meter.outcome("refused")
            raise
        self.meter.began()
        self.meter.open_rows(self._rows.open_count)
        for row, prompt in zip(exchange.rows, work.prompts, strict=True):
            row.message = {
                "op": "generate",
                "row": row.number,
                "gen": row.generation,
                **prompt,
                "params": work.params,
                "default_max_tokens": work.default_max_tokens,
            }
            self._tokenizer.send(row.message)
        return exchange

    def look_around(self) -> None:
        """Find out who has died and been started again: what the dead said is heard no more, and a tokenizer that took
        over is told everything that none has answered. Call after every kick.
        """
        control = self._control
        for stage in self._hears:
            self._hears[stage] = control.epoch(stage)
        control.set_hears("frontend", self._hears["detokenizer"])
        serves = control.serves("tokenizer")
        if serves != self._told:
            self._told = serves
            for message in (*self._rows.unaccepted, *self._asks.values()):
                self._tokenizer.send(message)

    def abandon(self, exchange: Exchange) -> None:
        """The client has left."""
        exchange.gone = True
        for row in exchange.rows:
            row.text.clear()
        self._rows.abort(exchange)
        exchange.wake.set()

    def close(self, exchange: Exchange) -> None:
        """The handler of `exchange` is done with it, for whatever reason; what still runs for it is aborted."""
        self._rows.abort(exchange)
        done = exchange.finished and exchange.error is None
        outcome: Outcome = "aborted"
        if done:
            outcome = "finished"
        elif exchange.error is not None and not exchange.gone:
            outcome = "rejected" if exchange.error.status < 500 else "errors"
        exchange.gone = True
        begin_ns, end_ns = exchange.rows[0].arrival_ns, time.monotonic_ns()
        self._trace.span(What.REQUEST, exchange.rows[0].number, begin_ns, end_ns)  # a request has no step: its row
        self.meter.ended(
            outcome,
            (end_ns - begin_ns) * 1e-9,
            sum(row.prompt_tokens for row in exchange.rows),
            sum(row.count for row in exchange.rows),
        )

    async def ask(self, question: dict[str, Any], size: int) -> dict[str, Any]:
        """Puts a question (tokenize, detokenize) of `size` bytes to the tokenizer; cancelled, tells it not to answer.

        Raises ApiError: the tokenizer's, 429 or 503.
        """
        refusal = self.refusal
        if refusal is not None:
            raise refusal
        if len(self._questions) >= QUESTIONS_MAX or self._question_bytes + size > QUESTION_BYTES_MAX:
            raise ApiError(429, "too many questions at once: try again soon", code="queue_full")
        self._asked += 1
        key = self._asked
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[key] = answer
        self._question_bytes += size
        self._asks[key] = {**question, "id": key}
        self._tokenizer.send(self._asks[key])
        try:
            return await answer
        except asyncio.CancelledError:
            self._tokenizer.send({"op": "cancel", "id": key})
            raise
        finally:
            del self._questions[key], self._asks[key]
            self._question_bytes -= size

    def receive(self, messages: list[dict[str, Any]]) -> None:
        """Brings the messages of one turn to the rows and questions they belong to."""
        for message in messages:
            sender = "detokenizer" if message["ev"] == "text" else "tokenizer"
            if message["epoch"] != self._hears[sender]:
                continue  # of a process that has died: what counts of it is in the ledger, and is said again
            if message["ev"] in ("tokenized", "detokenized", "failed"):
                self._answer(message)
            else:
                self._rows.dispatch(message)
        self.meter.open_rows(self._rows.open_count)

    def fail(self, reason: str) -> None:
        """The server has failed: every open exchange and question ends with that error."""
        error = ApiError(500, f"the server ended before this request was done: {reason}", code="failed")
        self._rows.fail_all(error)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error)

    def _answer(self, message: dict[str, Any]) -> None:
        answer = self._questions.get(message["id"])
        if answer is None or answer.done():
            return
        if message["ev"] == "failed":
            answer.set_exception(ApiError(message["status"], message["message"], message.get("param")))
        else:
            answer.set_result(message)
