"""The requests of a run under faults, all from one seed: what is asked, and how its client behaves.

Owns the mixture. Pure but for the file of prompts that it is given as lines; the same seed, model and limits give the
same requests.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Every kind once in each round, so that any number of requests holds about as many of each.
KINDS = (
    *("greedy", "seeded", "stop", "long", "leave", "slow", "whole", "chat", "chat whole", "several", "without ids"),
    *("greedy", "seeded", "seeded stop", "chat seeded"),
)
SPARE_TOKENS = 96  # of a prompt's room, for what a chat template puts around it
CHARS, LONG_CHARS = 160, 2400  # of a prompt; where a token is a character, the model's context may allow less


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request and the manners of who sends it."""

    number: int  # among those of the run
    kind: str
    path: str
    body: Mapping[str, Any]
    leave_after: int = 0  # events after which the client leaves; 0 = it stays
    read_pause_s: float = 0.0  # that the client does not read after each event

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_patient(self) -> bool:
        """Whether silences on its stream are the server's."""
        return self.streams and not self.read_pause_s

    def in_calm(self) -> Request:
        """The same request from a client that reads at once and to the end: what the others are compared with."""
        return dataclasses.replace(self, leave_after=0, read_pause_s=0.0)


def requests_of(seed: int, count: int, model: str, prompts: Sequence[str], max_len: int, tokens: int) -> list[Request]:
    """`count` requests, the first kinds first. max_len: tokens of prompt and answer; tokens: of an answer at most."""
    tokens = min(tokens, max_len // 4)
    room = max(8, max_len - tokens - SPARE_TOKENS)
    texts = [prompt for prompt in prompts if prompt.isascii()]  # so that no character is more than one token
    made = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = KINDS[number % len(KINDS)]
        prompt = _prompt(rng, texts, min(room, LONG_CHARS if kind == "long" else CHARS))
        made.append(_request(rng, number, kind, prompt, {"model": model, "max_tokens": tokens}))
    return made


def probe_of(number: int, model: str) -> Request:
    """The shortest question that every stage has to work on."""
    body = {"model": model, "prompt": "Are you there?", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return Request(number=number, kind="probe", path=TEXT, body={**body, "stream": True, "return_token_ids": True})


def with_stop(request: Request, text: str) -> Request:
    """The request with a stop string out of the middle of its answer, so that it is met; unchanged for a short one."""
    at = len(text) * 3 // 5
    stop = text[at : at + 3]
    return dataclasses.replace(request, body={**request.body, "stop": [stop]}) if stop.strip() else request


def in_turn(requests: Sequence[Request], seed: str) -> Iterator[Request]:
    """All of them again and again, each round in another order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(requests, len(requests))


def _prompt(rng: random.Random, texts: Sequence[str], chars: int) -> str:
    prompt = rng.choice(texts)
    while len(prompt) < chars > CHARS:  # a long one is made of several
        prompt += "\n\n" + rng.choice(texts)
    return prompt[:chars]


def _request(rng: random.Random, number: int, kind: str, prompt: str, common: dict[str, Any]) -> Request:
    body = {**common, "temperature": 0, "return_token_ids": True, "ignore_eos": rng.random() < 0.7}
    is_chat = kind.startswith("chat")
    if is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = [prompt, prompt[::-1]] if kind == "several" else prompt
    if "seeded" in kind or (kind in ("leave", "slow", "whole", "several") and rng.random() < 0.5):
        body |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.getrandbits(40)}
    if "whole" not in kind:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if kind == "without ids":
        del body["return_token_ids"]
    return Request(
        number=number,
        kind=kind,
        path=CHAT if is_chat else TEXT,
        body=body,
        leave_after=rng.randint(1, max(1, common["max_tokens"] // 2)) if kind == "leave" else 0,
        read_pause_s=rng.uniform(0.05, 0.3) if kind == "slow" else 0.0,
    )
