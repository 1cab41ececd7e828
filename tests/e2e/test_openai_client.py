"""The official `openai` client against a live server, streamed and not."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.live_server import ALONE, LiveServer, live_server

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
KEY = "secret-of-the-test"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--max-len", "512", "--api-key", KEY, *ALONE) as s:
        yield s


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    whole = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_completion_tokens=24,  # type: ignore[arg-type]
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None and whole.usage.completion_tokens > 1
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=12)
    chunks = client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=12, stream=True
    )
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_models_and_errors(client: openai.OpenAI, server: LiveServer) -> None:
    assert [m.id for m in client.models.list().data] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True)
    assert "logprobs" in str(refused.value)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0).models.list()
