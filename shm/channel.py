"""Channels carry control messages and text between processes: ZeroMQ PUSH to PULL over abstract unix sockets, in JSON.

Owns the sockets and their options. A channel may lose what was under way when a process died, so it may carry nothing
that the ledger cannot rebuild. It never blocks a sender: what is under way is bounded by the rows of the ledger, not by
the socket.

Each process of the receiving stage has an address of its own, by its epoch: what is sent to one that lives can never
end up in the connection to one that has died, whose end the socket need not have noticed.

Everybody on the machine can read the addresses that are in use. So nobody of another user is let in, and which address
a stage's next process will have follows from a secret: nobody else can be there first.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import TYPE_CHECKING, Any

import orjson
import zmq

if TYPE_CHECKING:
    import zmq.asyncio

_RECONNECT_MS = 10  # a receiver that is not there yet is found this soon


def new_secret(stage: str) -> str:
    """Return what the addresses of the receivers of `stage` are made of. It is for the server's processes alone."""
    return f"{stage}-{secrets.token_hex(16)}"


def _address_of(secret: str, epoch: int) -> str:
    """The address of one process: everybody finds it in /proc, where no other follows from it."""
    digest = hashlib.blake2b(f"{secret}-{epoch}".encode(), digest_size=16).hexdigest()
    return f"ipc://@stepahead-{digest}-{secret.partition('-')[0]}-{epoch}"


class Sender:
    """The sending end, for one thread.

    Messages to a receiver that is not there yet are kept until it is. One that dies takes messages with it, and nobody
    is told; `turn_to` its successor, and send again what may be missing. The receiver has to know whom it hears: `mark`
    travels with every message.
    """

    def __init__(self, ctx: zmq.Context[Any], secret: str, epoch: int) -> None:
        """secret: of the receiving stage; epoch: of the receiving process."""
        self._ctx = ctx
        self._secret = secret
        self._epoch = epoch
        self._socket = self._connect()
        self.mark: dict[str, int] = {}  # by whom a message is, and to whom: epochs of the two stages

    def turn_to(self, epoch: int) -> None:
        """Send to this process of the stage from here on; what the one before has not taken is lost."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._socket.close()
            self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        # A plain socket from a zmq.asyncio context, too: sending never has to be awaited.
        socket: zmq.Socket[bytes] = self._ctx.socket(zmq.PUSH, socket_class=zmq.Socket)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(_address_of(self._secret, self._epoch))
        return socket

    def send(self, message: dict[str, Any]) -> None:
        """Send an object that JSON can express. Returns at once; that it arrives is not certain (see above)."""
        self._socket.send(orjson.dumps({**message, **self.mark}), zmq.DONTWAIT)

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """The receiving end, for one thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket  # for zmq.Poller

    @classmethod
    def bind(cls, secret: str, epoch: int, ctx: zmq.Context[Any] | None = None) -> Receiver:
        """Be the process of this epoch; raises zmq.ZMQError if another one is."""
        socket: zmq.Socket[bytes] = (ctx or zmq.Context.instance()).socket(zmq.PULL)
        _bind(socket, _address_of(secret, epoch))
        return cls(socket)

    @property
    def fileno(self) -> int:
        """ZeroMQ's descriptor. It tells of changes only: whenever it was readable, call recv_all."""
        return int(self.socket.fileno())

    def recv_all(self) -> list[Any]:
        """Return every message that has arrived, in order; an empty list if none. Never waits."""
        messages = []
        while True:
            try:
                messages.append(orjson.loads(self.socket.recv(zmq.DONTWAIT)))
            except zmq.Again:
                return messages

    def wait(self, timeout_ms: int) -> bool:
        """Wait until a message is there or the time is over; return whether one is."""
        return bool(self.socket.poll(timeout_ms, zmq.POLLIN))

    def close(self) -> None:
        self.socket.close()


class AsyncReceiver:
    """The receiving end in an asyncio loop."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket

    @classmethod
    def bind(cls, secret: str, epoch: int, ctx: zmq.asyncio.Context | None = None) -> AsyncReceiver:
        """Be the process of this epoch; raises zmq.ZMQError if another one is."""
        import zmq.asyncio  # only the frontend pays for asyncio

        socket = (ctx or zmq.asyncio.Context.instance()).socket(zmq.PULL)
        _bind(socket, _address_of(secret, epoch))
        return cls(socket)

    async def recv(self) -> Any:
        """Wait for the next message."""
        return orjson.loads(await self.socket.recv())

    def close(self) -> None:
        self.socket.close()


def _bind(socket: zmq.Socket[Any] | zmq.asyncio.Socket, address: str) -> None:
    socket.set(zmq.IPC_FILTER_UID, os.geteuid())  # SO_PEERCRED, asked when a connection is accepted
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.bind(address)
