"""The requests of a run are the seed's, of every kind, and fit the model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from frontend.schema import ChatBody, CompletionBody
from tools.chaos_requests import CHAT, KINDS, SPARE_TOKENS, TEXT, Request, in_turn, probe_of, requests_of, with_stop

PROMPTS = ["tell me a story about the sea", "one two three " * 30, "Größe", "why is the sky blue?"]


def made(seed: int = 3, count: int = 40, max_len: int = 2048, tokens: int = 48) -> list[Request]:
    return requests_of(seed, count, "tiny", PROMPTS, max_len, tokens)


def test_the_same_seed_asks_the_same() -> None:
    assert made() == made() != made(seed=4)
    assert made(count=20) == made()[:20]


def test_every_kind_is_there_and_is_what_it_says() -> None:
    by_kind = {request.kind: request for request in made()}
    assert set(by_kind) == set(KINDS)
    assert by_kind["greedy"].body["temperature"] == 0 and "seed" not in by_kind["greedy"].body
    assert by_kind["seeded"].body["temperature"] > 0 and "seed" in by_kind["seeded"].body
    assert by_kind["leave"].leave_after > 0 and by_kind["slow"].read_pause_s > 0
    assert not by_kind["whole"].streams and not by_kind["chat whole"].streams and by_kind["chat"].streams
    assert len(by_kind["several"].body["prompt"]) == 2
    assert len(by_kind["long"].body["prompt"]) > 4 * len(by_kind["greedy"].body["prompt"])
    assert "return_token_ids" not in by_kind["without ids"].body
    calm = by_kind["leave"].in_calm()
    assert (calm.leave_after, calm.body) == (0, by_kind["leave"].body)
    assert not by_kind["slow"].is_patient and by_kind["slow"].in_calm().is_patient


@pytest.mark.parametrize("max_len", [128, 256, 4096])
def test_all_fit_even_where_a_character_is_a_token(max_len: int) -> None:
    for request in made(max_len=max_len):
        body: dict[str, Any] = dict(request.body)
        prompts = [body["messages"][0]["content"]] if request.path == CHAT else body["prompt"]
        longest = max(map(len, prompts if isinstance(prompts, list) else [prompts]))
        assert longest + body["max_tokens"] + SPARE_TOKENS <= max_len or longest == 8
        assert "ö" not in str(body)


def test_the_server_takes_them() -> None:
    for request in [*made(), probe_of(40, "tiny"), with_stop(made()[2], "once upon a time")]:
        assert request.path in (CHAT, TEXT)
        (ChatBody if request.path == CHAT else CompletionBody).model_validate(dict(request.body))


def test_a_stop_string_comes_out_of_the_answer() -> None:
    request = made()[2]
    assert with_stop(request, "0123456789").body["stop"] == ["678"]
    assert with_stop(request, "") is request and with_stop(request, "ab   ") is request


def test_each_round_asks_all_in_another_order() -> None:
    requests = made(count=16)
    turns = list(itertools.islice(in_turn(requests, "1"), 32))
    assert turns == list(itertools.islice(in_turn(requests, "1"), 32))
    first, second = turns[:16], turns[16:]
    assert first != second and all(sorted(r.number for r in turn) == list(range(16)) for turn in (first, second))
