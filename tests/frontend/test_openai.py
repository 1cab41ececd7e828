"""The official client against the frontend: what it sends is served, what it gets it understands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontend.live_frontend import MODEL, LiveFrontend, live_frontend

KEY = "secret"
MESSAGES: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "añb "}]}]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveFrontend]:
    with live_frontend(api_key=KEY, max_running=2, max_queued=0) as frontend:
        yield frontend


@pytest.fixture
def client(live: LiveFrontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key=KEY, max_retries=0, timeout=10) as c:
        yield c


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=7)
    assert whole.choices[0].message.content == "añb a\ufffd"
    assert whole.usage is not None and whole.usage.total_tokens == 5 + 7
    again: Any = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "x"}]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=1).choices[0].message.content == "x"


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=10, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "añb añb "
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10


def test_the_stream_helper(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "/stop 5"}]
    with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == "/stop"
    assert kinds[-1] == "content.done"


def test_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="ab", max_tokens=3, seed=1).choices[0].text == "aba"
    assert client.completions.create(model=MODEL, prompt=[[97, 98], [99]], max_tokens=2).choices[1].text == "cc"
    chunks = client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=3, stream=True, extra_body={"top_k": 1})
    assert "".join(c.choices[0].text for c in chunks) == "aba"


def test_errors_have_their_classes(client: openai.OpenAI, live: LiveFrontend) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | more))

    with pytest.raises(openai.BadRequestError) as refused:
        ask(logprobs=True)
    assert refused.value.param == "logprobs" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="gpt-4")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0).models.list()
    live.engine.gate.clear()
    held = [client.completions.create(model=MODEL, prompt="x", max_tokens=2, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError):
        ask()
    live.engine.gate.set()
    assert all(list(stream) for stream in held)
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_error_event_is_raised(client: openai.OpenAI, live: LiveFrontend) -> None:
    live.engine.pace_s = 0.02
    stream = client.completions.create(model=MODEL, prompt="/error 9", max_tokens=20, stream=True)
    with pytest.raises(openai.APIError, match="could not go on"):
        list(stream)
    live.engine.pace_s = 0.0
