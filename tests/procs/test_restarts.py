"""Deaths in a row, hangs seen from outside, and what the log says: decisions over times that the test makes up."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

from procs.child_specs import CHILD_SPECS
from procs.restarts import (
    ASLEEP_SECONDS,
    LATE_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    STOPPED_BY_SIGNAL,
    TOLD_SECONDS,
    Deaths,
    Look,
    Obituaries,
    Pulse,
    is_sound,
    look_at,
)
from shm.control import STAGES

SPEC = CHILD_SPECS[0]


def test_deaths_in_a_row_wait_longer_and_longer_and_are_bounded() -> None:
    deaths = Deaths(SPEC)
    waits = [deaths.died(at * 0.1, 0.0) for at in range(SPEC.deaths_in_a_row_max + 1)]
    assert waits[:3] == [0.0, 0.0, 0.1] and waits[-1] is None and None not in waits[:-1]
    assert waits[:-1] == sorted(waits[:-1], key=lambda wait: wait or 0.0)


def test_who_has_served_begins_a_new_row_but_not_for_ever() -> None:
    deaths = Deaths(SPEC)
    assert all(deaths.died(at * 2.0, 1.5) == 0.0 for at in range(100)), "one every other second"
    deaths = Deaths(SPEC)
    waits = [deaths.died(at * 0.5, 1.5) for at in range(SPEC.deaths_a_minute_max + 1)]
    assert waits.index(None) == SPEC.deaths_a_minute_max


def test_a_request_that_was_given_up_explains_the_deaths_before_it() -> None:
    """However often: a client that tries again and again does not end the server."""
    deaths = Deaths(SPEC)
    rows = []
    for at in range(4 * SPEC.deaths_a_minute_max):
        assert deaths.died(at * 0.1, 0.0, given_up=at // 4) is not None
        rows.append(deaths.in_a_row)
    assert rows == [1, 2, 3, 4] * SPEC.deaths_a_minute_max


def test_deaths_that_no_request_explains_go_on_counting() -> None:
    deaths = Deaths(SPEC)
    now_s = 0.0
    for _ in range(SPEC.deaths_a_minute_max - 1):  # each a row by itself
        assert deaths.died(now_s := now_s + 0.1, 1.5) is not None
    assert deaths.died(now_s, 0.0) is not None, "the last one that there may be"
    assert deaths.died(now_s, 0.0, given_up=1) is not None, "it was that of a request, as was the one before"
    assert deaths.died(now_s, 1.5, given_up=1) is not None
    assert deaths.died(now_s, 1.5, given_up=1) is None, "the others were not"


def test_what_was_too_many_is_told() -> None:
    deaths = Deaths(SPEC)
    while deaths.died(0.0, 0.0) is not None:
        pass
    assert deaths.told == f"{SPEC.deaths_in_a_row_max + 1} times in a row"
    deaths, now_s = Deaths(SPEC), 0.0
    while deaths.died(now_s, 1.5) is not None:
        now_s += 0.5
    assert deaths.told == f"{SPEC.deaths_a_minute_max + 1} times within a minute"


class Patient:
    """A pulse that is felt at every look, with what the test says of the process."""

    def __init__(self, asleep_s: float = math.inf) -> None:
        self.look = Look("S", 0)
        self.pulse = Pulse(lambda: self.look, asleep_s)
        self.now_s = 100.0

    def feel(self, beat_ns: int, seconds: float = LOOK_SECONDS) -> str | None:
        self.now_s += seconds
        return self.pulse.hangs(self.now_s, beat_ns)

    def until_dead(self, beat_ns: int, most_s: float, ticks: bool = False) -> float | None:
        """Seconds from the last heartbeat to the verdict."""
        began_s = self.now_s
        while self.now_s < began_s + most_s:
            if ticks:
                self.look = Look(self.look.state, self.look.ticks + 1)
            if self.feel(beat_ns):
                return self.now_s - began_s
        return None


def test_a_stopped_process_is_dead_within_two_heartbeats() -> None:
    patient = Patient()
    assert patient.feel(1) is None
    patient.look = Look("T", 5)
    found_s = patient.until_dead(1, 1.0)
    assert found_s is not None and found_s <= 0.1


def test_a_process_that_beats_is_alive_whatever_it_looks_like() -> None:
    patient = Patient()
    patient.look = Look("T", 5)
    assert all(patient.feel(beat) is None for beat in range(1, 100))


def test_asleep_without_heartbeat_or_tick_is_dead_and_at_work_is_not() -> None:
    patient = Patient()
    patient.feel(1)
    found_s = patient.until_dead(1, 5.0)
    assert found_s is not None and ASLEEP_SECONDS <= found_s < ASLEEP_SECONDS + 0.2
    for state, ticks in (("R", True), ("S", True), ("D", False), ("t", False)):
        patient = Patient()
        patient.look = Look(state, 0)
        patient.feel(1)
        assert patient.until_dead(1, SILENT_SECONDS - 1.0, ticks) is None, state
        dead = patient.until_dead(1, 3.0, ticks) is not None
        assert dead == (state != "t"), "a debugger may take its time"


def test_who_does_not_look_counts_no_time() -> None:
    """The whole server was frozen, or the machine asleep: nobody had a chance to beat."""
    patient = Patient()
    patient.feel(1)
    assert patient.feel(1, 3600.0) is None
    assert patient.feel(1) is None and patient.feel(2) is None


def test_who_was_frozen_with_the_one_that_looks_may_go_on_a_little_later() -> None:
    patient = Patient()
    patient.look = Look("T", 0)
    patient.feel(1)
    assert patient.feel(2, 5.0) is None, "its last heartbeat is news, and old"
    assert 0.9 < (patient.until_dead(2, 3.0) or 0) < 1.1


def test_a_process_that_starts_gives_no_sign_yet_but_must_not_be_stopped() -> None:
    patient = Patient()
    assert patient.until_dead(0, 2 * SILENT_SECONDS) is None
    patient.look = Look("T", 0)
    assert patient.until_dead(0, 1.0) is not None


def test_a_process_that_is_started_again_may_not_sleep_for_long() -> None:
    assert Patient(15.0).until_dead(0, 14.9) is None
    assert Patient(15.0).until_dead(0, 600.0, ticks=True) is None, "it is at work"
    assert 15 <= (Patient(15.0).until_dead(0, 16.0) or 0) < 15.2


def test_a_process_is_looked_at() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 5
        while (look := look_at(process.pid)) is None or look.state != "T":
            assert time.monotonic() < end
    finally:
        process.kill()
        process.wait()
    assert look_at(process.pid) is None
    own = look_at(os.getpid())
    assert own is not None and own.state == "R"


def test_each_death_gets_one_line() -> None:
    counts = {"rerun_total": 4, "requeued_total": 0}
    told = Obituaries(lambda _stage, name: counts[name])
    assert list(told.died("gpu", "killed", 10.0)) == []
    assert list(told.due(11.0)) == []
    told.is_back("gpu", 2, 12.0)
    counts["rerun_total"] += 3
    assert list(told.due(12.1)) == [], "the others are still at it"
    assert list(told.due(12.0 + TOLD_SECONDS)) == [
        "gpu died (killed), back after 2.00 s in epoch 2; 3 requests were queued again"
    ]
    assert list(told.due(20.0)) == list(told.rest()) == []
    told.is_back("scheduler", 1, 1.0)
    assert list(told.rest()) == [], "a first start is no return"


def test_deaths_that_overlap_get_their_lines_too() -> None:
    told = Obituaries(lambda _stage, _name: 0)
    list(told.died("gpu", "one", 10.0))
    assert list(told.died("gpu", "two", 10.5)) == ["gpu died (one), and again 0.50 s later while it started"]
    told.is_back("gpu", 3, 12.0)
    assert list(told.died("gpu", "three", 12.1)) == [
        "gpu died (two), back after 1.50 s in epoch 3; 0 requests were queued again"
    ]
    late = list(told.due(12.1 + LATE_SECONDS))
    assert late == ["gpu died (three); it is not back after 5 s, requests wait for it"]
    assert list(told.due(30.0)) == []
    assert list(told.rest()) == ["gpu died (three) and did not come back"]


KILLED = (-signal.SIGKILL, -signal.SIGTERM)
ERRORS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE, 0, 1)


def test_caches_are_sound_only_behind_a_gpu_process_that_was_killed_from_outside() -> None:
    assert all(is_sound("gpu", "host", status, "", "") for status in KILLED)
    assert not any(is_sound("gpu", "host", status, "", "") for status in ERRORS)
    assert not any(is_sound("gpu", "host", status, "device host: no", "") for status in (*KILLED, *ERRORS))
    assert not any(is_sound("gpu", "cuda", status, "", "") for status in (*KILLED, *ERRORS))


def test_who_was_stopped_has_done_nothing_wrong_and_who_hung_may_have() -> None:
    for state, sound in (("T", True), ("S", False)):
        patient = Patient()
        patient.look = Look(state, 0)
        told = next(filter(None, (patient.feel(1) for _ in range(100))))
        assert is_sound("gpu", "host", -signal.SIGKILL, "", told) == sound


def test_tables_are_sound_unless_the_scheduler_found_an_error_itself() -> None:
    assert all(is_sound("scheduler", "host", status, "", "") for status in (*KILLED, *ERRORS))
    assert is_sound("scheduler", "cuda", -signal.SIGKILL, "", "hung: asleep")
    assert not is_sound("scheduler", "host", 1, "AssertionError: page freed twice", "")


def test_nothing_is_sound_behind_one_of_which_nobody_knows_how_it_ended() -> None:
    assert not any(is_sound(stage, "host", None, "", hung) for stage in STAGES for hung in ("", STOPPED_BY_SIGNAL))
