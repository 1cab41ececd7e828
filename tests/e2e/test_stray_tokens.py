"""Tokens that no text may become or hold, in a live server of a tiny model: one that the model lacks, a stop token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import plain_http
from tests.e2e.live_server import ALONE, LiveServer, complete, ids_of, live_server, sse_events
from tests.model_factory import TinyLlama, vocabulary

BEYOND = len(vocabulary())  # the id of "<pad>", which the tokenizer has and the model has not

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = TinyLlama().write_hf(tmp_path_factory.mktemp("model") / "tiny")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": BEYOND, "content": "<pad>"})
    file.write_text(json.dumps(content))
    with live_server(str(folder), "--dtype", "float32", "--max-len", "128", "--kv-tokens", "2048", *ALONE) as s:
        yield s


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a<pad>b"}, "prompt"),
        ("/v1/completions", {"prompt": ["fine", "<pad>"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a <pad>"}]}, "messages"),
    ],
)
def test_a_text_with_a_token_that_the_model_lacks(
    server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = plain_http.post(server.url + path, json={"model": "tiny", "max_tokens": 2, **body}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "<pad>" in answer.json()["error"]["message"]
    (good,) = complete(server, [{"model": "tiny", "prompt": "a", "max_tokens": 2, "ignore_eos": True}])
    assert good["usage"]["completion_tokens"] == 2


def test_a_stop_token_is_counted_and_gives_no_text(server: LiveServer) -> None:
    body = {"model": "tiny", "prompt": "a b", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    (whole,) = complete(server, [body])
    ids = ids_of(whole)
    # The first token that comes late enough, is new there, and is text.
    at = next(i for i in range(4, len(ids)) if ids[i] not in ids[:i] and ids[i] > 2)
    (before,) = complete(server, [{**body, "max_tokens": at}])
    stopping = {**body, "stop_token_ids": [ids[at]]}
    (cut,) = complete(server, [stopping])
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == at + 1
    assert cut["choices"][0]["text"] == before["choices"][0]["text"]
    with plain_http.stream(
        "POST", server.url + "/v1/completions", json={**stopping, "stream": True}, timeout=60
    ) as stream:
        events = [event for event in sse_events(stream.iter_lines()) if isinstance(event, dict)]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == before["choices"][0]["text"]


def test_the_tokenizer_tells_its_tokens_as_they_are(server: LiveServer) -> None:
    answer = plain_http.post(server.url + "/tokenize", json={"model": "tiny", "prompt": "<pad>"}, timeout=60)
    assert answer.json()["tokens"] == [BEYOND]
