"""The same tokens whatever the server does around them: precision by precision, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live_server import LiveServer, complete, ids_of, live_server

pytestmark = pytest.mark.model
GREEDY = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl").read_text().splitlines()
]


def requests_of(n: int, tokens: int, ignore_eos: bool = True) -> list[dict[str, Any]]:
    """n requests with the greedy file's prompts; every second one is sampled at temperature 1 with its own seed."""
    bodies = []
    for i in range(n):
        line = GREEDY[i % len(GREEDY)]
        bodies.append(
            {
                "model": "smollm2-135m-instruct",
                "prompt": line["prompt_ids"],
                "max_tokens": tokens,
                "temperature": 0 if i % 2 == 0 else 1,
                "seed": 1000 + i,
                "ignore_eos": ignore_eos,
                "return_token_ids": True,
            }
        )
    return bodies


def drafting(name: str) -> tuple[str, ...]:
    """Options with which every step drafts."""
    return ("--speculate", name, "--draft-when", "always")


ITSELF = "smollm2-135m-instruct"  # the model drafts for itself


def answers(server: LiveServer, bodies: list[dict[str, Any]], apart_s: float = 0.0) -> list[list[int]]:
    return [ids_of(a) for a in complete(server, bodies, apart_s=apart_s)]


def test_float32_gives_every_id_of_the_greedy_file() -> None:
    """With drafts, which change how many tokens a step brings and never which ones."""
    with live_server("--dtype", "float32", *drafting("mtp")) as server:
        bodies = [
            {
                "model": "smollm2-135m-instruct",
                "prompt": line["prompt_ids"],
                "max_tokens": 64,
                "temperature": 0,
                "return_token_ids": True,
            }
            for line in GREEDY
        ]
        got = complete(server, bodies)
        for line, answer in zip(GREEDY, got, strict=True):
            assert ids_of(answer) == line["token_ids"]
            assert answer["choices"][0]["finish_reason"] == line["end"]
            assert answer["choices"][0]["text"] == line["text"]
        assert server.metrics()["stepahead_drafted_tokens_total"] > 1000
        chats = [line for line in GREEDY if line["chat"]]
        chat_bodies = [
            {
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": line["prompt"]}],
                "max_tokens": 64,
                "temperature": 0,
                "return_token_ids": True,
            }
            for line in chats
        ]
        for line, answer in zip(chats, complete(server, chat_bodies, "/v1/chat/completions"), strict=True):
            assert ids_of(answer) == line["token_ids"]
            assert answer["choices"][0]["message"]["content"] == line["text"]


TOKENS = 12
SHORT = requests_of(32, TOKENS)
LONG = requests_of(20, 56)
# Against overlap, chunks of 256 and no drafts: one difference would show.
OTHERWISE = ("--no-overlap", "--prefill-chunk", "16")


@pytest.mark.parametrize(
    ("dtype", "shuffled_with", "tight_with"),
    [("int8", "mtp", "dflash"), ("float32", "dflash", ITSELF), ("bfloat16", "ngram", "mtp")],
)
def test_same_ids_in_every_setting(dtype: str, shuffled_with: str, tight_with: str) -> None:
    """Overlap on and off; alone, 7 and 32 at once in any order; prefix hit; chunks of 16 and 256; retraction; without
    drafts, and with every drafter (`tools.same_answers --greedy` runs through all combinations).

    Greedy and seeded requests alike. All precisions accumulate in a fixed order, so bfloat16 is exact as well.
    """
    with live_server("--dtype", dtype) as server:
        together = answers(server, SHORT)
        assert len({tuple(ids) for ids in together}) > 30, "the requests were meant to differ"
        before = server.wait_idle()
        assert answers(server, SHORT) == together
        after = server.wait_idle()
        hits = after["stepahead_prefix_hit_tokens_total"] - before["stepahead_prefix_hit_tokens_total"]
        assert hits > 0, "the second round must have hit the prefix cache"
        roomy = answers(server, LONG)
    assert [ids[:TOKENS] for ids in roomy] == together[: len(LONG)]
    with live_server("--dtype", dtype, *OTHERWISE, *drafting(shuffled_with)) as server:
        for i in (0, 1):
            assert answers(server, [SHORT[i]]) == [together[i]], "alone"
        seven = [3, 30, 11, 4, 22, 17, 8]
        assert answers(server, [SHORT[i] for i in seven]) == [together[i] for i in seven], "7 at once"
        order = list(range(len(SHORT)))
        random.Random(7).shuffle(order)
        # One after the other, so that prompts join while others decode.
        shuffled = answers(server, [SHORT[i] for i in order], apart_s=0.04)
        assert [shuffled[order.index(i)] for i in range(len(SHORT))] == together, "32 at once"
    with live_server("--dtype", dtype, "--kv-tokens", "1024", *drafting(tight_with)) as server:
        tight = answers(server, LONG)
        metrics = server.wait_idle()
        assert metrics["stepahead_retractions_total"] > 0, "the cache was meant to be too small"
        assert tight == roomy
