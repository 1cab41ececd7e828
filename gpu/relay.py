"""The relay: what one step leaves on the device for the next, one entry per running request.

Owns each entry's length and newest token. The CPU names entries and never learns what is in them in time to hand it
over, so a step can be queued before the one in front of it has produced anything. Entry 0 belongs to no request:
padded rows read and write it, and it stays at length 0. Never touched by any stream but the forward stream.

An entry needs no clearing when its request ends: the next one's last chunk publishes and stashes before any decode
step reads it. In poison mode that is proven instead of believed: a chunk marks its entry with -1, and so does every
read of a token; reading a marked entry is a device error.
"""

import numpy as np

from gpu.device.protocol import Device, Regions


class Relay:
    """length i32[entries]: tokens in the KV cache. token i32[entries]: the newest token, which is not in it yet."""

    def __init__(self, device: Device, entries: int, *, poison: bool) -> None:
        self.length = device.buffer((entries,), np.int32, "relay.length")
        self.token = device.buffer((entries,), np.int32, "relay.token")
        self.poison = poison

    @property
    def regions(self) -> Regions:
        """All of it."""
        return (self.length.region(), self.token.region())
