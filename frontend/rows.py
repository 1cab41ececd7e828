"""Ledger rows as the frontend sees them: who holds which row, what has arrived for it, and when it is free again.

Owns the planes generation, abort, delivered, arrival_ns and freed of the ledger. May never free a row because a client
left: only when the scheduler has let go of it (an item with release) or will never see it (rejected, or given up before
it was ready).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from frontend.errors import ApiError, poison
from frontend.metrics import Meter
from frontend.tokenizer_line import TokenizerLine
from shm.faults import fault, wrong
from shm.ledger import Ledger
from shm.limits import GENERATION_MAX


class Drafts(NamedTuple):
    """What drafting has done for a row."""

    steps: int  # that had drafts
    drafted: int  # tokens in them
    accepted: int  # of those the ones that are in the output


class Row:
    """One prompt on its way to an answer."""

    __slots__ = (
        "accepted",
        "arrival_ns",
        "count",
        "drafts",
        "exchange",
        "finish",
        "generation",
        "ids",
        "index",
        "last_ns",
        "number",
        "prompt_ids",
        "prompt_tokens",
        "released",
        "text",
    )

    def __init__(self, number: int, generation: int, exchange: Exchange, index: int, now_ns: int) -> None:
        self.number = number
        self.generation = generation
        self.exchange = exchange
        self.index = index  # of the choice in the answer
        self.accepted = False
        self.released = False
        self.finish: str | None = None
        self.prompt_tokens = 0
        self.count = 0  # output tokens received
        self.drafts = Drafts(0, 0, 0)
        self.text: list[str] = []  # received and not yet taken
        self.ids: list[int] = []  # likewise, kept only on request
        self.prompt_ids: list[int] = []
        self.arrival_ns = now_ns
        self.last_ns = now_ns


class Exchange:
    """One HTTP request and its rows. Its handler sleeps on `wake`; what a slow client leaves becomes one piece."""

    def __init__(self, stream: bool, keep_ids: bool) -> None:
        self.stream = stream
        self.keep_ids = keep_ids
        self.rows: list[Row] = []
        self.wake = asyncio.Event()
        self.error: ApiError | None = None
        self.gone = False  # the client has left: nothing is kept for it any more

    @property
    def accepted(self) -> bool:
        return all(row.accepted for row in self.rows)

    @property
    def finished(self) -> bool:
        return all(row.finish is not None for row in self.rows)

    def fail(self, error: ApiError) -> None:
        """Ends the exchange with `error`; the first one counts."""
        if self.error is None:
            self.error = error
        self.wake.set()


class RowTable:
    """All rows of the ledger. Single-threaded: everything runs on the event loop."""

    def __init__(
        self, ledger: Ledger, rows: int, ring_scheduler: Callable[[], None], meter: Meter, line: TokenizerLine
    ) -> None:
        self._ledger = ledger
        self._line = line
        self._ring_scheduler = ring_scheduler
        self._meter = meter
        self._open: dict[int, Row] = {}
        # Last in, first out: the pages of few rows stay warm.
        self._free = list(range(rows - 1, -1, -1))
        self._adopt(meter)

    @property
    def open_count(self) -> int:
        return len(self._open)

    def _adopt(self, meter: Meter) -> None:
        """Take over the rows of a frontend that died: their clients are gone, so the scheduler has to end them.

        The tokenizer hands those on that it has not finished: nobody will send their prompts again.
        """
        ledger = self._ledger
        exchange = Exchange(stream=False, keep_ids=False)
        exchange.gone = True
        left = (ledger.generation > 0) & (ledger.freed != ledger.generation)
        for number in left.nonzero()[0].tolist():
            generation = int(ledger.generation[number])
            row = Row(number, generation, exchange, 0, time.monotonic_ns())
            row.count, row.accepted = int(ledger.delivered[number]), True
            if ledger.text_stop[number] == generation and row.count >= ledger.text_stop_count[number]:
                row.finish = "stop"  # the dead one was told, and nobody is told twice
            ledger.abort[number] = generation
            self._open[number] = row
            self._free.remove(number)
            self.send(row, {"op": "leave"})
        meter.took_over(len(self._open))
        if self._open:
            self._ring_scheduler()

    def send(self, row: Row, message: dict[str, Any]) -> None:
        """Tells the tokenizer of `row`, as often as it takes until it is accepted or rejected."""
        key = row.number, row.generation
        message |= {"row": row.number, "gen": row.generation}
        self._line.ask(key, message, lambda deaths: self._give_up(row, deaths))
        fault("frontend.row_sent")

    def _give_up(self, row: Row, deaths: int) -> bool:
        """Tokenizers died of `row`, which none has now; False if it was ready all the same."""
        if self._ledger.ready[row.number] == row.generation:
            return False
        self._free_row(row)
        row.exchange.fail(poison("tokenizer", deaths))
        return True

    def open(self, exchange: Exchange, choices: int) -> None:
        """Takes a row for each of the `choices` prompts of `exchange`, or raises ApiError 429 and takes none."""
        if len(self._free) < choices:
            raise ApiError(429, "the queue is full: try again soon", code="queue_full")
        ledger, now_ns = self._ledger, time.monotonic_ns()
        for index in range(choices):
            number = self._free.pop()
            generation = int(ledger.generation[number]) + 1
            assert generation <= GENERATION_MAX
            ledger.delivered[number] = 0
            ledger.arrival_ns[number] = now_ns
            ledger.generation[number] = generation
            fault("frontend.row_opened")
            row = Row(number, generation, exchange, index, now_ns)
            self._open[number] = row
            exchange.rows.append(row)

    def abort(self, exchange: Exchange) -> bool:
        """Asks the scheduler to end what still runs of `exchange`; the rows come back by release. True if any ran."""
        running = [row for row in exchange.rows if row.finish is None and not row.released]
        for row in running:
            self._ledger.abort[row.number] = row.generation
        if running:
            self._ring_scheduler()  # SYNC abort-flagged
        return bool(running)

    def dispatch(self, message: dict[str, Any]) -> None:
        """Brings one message of the tokenizer or the detokenizer to its rows."""
        kind = message["ev"]
        if kind == "text":
            now_ns = time.monotonic_ns()
            for item in message["items"]:
                self._text(item, now_ns)
        elif kind == "accepted":
            row = self._find(message["row"], message["gen"])
            if row is not None and not row.accepted:
                self._accept(row, message["prompt_tokens"])
            self._line.answered((message["row"], message["gen"]))
        elif kind == "rejected":
            row = self._find(message["row"], message["gen"])
            self._line.answered((message["row"], message["gen"]))
            if row is not None:
                self._free_row(row)
                row.exchange.fail(
                    ApiError(message["status"], message["message"], message.get("param"), message.get("code"))
                )
        else:
            raise AssertionError(f"unknown message {kind!r}")

    def fail_all(self, error: ApiError) -> None:
        """Tells every open exchange that nothing more will come."""
        for row in self._open.values():
            if row.finish is None:
                row.exchange.fail(error)

    def _find(self, number: int, generation: int) -> Row | None:
        row = self._open.get(number)
        # A message for a generation that is over is late, not wrong.
        return row if row is not None and row.generation == generation else None

    def _accept(self, row: Row, prompt_tokens: int) -> None:
        row.accepted = True
        row.prompt_tokens = prompt_tokens
        exchange = row.exchange
        if exchange.keep_ids:
            row.prompt_ids = self._ledger.tokens[row.number, :prompt_tokens].tolist()
        if exchange.accepted:
            exchange.wake.set()

    def _text(self, item: list[Any], now_ns: int) -> None:
        number, generation, first, count, text, finish, release = item
        row = self._find(number, generation)
        if row is None:
            return
        if not row.accepted:
            # The detokenizer's word may overtake the tokenizer's: they are two senders.
            self._accept(row, int(self._ledger.prompt_len[number]))
            self._line.answered((number, generation))
        exchange = row.exchange
        if row.finish is None and (count > row.count or finish is not None):
            is_next = first == row.count or wrong("text.ignores_delivered")
            assert is_next or not text, f"row {number}: text from {first} on, {row.count} tokens before it"
            self._observe(row, count - row.count, now_ns)
            if exchange.keep_ids:
                start = row.prompt_tokens
                row.ids += self._ledger.tokens[number, start + row.count : start + count].tolist()
            if text and not exchange.gone:
                row.text.append(text)
            row.count = count
            fault("frontend.text_taken")
            self._ledger.delivered[number] = count
            fault("frontend.delivered_stored")
            if finish is not None:
                self._finish(row, finish)
            if finish is not None or (exchange.stream and text):
                exchange.wake.set()
        if release:
            assert row.finish is not None, f"row {number} was released before it finished"
            self._free_row(row)

    def _finish(self, row: Row, finish: str) -> None:
        row.finish, ledger, number = finish, self._ledger, row.number
        steps, drafted, accepted = (int(p[number]) for p in (ledger.draft_steps, ledger.drafted, ledger.accepted))
        # Steps that ran on behind a stop string are counted as well: no more can have come than the output has.
        steps = min(steps, max(0, row.count - 1))
        row.drafts = Drafts(steps, drafted, min(accepted, max(0, row.count - 1 - steps)))
        if finish == "abort":
            row.exchange.fail(ApiError(503, "the server ended this request before it was done", code="aborted"))
        elif finish == "error":
            row.exchange.fail(self._why_given_up(number))

    def _why_given_up(self, number: int) -> ApiError:
        ledger = self._ledger
        # Those since it got on last, or those in a row: the larger number has all of the others in it.
        counts = [
            (ledger.gpu_deaths, ledger.gpu_in_a_row, "gpu"),
            (ledger.scheduler_deaths, ledger.scheduler_in_a_row, "scheduler"),
        ]
        if ledger.text_deaths_of[number] == ledger.generation[number]:
            counts.append((ledger.text_deaths, ledger.text_in_a_row, "detokenizer"))
        deaths, stage = max((int(max(plane[number] for plane in planes)), stage) for *planes, stage in counts)
        if deaths:
            return poison(stage, deaths)
        return ApiError(500, "the server could not go on with this request", code="internal_error")

    def _observe(self, row: Row, tokens: int, now_ns: int) -> None:
        if tokens <= 0:
            return
        seconds = (now_ns - row.last_ns) * 1e-9
        if row.count == 0:
            self._meter.first_token(seconds)
        else:
            self._meter.next_tokens(seconds, tokens)
        row.last_ns = now_ns

    def _free_row(self, row: Row) -> None:
        row.released = True
        self._ledger.freed[row.number] = row.generation
        fault("frontend.row_freed")
        del self._open[row.number]
        self._free.append(row.number)
        # A row that was taken over may end before the tokenizer has answered, and then it never does.
        self._line.answered((row.number, row.generation))
