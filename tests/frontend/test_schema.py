"""Bodies: defaults, limits, nothing ignored in silence. Fuzzed: any body is work or an error of the right shape."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend import schema, unserved
from frontend.errors import ApiError
from frontend.schema import Work, chat_work, completion_work
from tests.frontend.live_frontend import MODEL, chat, server_config, text

CONFIG = server_config()
MAX_LEN = CONFIG.max_len


def chat_of(body: Any) -> Work:
    return chat_work(orjson.dumps(body), CONFIG)


def text_of(body: Any) -> Work:
    return completion_work(orjson.dumps(body), CONFIG)


def refused(body: Any, check: Any = chat_of) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check(body)
    return caught.value


def test_defaults_are_openais() -> None:
    work = chat_of(chat("hi"))
    params = dict(work.params)
    assert 0 <= params.pop("seed") < 2**63
    assert params == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
    }
    assert work.default_max_tokens is None
    assert not (work.stream or work.include_usage or work.return_token_ids)
    assert text_of(text("hi")).default_max_tokens == 16
    assert chat_of(chat("hi")).params["seed"] != chat_of(chat("hi")).params["seed"]


def test_null_is_the_default_everywhere() -> None:
    fields = set(schema.ChatBody.model_fields) | set(unserved.CHAT) - {"messages", "prompt"}
    body = dict.fromkeys(fields) | chat("hi")
    body.pop("prompt", None)
    assert chat_of(body).params["temperature"] == 1.0


@pytest.mark.parametrize(
    ("given_", "sent"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"min_p": 1}, {"min_p": 1.0}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"seed": 0}, {"seed": 0}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x"] * 16}, {"stop": ["x"] * 16}),
        ({"stop": "é" * 256}, {"stop": ["é" * 256]}),
        ({"stop": []}, {"stop": []}),
        ({"stop_token_ids": [0, 256]}, {"stop_token_ids": [0, 256]}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": MAX_LEN - 1}, {"max_tokens": MAX_LEN - 1}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
    ],
)
def test_parameters_arrive(given_: dict[str, Any], sent: dict[str, Any]) -> None:
    for work in (chat_of(chat("hi", **given_)), text_of(text("hi", **given_))):
        assert {name: work.params[name] for name in sent} == sent


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": MAX_LEN}, "max_tokens"),
        ({"max_tokens": 2**62}, "max_tokens"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"model": 5}, "model"),
        ({"return_token_ids": 0}, "return_token_ids"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"echo": True}, "echo"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"user": 5}, "user"),
        ({"what": None}, "what"),
        ({"": 1}, ""),
    ],
)
def test_bad_parameters_are_named(bad: dict[str, Any], param: str) -> None:
    for error in (refused(chat("hi", **bad)), refused(text("hi", **bad), text_of)):
        assert (error.status, error.param) == (400, param)
        assert param in error.message


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
    ],
)
def test_what_chat_does_not_serve(bad: dict[str, Any], param: str) -> None:
    error = refused(chat("hi", **bad))
    assert (error.status, error.param, error.code) == (400, param, "unsupported_parameter")


def test_zero_logprobs_of_a_completion_is_a_wish() -> None:
    assert refused(text("hi", logprobs=0), text_of).param == "logprobs"


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True},
        {"modalities": ["text"], "skip_special_tokens": True, "priority": 0, "best_of": 1},
    ],
)
def test_values_that_change_nothing_are_taken(neutral: dict[str, Any]) -> None:
    assert chat_of(chat("hi", **neutral))


def test_messages() -> None:
    def sent(*messages: dict[str, Any]) -> Any:
        return chat_of({"model": MODEL, "messages": list(messages)}).prompts[0]["messages"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sent({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    assert sent({"role": "developer", "content": ""}) == [{"role": "system", "content": ""}]
    assert sent({"role": "user", "content": "x", "name": "joe"}) == [{"role": "user", "content": "x", "name": "joe"}]
    # As the official client gives an answer back.
    echo = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    assert sent(echo) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "what": 1}, "messages[0].what"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": []}]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ("x", "messages[0]"),
    ],
)
def test_bad_messages_are_named(message: Any, param: str) -> None:
    error = refused({"model": MODEL, "messages": [message]})
    assert (error.status, error.param) == (400, param)


def test_no_messages() -> None:
    for messages in ([], None, "hi", {}):
        assert refused({"model": MODEL, "messages": messages}).param == "messages"
    assert refused({"model": MODEL}).param == "messages"


@pytest.mark.parametrize(
    ("prompt", "kinds"),
    [
        ("x", ["text"]),
        ("", ["text"]),  # the tokenizer says what is empty
        (["x"], ["text"]),
        (["x", "y"], ["text", "text"]),
        ([1, 2], ["ids"]),
        ([[1, 2]], ["ids"]),
        ([[1], "x"], ["ids", "text"]),
        ([256] * (MAX_LEN - 1), ["ids"]),
    ],
)
def test_prompts(prompt: Any, kinds: list[str]) -> None:
    assert [p["kind"] for p in text_of(text(prompt)).prompts] == kinds


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, {}, [], [[]], [[-1]], [-1], [257], [[257]], [1.0], [True], [1, "x"], ["x", 1], [[1, [2]]],
        [256] * MAX_LEN, ["x"] * 65, [2**40],
    ],
)  # fmt: skip
def test_bad_prompts(prompt: Any) -> None:
    error = refused(text(prompt), text_of)
    assert error.status == 400 and error.param is not None and error.param.startswith("prompt")


def test_a_prompt_that_is_too_long_names_the_limit() -> None:
    error = refused(text([1] * MAX_LEN), text_of)
    assert error.code == "context_length_exceeded" and str(MAX_LEN) in error.message


def test_the_model_is_checked() -> None:
    error = refused(chat("hi", model="gpt-4"))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert chat_of({"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b'{"model": NaN}', b'{"temperature": Infinity}', b"[" * 100_000,
     b'{"prompt": "\\ud800"}', b'{"prompt": "\xed\xa0\x80"}', b'{"temperature": 1e999}'],
)  # fmt: skip
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        completion_work(raw, CONFIG)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_tokenize_and_detokenize() -> None:
    def ask(body: Any) -> dict[str, Any]:
        return schema.tokenize_request(orjson.dumps(body), CONFIG)

    assert ask({"prompt": "x"}) == {
        "op": "tokenize", "prompt": "x", "add_special_tokens": True, "add_generation_prompt": True
    }  # fmt: skip
    messages = [{"role": "user", "content": "x"}]
    asked = ask({"messages": messages, "add_generation_prompt": False})
    assert (asked["messages"], asked["add_special_tokens"], asked["add_generation_prompt"]) == (messages, False, False)
    for bad in ({}, {"prompt": "x", "messages": messages}, {"prompt": "x", "return_token_strs": True}, {"prompt": 1}):
        assert refused(bad, ask).status == 400

    def back(body: Any) -> dict[str, Any]:
        return schema.detokenize_request(orjson.dumps(body), CONFIG)

    assert back({"tokens": [1, 256]}) == {"op": "detokenize", "tokens": [1, 256]}
    for tokens in ([257], [-1], ["x"], None, "x"):
        assert refused({"tokens": tokens}, back).status == 400


# Fuzz -----------------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["user", "text", "auto", MODEL]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "include_usage"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
names = st.sampled_from([*sorted(set(schema.ChatBody.model_fields) | {"prompt"} | set(unserved.CHAT)), "what"])


@given(st.dictionaries(names, json_values, max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_object_is_work_or_an_error(more: dict[str, Any], is_chat: bool) -> None:
    good = chat("hi") if is_chat else text("hi")
    raw = json.dumps(good | more).encode()
    try:
        work = (chat_work if is_chat else completion_work)(raw, CONFIG)
    except ApiError as error:
        assert error.status in (400, 404) and error.message
        assert set(error.body()["error"]) == {"message", "type", "param", "code"}
        orjson.dumps(error.body())
    else:
        assert 0 <= work.params["temperature"] <= 2 and 0 <= work.params["seed"] < 2**64
        assert work.params["max_tokens"] is None or 1 <= work.params["max_tokens"] < MAX_LEN
        assert "what" not in more
        orjson.dumps(work.params)


@given(st.binary(max_size=64))
def test_any_bytes_are_an_error(raw: bytes) -> None:
    with pytest.raises(ApiError):
        chat_work(raw, CONFIG)
