"""Every refusal, by name; whatever is not refused comes back in the ledger's form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procs.prompt_checks import (
    BadRequest,
    check_ids,
    check_length,
    check_sampling,
    check_stops,
    check_text,
    check_text_length,
    output_limit,
)
from shm.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

VOCAB = 300
MAX_LEN = 64

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc00\ud800"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="surrogate") as caught:
        check_text(text, "prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    "ids", ["12", {"a": 1}, 3, [1, "2"], [1, None], [1, True], [1.0], [[1]], [-1], [VOCAB], [2**70]]
)
def test_bad_ids_are_refused(ids: object) -> None:
    with pytest.raises(BadRequest) as caught:
        check_ids(ids, VOCAB, "prompt")
    assert caught.value.param == "prompt"


def test_ids_at_the_bounds() -> None:
    assert check_ids([0, VOCAB - 1], VOCAB, "prompt") == [0, VOCAB - 1]
    assert check_ids([], VOCAB, "prompt") == []
    with pytest.raises(BadRequest, match="has 64 tokens") as caught:
        check_ids([None] * MAX_LEN, VOCAB, "prompt", MAX_LEN - 1)
    assert caught.value.code == "context_length_exceeded"


def test_prompt_lengths() -> None:
    check_length(1, MAX_LEN, "prompt")
    check_length(MAX_LEN - 1, MAX_LEN, "prompt")
    for length, code in (
        (0, "empty_prompt"),
        (MAX_LEN, "context_length_exceeded"),
        (MAX_LEN + 1, "context_length_exceeded"),
    ):
        with pytest.raises(BadRequest) as caught:
            check_length(length, MAX_LEN, "prompt")
        assert caught.value.code == code


@given(st.lists(st.integers(1, 9), max_size=100))
def test_a_text_that_could_fit_is_never_refused_unseen(lengths: list[int]) -> None:
    if len(lengths) < MAX_LEN:
        check_text_length(sum(lengths), 9, MAX_LEN, "prompt")


def test_a_text_that_cannot_fit_is_refused_unseen() -> None:
    check_text_length(9 * (MAX_LEN - 1), 9, MAX_LEN, "prompt")
    with pytest.raises(BadRequest, match="at least 64 tokens"):
        check_text_length(9 * (MAX_LEN - 1) + 1, 9, MAX_LEN, "prompt")


@pytest.mark.parametrize(
    ("max_tokens", "default", "limit"), [(None, None, 54), (None, 16, 16), (None, 99, 54), (1, 16, 1), (54, None, 54)]
)
def test_output_limits(max_tokens: int | None, default: int | None, limit: int) -> None:
    assert output_limit(10, max_tokens, default, MAX_LEN) == limit


@pytest.mark.parametrize("max_tokens", [0, -1, 55, 2**70, True, 1.0, "1", [1]])
def test_bad_output_limits_are_refused(max_tokens: object) -> None:
    with pytest.raises(BadRequest) as caught:
        output_limit(10, max_tokens, None, MAX_LEN)
    assert caught.value.param == "max_tokens"


def test_stops() -> None:
    assert check_stops(None, None, VOCAB).strings == ()
    assert check_stops("a", [], VOCAB).strings == ("a",)
    assert check_stops(["b", "a", "b"], [5, 4, 5], VOCAB) == check_stops(["b", "a"], [5, 4], VOCAB)
    longest = ["\U0001f600" * MAX_STOP_CHARS] * MAX_STOP_STRINGS
    assert check_stops(longest, list(range(MAX_STOP_TOKEN_IDS)), VOCAB).strings == (longest[0],)


@pytest.mark.parametrize(
    ("stop", "stop_token_ids", "param"),
    [
        ([""], [], "stop"),
        ("", [], "stop"),
        (["a" * (MAX_STOP_CHARS + 1)], [], "stop"),
        (["a"] * (MAX_STOP_STRINGS + 1), [], "stop"),
        ([None], [], "stop"),
        (5, [], "stop"),
        (["\ud800"], [], "stop"),
        ([], [1] * (MAX_STOP_TOKEN_IDS + 1), "stop_token_ids"),
        ([], [VOCAB], "stop_token_ids"),
        ([], [-1], "stop_token_ids"),
        ([], [True], "stop_token_ids"),
        ([], 1, "stop_token_ids"),
    ],
)
def test_bad_stops_are_refused(stop: object, stop_token_ids: object, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_stops(stop, stop_token_ids, VOCAB)
    assert caught.value.param == param


def test_sampling_defaults_and_extremes() -> None:
    plain = check_sampling({}, VOCAB)
    assert (plain.temperature, plain.top_p, plain.min_p, plain.top_k, plain.ignore_eos) == (1.0, 1.0, 0.0, 0, False)
    assert check_sampling({"temperature": 1e-9}, VOCAB).temperature == 0.0
    assert check_sampling({"top_p": 1e-300}, VOCAB).top_p > 1e-7
    assert check_sampling({"top_k": -1}, VOCAB).top_k == 0
    assert check_sampling({"top_k": 2**40}, VOCAB).top_k == VOCAB
    assert check_sampling({"seed": -1}, VOCAB).seed == 2**64 - 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 2**70},
        {"temperature": "1"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.01},
        {"min_p": -0.01},
        {"min_p": 1.5},
        {"top_k": -2},
        {"top_k": 1.0},
        {"seed": "x"},
    ],
)
def test_bad_sampling_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        check_sampling(params, VOCAB)
    assert caught.value.param == next(iter(params))


@given(value=JSON, name=st.sampled_from(["temperature", "top_p", "min_p", "top_k", "seed", "ignore_eos"]))
def test_nothing_but_a_refusal_is_ever_raised(value: object, name: str) -> None:
    for check in (
        lambda: check_sampling({name: value}, VOCAB),
        lambda: check_stops(value, value, VOCAB),
        lambda: check_ids(value, VOCAB, "prompt"),
        lambda: check_text(value, "prompt"),
        lambda: output_limit(10, value, None, MAX_LEN),
    ):
        try:
            check()
        except BadRequest as refusal:
            assert refusal.status == 400 and refusal.message and refusal.param
