"""Every route over HTTP, from a real process: shapes, statuses, the key, and that no body whatever makes a 5xx."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm.limits import BODY_BYTES_MAX
from tests.frontend.live_frontend import MODEL, LiveFrontend, chat, live_frontend, text
from tests.frontend.sse import parse_stream

KEY = "sesame-ä"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveFrontend]:
    with live_frontend() as frontend:
        yield frontend
        frontend.wait_rows(0)


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveFrontend]:
    with live_frontend(api_key=KEY) as frontend:
        yield frontend


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


def test_chat(live: LiveFrontend) -> None:
    answer = live.post("/v1/chat/completions", chat("héllo ", max_tokens=10, return_token_ids=True))
    body = answer.json()
    assert answer.status_code == 200 and body["object"] == "chat.completion" and body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "héllo hé", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "token_ids": list("héllo hé".encode()),
        }
    ]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17}
    assert body["prompt_token_ids"] == list("héllo ".encode())


def test_a_stream_of_split_characters(live: LiveFrontend) -> None:
    options = {"include_usage": True}
    body = chat("日本語😀", max_tokens=26, stream=True, stream_options=options, return_token_ids=True)
    answer = live.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    stream = parse_stream(answer.content, include_usage=True)
    assert stream.text == "日本語😀日本語😀"
    assert stream.usage == {"prompt_tokens": 13, "completion_tokens": 26, "total_tokens": 39}
    assert bytes(stream.choices[0].ids).decode() == stream.text


def test_the_end_token_counts_and_has_no_text(live: LiveFrontend) -> None:
    for order in ("/eos 9", "/stop 9"):
        answer = live.post("/v1/completions", text(order + " xyz", max_tokens=50)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 9
    live.wait_rows(0)


def test_several_prompts(live: LiveFrontend) -> None:
    answer = live.post("/v1/completions", text(["ab", [99, 100]], max_tokens=3)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "aba"), (1, "cdc")]
    assert live.post("/v1/completions", text(["ab"] * 17)).status_code == 429
    stream = parse_stream(live.post("/v1/completions", text(["ab", "cd"], max_tokens=3, stream=True)).content)
    assert [stream.choices[i].text for i in (0, 1)] == ["aba", "cdc"]


def test_the_message_to_the_tokenizer(live: LiveFrontend) -> None:
    live.post("/v1/completions", text([65], seed=-3, top_k=5, stop="x", max_tokens=2))
    sent = live.engine.seen[-1]
    assert sent == {
        "op": "generate", "row": sent["row"], "gen": sent["gen"], "kind": "ids", "prompt": [65],
        "default_max_tokens": 16,
        "params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "seed": 2**64 - 3, "max_tokens": 2,
            "stop": ["x"], "stop_token_ids": [], "ignore_eos": False,
        },
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_tokenizer_rejects_has_its_real_status(live: LiveFrontend, stream: bool) -> None:
    answer = live.post("/v1/completions", text("/reject", stream=stream))
    assert answer.status_code == 400 and error_of(answer)["message"] == "rejected as ordered"
    assert live.post("/v1/chat/completions", chat("", stream=stream)).status_code == 400


def test_tokenize_and_detokenize(live: LiveFrontend) -> None:
    answer = live.post("/tokenize", {"model": MODEL, "prompt": "hé"})
    assert answer.json() == {
        "count": 3, "max_model_len": live.config.max_len, "tokens": [104, 195, 169], "token_strs": None
    }  # fmt: skip
    assert live.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["count"] == 7
    assert live.post("/detokenize", {"tokens": [104, 195, 169]}).json() == {"prompt": "hé"}
    refused = live.post("/tokenize", {"prompt": "/reject"})
    assert refused.status_code == 400 and error_of(refused)["param"] == "prompt"


def test_models(live: LiveFrontend) -> None:
    models = live.get("/v1/models").json()
    assert models["object"] == "list" and [m["id"] for m in models["data"]] == [MODEL]
    assert live.get(f"/v1/models/{MODEL}").json() == models["data"][0]
    assert error_of(live.get("/v1/models/a/b"))["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/what", 404), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405)],
)
def test_what_is_not_there(live: LiveFrontend, method: str, path: str, status: int) -> None:
    answer = live.client.request(method, path)
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    assert status != 405 or answer.headers["allow"]


def test_the_description_resolves(live: LiveFrontend) -> None:
    document = live.get("/openapi.json").json()
    refs = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert {"ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody", "Message"} <= refs
    assert refs <= set(document["components"]["schemas"])


def test_content_types(live: LiveFrontend) -> None:
    raw = json.dumps(text("x", max_tokens=1))
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 400), ("multipart/form-data", 400)):
        answer = live.client.post("/v1/completions", content=raw, headers={"content-type": kind})
        assert answer.status_code == status
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        # What a page in a browser sends if it sets none: no question is asked before it.
        answer = live.client.post(path, content=raw)
        assert answer.status_code == 400 and error_of(answer)["code"] == "unsupported_media_type"
        assert "content-type" in error_of(answer)["message"] and "application/json" in error_of(answer)["message"]
    command = ["curl", "-s", live.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", raw]
    done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    assert json.loads(done.stdout)["object"] == "text_completion"


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/openapi.json"]
)
def test_head_is_get_without_its_body(live: LiveFrontend, path: str) -> None:
    got, asked = live.get(path), live.client.head(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-type"] == got.headers["content-type"]


def test_no_page_loads_scripts_from_elsewhere(live: LiveFrontend) -> None:
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert live.get(path).status_code == 404


@pytest.mark.parametrize("told", [True, False])
def test_a_large_body_is_not_read_whole(live: LiveFrontend, told: bool) -> None:
    big = b" " * (BODY_BYTES_MAX + 1)

    def pieces() -> Iterator[bytes]:
        for i in range(0, 10_000_000, 100_000):
            yield big[i % 1000 : i % 1000 + 100_000]

    answer = live.client.post("/v1/completions", content=b" " * 10_000_000 if told else pieces(), headers=JSON)
    assert answer.status_code == 413 and error_of(answer)["code"] == "body_too_large"
    fits = json.dumps(text("x", max_tokens=1)).encode().ljust(BODY_BYTES_MAX)
    assert live.client.post("/v1/completions", content=fits, headers=JSON).status_code == 200
    assert live.client.post("/v1/completions", content=fits + b" ", headers=JSON).status_code == 413


def test_a_body_that_stops_half_way(live: LiveFrontend) -> None:
    port = int(live.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert live.get("/health").status_code == 200


def test_the_key(locked: LiveFrontend) -> None:
    right = {"authorization": f"Bearer {KEY}".encode()}
    assert locked.get("/health").status_code == 200
    wrong: list[dict[str, bytes]] = [
        {}, {"authorization": b"Bearer"}, {"authorization": b"Bearer x"}, {"authorization": KEY.encode()},
        {"authorization": b"Basic " + KEY.encode()}, {"x-api-key": KEY.encode()},
        {"authorization": b"Bearer " + KEY.encode()[:-1]},
    ]  # fmt: skip
    for path in ("/ready", "/metrics", "/v1/models", "/openapi.json", "/docs", "/nothing", "/health/"):
        for headers in wrong:
            answer = locked.get(path, headers=headers)
            assert answer.status_code == 401, (path, headers)
            assert error_of(answer)["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
        assert locked.get(path, headers=right).status_code != 401
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert locked.post(path, {}).status_code == 401
    assert locked.post("/v1/completions", text("x"), headers=right).status_code == 200
    assert locked.post("/v1/completions", text("x"), headers={"authorization": b"bearer  " + KEY.encode()}).is_success
    before = len(locked.engine.seen)
    assert locked.post("/v1/completions", text("x")).status_code == 401 and len(locked.engine.seen) == before


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    ["prompt", "messages", "max_tokens", "stop", "stream", "seed", "tokens", "n", "stream_options"]
)
bodies = (
    st.binary(max_size=40)
    | st.dictionaries(fields, anything, max_size=5).map(lambda b: json.dumps(b).encode())
    | anything.map(lambda v: json.dumps({"messages": [{"role": "user", "content": v}]}).encode())
    | anything.map(lambda v: json.dumps({"prompt": v, "max_tokens": 3, "stream": True}).encode())
)


@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]), raw=bodies)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_makes_a_5xx(live: LiveFrontend, path: str, raw: bytes) -> None:
    answer = live.client.post(path, content=raw, headers=JSON)
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            parse_stream(answer.content)
        return
    assert answer.status_code in (400, 404), answer.text
    error_of(answer)
