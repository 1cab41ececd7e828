"""The line to the tokenizer: everything that it was asked and has not answered, so that its death loses none of it.

Owns the channel to the tokenizer, and which of its messages are heard: those of the process that lives. What a
tokenizer left unanswered is told to the next one. What two of them left unanswered when they died is suspect, and told
alone, so that the one request that kills tokenizers is found: it is given up, the others go on. May never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.metrics import Meter
from shm.control import Control

DEATHS_MAX = 2  # of tokenizers that had a message unanswered: from then on it is told alone


class Channel(Protocol):
    """What is needed of a `shm.channel.Sender` here."""

    def send(self, message: dict[str, Any]) -> None: ...

    def turn_to(self, epoch: int) -> None: ...


@dataclass(slots=True)
class _Open:
    """A message without an answer."""

    message: dict[str, Any]
    give_up: Callable[[int], bool]
    told: bool = False  # to the tokenizer that lives
    deaths: int = 0

    @property
    def suspect(self) -> bool:
        return self.deaths >= DEATHS_MAX


class TokenizerLine:
    """Single-threaded: everything runs on the event loop."""

    def __init__(self, control: Control, channel: Channel, meter: Meter) -> None:
        self._meter = meter
        self._control = control
        self._channel = channel
        self._open: dict[Hashable, _Open] = {}
        self._told = 0  # how many of them are
        self._suspects = 0  # how many of them are
        self._epoch = control.epoch("tokenizer")
        channel.turn_to(self._epoch)

    @property
    def epoch(self) -> int:
        """Of the tokenizer whose messages count."""
        return self._epoch

    @property
    def _serves(self) -> bool:
        return self._control.serves("tokenizer") == self._epoch

    def ask(self, key: Hashable, message: dict[str, Any], give_up: Callable[[int], bool]) -> None:
        """Tell the tokenizer, now or once there is one. `give_up(deaths)` is called if it kills tokenizers, and returns
        False if it has to be told all the same. Call `answered` with the same key.
        """
        one = self._open[key] = _Open(message, give_up)
        if self._serves and not self._suspects:
            self._tell(one)

    def answered(self, key: Hashable) -> None:
        """The message needs no answer any more. Harmless for one that is not open."""
        one = self._open.pop(key, None)
        if one is None:
            return
        self._told -= one.told
        if one.suspect:
            self._suspects -= 1
        if self._suspects or one.suspect:
            self._go_on()

    def cancel(self, key: Hashable, message: dict[str, Any]) -> None:
        """Forget a message; `message` says so to a tokenizer that was told."""
        one = self._open.get(key)
        if one is not None and one.told:
            self._channel.send(message)
        self.answered(key)

    def look_around(self) -> None:
        """Find out whether the tokenizer has died, and whether one serves that has not been told. Call after kicks."""
        epoch = self._control.epoch("tokenizer")
        if epoch != self._epoch:
            self._epoch = epoch
            self._channel.turn_to(epoch)
            self._bury()
        if self._told < len(self._open):
            self._go_on()

    def _bury(self) -> None:
        """A tokenizer is dead; whatever it had begun is in the ledger by now, or never will be."""
        left = [(key, one) for key, one in self._open.items() if one.told]
        self._told = 0
        self._meter.resent(len(left))
        for _, one in left:
            one.told = False
            one.deaths += 1
            self._suspects += one.deaths == DEATHS_MAX
        if len(left) == 1 and left[0][1].suspect and left[0][1].give_up(left[0][1].deaths):
            self._meter.gave_up()
            self.answered(left[0][0])

    def _go_on(self) -> None:
        """Tell what is to be told: suspects first, each once nothing else is unanswered, then all the others."""
        if not self._serves:
            return
        if self._suspects:
            if not self._told:
                self._tell(next(one for one in self._open.values() if one.suspect))
            return
        for one in self._open.values():
            if not one.told:
                self._tell(one)

    def _tell(self, one: _Open) -> None:
        one.told = True
        self._told += 1
        self._channel.send(one.message)
