"""The listening socket, bound before anything else is started.

Owns its making alone: the frontend accepts on it. It may never be bound with SO_REUSEPORT, which would let two servers
share a port without either noticing.
"""

from __future__ import annotations

import errno
import socket

from shm.child import StartupError

BACKLOG = 2048
PORT_MAX = 65535


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket on the first address of `host`; port 0 = any free one.

    Raises StartupError, with one line for the user, for a port in use, an unknown host or a missing right.
    """
    if not 0 <= port <= PORT_MAX:
        raise StartupError(f"--port: must be 0 to {PORT_MAX}, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise StartupError(f"--host {host}: no such address ({error})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use: stop what listens there, or choose --port") from error
        raise StartupError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listener
