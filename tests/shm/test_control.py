"""The control segment: what the supervisor and the stages see of each other."""

import os
import time

import pytest

from shm.control import DRAINING, FAILED, READY, STAGES, STARTING, Control, ServerState
from shm.doorbell import Doorbell
from shm.limits import FAILURE_BYTES_MAX
from shm.segment import LayoutError, Segment


def make() -> tuple[Control, Control]:
    """Return two views of one segment, as two processes have them."""
    segment = Segment.create("control", Control.size())
    return Control(segment), Control(Segment.attach(segment.fd, segment.size, "control"))


def test_the_state_starts_as_starting_and_is_seen() -> None:
    mine, theirs = make()
    assert theirs.state is STARTING
    for state in (READY, DRAINING, FAILED):
        mine.state = state
        assert theirs.state is state
    assert [int(state) for state in ServerState] == [0, 1, 2, 3]


@pytest.mark.parametrize("reason", ["", "gpu: not enough memory", "ä€😀" * FAILURE_BYTES_MAX])
def test_a_failure_carries_its_reason(reason: str) -> None:
    mine, theirs = make()
    mine.fail("an earlier and longer reason " * 9)
    mine.fail(reason)
    assert theirs.state is FAILED
    assert reason.startswith(theirs.failure)
    assert len(theirs.failure.encode()) >= min(len(reason.encode()), FAILURE_BYTES_MAX - 3)
    assert theirs.epoch("supervisor") == 0, "the text stays in its place"


def test_every_word_of_every_stage_is_its_own() -> None:
    mine, theirs = make()
    for i, stage in enumerate(STAGES):
        mine.set_epoch(stage, 10 + i)
        mine.set_pid(stage, 20 + i)
        mine.set_restarts(stage, 30 + i)
        mine.set_memory(stage, 40 + i)
        bell = mine.doorbell(stage, Doorbell.create_fd())
        if i % 2:
            bell.arm()
        os.close(bell.fileno())
    before = time.monotonic_ns()
    mine.beat("gpu")
    for i, stage in enumerate(STAGES):
        assert (theirs.epoch(stage), theirs.pid(stage), theirs.restarts(stage)) == (10 + i, 20 + i, 30 + i)
        assert theirs.memory(stage) == 40 + i
        assert theirs.waiting(stage) == bool(i % 2)
        assert (theirs.heartbeat_ns(stage) >= before) == (stage == "gpu")
    assert theirs.state is STARTING


def test_an_unknown_stage_is_an_error() -> None:
    mine, _ = make()
    with pytest.raises(KeyError):
        mine.epoch("drafter")


def test_another_segment_is_refused() -> None:
    segment = Segment.create("other", Control.size())
    segment.format("stats", 1)
    with pytest.raises(LayoutError):
        Control(segment)


def test_a_death_and_its_reason() -> None:
    control = make()[0]
    assert control.stage_state("gpu") == "down" and control.last_reason("gpu") == ""
    control.set_epoch("gpu", 1)
    control.set_pid("gpu", 77)
    assert control.stage_state("gpu") == "starting"
    control.set_serves("gpu", 1)
    assert control.stage_state("gpu") == "serving"
    for deaths, reason in enumerate(("killed by SIGKILL", "é" * 1000, "short"), 1):
        control.died("gpu", reason)
        assert control.stage_state("gpu") == "down" and control.deaths("gpu") == deaths
        assert control.last_reason("gpu") == reason[:128]
    assert control.last_reason("scheduler") == "" and control.last_reason("detokenizer") == ""
