"""Channels: order, and receivers that come late or come back."""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from shm.channel import AsyncReceiver, Receiver, Sender, new_address


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
    address = new_address("tokenizer")
    sender = Sender(ctx, address, 1)
    wanted = [{"op": "generate", "row": i, "text": "ä" * (i % 7), "params": {"stop": ["a"]}} for i in range(3000)]
    for message in wanted[:2000]:
        sender.send(message)
    receiver = Receiver.bind(address, 1, ctx)
    for message in wanted[2000:]:
        sender.send(message)
    assert collect(receiver, len(wanted)) == wanted
    assert receiver.recv_all() == []
    assert not receiver.wait(0)


def test_nothing_that_is_sent_to_a_successor_is_lost(ctx: zmq.Context[Any]) -> None:
    """Though it is sent in the same breath in which the one before died, and its connection looks alive."""
    address = new_address("frontend")
    sender = Sender(ctx, address, 1)
    for round_ in range(20):
        life = zmq.Context()  # a process of its own
        receiver = Receiver.bind(address, round_ + 1, life)
        sender.turn_to(round_ + 1)
        sender.send({"round": round_})
        assert collect(receiver, 1) == [{"round": round_}]
        receiver.close()
        life.term()


def test_several_senders_share_a_receiver(ctx: zmq.Context[Any]) -> None:
    address = new_address("frontend")
    receiver = Receiver.bind(address, 1, ctx)
    senders = [Sender(ctx, address, 1) for _ in range(3)]
    for i, sender in enumerate(senders):
        for j in range(50):
            sender.send({"from": i, "n": j})
    messages = collect(receiver, 150)
    for i in range(3):
        assert [m["n"] for m in messages if m["from"] == i] == list(range(50))


def test_an_address_belongs_to_one_process_and_is_no_file(ctx: zmq.Context[Any]) -> None:
    address = new_address("tokenizer")
    assert address.startswith("ipc://@stepahead-")
    assert address != new_address("tokenizer")
    receiver = Receiver.bind(address, 1, ctx)
    assert not os.path.exists(address.removeprefix("ipc://"))
    with pytest.raises(zmq.ZMQError, match="in use"):
        Receiver.bind(address, 1, ctx)
    receiver.close()


def test_the_descriptor_becomes_readable(ctx: zmq.Context[Any]) -> None:
    address = new_address("tokenizer")
    receiver = Receiver.bind(address, 1, ctx)
    poller = zmq.Poller()
    poller.register(receiver.socket, zmq.POLLIN)
    assert receiver.fileno >= 0
    sender = Sender(ctx, address, 1)
    sender.send({"a": 1})
    assert poller.poll(10_000)
    assert receiver.recv_all() == [{"a": 1}]


def test_the_asyncio_receiver() -> None:
    async def main() -> list[Any]:
        address = new_address("frontend")
        receiver = AsyncReceiver.bind(address, 1)
        sender = Sender(zmq.Context.instance(), address, 1)
        waiting = asyncio.create_task(receiver.recv())
        await asyncio.sleep(0)
        for i in range(3):
            sender.send({"i": i})
        messages = [await waiting, await receiver.recv(), await receiver.recv()]
        receiver.close()
        sender.close()
        return messages

    assert asyncio.run(asyncio.wait_for(main(), 20)) == [{"i": 0}, {"i": 1}, {"i": 2}]
