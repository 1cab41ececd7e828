"""Standbys of a real server: they take the place of stages that die, come again, disturb nothing, and end with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_server import LiveServer, descendants, live_server, process_titles, spawn, wait_ready
from tests.e2e.stories import STAGES, Story, all_at_once, body, health, pid_of, tell, wait_for, wait_whole
from tests.e2e.test_faults import alive
from tests.model_factory import TinyLlama

pytestmark = pytest.mark.model
MODEL = "tiny"
ALL = (*STAGES, "frontend")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(seed=1).write_hf(tmp_path_factory.mktemp("tiny") / "model")


def options(path: Path) -> list[str]:
    return [str(path), "--served-model-name", MODEL, "--max-len", "512"]


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[LiveServer]:
    with live_server(*options(path)) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(server: LiveServer) -> list[Story]:
    return all_at_once(server, MODEL).end()


def standbys(server: LiveServer) -> dict[str, int]:
    """Stage -> pid of its standby."""
    found = {}
    for pid in descendants(server.process.pid):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        if title.startswith("stepahead: ") and title.endswith(" (standby)"):
            found[title.removeprefix("stepahead: ").removesuffix(" (standby)")] = pid
    return found


def complete(server: LiveServer) -> dict[str, int]:
    """The standbys, once all of them are prepared."""
    wait_for(lambda: server.metrics()["stepahead_standbys"] == len(ALL), "standbys")
    assert server.metrics()["stepahead_standbys_wanted"] == len(ALL)
    return standbys(server)


@pytest.mark.parametrize("stage", ALL)
def test_the_standby_is_the_successor(server: LiveServer, wanted: list[Story], stage: str) -> None:
    before = complete(server)
    assert sorted(before) == sorted(ALL)
    telling = all_at_once(server, MODEL, max_tokens=48 if stage != "frontend" else 400)
    telling.wait_tokens(3)
    os.kill(pid_of(server, stage), signal.SIGKILL)
    stories = telling.end()
    assert stories == wanted or stage == "frontend"
    wait_whole(server)
    assert pid_of(server, stage) == before[stage]
    after = complete(server)
    assert {name for name in ALL if after[name] != before[name]} == {stage}
    server.wait_idle()
    assert all_at_once(server, MODEL).end() == wanted, "and afterwards all is as before"


@pytest.mark.parametrize("stage", ALL)
def test_sigterm_from_somebody_else_than_the_supervisor_is_a_death(
    server: LiveServer, wanted: list[Story], stage: str
) -> None:
    complete(server)
    restarts = health(server)[stage]["restarts"]
    telling = all_at_once(server, MODEL, max_tokens=48 if stage != "frontend" else 400)
    telling.wait_tokens(3)
    for name in ALL:
        os.kill(pid_of(server, name), signal.SIGINT)  # of which stages take no notice
    pid = pid_of(server, stage)
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: pid_of(server, stage) != pid, "end of the process", 10)
    if stage == "frontend":
        assert tell(server, body(0, MODEL)) == wanted[0], "new clients wait for the next one"
        assert any(story.end.startswith("broken") for story in telling.end())
    else:
        assert telling.end() == wanted
    after = wait_whole(server)
    assert (after[stage]["restarts"], after[stage]["last_reason"]) == (restarts + 1, "killed by SIGTERM")
    server.wait_idle()


@pytest.mark.parametrize("stage", ALL)
def test_a_standby_that_dies_is_not_missed(server: LiveServer, wanted: list[Story], stage: str) -> None:
    before, restarts = complete(server), {name: told["restarts"] for name, told in health(server).items()}
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    os.kill(before[stage], signal.SIGKILL)
    assert telling.end() == wanted
    wait_for(lambda: standbys(server).get(stage, before[stage]) != before[stage], "new standby")
    complete(server)
    assert {name: told["restarts"] for name, told in health(server).items()} == restarts
    assert f"the standby of {stage} died (killed by SIGKILL" in server.text()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_and_its_standby_at_once(server: LiveServer, wanted: list[Story], stage: str) -> None:
    before = complete(server)
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    os.kill(before[stage], signal.SIGKILL)
    os.kill(pid_of(server, stage), signal.SIGKILL)
    assert telling.end() == wanted
    wait_whole(server)
    complete(server)


def test_a_server_that_does_nothing_has_standbys_that_do_nothing(server: LiveServer) -> None:
    there = complete(server)
    server.wait_idle()

    def ticks() -> int:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in there.values()]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats)

    before = ticks()
    time.sleep(2)
    assert ticks() == before


@pytest.mark.parametrize("signals", [1, 2])
def test_nothing_is_left_of_them(path: Path, signals: int) -> None:
    server = wait_ready(spawn(*options(path)))
    complete(server)
    pids = descendants(server.process.pid)
    assert len(pids) == 2 * len(ALL)
    telling = all_at_once(server, MODEL, max_tokens=400)
    telling.wait_tokens(3)
    for _ in range(signals):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert server.process.wait(60) == (0 if signals == 1 else 128 + signal.SIGTERM), server.text()
    telling.end()
    wait_for(lambda: not [pid for pid in pids if alive(pid)], "end of all", 5)


def test_a_signal_to_all_processes_at_once_ends_the_server_and_no_request(path: Path, wanted: list[Story]) -> None:
    """As a manager of services sends it; to the supervisor last, which is the worst order."""
    server = wait_ready(spawn(*options(path), "--drain-seconds", "240"))
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    for pid in [*process_titles(server.process.pid).values()][::-1]:
        os.kill(pid, signal.SIGTERM)
    refused = "503: the server is shutting down"  # who had not been opened yet
    assert all(story in (right, Story(end=refused)) for story, right in zip(telling.end(), wanted, strict=True))
    assert server.process.wait(60) == 0, server.text()


def test_none_without_them(path: Path) -> None:
    with live_server(*options(path), "--no-standby") as server:
        wanted = all_at_once(server, MODEL).end()
        assert server.metrics()["stepahead_standbys_wanted"] == 0
        telling = all_at_once(server, MODEL)
        telling.wait_tokens(3)
        os.kill(pid_of(server, "scheduler"), signal.SIGKILL)
        assert telling.end() == wanted
        wait_whole(server)
        assert not standbys(server)
        assert len(process_titles(server.process.pid)) == len(descendants(server.process.pid)) + 1
