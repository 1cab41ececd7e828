"""One answer on one connection, without a network: what is written when, for fast, slow and leaving clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.errors import ApiError
from frontend.schema import chat_work, completion_work
from frontend.stream import Answer
from tests.frontend.live_frontend import chat, text
from tests.frontend.loose_engine import Connection, LooseEngine
from tests.frontend.sse import parse_stream


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


async def turns(n: int = 4) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def begin(engine: LooseEngine, **more: Any) -> tuple[Connection, asyncio.Task[None]]:
    prompt = more.pop("prompt", "abc")
    if isinstance(prompt, dict):
        work = chat_work(orjson.dumps(prompt | more), engine.config)
    else:
        work = completion_work(orjson.dumps(text(prompt, **more)), engine.config)
    connection = Connection()
    return connection, asyncio.create_task(connection.run(Answer(engine, work)))


def test_nothing_is_written_before_the_request_is_accepted() -> None:
    async def test() -> None:
        engine = LooseEngine()
        connection, task = begin(engine, stream=True)
        await turns()
        assert connection.messages == []
        engine.receive([{"ev": "rejected", "row": engine.sent[0]["row"], "gen": 1, "status": 400, "message": "no"}])
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.status == 400 and connection.messages == []
        assert engine.idle and engine.figures()["rejected_total"] == 1

    run(test)


def test_items_of_one_message_make_one_chunk() -> None:
    async def test() -> None:
        engine = LooseEngine()
        connection, task = begin(engine, stream=True)
        await turns()
        row, gen = engine.accept()
        await turns()
        engine.text(*[(row, gen, i, i + 1, c, None, False) for i, c in enumerate("Hello")])
        await turns()
        engine.text((row, gen, 5, 5, "", None, False), (row, gen, 5, 6, "!", "stop", True))
        await task
        stream = parse_stream(connection.body)
        assert (stream.text, stream.choices[0].pieces, stream.choices[0].finish) == ("Hello!", 2, "stop")

    run(test)


def test_text_for_a_slow_client_piles_up_as_one_piece() -> None:
    async def test() -> None:
        engine = LooseEngine()
        connection, task = begin(engine, stream=True, max_tokens=2000, return_token_ids=True)
        await turns()
        row, gen = engine.accept()
        await turns()
        connection.write_allowed.clear()
        for i in range(1500):
            engine.text((row, gen, i, i + 1, "x", None, False))
            await turns(1)
        assert len(connection.messages) <= 2, "the start, and one piece that is not taken"
        engine.text((row, gen, 1500, 1501, "", "length", True))
        assert engine.idle, "a client that reads slowly holds no row"
        connection.write_allowed.set()
        await task
        stream = parse_stream(connection.body)
        assert stream.text == "x" * 1500 and stream.choices[0].pieces <= 2
        assert len(stream.choices[0].ids) == 1501

    run(test)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("accepted", [True, False])
def test_a_client_that_leaves_is_aborted_at_once(stream: bool, accepted: bool) -> None:
    async def test() -> None:
        engine = LooseEngine()
        connection, task = begin(engine, stream=stream)
        await turns()
        if accepted:
            engine.accept()
            await turns()
        row, gen = engine.sent[0]["row"], engine.sent[0]["gen"]
        connection.left.set()
        await turns(3)
        assert engine.ledger.abort[row] == gen and engine.rings >= 1
        await task
        assert b"[DONE]" not in connection.body
        assert not engine.idle
        if not accepted:
            engine.accept()
        engine.text((row, gen, 0, 0, "", "abort", True))
        assert engine.idle
        figures = engine.figures()
        assert (figures["aborted_total"], figures["open_streams"], figures["errors_total"]) == (1, 0, 0)

    run(test)


def test_a_client_that_leaves_while_it_is_written_to_is_aborted() -> None:
    async def test() -> None:
        engine = LooseEngine()
        connection, task = begin(engine, stream=True)
        await turns()
        row, gen = engine.accept()
        connection.write_allowed.clear()
        engine.text((row, gen, 0, 1, "x", None, False))
        await turns()
        connection.left.set()
        await turns()
        assert engine.ledger.abort[row] == gen
        connection.write_allowed.set()
        await task

    run(test)


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("abort", 503)])
def test_a_request_that_the_server_ends(is_chat: bool, finish: str, status: int) -> None:
    async def test() -> None:
        prompt: Any = chat("abc") if is_chat else "abc"
        for stream in (True, False):
            engine = LooseEngine()
            connection, task = begin(engine, prompt=prompt, stream=stream)
            await turns()
            row, gen = engine.accept()
            await turns()
            engine.text((row, gen, 0, 1, "x", None, False), (row, gen, 1, 2, "y", finish, True))
            if not stream:
                with pytest.raises(ApiError) as caught:
                    await task
                assert caught.value.status == status
                continue
            await task
            parsed = parse_stream(connection.body)
            assert parsed.error is not None and parsed.error["type"] == "server_error"
            assert parsed.text == "xy" and parsed.choices[0].finish is None
            assert engine.figures()["errors_total"] == 1

    run(test)


def test_several_prompts_are_several_choices() -> None:
    async def test() -> None:
        engine = LooseEngine()
        options = {"include_usage": True}
        connection, task = begin(engine, prompt=["a", "b"], stream=True, stream_options=options)
        await turns()
        first = engine.accept(0, 2)
        await turns()
        assert connection.messages == [], "all or none"
        second = engine.accept(1, 5)
        await turns()
        engine.text((*second, 0, 1, "B", "stop", True), (*first, 0, 1, "A", None, False))
        await turns()
        engine.text((*first, 1, 3, "AA", "length", True))
        await task
        stream = parse_stream(connection.body, include_usage=True)
        assert {i: (c.text, c.finish) for i, c in stream.choices.items()} == {0: ("AAA", "length"), 1: ("B", "stop")}
        assert stream.usage == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}

    run(test)


def test_one_rejected_prompt_ends_the_others() -> None:
    async def test() -> None:
        engine = LooseEngine()
        _, task = begin(engine, prompt=["a", "b"])
        await turns()
        row, gen = engine.accept(0)
        other = engine.sent[1]
        engine.receive([{"ev": "rejected", "row": other["row"], "gen": 1, "status": 400, "message": "no"}])
        with pytest.raises(ApiError):
            await task
        assert engine.ledger.abort[row] == gen and not engine.idle
        engine.text((row, gen, 0, 0, "", "abort", True))
        assert engine.idle

    run(test)


def test_a_failed_server_tells_every_client() -> None:
    async def test() -> None:
        engine = LooseEngine()
        streamed, first = begin(engine, stream=True)
        _, second = begin(engine)
        _, third = begin(engine, stream=True)
        asked = asyncio.create_task(engine.ask({"op": "tokenize"}, 10))
        await turns()
        engine.accept(0)
        engine.accept(1)
        await turns()
        engine.state.fail("the gpu process has ended")
        engine.fail(engine.failure)
        await first
        parsed = parse_stream(streamed.body)
        assert parsed.error is not None and "gpu" in parsed.error["message"]
        for task in (second, third, asked):
            with pytest.raises(ApiError) as caught:
                await task
            assert caught.value.status == 500 and "gpu" in caught.value.message
        with pytest.raises(ApiError) as caught:
            await begin(engine)[1]
        assert caught.value.status == 503

    run(test)


@given(
    pieces=st.lists(st.tuples(st.text(max_size=4), st.booleans()), max_size=12),
    tail=st.text(max_size=4),
    is_chat=st.booleans(),
    ids=st.booleans(),
    usage=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_joined_stream_is_the_whole_text(
    pieces: list[tuple[str, bool]], tail: str, is_chat: bool, ids: bool, usage: bool
) -> None:
    async def test() -> None:
        answers: list[Any] = []
        options = {"stream_options": {"include_usage": usage}}
        for stream in (True, False):
            engine = LooseEngine()
            prompt: Any = chat("abc") if is_chat else "abc"
            more = options if stream else {}
            connection, task = begin(engine, prompt=prompt, stream=stream, return_token_ids=ids, **more)
            await turns()
            engine.ledger.tokens[engine.sent[0]["row"], :40] = range(40)
            row, gen = engine.accept(prompt_tokens=3)
            for i, (piece, pause) in enumerate(pieces):
                engine.text((row, gen, i, i + 1, piece, None, False))
                await turns(3 * pause)
            engine.text((row, gen, len(pieces), len(pieces) + 1, tail, "stop", True))
            await task
            answers.append(parse_stream(connection.body, usage) if stream else json.loads(connection.body))
        streamed, whole = answers
        choice = whole["choices"][0]
        told = choice["message"]["content"] if is_chat else choice["text"]
        assert streamed.text == told == "".join(p for p, _ in pieces) + tail
        assert streamed.choices[0].finish == choice["finish_reason"] == "stop"
        if usage:
            assert streamed.usage == whole["usage"]
        if ids:
            prompt_ids = (whole if is_chat else choice)["prompt_token_ids"]
            assert streamed.choices[0].ids == choice["token_ids"] == list(range(3, 4 + len(pieces)))
            assert streamed.choices[0].prompt_ids == prompt_ids == [0, 1, 2]
        else:
            assert "token_ids" not in choice and streamed.choices[0].ids == []

    run(test)
