"""The control segment: the state of the server and, for every stage, who it is and whether it lives.

Owns the words by which the supervisor and the stages see each other without a message. Every word has one writer. It
holds nothing about any request.
"""

from __future__ import annotations

import time
from enum import IntEnum

from shm.doorbell import Doorbell
from shm.limits import CACHE_LINE_BYTES, FAILURE_BYTES_MAX, HEADER_BYTES
from shm.segment import Segment, schema_hash

STAGES = ("supervisor", "frontend", "tokenizer", "scheduler", "gpu", "detokenizer")
STAGE_INDEX = {stage: i for i, stage in enumerate(STAGES)}


class ServerState(IntEnum):
    STARTING = 0
    READY = 1
    DRAINING = 2
    FAILED = 3


STARTING, READY, DRAINING, FAILED = ServerState

_LINE_WORDS = CACHE_LINE_BYTES // 8
# Line 1. Writer: supervisor
_STATE, _FAILURE_BYTES = 8, 9
_FAILURE_TEXT = 128  # bytes; FAILURE_BYTES_MAX long
# Two lines for every stage, behind the header
_STAGE_WORDS = 2 * _LINE_WORDS
_EPOCH, _PID, _RESTARTS, _SERVES, _DEATHS, _MEMORY, _STREAK = range(7)  # writer: supervisor
_WAITING, _HEARTBEAT_NS, _HEARS, _AT_WORK = range(_LINE_WORDS, _LINE_WORDS + 4)  # writer: the stage
_BASE = HEADER_BYTES // 8
# Behind the stages' lines: why each of them died, twice, so that the newest text stands still while another is written.
_REASONS = HEADER_BYTES + len(STAGES) * _STAGE_WORDS * 8
_REASON_BYTES = 4 * CACHE_LINE_BYTES  # zero behind the text
_SCHEMA = schema_hash(
    f"{STAGES} {_STATE} {_FAILURE_BYTES} {_FAILURE_TEXT} {_STAGE_WORDS} {_WAITING} {_HEARTBEAT_NS} {_HEARS} "
    f"{_AT_WORK} {_DEATHS} {_MEMORY} {_STREAK} {_REASON_BYTES}"
)

assert _FAILURE_TEXT + FAILURE_BYTES_MAX <= HEADER_BYTES


class Control:
    """A view of the control segment, the same in every process."""

    def __init__(self, segment: Segment) -> None:
        """Attach to the segment, or format it if it is new (the supervisor does, before any child exists)."""
        if not segment.formatted:
            segment.format("control", _SCHEMA)
        segment.check("control", _SCHEMA)
        self.segment = segment
        self.words = segment.words

    @staticmethod
    def size() -> int:
        return _REASONS + len(STAGES) * 2 * _REASON_BYTES

    @property
    def state(self) -> ServerState:
        return ServerState(self.words[_STATE])

    @state.setter
    def state(self, state: ServerState) -> None:
        """Writer: supervisor."""
        self.words[_STATE] = state

    @property
    def failure(self) -> str:
        """Why the server failed; meaningful once `state` is FAILED."""
        raw = bytes(self.segment.buf[_FAILURE_TEXT : _FAILURE_TEXT + self.words[_FAILURE_BYTES]])
        return raw.decode("utf-8", "ignore")

    def fail(self, reason: str) -> None:
        """Store the reason, then the state FAILED. Writer: supervisor."""
        raw = reason.encode("utf-8", "replace")[:FAILURE_BYTES_MAX]
        self.words[_FAILURE_BYTES] = 0
        self.segment.buf[_FAILURE_TEXT : _FAILURE_TEXT + len(raw)] = raw
        self.words[_FAILURE_BYTES] = len(raw)
        self.words[_STATE] = ServerState.FAILED

    def epoch(self, stage: str) -> int:
        """How often the stage was started; 0 = never."""
        return self.words[_word(stage, _EPOCH)]

    def pid(self, stage: str) -> int:
        return self.words[_word(stage, _PID)]

    def restarts(self, stage: str) -> int:
        return self.words[_word(stage, _RESTARTS)]

    def serves(self, stage: str) -> int:
        """The epoch in which the stage was last ready; below `epoch` while it is down or starting."""
        return self.words[_word(stage, _SERVES)]

    def memory(self, stage: str) -> int:
        """The epoch since which the memory that outlives a process of the stage has been sound: its own, or that of a
        predecessor whose work it may go on with. Stored before `epoch`.
        """
        return self.words[_word(stage, _MEMORY)]

    def deaths(self, stage: str) -> int:
        """How often the stage has died, or was killed because it hung."""
        return self.words[_word(stage, _DEATHS)]

    def streak(self, stage: str) -> int:
        """The number of the death that began the stage's latest streak: deaths in a row, between which it never served
        for STABLE_SECONDS and no request was given up. Stored before the epoch that follows a death; 0 = it has not
        died.
        """
        return self.words[_word(stage, _STREAK)]

    def set_streak(self, stage: str, deaths: int) -> None:
        """Writer: supervisor, while no process of the stage lives."""
        self.words[_word(stage, _STREAK)] = deaths

    def last_reason(self, stage: str) -> str:
        """Why the stage died last; empty if it never has."""
        deaths = self.deaths(stage)
        if not deaths:
            return ""
        at = _reason_at(stage, deaths)
        return bytes(self.segment.buf[at : at + _REASON_BYTES]).rstrip(b"\0").decode("utf-8", "ignore")

    def died(self, stage: str, reason: str) -> None:
        """The stage is dead: store why, then that it is. Writer: supervisor."""
        deaths = self.deaths(stage) + 1
        at = _reason_at(stage, deaths)
        raw = reason.encode("utf-8", "replace")[:_REASON_BYTES]
        self.segment.buf[at : at + _REASON_BYTES] = raw.ljust(_REASON_BYTES, b"\0")
        self.words[_word(stage, _PID)] = 0
        self.words[_word(stage, _DEATHS)] = deaths

    def stage_state(self, stage: str) -> str:
        """What the stage does, in a word: "serving", "starting", or "down" while nothing runs but what was killed."""
        if not self.pid(stage):
            return "down"
        return "serving" if self.serves(stage) == self.epoch(stage) else "starting"

    def hears(self, stage: str) -> int:
        """The epoch of the detokenizer whose items the stage takes; older ones it drops, unread."""
        return self.words[_word(stage, _HEARS)]

    def set_epoch(self, stage: str, epoch: int) -> None:
        """Writer: supervisor."""
        self.words[_word(stage, _EPOCH)] = epoch

    def set_memory(self, stage: str, epoch: int) -> None:
        """Writer: supervisor, while no process of the stage lives."""
        self.words[_word(stage, _MEMORY)] = epoch

    def set_pid(self, stage: str, pid: int) -> None:
        """Writer: supervisor. 0 = not running, or killed and not gone yet."""
        self.words[_word(stage, _PID)] = pid

    def set_restarts(self, stage: str, restarts: int) -> None:
        """Writer: supervisor."""
        self.words[_word(stage, _RESTARTS)] = restarts

    def set_serves(self, stage: str, epoch: int) -> None:
        """Writer: supervisor."""
        self.words[_word(stage, _SERVES)] = epoch

    def set_hears(self, stage: str, epoch: int) -> None:
        """Writer: the stage."""
        self.words[_word(stage, _HEARS)] = epoch

    def at_work(self, stage: str) -> bool:
        """Whether the stage has requests in its hands: if it is dead, whether it died of what it did with them, or
        while it waited.
        """
        return bool(self.words[_word(stage, _AT_WORK)])

    def set_at_work(self, stage: str, at_work: bool) -> None:
        """Writer: the stage."""
        self.words[_word(stage, _AT_WORK)] = at_work

    def waiting(self, stage: str) -> bool:
        return bool(self.words[_word(stage, _WAITING)])

    def heartbeat_ns(self, stage: str) -> int:
        """CLOCK_MONOTONIC of the stage's last sign of life; 0 = none yet."""
        return self.words[_word(stage, _HEARTBEAT_NS)]

    def beat(self, stage: str) -> None:
        """Writer: the stage."""
        self.words[_word(stage, _HEARTBEAT_NS)] = time.monotonic_ns()

    def doorbell(self, stage: str, eventfd: int) -> Doorbell:
        """Return the doorbell of `stage` over its eventfd; the waiting flag is written by the stage alone."""
        return Doorbell(eventfd, self.words, _word(stage, _WAITING))


def _word(stage: str, field: int) -> int:
    return _BASE + STAGE_INDEX[stage] * _STAGE_WORDS + field


def _reason_at(stage: str, deaths: int) -> int:
    return _REASONS + (2 * STAGE_INDEX[stage] + deaths % 2) * _REASON_BYTES
