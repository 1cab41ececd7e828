"""Enumeration: every order in which an adversary's queues may run, each one executed.

Owns the walk over all states of a program that has been issued: whatever may run next is tried, one after the other,
and taken back. Two orders that lead to the same state (the same operations have run, and every byte of memory is the
same) go on alike, so each state is walked once; the orders are counted all the same. Only memory that the device knows
is taken back: what host functions leave in Python objects is not, and no outcome may depend on it.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu.device.adversary import AdversaryDevice
from gpu.device.buffers import ArrayBuffer
from gpu.device.guard import plain
from gpu.device.policies import Policy

STATES_MAX = 200_000


class Orders(NamedTuple):
    """What came of all orders."""

    total: int  # orders
    wrong: int  # orders with a wrong outcome, or an error of the device
    states: int  # states walked through


def all_orders(device: AdversaryDevice, is_right: Callable[[], bool], states_max: int = STATES_MAX) -> Orders:
    """Run whatever is queued in every order; `is_right` judges memory once all has run. Leaves everything as it was.

    What was queued must have been issued under a policy that leaves it there, such as `Lazy`. Asserts that there are
    no more than `states_max` states.
    """
    return _Walk(device, is_right, states_max).run()


def wrong_orders(run: Callable[[AdversaryDevice], Any], right: Any, policies: Iterable[Policy], **options: Any) -> int:
    """How many of `policies` make `run(device)` return something other than `right`, or fail.

    `run` issues a program, waits for it and returns what came out. options: for `AdversaryDevice`.
    """
    return sum(_outcome(run, AdversaryDevice(policy, **options)) != right for policy in policies)


def _outcome(run: Callable[[AdversaryDevice], Any], device: AdversaryDevice) -> Any:
    try:
        return run(device)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is a wrong outcome
        return error


class _Walk:
    """One walk, depth first."""

    def __init__(self, device: AdversaryDevice, is_right: Callable[[], bool], states_max: int) -> None:
        self._queues = device.queues
        self._memory = [bytes_of(buffer) for buffer in device.buffers]
        self._is_right = is_right
        self._states_max = states_max
        self._known: dict[Any, tuple[int, int]] = {}  # state -> orders from there on, and how many of them are wrong

    def run(self) -> Orders:
        total, wrong = self._visit()
        return Orders(total, wrong, len(self._known))

    def _visit(self) -> tuple[int, int]:
        queues = self._queues
        enabled = queues.enabled()
        state = self._state()
        if state in self._known:
            return self._known[state]
        assert len(self._known) < self._states_max, "too many states"
        total = wrong = 0
        if not enabled:
            total, wrong = 1, int(queues.error is not None or not self._is_right())
        else:
            progress, memory = queues.progress, [part.copy() for part in self._memory]
            for name in enabled:
                queues.run(name)
                more, bad = self._visit()
                total, wrong = total + more, wrong + bad
                queues.go_back(progress)
                for part, before in zip(self._memory, memory, strict=True):
                    np.copyto(part, before)
        self._known[state] = total, wrong
        return total, wrong

    def _state(self) -> Any:
        positions, calls, error = self._queues.progress
        if error is not None:
            return positions, calls, error[0]  # nothing runs any more, whatever is in memory
        digest = hashlib.blake2b(digest_size=16)
        for part in self._memory:
            digest.update(part.data)
        return positions, calls, digest.digest()


def bytes_of(buffer: ArrayBuffer) -> NDArray[np.uint8]:
    """The memory of a buffer, a view."""
    array = plain(buffer.array)
    if not isinstance(array, np.ndarray):
        import torch

        array = array.reshape(-1).view(torch.uint8).numpy()
    raw: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return raw
