"""Channels: order, and receivers that come late or come back."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shm.channel import AsyncReceiver, Receiver, Sender, new_secret

NOBODY = 65534


@pytest.fixture
def ctx() -> Iterator[zmq.Context[Any]]:
    ctx = zmq.Context()
    yield ctx
    ctx.destroy(linger=0)


def collect(receiver: Receiver, count: int) -> list[Any]:
    messages: list[Any] = []
    end = time.monotonic() + 20
    while len(messages) < count and time.monotonic() < end:
        receiver.wait(100)
        messages += receiver.recv_all()
    return messages


def test_messages_arrive_in_order_even_if_sent_before_the_receiver_was_there(ctx: zmq.Context[Any]) -> None:
    secret = new_secret("tokenizer")
    sender = Sender(ctx, secret, 1)
    wanted = [{"op": "generate", "row": i, "text": "ä" * (i % 7), "params": {"stop": ["a"]}} for i in range(3000)]
    for message in wanted[:2000]:
        sender.send(message)
    receiver = Receiver.bind(secret, 1, ctx)
    for message in wanted[2000:]:
        sender.send(message)
    assert collect(receiver, len(wanted)) == wanted
    assert receiver.recv_all() == []
    assert not receiver.wait(0)


def test_nothing_that_is_sent_to_a_successor_is_lost(ctx: zmq.Context[Any]) -> None:
    """Though it is sent in the same breath in which the one before died, and its connection looks alive."""
    secret = new_secret("frontend")
    sender = Sender(ctx, secret, 1)
    for round_ in range(20):
        life = zmq.Context()  # a process of its own
        receiver = Receiver.bind(secret, round_ + 1, life)
        sender.turn_to(round_ + 1)
        sender.send({"round": round_})
        assert collect(receiver, 1) == [{"round": round_}]
        receiver.close()
        life.term()


def test_several_senders_share_a_receiver(ctx: zmq.Context[Any]) -> None:
    secret = new_secret("frontend")
    receiver = Receiver.bind(secret, 1, ctx)
    senders = [Sender(ctx, secret, 1) for _ in range(3)]
    for i, sender in enumerate(senders):
        for j in range(50):
            sender.send({"from": i, "n": j})
    messages = collect(receiver, 150)
    for i in range(3):
        assert [m["n"] for m in messages if m["from"] == i] == list(range(50))


def test_an_address_belongs_to_one_process_and_is_no_file(ctx: zmq.Context[Any]) -> None:
    secret = new_secret("tokenizer")
    receiver = Receiver.bind(secret, 1, ctx)
    (name,) = names_of("tokenizer-1")
    assert not os.path.exists(name)
    with pytest.raises(zmq.ZMQError, match="in use"):
        Receiver.bind(secret, 1, ctx)
    receiver.close()


def test_no_address_follows_from_another(ctx: zmq.Context[Any]) -> None:
    secret = new_secret("tokenizer")
    receivers = [Receiver.bind(secret, epoch, ctx) for epoch in (1, 2)]
    first, second = names_of("tokenizer-1") + names_of("tokenizer-2")
    assert first.removesuffix("1") != second.removesuffix("2")
    assert not any(part in first + second for part in secret.split("-")[1:])
    assert new_secret("tokenizer") != secret
    for receiver in receivers:
        receiver.close()


def names_of(stage_and_epoch: str) -> list[str]:
    """The channels that this process holds."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sorted({line[-1] for line in lines if f"socket:[{line[6]}]" in mine and line[-1].endswith(stage_and_epoch)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_let_in(ctx: zmq.Context[Any]) -> None:
    receiver = Receiver.bind(new_secret("frontend"), 1, ctx)
    (name,) = names_of("frontend-1")
    assert [greets(name, user) for user in (0, NOBODY)] == [True, False]
    receiver.close()


def greets(name: str, user: int) -> bool:
    """Whether ZeroMQ says a word to a process of that user."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(20)
                s.connect(name.replace("@", "\0", 1))
                os._exit(len(s.recv(1)))
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1)
    return status == 1


def test_the_descriptor_becomes_readable(ctx: zmq.Context[Any]) -> None:
    secret = new_secret("tokenizer")
    receiver = Receiver.bind(secret, 1, ctx)
    poller = zmq.Poller()
    poller.register(receiver.socket, zmq.POLLIN)
    assert receiver.fileno >= 0
    sender = Sender(ctx, secret, 1)
    sender.send({"a": 1})
    assert poller.poll(10_000)
    assert receiver.recv_all() == [{"a": 1}]


def test_the_asyncio_receiver() -> None:
    async def main() -> list[Any]:
        secret = new_secret("frontend")
        receiver = AsyncReceiver.bind(secret, 1)
        sender = Sender(zmq.Context.instance(), secret, 1)
        waiting = asyncio.create_task(receiver.recv())
        await asyncio.sleep(0)
        for i in range(3):
            sender.send({"i": i})
        messages = [await waiting, await receiver.recv(), await receiver.recv()]
        receiver.close()
        sender.close()
        return messages

    assert asyncio.run(asyncio.wait_for(main(), 20)) == [{"i": 0}, {"i": 1}, {"i": 2}]
