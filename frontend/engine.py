"""The rest of the server as the routes see it: opens exchanges, passes work to the tokenizer, hears what comes back.

Owns the row table, the questions to the tokenizer that are still open, and who of the other processes is heard. May
never wait: all of it runs between two turns of the event loop, and all messages of one turn are brought before any
handler wakes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from frontend.errors import ApiError, poison
from frontend.metrics import Meter, Outcome
from frontend.rows import Exchange, RowTable
from frontend.schema import Work
from frontend.tokenizer_line import TokenizerLine
from shm.channel import Sender
from shm.config import ServerConfig
from shm.control import DRAINING, FAILED, READY, STAGES, STARTING, Control
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
        epoch: int = 0,
    ) -> None:
        """epoch: of this process, to which the detokenizer addresses its messages."""
        self.config = config
        self.meter = meter
        self._control = control
        self._epoch = epoch
        self._trace = trace
        self._line = TokenizerLine(control, tokenizer, meter)
        self._rows = RowTable(ledger, config.rows, ring_scheduler, meter, self._line)
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._question_bytes = 0
        self._asked = epoch << 32  # an answer to a question of an earlier frontend must not look like one to ours
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
        if state == DRAINING:
            return ApiError(503, "the server is shutting down", code="draining")
        if state == STARTING:
            return ApiError(503, "the server is starting", code="starting")
        assert state == READY, state
        return None

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        """Every process of the server: what it does, its epoch, its restarts and why it died last."""
        control = self._control
        return {
            stage: {
                "state": control.stage_state(stage),
                "epoch": control.epoch(stage),
                "restarts": control.restarts(stage),
                "last_reason": control.last_reason(stage) or None,
            }
            for stage in STAGES
        }

    @property
    def whole(self) -> bool:
        """Whether every process serves. If not, requests are taken all the same, and wait for the one that is away."""
        return all(self._control.stage_state(stage) == "serving" for stage in STAGES)

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
            extra = {"params": work.params, "default_max_tokens": work.default_max_tokens}
            self._rows.send(row, {"op": "generate", **prompt, **extra})
        return exchange

    def look_around(self) -> None:
        """Find out who has died and been started again: what the dead said is heard no more. Call after every kick."""
        self._detokenizer = self._control.epoch("detokenizer")
        self._control.set_hears("frontend", self._detokenizer)
        self._line.look_around()

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
        self._line.ask(key, {**question, "id": key}, lambda deaths: _refuse(answer, poison("tokenizer", deaths)))
        try:
            return await answer
        except asyncio.CancelledError:
            self._line.cancel(key, {"op": "cancel", "id": key})
            raise
        finally:
            self._line.answered(key)
            del self._questions[key]
            self._question_bytes -= size

    def receive(self, messages: list[dict[str, Any]]) -> None:
        """Brings the messages of one turn to the rows and questions they belong to."""
        for message in messages:
            if not self._counts(message):
                continue  # what counts of it is in the ledger, and is said again
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
            _refuse(answer, error)

    def _counts(self, message: dict[str, Any]) -> bool:
        """Whether a message is of a process that lives. The detokenizer's have to be meant for this process, too: what
        it told an earlier one is missing here.
        """
        if message["ev"] != "text":
            return bool(message["epoch"] == self._line.epoch)
        return bool(message["epoch"] == self._detokenizer and message["to"] == self._epoch)

    def _answer(self, message: dict[str, Any]) -> None:
        answer = self._questions.get(message["id"])
        if answer is None or answer.done():
            return
        if message["ev"] == "failed":
            _refuse(answer, ApiError(message["status"], message["message"], message.get("param")))
        else:
            answer.set_result(message)


def _refuse(answer: asyncio.Future[dict[str, Any]], error: ApiError) -> bool:
    if not answer.done():
        answer.set_exception(error)
    return True
