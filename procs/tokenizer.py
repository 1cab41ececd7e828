"""The tokenizer: requests from the frontend become rows of the ledger that the scheduler can run.

Owns the chat template, the encoding of prompts, the checks of every request (`prompt_checks`) and the tokenizer's
planes of the ledger. It keeps no state between requests, so a request can be sent again after a death, and it never
lets what a client sent end it: a bad request is refused, whatever else is raised is a bug and does end it.

Order for one row: its planes, `ready`, the intake record, then "accepted", which says that the scheduler has it. Text
of the row comes to the frontend from another sender and may arrive before "accepted". A row that the client left
meanwhile is handed on without a prompt, because only the scheduler ends rows. A full intake ring is waited for: nothing
is read from the frontend meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zmq

from procs.chat_template import ChatTemplate, TemplateBroken
from procs.prompt_checks import (
    BadRequest,
    Sampling,
    Stops,
    check_ids,
    check_length,
    check_sampling,
    check_stops,
    check_text,
    output_limit,
)
from procs.prompt_encoder import PromptEncoder, Work
from procs.tokenizer_files import load_chat_template, load_special_tokens, load_tokenizer
from shm import child
from shm.channel import Receiver, Sender
from shm.config import ServerConfig
from shm.faults import fault
from shm.ledger import Ledger
from shm.limits import INTAKE_ROWS_MAX, MAX_STOP_TOKEN_IDS, WAIT_MS_MAX
from shm.records import intake_record
from shm.ring import RingProducer
from shm.stats import StatsWriter
from shm.tensor_map import ModelError
from shm.trace import TraceWriter, What

# Texts of about this size are encoded at a time: some hundredths of a second.
GROUP_CHARS = 32 * 1024

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What a generate message asks for, checked, except for what depends on the number of prompt tokens."""

    row: int
    generation: int
    prompt_param: str
    stops: Stops
    sampling: Sampling
    max_tokens: object
    default_max_tokens: int | None


class TokenizerStage:
    """Handles messages of the frontend. `wait_for` waits for a condition and returns False if the stage is to end."""

    def __init__(
        self,
        config: ServerConfig,
        ledger: Ledger,
        intake: RingProducer,
        frontend: Sender,
        encoder: PromptEncoder,
        template: ChatTemplate | None,
        stats: StatsWriter,
        trace: TraceWriter,
        wait_for: Callable[[Callable[[], bool]], bool],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._intake = intake
        self._frontend = frontend
        self._encoder = encoder
        self._template = template
        self._stats = stats
        self._trace = trace
        self._wait_for = wait_for
        self._vocab_size = config.model.vocab_size
        self._ready: list[tuple[int, int, int]] = []  # row, generation, prompt tokens: not pushed yet
        self._handlers: dict[str, Callable[[Message], Work | None]] = {
            "generate": self._generate,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "cancel": self._cancel,
            "leave": self._leave,
        }

    def take(self, messages: Sequence[Message]) -> None:
        """Handles messages in groups, so that the first of many requests run while the last are still text."""
        self._stats.add("requests_total", len(messages))
        works = []
        chars = 0
        for message in messages:
            work = self._open(message)
            if work is not None and not self._encoder.encode_later(work):
                works.append(work)
                chars += len(work.text)
            if len(works) + len(self._ready) >= INTAKE_ROWS_MAX or chars >= GROUP_CHARS:
                self._go_on(works)
                works, chars = [], 0
        self._go_on(works)

    def take_long(self) -> None:
        """Goes on with long texts that have been encoded."""
        if self._encoder.take_long():
            self._push()
        self._stats.set("waiting", self._encoder.pending)

    def _go_on(self, works: Sequence[Work]) -> None:
        if works:
            begin_ns = time.monotonic_ns()
            self._encoder.encode(works)
            self._record(begin_ns)
        self._push()

    def _open(self, message: Message) -> Work | None:
        try:
            return self._handlers[message["op"]](message)
        except BadRequest as refusal:
            self._refuse(message, refusal)
            return None

    def _generate(self, message: Message) -> Work | None:
        row, generation, kind, params = message["row"], message["gen"], message["kind"], message["params"]
        fault("tokenizer.row_taken", lambda: (params.get("seed"),))
        if self._is_known(row, generation) or self._left(row, generation):
            return None
        param = "messages" if kind == "chat" else "prompt"
        request = Request(
            row,
            generation,
            param,
            check_stops(params.get("stop"), params.get("stop_token_ids"), self._vocab_size),
            check_sampling(params, self._vocab_size),
            params.get("max_tokens"),
            message.get("default_max_tokens"),
        )
        then = partial(self._finish, message, request)
        if kind == "ids":
            then(check_ids(message["prompt"], self._vocab_size, param, self._config.max_len - 1))
            return None
        text = self._text(message, True)
        self._encoder.check_length(text, self._config.max_len, param)
        return Work(text, kind == "text", then)

    def _is_known(self, row: int, generation: int) -> bool:
        """Whether a row that is sent once more is over, or is in the ledger already; then it is handed on as it is: a
        row that is ready may be running, and is never written again.
        """
        ledger = self._ledger
        if ledger.generation[row] != generation or ledger.freed[row] == generation:
            return True
        if ledger.ready[row] != generation:
            return False
        self._ready.append((row, generation, int(ledger.prompt_len[row])))
        return True

    def _leave(self, message: Message) -> None:
        """A row whose frontend has died: nobody will send its prompt again."""
        row, generation = message["row"], message["gen"]
        if not self._is_known(row, generation):
            left = self._left(row, generation)
            assert left, "whoever says so has set the row's abort flag before"

    def _tokenize(self, message: Message) -> Work | None:
        self._ask(message)
        chat = message.get("messages") is not None
        special = message.get("add_special_tokens")
        text = self._text(message, message.get("add_generation_prompt") is not False)
        add = not chat if special is None else bool(special)
        return Work(text, add, partial(self._tokenized, message), question=message["id"])

    def _tokenized(self, message: Message, ids: list[int]) -> None:
        self._answer({"ev": "tokenized", "id": message["id"], "tokens": ids, "count": len(ids)})

    def _detokenize(self, message: Message) -> None:
        self._ask(message)
        ids = check_ids(message["tokens"], self._vocab_size, "tokens")
        self._encoder.decode(ids, partial(self._detokenized, message), message["id"])

    def _detokenized(self, message: Message, text: str) -> None:
        self._answer({"ev": "detokenized", "id": message["id"], "text": text})

    @staticmethod
    def _ask(question: Message) -> None:
        """A question has come. What tells it from others is how long it is: characters, ids or messages."""
        asked = [question.get(name) for name in ("prompt", "messages", "tokens")]
        fault("tokenizer.question_taken", lambda: [len(one) for one in asked if isinstance(one, str | list)])

    def _answer(self, answer: Message) -> None:
        self._frontend.send(answer)
        fault("tokenizer.question_answered")

    def _cancel(self, message: Message) -> None:
        self._encoder.cancel(message["id"])

    def _text(self, message: Message, add_generation_prompt: bool) -> str:
        messages = message.get("messages")
        if messages is None:
            return check_text(message["prompt"], "prompt")
        if self._template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", "messages", "no_chat_template")
        return self._template.render(messages, add_generation_prompt)

    def _finish(self, message: Message, request: Request, ids: list[int]) -> None:
        if self._is_known(request.row, request.generation) or self._left(request.row, request.generation):
            return
        max_len = self._config.max_len
        try:
            check_length(len(ids), max_len, request.prompt_param)
            self._encoder.check_vocabulary(ids, self._vocab_size, request.prompt_param)
            limit = output_limit(len(ids), request.max_tokens, request.default_max_tokens, max_len)
        except BadRequest as refusal:
            self._refuse(message, refusal)
            return
        self._write(request, ids, limit)

    def _left(self, row: int, generation: int) -> bool:
        """Whether the client is gone; then the row goes on without a prompt, for the scheduler to end it."""
        ledger = self._ledger
        if int(ledger.abort[row]) != generation:
            return False
        ledger.prompt_len[row] = 0
        ledger.ready[row] = generation  # LAST
        self._ready.append((row, generation, 0))
        return True

    def _write(self, request: Request, ids: list[int], limit: int) -> None:
        ledger, row, sampling = self._ledger, request.row, request.sampling
        stop_ids = request.stops.token_ids
        ledger.tokens[row, : len(ids)] = ids
        ledger.prompt_len[row] = len(ids)
        ledger.temperature[row] = sampling.temperature
        ledger.top_p[row] = sampling.top_p
        ledger.min_p[row] = sampling.min_p
        ledger.top_k[row] = sampling.top_k
        ledger.seed[row] = np.uint64(sampling.seed)
        ledger.max_new[row] = limit
        ledger.ignore_eos[row] = sampling.ignore_eos
        ledger.stop_ids[row] = [*stop_ids, *[-1] * (MAX_STOP_TOKEN_IDS - len(stop_ids))]
        ledger.write_stop_strings(row, list(request.stops.strings))
        fault("tokenizer.planes_written", lambda: (sampling.seed,))
        ledger.ready[row] = request.generation  # LAST
        fault("tokenizer.row_ready")
        self._ready.append((row, request.generation, len(ids)))

    def _push(self) -> None:
        """Hands the rows that are ready to the scheduler, then tells the frontend."""
        while self._ready:
            group = self._ready[:INTAKE_ROWS_MAX]
            if not self._wait_for(lambda: self._intake.space() > 0):
                return
            rows, generations, prompt_lens = zip(*group, strict=True)
            self._intake.push(intake_record(rows, generations))
            fault("tokenizer.intake_told")
            for row, generation, prompt_len in group:
                self._frontend.send({"ev": "accepted", "row": row, "gen": generation, "prompt_tokens": prompt_len})
            fault("tokenizer.accepted_told")
            self._stats.add("accepted_total", len(group))
            self._stats.add("prompt_tokens_total", sum(prompt_lens))
            del self._ready[: len(group)]

    def _refuse(self, message: Message, refusal: BadRequest) -> None:
        why = {"status": refusal.status, "message": refusal.message, "param": refusal.param, "code": refusal.code}
        if "row" in message:
            self._frontend.send({"ev": "rejected", "row": message["row"], "gen": message["gen"], **why})
        else:
            self._frontend.send({"ev": "failed", "id": message["id"], **why})
        self._stats.add("rejected_total")

    def _record(self, begin_ns: int) -> None:
        end_ns = time.monotonic_ns()
        self._stats.add("encode_ns_total", end_ns - begin_ns)
        self._stats.observe("encode_s", (end_ns - begin_ns) / 1e9)
        self._trace.span(What.TOKENIZE, 0, begin_ns, end_ns)


def load_template(path: str) -> ChatTemplate | None:
    """The model's chat template, ready to render; None if it has none. Raises ModelError, TemplateBroken."""
    source = load_chat_template(path)
    return None if source is None else ChatTemplate(source, load_special_tokens(path))


def main() -> None:
    """Runs the stage until SIGTERM."""
    with child.start() as stage:
        model, bell = stage.config.model, stage.own_doorbell
        try:
            tokenizer, template = load_tokenizer(model.path), load_template(model.path)
        except (ModelError, TemplateBroken) as error:
            raise child.StartupError(f"{model.path}: {error}") from error
        encoder = PromptEncoder(tokenizer, bell.kick)
        gc.freeze()  # the vocabulary lives as long as the process: no need to look through it ever again
        stage.take_over()

        def wait_for(condition: Callable[[], bool]) -> bool:
            while not stage.stopping:
                stage.beat()
                if bell.wait(condition):
                    return True
            return False

        receiver = Receiver.bind(stage.channels["tokenizer"], stage.epoch)
        to = stage.control.epoch("frontend")
        frontend = Sender(zmq.Context.instance(), stage.channels["frontend"], to)
        frontend.mark = {"epoch": stage.epoch}  # the frontend hears the living only
        handler = TokenizerStage(
            stage.config,
            stage.ledger,
            stage.ring_producer("intake"),
            frontend,
            encoder,
            template,
            stage.stats_writer(),
            stage.trace(),
            wait_for,
        )
        poller = zmq.Poller()
        poller.register(receiver.socket, zmq.POLLIN)
        poller.register(bell.fileno(), zmq.POLLIN)
        stage.ready()
        while not stage.stopping:
            stage.beat()
            poller.poll(WAIT_MS_MAX)
            bell.drain()
            messages = receiver.recv_all()
            # Behind that: whoever has asked is this frontend, or is dead.
            frontend.turn_to(stage.control.epoch("frontend"))
            handler.take_long()
            handler.take(messages)


if __name__ == "__main__":
    main()
