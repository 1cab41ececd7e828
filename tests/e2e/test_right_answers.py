"""The same tokens whatever the server does around them: precision by precision, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.live_server import ALONE, LiveServer, complete, ids_of, live_server

pytestmark = pytest.mark.model
GREEDY = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl").read_text().splitlines()
]


def requests_of(lines: list[dict[str, Any]], tokens: int, prompt: int | None = None) -> list[dict[str, Any]]:
    """One per line with the line's prompt, or its first tokens; every second one is sampled at temperature 1 with its
    own seed.
    """
    return [
        {
            "model": "smollm2-135m-instruct",
            "prompt": line["prompt_ids"][:prompt],
            "max_tokens": tokens,
            "temperature": 0 if i % 2 == 0 else 1,
            "seed": 1000 + i,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for i, line in enumerate(lines)
    ]


def drafting(name: str) -> tuple[str, ...]:
    """Options with which every step drafts."""
    return ("--speculate", name, "--draft-when", "always")


ITSELF = "smollm2-135m-instruct"  # the model drafts for itself


def answers(server: LiveServer, bodies: list[dict[str, Any]], apart_s: float = 0.0) -> list[list[int]]:
    return [ids_of(a) for a in complete(server, bodies, apart_s=apart_s)]


def test_float32_gives_every_id_of_the_greedy_file() -> None:
    """Without drafts, against which all drafters are held below. What is a chat is asked as one."""
    same = {"model": "smollm2-135m-instruct", "max_tokens": 64, "temperature": 0, "return_token_ids": True}
    texts, chats = ([line for line in GREEDY if line["chat"] == chat] for chat in (False, True))
    with live_server("--dtype", "float32", *ALONE) as server:
        bodies = [same | {"prompt": line["prompt_ids"]} for line in texts]
        for line, answer in zip(texts, complete(server, bodies), strict=True):
            assert ids_of(answer) == line["token_ids"]
            assert answer["choices"][0]["finish_reason"] == line["end"]
            assert answer["choices"][0]["text"] == line["text"]
        bodies = [same | {"messages": [{"role": "user", "content": line["prompt"]}]} for line in chats]
        for line, answer in zip(chats, complete(server, bodies, "/v1/chat/completions"), strict=True):
            assert ids_of(answer) == line["token_ids"]
            assert answer["choices"][0]["finish_reason"] == line["end"]
            assert answer["choices"][0]["message"]["content"] == line["text"]


# Against overlap, chunks of 256, one thread and no drafts: one difference would show.
OTHERWISE = ("--no-overlap", "--prefill-chunk", "16", "--threads", "2")
PAGE = 16


class Asked(NamedTuple):
    """n requests, each with the first tokens of its prompt, and some long ones. Of these two must outgrow a cache that
    is a page larger than what one of them fills, however late the second one comes: it begins with two pages (its
    prompt and two windows), and only where as many and one more are left.
    """

    n: int
    prompt: int | None
    tokens: int
    n_long: int
    tokens_long: int

    @property
    def short(self) -> list[dict[str, Any]]:
        return requests_of(GREEDY[: self.n], self.tokens, self.prompt)

    @property
    def long(self) -> list[dict[str, Any]]:
        enough = [line for line in GREEDY if len(line["prompt_ids"]) >= PAGE]
        return requests_of(enough[: self.n_long], self.tokens_long, PAGE)

    @property
    def tight(self) -> tuple[str, str]:
        """The option for the cache."""
        assert self.tokens_long % PAGE == 0
        return "--kv-tokens", str(PAGE + self.tokens_long + PAGE)


@pytest.mark.parametrize(
    ("dtype", "shuffled_with", "tight_with", "asked"),
    [
        ("int8", "mtp", "dflash", Asked(24, None, 12, 4, 96)),
        ("float32", "ngram", "mtp", Asked(8, 40, 6, 2, 48)),
        ("bfloat16", "dflash", ITSELF, Asked(8, 40, 6, 2, 48)),
    ],
    ids=["int8", "float32", "bfloat16"],
)
def test_same_ids_in_every_setting(dtype: str, shuffled_with: str, tight_with: str, asked: Asked) -> None:
    """Overlap on and off; alone, 7 and n at once in any order; prefix hit; chunks of 16 and 256; one thread and two;
    retraction; without drafts, and with every drafter (`tools.same_answers --greedy` runs through all combinations).

    Greedy and seeded requests alike. All precisions accumulate in a fixed order, so bfloat16 is exact as well. What
    serves by default is asked the most.
    """
    n, short, long = asked.n, asked.short, asked.long
    with live_server("--dtype", dtype, *ALONE) as server:
        together = answers(server, short)
        assert len({tuple(ids) for ids in together}) > n - 2, "the requests were meant to differ"
        before = server.wait_idle()
        assert answers(server, short) == together
        after = server.wait_idle()
        hits = after["stepahead_prefix_hit_tokens_total"] - before["stepahead_prefix_hit_tokens_total"]
        assert hits > 0, "the second round must have hit the prefix cache"
        roomy = answers(server, long)
        assert server.wait_idle()["stepahead_retractions_total"] == 0
    with live_server("--dtype", dtype, *ALONE, *OTHERWISE, *drafting(shuffled_with)) as server:
        for i in (0, 1):
            assert answers(server, [short[i]]) == [together[i]], "alone"
        seven = random.Random(3).sample(range(n), 7)
        assert answers(server, [short[i] for i in seven]) == [together[i] for i in seven], "7 at once"
        order = random.Random(7).sample(range(n), n)
        # One after the other, so that prompts join while others decode.
        shuffled = answers(server, [short[i] for i in order], apart_s=0.04)
        assert [shuffled[order.index(i)] for i in range(n)] == together, "all at once"
    with live_server("--dtype", dtype, *ALONE, *asked.tight, *drafting(tight_with)) as server:
        tight = answers(server, long)
        metrics = server.wait_idle()
        assert metrics["stepahead_retractions_total"] > 0, "the cache was meant to be too small"
        assert tight == roomy
