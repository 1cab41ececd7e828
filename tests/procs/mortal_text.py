"""The real frontend's engine, tokenizer and detokenizer in one thread, each of which may die behind any store or send.

The scheduler never dies: it writes what a script has for the seed of a row, and looks at every row that it gets.
Clients come and go as `plan` says. `TextServer.run` returns what each of them was told in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from frontend.engine import Engine
from frontend.errors import ApiError
from frontend.metrics import Meter
from frontend.rows import Exchange
from frontend.schema import Work
from procs.detokenizer import Detokenizer, agree_on_text
from procs.model_info import read_model_info
from procs.prompt_encoder import PromptEncoder
from procs.token_text import TextTable
from procs.tokenizer import TokenizerStage, load_template
from procs.tokenizer_files import load_tokenizer
from shm.config import ServerConfig
from shm.control import READY
from shm.ledger import FINISH_ABORT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from shm.records import progress_record, read_intake
from tests.model_factory import EOS_TOKEN_IDS
from tests.procs.mortal import Deaths, Died, Wire
from tests.procs.mortal_memory import STATS, Bell, Memory

STAGES = ("frontend", "tokenizer", "detokenizer")
TURNS_MAX = 80
READ_AT_ONCE = 2  # messages that the tokenizer takes in one turn
BYTE = 3  # id of byte 0
TAMPERED = 1000  # added to the seed of a row that runs: whoever writes the row once more undoes it

LONG = "the long end " * 3
# What the model says to a seed, and after how many tokens a turn.
SCRIPTS = {
    100: ("so it ENDs" + 80 * ".", 4),
    101: ("a€d", 3),
    102: ("never to the end", 1),
    103: ("xyz", 2),
    104: ("q", 1),
}


@dataclass
class Client:
    """One that asks for text (prompt, seed, stop) or puts a question, in the turn that is said; what it is told."""

    turn: int
    prompt: Any = None
    kind: str = "text"
    seed: int = 0
    stop: list[str] = field(default_factory=list)
    leaves: int | None = None  # in this turn
    question: dict[str, Any] | None = None
    # What became of it.
    exchange: Exchange | None = None
    waiting: tuple[Any, asyncio.Future[Any]] | None = None
    told: Any = None

    def work(self) -> Work:
        params = {"seed": self.seed, "stop": self.stop, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 7}
        prompt = {"kind": self.kind, "messages" if self.kind == "chat" else "prompt": self.prompt}
        one = params | {"max_tokens": None, "stop_token_ids": [7], "ignore_eos": True}
        return Work("text", (prompt,), one, 16, True, False, True)

    def ask(self, engine: Engine) -> None:
        if self.question is None:
            try:
                self.exchange = engine.open(self.work())
            except ApiError as error:  # rows that a dead frontend had are not free yet: it asks again
                assert error.status == 429
        else:
            call = engine.ask(self.question, 1)
            self.waiting = call, call.send(None)

    def look(self, engine: Engine, turn: int) -> None:
        """Take what has come."""
        if self.waiting is not None and self.waiting[1].done():
            try:
                self.waiting[0].send(None)
            except StopIteration as answer:
                self.told = {key: value for key, value in answer.value.items() if key not in ("id", "epoch")}
            except ApiError as error:
                self.told = error.status, error.param
            self.waiting = None
        if self.exchange is None or self.told is not None:
            return
        if self.leaves is not None and turn >= self.leaves:
            engine.abandon(self.exchange)
            self.told = "left"
        elif self.exchange.error is not None:
            self.told = self.exchange.error.status, self.exchange.error.param
            engine.close(self.exchange)
        elif self.exchange.finished:
            self.told = self._answer()
            engine.close(self.exchange)

    def _answer(self) -> tuple[Any, ...]:
        assert self.exchange is not None
        row = self.exchange.rows[0]
        return "".join(row.text), tuple(row.ids), row.finish, row.prompt_tokens

    def cut(self, wanted: Any) -> None:
        """Its frontend has died. wanted: what it would have been told; None if nobody knows."""
        if self.waiting is not None:
            with contextlib.suppress(Died):
                self.waiting[0].close()
            self.waiting[1].cancel() or self.waiting[1].exception()
            self.waiting = None
        elif self.exchange is not None and self.told is None and self.leaves is None and len(wanted or ()) == 4:
            text, ids = self._answer()[:2]
            assert wanted[0].startswith(text) and wanted[1][: len(ids)] == ids
        self.told = self.told or "cut"


def plan() -> list[Client]:
    return [
        Client(0, "the answer", seed=100, stop=["END"]),
        Client(0, [5, 6, 7], kind="ids", seed=101),
        Client(0, "", seed=9),
        Client(0, question={"op": "tokenize", "prompt": "the answer"}),
        Client(1, [{"role": "user", "content": "hi"}], kind="chat", seed=102, leaves=4),
        Client(1, "gone at once", seed=104, leaves=1),
        Client(1, question={"op": "detokenize", "tokens": [5, 6]}),
        Client(1, question={"op": "detokenize", "tokens": [10**6]}),
        Client(2, LONG, seed=103),
        Client(2, question={"op": "tokenize", "prompt": LONG}),
    ]


class PlainEncoder(PromptEncoder):
    """Long texts without a thread: they are ready when somebody looks."""

    def _run(self) -> None:
        pass

    def _later(self, compute: Callable[[], Any], then: Callable[[Any], None], _question: int | None) -> None:
        self.pending += 1
        self._done.put(partial(then, compute()))


class Kit:
    """What all servers of a test share, because nobody changes it."""

    def __init__(self, path: Path) -> None:
        model = read_model_info(path)
        values = {"max_running": 4, "max_queued": 3, "kv_tokens": 1024, "max_len": 128, "threads": 1}
        self.config = ServerConfig(model=model, served_model_name="tiny", host="h", port=0, **values)  # type: ignore[arg-type]
        self.tokenizer = load_tokenizer(path)
        self.template = load_template(str(path))
        self.table = TextTable(self.tokenizer, model.vocab_size, EOS_TOKEN_IDS)
        self.loop = asyncio.new_event_loop()


class Scribe:
    """The scheduler: rows run from the turn in which it finds them on the intake ring."""

    def __init__(self, memory: Memory) -> None:
        self._ledger = memory.ledger
        self._intake = memory.rings["intake"].attach_consumer()
        self._progress = memory.rings["progress"].attach_producer()
        self.running: dict[int, tuple[int, int]] = {}  # row -> seed, 0 for one without a prompt; generation

    def turn(self) -> None:
        while self._intake.available():
            for row, generation in zip(
                *(part.tolist() for part in read_intake(self._intake.peek().payload)), strict=True
            ):
                if self._ledger.begun[row] < generation == self._ledger.generation[row]:
                    self._begin(row, generation)
            self._intake.release()
        news = [self._advance(row, *self.running[row]) for row in list(self.running)]
        if news:
            self._progress.push(progress_record(*np.array(news).T), source_seq=1)

    def _begin(self, row: int, generation: int) -> None:
        ledger = self._ledger
        assert ledger.ready[row] == generation, "told of a row that is not ready"
        seed = int(ledger.seed[row]) if ledger.prompt_len[row] else 0
        if seed:
            stops = ["END"] if seed == 100 else []
            assert seed in SCRIPTS and ledger.stop_strings(row) == stops and ledger.max_new[row] == 16
            assert ledger.stop_ids[row].tolist()[:2] == [7, -1] and ledger.top_k[row] == 7
        else:
            assert ledger.abort[row] == generation, "a row without a prompt, and its client is there"
        ledger.seed[row] = seed + TAMPERED
        ledger.count[row], ledger.finish[row] = 0, FINISH_NONE
        ledger.begun[row] = generation
        self.running[row] = seed, generation

    def _advance(self, row: int, seed: int, generation: int) -> tuple[int, int, int, int]:
        ledger = self._ledger
        assert ledger.seed[row] == seed + TAMPERED, "a row that runs was written once more"
        count, finish = int(ledger.count[row]), FINISH_NONE
        if ledger.abort[row] == generation:
            finish = FINISH_ABORT
        elif ledger.text_stop[row] == generation:
            finish = FINISH_STOP
        else:
            text, pace = SCRIPTS[seed]
            tokens = [BYTE + byte for byte in text.encode()]
            start, end = int(ledger.prompt_len[row]) + count, min(count + pace, len(tokens))
            ledger.tokens[row, start : start + end - count] = tokens[count:end]
            ledger.count[row] = count = end
            finish = FINISH_LENGTH if end == len(tokens) else FINISH_NONE
        if finish:
            assert finish != FINISH_LENGTH or seed != 100, "its stop string was found, and the scheduler not told"
            ledger.finish[row] = finish
            ledger.done[row] = generation
            del self.running[row]
        return row, generation, count, finish


class TextServer:
    """deaths: at which store or send the processes of a stage die. lost: whether what is under way to or from a process
    is lost with it, or arrives all the same.
    """

    def __init__(self, kit: Kit, deaths: dict[str, Sequence[int]] | None = None, lost: bool = False) -> None:
        self._kit = kit
        self._lost = lost
        self.memory = Memory(kit.config)
        self.memory.control.state = READY
        self.deaths = {stage: Deaths((deaths or {}).get(stage, ()), fine=False) for stage in STAGES}
        self.wires = {stage: Wire() for stage in ("frontend", "tokenizer")}
        self.scribe = Scribe(self.memory)
        self.clients: list[Client] = []
        for stage in STAGES:
            self._start(stage)

    def run(self, wanted: list[Any] | None = None) -> list[Any]:
        """Serve the plan. Asserts that nothing is left. wanted: what each client is told when nobody dies."""
        return self._kit.loop.run_until_complete(self._serve(wanted))

    async def _serve(self, wanted: list[Any] | None) -> list[Any]:
        self.clients, self._wanted = plan(), wanted
        for turn in range(TURNS_MAX):
            self._turn("frontend", partial(self._frontend_turn, turn))
            self._turn("tokenizer", self._tokenizer_turn)
            self.scribe.turn()
            self._turn("detokenizer", self._detokenizer_turn)
            if all(client.told is not None for client in self.clients) and self.engine.idle and not self._left():
                self._assert_clean()
                return [client.told for client in self.clients]
        raise AssertionError(f"somebody starves: {[client.told for client in self.clients]}, {self._left()}")

    def _left(self) -> list[Any]:
        """Whatever is still under way."""
        messages = [message for wire in self.wires.values() for message in wire.messages]
        late = ["long texts"] * self.encoder.pending
        return [*messages, *self.memory.left_in_rings().items(), *self.scribe.running, *late]

    def _assert_clean(self) -> None:
        ledger = self.memory.ledger
        assert (ledger.freed == ledger.generation).all(), "a row is not free"
        assert (ledger.in_hand == 0).all()
        assert not self.engine._line._open
        assert len(self.engine._rows._free) == ledger.rows == len(set(self.engine._rows._free))

    # ------------------------------------------------------------------ processes

    def _turn(self, stage: str, do: Callable[[], None]) -> None:
        try:
            with self.deaths[stage].lives[-1].turn():
                do()
        except Died:
            if self._lost:
                self._lose(stage)
            if stage == "frontend":
                for client, right in zip(self.clients, self._wanted or [None] * len(self.clients), strict=True):
                    if client.exchange is not None or client.waiting is not None:
                        client.cut(right)
            self._others_go_on(stage)
            self._start(stage)

    def _others_go_on(self, stage: str) -> None:
        """While it is away."""
        turns = {"tokenizer": self._tokenizer_turn, "detokenizer": self._detokenizer_turn}
        turns.pop(stage, None)
        for other, do in turns.items():
            if self.deaths[other].lives and not self.deaths[other].lives[-1].dead:
                self._turn(other, do)
        self.scribe.turn()

    def _lose(self, stage: str) -> None:
        if stage in self.wires:
            self.wires[stage].take()
        if stage == "frontend":
            self.wires["tokenizer"].take()
            return
        inbox = self.wires["frontend"]
        inbox.messages = [m for m in inbox.messages if (m["ev"] == "text") != (stage == "detokenizer")]

    def _start(self, stage: str) -> None:
        while True:
            try:
                life = self.deaths[stage].next()
                seat = self.memory.seat(stage, life)
                with life.turn():
                    getattr(self, f"_start_{stage}")(seat)
                self.memory.serves(stage)
                return
            except Died:
                self._others_go_on(stage)

    def _start_frontend(self, seat: Any) -> None:
        meter, wire = Meter(STATS.writer("frontend")), self.wires["tokenizer"].sender(seat.life)
        arguments: tuple[Any, ...] = (seat.control, seat.ledger, meter, wire, lambda: None, seat.trace(), seat.epoch)
        self.engine = Engine(self._kit.config, *arguments)

    def _start_tokenizer(self, seat: Any) -> None:
        self.encoder = PlainEncoder(self._kit.tokenizer, lambda: None)
        sender: Any = self.wires["frontend"].sender(seat.life)
        sender.mark = {"epoch": seat.epoch}
        self.tokenizer = TokenizerStage(
            self._kit.config,
            seat.ledger,
            seat.ring_producer("intake"),
            sender,
            self.encoder,
            self._kit.template,
            seat.stats_writer(),
            seat.trace(),
            lambda condition: condition(),
        )

    def _start_detokenizer(self, seat: Any) -> None:
        sender: Any = self.wires["frontend"].sender(seat.life)
        ring = seat.ring_consumer("progress")
        said = seat.stats_writer(), seat.trace(), 0
        self._seat, self._sender = seat, sender
        self.detokenizer = Detokenizer(seat.ledger, ring, sender, Bell(), self._kit.table, *said)

    # ------------------------------------------------------------------ turns

    def _frontend_turn(self, turn: int) -> None:
        """Word of a death may come before or behind what the dead one has said."""
        messages = self.wires["frontend"].take()
        if self._lost:
            self.engine.look_around()
        self.engine.receive(messages)
        self.engine.look_around()
        for client in self.clients:
            if client.told is None and client.exchange is None and client.waiting is None and client.turn <= turn:
                client.ask(self.engine)
            client.look(self.engine, turn)

    def _tokenizer_turn(self) -> None:
        self.tokenizer.take_long()
        inbox = self.wires["tokenizer"]
        now, inbox.messages = inbox.messages[:READ_AT_ONCE], inbox.messages[READ_AT_ONCE:]
        self.tokenizer.take(now)

    def _detokenizer_turn(self) -> None:
        if agree_on_text(self._seat, self._sender, self.detokenizer):
            self.detokenizer.turn()
