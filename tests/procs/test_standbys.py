"""Standbys: which is started when, and a server of fake stages with them: who takes whose place, and what is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procs.standbys import Plan
from tests.procs.fake_server import CALM_SECONDS, spec
from tests.procs.test_supervisor import FRONTEND, GPU, Server, runs

SPECS = [spec("gpu", ""), spec("frontend", "")]
CALM_S = 100.0
LATER_S = CALM_S + CALM_SECONDS
WAIT_SECONDS = 30.0


def test_they_are_started_one_at_a_time_and_only_when_all_is_calm() -> None:
    plan = Plan(SPECS)
    assert plan.next(LATER_S, None, {}) is None, "a stage does not serve"
    assert plan.next(CALM_S + CALM_SECONDS / 4, CALM_S, {}) is None, "one has just come back"
    assert plan.next(CALM_S + CALM_SECONDS / 2, CALM_S, {}) == "frontend", "this one leaves less to be done again"
    assert plan.next(LATER_S, CALM_S, {}) == "gpu"
    assert plan.next(LATER_S, CALM_S, {"gpu": False}) is None, "one is being prepared"
    assert plan.next(LATER_S, CALM_S, {"gpu": True}) == "frontend"
    assert plan.next(LATER_S, CALM_S, {"gpu": True, "frontend": True}) is None
    assert plan.wanted == 2


def test_one_that_dies_is_started_again_later_and_not_for_ever() -> None:
    plan = Plan(SPECS)
    now_s = LATER_S
    assert plan.died("gpu", now_s, 0.0) == 0.05
    assert plan.next(now_s, CALM_S, {}) == "frontend", "the others need not wait for it"
    assert plan.next(now_s + 0.05, CALM_S, {}) == "gpu"
    assert plan.died("gpu", now_s, 0.0) == 0.05
    assert plan.died("gpu", now_s, 10.0) == 0.05, "it had stood by: a new row of deaths"
    assert plan.died("gpu", now_s, 0.0) == 0.05
    assert plan.died("gpu", now_s, 0.0) is None
    assert plan.next(now_s + 10**6, CALM_S, {"frontend": True}) is None
    assert plan.wanted == 1


def test_without_standbys_none_is_wanted() -> None:
    assert (Plan([]).wanted, Plan([]).next(LATER_S, CALM_S, {})) == (0, None)


@given(st.lists(st.tuples(st.sampled_from(["gpu", "frontend"]), st.floats(0, 3), st.floats(0, 3))))
def test_whatever_dies_when_there_are_never_two_of_a_stage_nor_more_deaths_in_a_row_than_allowed(
    deaths: list[tuple[str, float, float]],
) -> None:
    plan, now_s, row = Plan(SPECS), LATER_S, {"gpu": 0, "frontend": 0}
    for stage, passed_s, stood_s in deaths:
        now_s += passed_s
        row[stage] = 1 if stood_s >= SPECS[0].stable_seconds else row[stage] + 1
        gone = plan.died(stage, now_s, stood_s) is None
        assert gone == (row[stage] > SPECS[0].standby_deaths_in_a_row_max) or len(deaths) > 60
        if gone:
            return
        assert plan.next(now_s + 1, CALM_S, dict.fromkeys(row, True)) is None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def one(*stages: dict[str, object], standby: bool = True) -> Server:
        started.append(Server(tmp_path, *stages, standby=standby))
        started[-1].wait_line("ready")
        return started[-1]

    yield one
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def pid(server: Server, title: str, other_than: int = 0) -> int:
    """Of the child with this title, once there is one; all children are noted, for the end."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        server.note_children()
        found = server.pids.get(f"stepahead: {title}", other_than)
        if found != other_than and runs(found):
            return found
        assert time.monotonic() < deadline, server.pids
        time.sleep(0.01)


def complete(server: Server) -> None:
    """Returns once both stages have a standby."""
    pid(server, "gpu (standby)")
    pid(server, "frontend (standby)")


def end(server: Server) -> list[str]:
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0, server.errors
    return lines


@pytest.mark.parametrize("stage", ["gpu", "frontend"])
def test_the_standby_takes_the_place_of_a_stage_that_dies_and_another_one_comes(
    start: Callable[..., Server], stage: str
) -> None:
    server = start(GPU, FRONTEND)
    standby = pid(server, f"{stage} (standby)")
    complete(server)
    os.kill(pid(server, stage), signal.SIGKILL)
    line = server.wait_line(f"note {stage} died (killed by SIGKILL")
    assert " in epoch 2; " in line
    assert pid(server, stage) == standby
    assert pid(server, f"{stage} (standby)", standby) != standby
    os.kill(standby, signal.SIGKILL)
    assert " in epoch 3; " in server.wait_line(f"note {stage} died (killed by SIGKILL")
    end(server)


def test_a_standby_that_dies_is_nobodys_loss(start: Callable[..., Server]) -> None:
    server = start(GPU, FRONTEND)
    standby, serving = pid(server, "gpu (standby)"), pid(server, "gpu")
    os.kill(standby, signal.SIGKILL)
    line = server.wait_line("note the standby of gpu died (killed by SIGKILL (is memory short?)); ")
    assert line.endswith("another one is started in 0.05 s")
    standby = pid(server, "gpu (standby)", standby)
    os.kill(standby, signal.SIGTERM)
    server.wait_line("note the standby of gpu died (ended with status 0, without a reason)")
    pid(server, "gpu (standby)", standby)
    assert pid(server, "gpu") == serving
    assert not [line for line in end(server) if line.startswith("note gpu died")]


@pytest.mark.parametrize("order", [("gpu", "gpu (standby)"), ("gpu (standby)", "gpu")])
def test_a_stage_and_its_standby_at_once(start: Callable[..., Server], order: tuple[str, str]) -> None:
    server = start(GPU, FRONTEND)
    complete(server)
    for title in order:
        os.kill(server.pids[f"stepahead: {title}"], signal.SIGKILL)
    killed = {server.pids[f"stepahead: {title}"] for title in order}
    assert pid(server, "gpu", server.pids["stepahead: gpu"]) not in killed
    pid(server, "gpu (standby)", server.pids["stepahead: gpu (standby)"])
    lines = end(server)
    assert [line for line in lines if line.startswith("note gpu died")]
    assert not [line for line in lines if line.startswith("failed")]


def test_who_is_not_prepared_yet_gets_the_word_early(start: Callable[..., Server]) -> None:
    server = start({"stage": "gpu", "fake": "as standby: dawdle"}, FRONTEND)
    standby = pid(server, "gpu (standby)")
    os.kill(pid(server, "gpu"), signal.SIGKILL)
    server.wait_line("note gpu died")
    assert pid(server, "gpu") == standby
    end(server)


def test_a_standby_that_was_stopped_is_found_out_when_it_is_needed(start: Callable[..., Server]) -> None:
    server = start(GPU, FRONTEND)
    standby = pid(server, "gpu (standby)")
    complete(server)
    os.kill(standby, signal.SIGSTOP)
    os.kill(pid(server, "gpu"), signal.SIGKILL)
    server.wait_line("note gpu died (stopped by a signal), back after ")
    assert pid(server, "gpu") != standby
    end(server)


@pytest.mark.parametrize(
    ("how", "reason"), [("exit 3", "ended with status 3, without a reason"), ("user's fault", "the file is broken")]
)
def test_standbys_that_cannot_live_are_given_up_and_the_server_goes_on(
    start: Callable[..., Server], how: str, reason: str
) -> None:
    server = start({"stage": "gpu", "fake": f"as standby: {how}"}, FRONTEND)
    server.wait_line(f"note the standby of gpu died ({reason}); there will be no other one")
    pid(server, "frontend (standby)")
    os.kill(pid(server, "gpu"), signal.SIGKILL)
    server.wait_line("note gpu died (killed by SIGKILL (is memory short?)), back after ")
    lines = end(server)
    assert len([line for line in server.lines if line.startswith("note the standby of gpu")]) == 3
    assert not [line for line in lines if line.startswith("failed")]


def test_standbys_end_with_the_server_however_it_ends(start: Callable[..., Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "frontend 3 60"})
    complete(server)
    assert len([title for title in server.pids if title.endswith("(standby)")]) == 2
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("note finishing")
    time.sleep(0.15)
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 128 + signal.SIGTERM
    server = start(GPU, FRONTEND)
    complete(server)
    server.process.kill()
    assert server.end()[0] == -signal.SIGKILL


def test_there_are_none_if_none_are_wanted(start: Callable[..., Server]) -> None:
    server = start(GPU, FRONTEND, standby=False)
    time.sleep(2 * CALM_SECONDS)
    server.note_children()
    os.kill(pid(server, "gpu"), signal.SIGKILL)
    server.wait_line("note gpu died")
    time.sleep(2 * CALM_SECONDS)
    server.note_children()
    assert not [title for title in server.pids if "standby" in title]
    end(server)
