"""Edges and hostile input against a live server: right status and message, server healthy, pages back to baseline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import plain_http
from tests.e2e.live_server import ALONE, LiveServer, complete, live_server, sse_events

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
MAX_LEN = 256


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--max-len", str(MAX_LEN), "--max-running", "64", *ALONE) as s:
        yield s


@pytest.fixture(autouse=True)
def pages_come_back(server: LiveServer) -> Iterator[None]:
    yield
    metrics = server.wait_idle()
    assert metrics["stepahead_pages_in_rows"] == 0
    assert metrics["stepahead_pages_free"] + metrics["stepahead_pages_cached"] == metrics["stepahead_pages"]
    assert plain_http.get(server.url + "/health").status_code == 200
    assert plain_http.get(server.url + "/ready").status_code == 200


def post(server: LiveServer, body: Any, path: str = "/v1/completions") -> httpx.Response:
    return plain_http.post(server.url + path, json=body, timeout=60)


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [504, 3575, 282], "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


@pytest.mark.parametrize(("length", "status"), [(MAX_LEN - 1, 200), (MAX_LEN, 400), (MAX_LEN + 1, 400)])
def test_prompt_at_the_context_limit(server: LiveServer, length: int, status: int) -> None:
    answer = post(server, body(prompt=[504] * length, max_tokens=None))
    assert answer.status_code == status, answer.text
    if status == 200:
        assert answer.json()["usage"]["completion_tokens"] == 1
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    else:
        assert str(MAX_LEN) in answer.json()["error"]["message"]


@pytest.mark.parametrize(("asked", "status"), [(0, 400), (1, 200), (10**9, 400), (-1, 400), (2**70, 400)])
def test_max_tokens(server: LiveServer, asked: int, status: int) -> None:
    answer = post(server, body(max_tokens=asked))
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "max_tokens" in answer.text


def test_output_up_to_the_context_limit(server: LiveServer) -> None:
    answer = post(server, body(max_tokens=MAX_LEN - 3))
    assert answer.json()["usage"]["completion_tokens"] == MAX_LEN - 3


BAD = [
    ("empty prompt", body(prompt="")),
    ("empty ids", body(prompt=[])),
    ("negative id", body(prompt=[1, -1])),
    ("id past the vocabulary", body(prompt=[1, 49152])),
    ("nested negative", body(prompt=[[-1]])),
    ("wrong type", body(prompt=5)),
    ("wrong temperature", body(temperature="hot")),
    ("negative temperature", body(temperature=-1)),
    ("seventeen stops", body(stop=["x"] * 17)),
    ("long stop", body(stop="x" * 257)),
    ("stop id", body(stop_token_ids=[49152])),
    ("not served", body(logprobs=3)),
    ("unknown field", body(no_such_parameter=1)),
    ("array", [1, 2]),
]


@pytest.mark.parametrize(("name", "bad"), BAD, ids=[n for n, _ in BAD])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies(server: LiveServer, name: str, bad: Any, stream: bool) -> None:
    answer = post(server, {**bad, "stream": True} if stream and isinstance(bad, dict) else bad)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_bytes_that_are_no_json(server: LiveServer) -> None:
    url = server.url + "/v1/chat/completions"
    lone = b'{"model":"%s","messages":[{"role":"user","content":"\\ud800"}]}' % MODEL.encode()
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}', lone):
        answer = plain_http.post(url, content=content, headers={"content-type": "application/json"}, timeout=30)
        assert answer.status_code == 400, (content[:40], answer.text)
        assert answer.json()["error"]["message"]


def test_ten_megabytes(server: LiveServer) -> None:
    answer = post(server, body(prompt="a" * 10_000_000))
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]


def test_model_name_is_checked(server: LiveServer) -> None:
    answer = post(server, body(model="gpt-4"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_six_hundred_at_once(server: LiveServer) -> None:
    answers = complete(server, [body(prompt=[504 + i], max_tokens=2) for i in range(600)])
    assert all(a["usage"]["completion_tokens"] == 2 for a in answers)


def test_a_full_queue_answers_429_at_once() -> None:
    with live_server("--max-len", "256", "--max-running", "2", "--max-queued", "2", *ALONE) as small:

        async def run() -> list[httpx.Response]:
            async with plain_http.AsyncClient(base_url=small.url, timeout=60) as client:
                one = body(max_tokens=100)
                return list(await asyncio.gather(*(client.post("/v1/completions", json=one) for _ in range(12))))

        answers = asyncio.run(run())
        codes = sorted(a.status_code for a in answers)
        assert codes == [200] * 4 + [429] * 8
        refused = next(a for a in answers if a.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"]


def seconds_to_abort(server: LiveServer, stream: bool) -> float:
    """Sends a long request, hangs up, and waits until nothing runs; seconds from one to the other."""
    long = body(max_tokens=MAX_LEN - 3, stream=stream)
    aborted = server.metrics()["stepahead_aborted_requests_total"]
    if stream:
        with plain_http.stream("POST", server.url + "/v1/completions", json=long, timeout=30) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            plain_http.post(server.url + "/v1/completions", json=long, timeout=0.4)
    begin = time.monotonic()
    while server.metrics()["stepahead_running_requests"] > 0:
        time.sleep(0.02)
    seconds = time.monotonic() - begin
    assert server.wait_idle()["stepahead_aborted_requests_total"] == aborted + 1
    return seconds


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_aborted_within_a_second(server: LiveServer, stream: bool) -> None:
    """The best of three: a machine that is busy elsewhere may hold up a single one."""
    assert min(seconds_to_abort(server, stream) for _ in range(3)) < 1.0


def check_stream(server: LiveServer, one: dict[str, Any]) -> None:
    whole = post(server, one).json()["choices"][0]
    with plain_http.stream("POST", server.url + "/v1/completions", json={**one, "stream": True}, timeout=60) as answer:
        events = list(sse_events(answer.iter_lines()))
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = [e["choices"][0] for e in events[:-1] if isinstance(e, dict)]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [whole["finish_reason"]]


def test_streamed_text_equals_the_whole_text(server: LiveServer) -> None:
    prompts, temperatures = ("Write many emojis: 😀🎉", "日本語で", "Γειά σου"), (0, 1.5)
    asked = [body(prompt=p, max_tokens=60, temperature=t, seed=5) for p in prompts for t in temperatures]
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda one: check_stream(server, one), asked))


def test_no_part_of_a_stop_string_leaves(server: LiveServer) -> None:
    one = body(prompt="Count: 1, 2, 3, 4, 5, 6,", max_tokens=60)
    text = post(server, one).json()["choices"][0]["text"]
    stop = text[20:26]
    want = text[: text.index(stop)]
    stopped = post(server, {**one, "stop": ["never there", stop]}).json()
    assert stopped["choices"][0] == {**stopped["choices"][0], "text": want, "finish_reason": "stop"}
    assert stopped["usage"]["completion_tokens"] < 60
    with plain_http.stream(
        "POST", server.url + "/v1/completions", json={**one, "stop": stop, "stream": True}
    ) as answer:
        events = [e for e in sse_events(answer.iter_lines()) if isinstance(e, dict)]
    assert "".join(e["choices"][0]["text"] for e in events) == want
    assert json.dumps(events).count('"finish_reason": "stop"') == 1


def text_of(server: LiveServer, **more: Any) -> str:
    return str(post(server, body(prompt="The best thing about", max_tokens=16, **more)).json()["choices"][0]["text"])


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_each_filter_reaches_the_sampler(server: LiveServer, filters: dict[str, float]) -> None:
    """Each of them, at its narrowest, leaves the likeliest token alone: greedy, at any temperature."""
    assert text_of(server, temperature=2, seed=1, **filters) == text_of(server, temperature=0)


def test_a_filter_that_keeps_everything_changes_nothing(server: LiveServer) -> None:
    wide = text_of(server, temperature=1.5, seed=1, top_p=1.0, min_p=0.0, top_k=0)
    assert wide == text_of(server, temperature=1.5, seed=1)
    assert wide != text_of(server, temperature=0)
    assert wide != text_of(server, temperature=1.5, seed=2)


def test_tokens_there_and_back(server: LiveServer) -> None:
    text = "Grüße, 世界 😀"
    ids = post(server, {"model": MODEL, "prompt": text}, "/tokenize").json()["tokens"]
    assert post(server, {"model": MODEL, "tokens": ids}, "/detokenize").json()["prompt"] == text
    whole = post(server, body(prompt=text, return_token_ids=True)).json()["choices"][0]
    assert whole["prompt_token_ids"] == ids
