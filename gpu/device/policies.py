"""Policies: which of the things that a device may do next it does, and how far it comes before the host goes on.

Owns the choices of the adversary and nothing of its state. A policy is asked with the names of what may run now:
streams, and `CALLS` for the next host function. It is used for one run.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Protocol

CALLS = "calls"


class Policy(Protocol):
    """How one run goes."""

    name: str
    hurries: bool  # whether more than what the host waits for may run while it waits

    def between(self, enabled: Sequence[str]) -> int | None:
        """Asked again and again between two calls of the host: what to run, as an index, or None: the host's turn."""

    def choose(self, enabled: Sequence[str]) -> int:
        """Asked while the host waits: what to run, as an index."""


class Eager:
    """Everything runs as soon as it may: the device never lags behind."""

    name = "eager"
    hurries = True

    def between(self, enabled: Sequence[str]) -> int | None:
        """The first."""
        return 0

    def choose(self, enabled: Sequence[str]) -> int:
        """The first."""
        return 0


class Lazy:
    """Nothing runs before all has been issued, or the host waits for it. Then `rushed`, if any, runs ahead of all."""

    hurries = False

    def __init__(self, rushed: str = "") -> None:
        self.name = f"lazy, then {rushed} first" if rushed else "lazy"
        self._rushed = rushed

    def between(self, enabled: Sequence[str]) -> int | None:
        """Nothing."""
        return None

    def choose(self, enabled: Sequence[str]) -> int:
        """The rushed one as long as it may run."""
        return enabled.index(self._rushed) if self._rushed in enabled else 0


class Starving:
    """Everything but one runs at once; that one only when nothing else can, one operation at a time."""

    hurries = True

    def __init__(self, starved: str) -> None:
        self.name = f"starving {starved}"
        self._starved = starved

    def between(self, enabled: Sequence[str]) -> int | None:
        """Another one, if there is one."""
        at = self.choose(enabled)
        return None if enabled[at] == self._starved else at

    def choose(self, enabled: Sequence[str]) -> int:
        """Another one before the starved one."""
        return next((i for i, name in enumerate(enabled) if name != self._starved), 0)


class Seeded:
    """Chance decides, the same way every time for one seed. Some are much faster than others, in every run anew."""

    hurries = True

    def __init__(self, seed: int) -> None:
        self.name = f"seed {seed}"
        self._random = random.Random(seed)
        self._stops = self._random.choice((0.02, 0.1, 0.3, 0.7))  # how soon it is the host's turn
        self._speeds: dict[str, float] = {}

    def between(self, enabled: Sequence[str]) -> int | None:
        """Any, or none."""
        return None if self._random.random() < self._stops else self.choose(enabled)

    def choose(self, enabled: Sequence[str]) -> int:
        """Any, the fast ones more often."""
        for name in enabled:
            if name not in self._speeds:
                self._speeds[name] = self._random.choice((0.01, 0.2, 1.0, 1.0, 5.0))
        return self._random.choices(range(len(enabled)), [self._speeds[name] for name in enabled])[0]


def policies(streams: Sequence[str], seeds: int) -> Iterator[Policy]:
    """The ones worth trying: eager, lazy, each stream and the calls ahead of all and behind all, and chance."""
    yield Eager()
    yield Lazy()
    for name in (*streams, CALLS):
        yield Lazy(name)
        yield Starving(name)
    for seed in range(seeds):
        yield Seeded(seed)
