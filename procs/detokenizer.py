"""The detokenizer: output tokens in the ledger become text for the frontend.

Owns the text state of every running row, the search for stop strings and the planes that tell the scheduler of one that
was found. It may keep nothing that the ledger cannot rebuild (`open_row`), never frees a row and never decides when an
output ends, except by a stop string.

One item for the frontend is [row, generation, first, count, text, finish, release]: output tokens [first, count) were
taken in since the row's last item. `text` is what may leave by now; it may lag behind the tokens (half a character, the
beginning of a stop string) and then comes with a later item. The ranges of a row's items lie end to end from 0 to the
count of the item with `finish`. Exactly one item of a row has a finish, exactly one has release = true, and none comes
after it; after a stop string these are two items unless the scheduler had finished the row by itself. An item without
text, finish and release is not sent.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zmq

from procs.text_stream import OutputText, StopStrings
from procs.token_text import TextTable, UnknownDecoder
from procs.tokenizer_files import load_tokenizer
from shm import child
from shm.channel import Sender
from shm.faults import fault, wrong
from shm.ledger import FINISH_NAMES, FINISH_NONE, Ledger
from shm.limits import DEATHS_IN_A_ROW
from shm.records import read_progress
from shm.ring import RingConsumer
from shm.stats import StatsWriter
from shm.tensor_map import ModelError
from shm.trace import TraceWriter, What

# Automata of the latest sets of stop strings are kept: requests of one application have the same. The largest is 1 MB.
STOP_SETS_MAX = 32

DEATHS_MAX = 2  # that a row may cause, without getting on, before it is given up
REBUILD_LOOK_MS = 5  # between two looks whether the frontend has let go of an earlier detokenizer

Item = list[Any]


class Bell(Protocol):
    """What is needed of a doorbell here."""

    def ring(self) -> None: ...


class RowText:
    """One row: its output's text, and what the frontend has been told."""

    __slots__ = ("finished", "generation", "output", "tokens", "told")

    def __init__(self, generation: int, tokens: npt.NDArray[np.int32], output: OutputText) -> None:
        self.generation = generation
        self.tokens = tokens  # the row's plane from the first output token on
        self.output = output
        self.told = 0  # end of the last item's range
        self.finished = False  # an item with a finish was sent


def open_row(
    ledger: Ledger, table: TextTable, stops: Callable[[tuple[str, ...]], StopStrings], row: int, generation: int
) -> RowText:
    """Makes a row's state from the ledger: that of a row whose first `delivered` output tokens are with the frontend.

    For a new row that is none; what else is held back follows from the tokens alone.
    """
    assert ledger.generation[row] == generation, f"row {row}: {generation} is not its generation"
    strings = tuple(ledger.stop_strings(row))
    stop_ids = ledger.stop_ids[row].tolist()  # padded with -1, which no token is
    tokens = ledger.tokens[row, int(ledger.prompt_len[row]) :]
    state = RowText(generation, tokens, OutputText(table, stops(strings) if strings else None, stop_ids))
    delivered = 0 if wrong("text.ignores_delivered") else int(ledger.delivered[row])
    state.output.push(tokens[:delivered].tolist())
    state.told = delivered
    state.finished = state.output.stop_count > 0
    return state


class Detokenizer:
    """Turns progress records into items; all that has come by the time of a turn goes out in one message."""

    def __init__(
        self,
        ledger: Ledger,
        progress: RingConsumer,
        frontend: Sender,
        scheduler_bell: Bell,
        table: TextTable,
        stats: StatsWriter,
        trace: TraceWriter,
        streak: int,
    ) -> None:
        """streak: of the detokenizers' deaths, see `Control.streak`."""
        self._ledger = ledger
        self._progress = progress
        self._frontend = frontend
        self._scheduler_bell = scheduler_bell
        self._table = table
        self._stats = stats
        self._trace = trace
        self._rows: dict[int, RowText] = {}
        self._stops = lru_cache(maxsize=STOP_SETS_MAX)(StopStrings)
        self._blamed: dict[int, int] = {}  # rows that a detokenizer died of -> generation
        self._spoilt: dict[int, int] = {}  # those that several did
        self._blame(streak)

    @property
    def open_rows(self) -> int:
        """Rows that have been seen and not been released."""
        return len(self._rows)

    def _blame(self, streak: int) -> None:
        """Whoever was in hand when the process before this one died is blamed for it: rows are worked on one by one."""
        ledger = self._ledger
        in_hand = (ledger.in_hand > 0) & (ledger.in_hand == ledger.generation) & (ledger.freed != ledger.generation)
        for row in np.flatnonzero(in_hand).tolist():
            generation = int(ledger.generation[row])
            known = ledger.text_deaths_of[row] == generation
            in_a_row = int(ledger.text_in_a_row[row]) if known and ledger.text_streak[row] == streak else 0
            ledger.text_in_a_row[row] = in_a_row + 1
            ledger.text_streak[row] = streak
            ledger.text_deaths[row] = (int(ledger.text_deaths[row]) if known else 0) + 1
            ledger.text_deaths_of[row] = generation  # LAST
            ledger.in_hand[row] = 0
        blamed = (ledger.text_deaths_of > 0) & (ledger.text_deaths_of == ledger.generation) & (ledger.text_deaths > 0)
        for row in np.flatnonzero(blamed & (ledger.freed != ledger.generation)).tolist():
            is_spoilt = ledger.text_deaths[row] >= DEATHS_MAX or ledger.text_in_a_row[row] >= DEATHS_IN_A_ROW
            those = self._spoilt if is_spoilt else self._blamed
            those[row] = int(ledger.generation[row])

    def rebuild(self) -> None:
        """Begin anew from the ledger: what the frontend has not taken of any row is said again, from `delivered` on."""
        ledger = self._ledger
        self._rows.clear()
        known = (ledger.generation > 0) & (ledger.begun == ledger.generation) & (ledger.freed != ledger.generation)
        news = {}
        for row in np.flatnonzero(known).tolist():
            generation = int(ledger.begun[row])
            done = int(ledger.done[row]) == generation  # before the count: nothing is stored behind it
            finish = int(ledger.finish[row]) if done else FINISH_NONE
            news[row] = (generation, int(ledger.count[row]), finish)
        fault("detokenizer.rebuilding")
        self._stats.add("rebuilt_total", len(news))
        self._say(news.items())

    def turn(self) -> int:
        """Handles every record that is there; returns how many. The message leaves before the records are given back,
        so that a death in between repeats items and loses none.
        """
        records = self._progress.available()
        if not records:
            return 0
        begin_ns = time.monotonic_ns()
        news, step = self._read(records)
        fault("detokenizer.records_read")
        tokens, pieces = self._say(news.items())
        fault("detokenizer.text_sent")
        self._progress.release(records)
        fault("detokenizer.records_released")
        self._record(step, begin_ns, tokens, pieces)
        return records

    def _say(self, news: Iterable[tuple[int, tuple[int, int, int]]]) -> tuple[int, int]:
        """Sends the items of rows that are at (generation, count, finish); returns how many tokens and items."""
        items: list[Item] = []
        tokens = 0
        for row, (generation, count, finish) in news:
            tokens += self._advance(row, generation, count, finish, items)
        if items:
            self._frontend.send({"ev": "text", "items": items})
        return tokens, len(items)

    def _read(self, records: int) -> tuple[dict[int, tuple[int, int, int]], int]:
        """Returns ({row: (generation, count, finish)}, newest step): a row's last record says what the others said."""
        news: dict[int, tuple[int, int, int]] = {}
        step = 0
        for index in range(records):
            slot = self._progress.peek(index)
            step = slot.source_seq
            columns = (column.tolist() for column in read_progress(slot.payload))
            for row, generation, count, finish in zip(*columns, strict=True):
                earlier = news.get(row)
                if earlier is not None and earlier[2] != FINISH_NONE and earlier[0] == generation:
                    # A scheduler that takes over tells once more of what may not have been told.
                    assert (count, finish) == earlier[1:], f"row {row} goes on after it was finished"
                news[row] = (generation, count, finish)
        return news, step

    def _advance(self, row: int, generation: int, count: int, finish: int, items: list[Item]) -> int:
        """Takes a row up to `count` output tokens, appends its item if there is one; returns the tokens taken in."""
        ledger = self._ledger
        if ledger.generation[row] > generation or ledger.freed[row] == generation:
            return 0  # over since, and told once more by a scheduler that took over
        ledger.in_hand[row] = generation
        state = self._rows.get(row)
        if state is None or state.generation != generation:
            # Of a row that was over before its last records came, something may be left here.
            assert state is None or ledger.freed[row] >= state.generation, f"row {row} has two holders"
            state = self._rows[row] = self._open(row, generation, items)
        release = finish != FINISH_NONE
        before = state.output.count
        if not state.finished:
            self._take_in(row, state, count, finish, items)
        elif release:
            items.append([row, generation, state.told, state.told, "", None, True])
        if release:
            del self._rows[row]
            self._stats.add("finished_total")
        if self._blamed.get(row) == generation:
            ledger.text_deaths[row] = 0
            del self._blamed[row]
        ledger.in_hand[row] = 0
        return state.output.count - before

    def _open(self, row: int, generation: int, items: list[Item]) -> RowText:
        if self._spoilt.get(row) != generation:
            return open_row(self._ledger, self._table, self._stops, row, generation)
        # Nothing of it is looked at any more. The scheduler ends the row as for a stop string.
        self._stats.add("poison_total")
        delivered = int(self._ledger.delivered[row])
        state = RowText(generation, self._ledger.tokens[row, :0], OutputText(self._table, None))
        state.told, state.finished = delivered, True
        items.append([row, generation, delivered, delivered, "", "error", False])
        self._tell_scheduler(row, state, False)
        return state

    def _take_in(self, row: int, state: RowText, count: int, finish: int, items: list[Item]) -> None:
        fault("detokenizer.row_in_hand", lambda: (int(self._ledger.seed[row]),))
        release = finish != FINISH_NONE
        text = state.output.push(state.tokens[state.output.count : count].tolist())
        if release:
            text += state.output.flush()
        reason = "stop" if state.output.stop_count else FINISH_NAMES[finish]
        if state.output.stop_count:
            self._tell_scheduler(row, state, release)
        if text or reason:
            items.append([row, state.generation, state.told, state.output.count, text, reason, release])
            state.told = state.output.count
            state.finished = reason is not None

    def _tell_scheduler(self, row: int, state: RowText, finished: bool) -> None:
        self._ledger.text_stop_count[row] = state.output.stop_count
        fault("detokenizer.stop_counted")
        self._ledger.text_stop[row] = state.generation  # LAST
        fault("detokenizer.stop_stored")
        self._stats.add("stops_total")
        if not finished:
            self._scheduler_bell.ring()

    def _record(self, step: int, begin_ns: int, tokens: int, pieces: int) -> None:
        end_ns = time.monotonic_ns()
        stats = self._stats
        stats.add("tokens_total", tokens)
        stats.add("pieces_total", pieces)
        stats.add("decode_ns_total", end_ns - begin_ns)
        stats.observe("decode_s", (end_ns - begin_ns) / 1e9)
        stats.set("open_rows", len(self._rows))
        self._trace.span(What.DETOKENIZE, step, begin_ns, end_ns)


def main() -> None:
    """Runs the stage until SIGTERM."""
    with child.start() as stage:
        model = stage.config.model
        try:
            table = TextTable(load_tokenizer(model.path), model.vocab_size, model.eos_token_ids)
        except (ModelError, UnknownDecoder) as error:
            raise child.StartupError(f"{model.path}: {error}") from error
        gc.freeze()  # the table lives as long as the process: no need to look through it ever again
        stage.take_over()
        progress = stage.ring_consumer("progress")
        to = stage.control.serves("frontend")
        frontend = Sender(zmq.Context.instance(), stage.channels["frontend"], to)
        detokenizer = Detokenizer(
            stage.ledger,
            progress,
            frontend,
            stage.doorbells["scheduler"],
            table,
            stage.stats_writer(),
            stage.trace(),
            stage.control.streak("detokenizer"),
        )
        stage.ready()
        while not stage.stopping:
            stage.beat()
            if agree_on_text(stage, frontend, detokenizer):
                stage.own_doorbell.wait(lambda: progress.available() > 0)
                detokenizer.turn()


def agree_on_text(stage: child.Child, frontend: Sender, detokenizer: Detokenizer) -> bool:
    """Whether what is said counts. Waits a moment and returns False while it does not.

    A frontend that has taken over has heard nothing, and one that still hears an earlier detokenizer may be about to
    take its last items: once it hears this one, `delivered` stands still. Then everything is said from there on.
    """
    control, mark = stage.control, {"epoch": stage.epoch, "to": stage.control.serves("frontend")}
    if frontend.mark == mark:
        return True
    if control.hears("frontend") != stage.epoch:
        stage.own_doorbell.wait(lambda: control.hears("frontend") == stage.epoch, REBUILD_LOOK_MS)
        return False
    frontend.turn_to(mark["to"])
    frontend.mark = mark
    detokenizer.rebuild()
    return True


if __name__ == "__main__":
    main()
