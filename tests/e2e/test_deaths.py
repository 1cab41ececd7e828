"""Any stage may be killed while requests run: every answer is the one that it would have been, piece by piece."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests import plain_http
from tests.e2e.live_server import LiveServer, live_server, spawn, wait_ready
from tests.e2e.stories import (
    STAGES,
    Story,
    all_at_once,
    exhaust,
    health,
    kill,
    pid_of,
    wait_for,
    wait_whole,
)

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
PAGE_SIZE = 16
STABLE_SECONDS = 1.1  # a stage that has served for so long begins a new row of deaths


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--max-len", "512") as made:
        yield made


@pytest.fixture(scope="module")
def wanted(server: LiveServer) -> list[Story]:
    return all_at_once(server, MODEL).end()


# Of the other signals one stage each: `stepahead chaos` sends all of them to all, in `test_chaos`.
WAYS = [(stage, how) for stage in STAGES for how in (signal.SIGKILL, signal.SIGSTOP)]
WAYS += [("tokenizer", signal.SIGSEGV), ("detokenizer", signal.SIGABRT)]


@pytest.mark.parametrize(("stage", "how"), WAYS, ids=lambda value: getattr(value, "name", value))
def test_a_death_is_a_pause(server: LiveServer, wanted: list[Story], stage: str, how: signal.Signals) -> None:
    before = health(server)[stage]
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    kill(server, stage, how)
    assert telling.end() == wanted
    after = wait_whole(server)[stage]
    assert (after["restarts"], after["epoch"]) == (before["restarts"] + 1, before["epoch"] + 1)
    assert ("stopped" if how == signal.SIGSTOP else how.name) in after["last_reason"]
    server.wait_idle()
    if how == signal.SIGKILL:
        assert all_at_once(server, MODEL).end() == wanted, "and afterwards all is as before"


@pytest.mark.parametrize("pair", [("gpu", "scheduler"), ("scheduler", "detokenizer"), ("tokenizer", "gpu")])
@pytest.mark.parametrize("apart_s", [0.0, 0.4])
def test_two_stages_at_once_or_during_a_recovery(
    server: LiveServer, wanted: list[Story], pair: tuple[str, str], apart_s: float
) -> None:
    time.sleep(STABLE_SECONDS)
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    for stage in pair:
        kill(server, stage)
        time.sleep(apart_s)
    assert telling.end() == wanted
    wait_whole(server)
    server.wait_idle()


@pytest.mark.parametrize("stage", STAGES)
def test_a_death_during_its_own_start(server: LiveServer, wanted: list[Story], stage: str) -> None:
    time.sleep(STABLE_SECONDS)
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    before = kill(server, stage)
    wait_for(lambda: pid_of(server, stage) != before, "new process")
    kill(server, stage)
    assert telling.end() == wanted
    wait_whole(server)
    server.wait_idle()


KEPT = [("scheduler", signal.SIGKILL, True), ("scheduler", signal.SIGSEGV, True), ("scheduler", signal.SIGSTOP, True)]
KEPT += [("gpu", signal.SIGKILL, True), ("gpu", signal.SIGSTOP, True), ("gpu", signal.SIGSEGV, False)]


def prefilled_again(server: LiveServer, wanted: list[Story], stage: str, how: signal.Signals) -> dict[str, float]:
    """What some counters gain by a death while all requests decode."""
    names = [f"stepahead_scheduler_{name}_total" for name in ("prefill_tokens", "adopted_pages", "rerun", "requeued")]
    time.sleep(STABLE_SECONDS)
    wait_whole(server)
    telling = all_at_once(server, MODEL)
    # Nobody is done before the others have begun: whoever is told whole shows nothing before.
    wait_for(lambda: all(len(story.ids) >= 8 for i, story in enumerate(telling.stories) if i % 4 != 1), "tokens")
    before = server.metrics()
    kill(server, stage, how)
    assert telling.end() == wanted
    wait_whole(server)
    after = server.wait_idle()
    return {name.split("_", 2)[2]: after[name] - before[name] for name in names}


@pytest.mark.parametrize(("stage", "how", "kept"), KEPT, ids=lambda value: getattr(value, "name", str(value)))
def test_pages_that_can_be_right_are_not_computed_again(
    server: LiveServer, wanted: list[Story], stage: str, how: signal.Signals, kept: bool
) -> None:
    gained = prefilled_again(server, wanted, stage, how)
    rows = gained["rerun_total"] + gained["requeued_total"]
    assert rows >= 4, gained
    if kept:
        assert gained["prefill_tokens_total"] <= rows * (PAGE_SIZE + 1), gained
    else:
        assert gained["prefill_tokens_total"] > rows * (PAGE_SIZE + 1), gained
    assert (gained["adopted_pages_total"] > 0) == (stage == "scheduler"), gained


@pytest.fixture
def bare() -> Iterator[LiveServer]:
    with live_server("--max-len", "512", "--no-standby") as made:
        yield made


def test_health_ready_and_metrics_tell_of_a_death(bare: LiveServer) -> None:
    server = bare  # without standbys: a stage is away for long enough to be seen away
    before = wait_whole(server)["gpu"]
    kill(server, "gpu")
    began = time.monotonic()
    wait_for(lambda: health(server)["gpu"]["state"] != "serving", "death in /health")
    print(f"told {time.monotonic() - began:.3f} s after the death")
    assert plain_http.get(server.url + "/ready").json()["status"] == "recovering"
    metrics = plain_http.get(server.url + "/metrics").text
    assert 'stepahead_stage_up{stage="gpu"} 0.0' in metrics
    told = health(server)["gpu"]
    assert told["epoch"] in (before["epoch"], before["epoch"] + 1) and "SIGKILL" in told["last_reason"]
    after = wait_whole(server)["gpu"]
    assert after["restarts"] == before["restarts"] + 1 and after["epoch"] == before["epoch"] + 1
    assert plain_http.get(server.url + "/ready").json()["status"] == "ready"
    metrics = plain_http.get(server.url + "/metrics").text
    assert f'stepahead_stage_restarts_total{{stage="gpu"}} {after["restarts"]}.0' in metrics
    assert 'stepahead_stage_last_death{reason="killed by SIGKILL' in metrics


def test_the_log_has_a_line_for_each_death(server: LiveServer) -> None:
    time.sleep(STABLE_SECONDS)
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    before = sum(stage["restarts"] for stage in wait_whole(server).values())
    kill(server, "gpu", signal.SIGSEGV)
    telling.end()
    wait_for(lambda: server.text().count("gpu died (killed by SIGSEGV), back after ") > 0, "line")
    lines = [line for line in server.text().splitlines() if " died (" in line and "not back" not in line]
    assert len(lines) == before + 1
    told = r"stepahead: gpu died \(killed by SIGSEGV\), back after \d+\.\d\d s in epoch \d+; [1-8] requests were queued"
    assert re.fullmatch(told + " again", lines[-1]), lines[-1]


def test_a_frontend_that_dies_takes_its_clients_and_nobody_else(server: LiveServer, wanted: list[Story]) -> None:
    wait_whole(server)
    telling = all_at_once(server, MODEL, max_tokens=400)
    telling.wait_tokens(3)
    began = time.monotonic()
    kill(server, "frontend")
    port = int(server.url.rsplit(":", 1)[1])
    for _ in range(20):  # nobody is refused
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        time.sleep(0.01)
    metrics = server.metrics()
    while metrics["stepahead_running_requests"] or metrics["stepahead_open_rows"]:
        assert time.monotonic() - began < 60, metrics
        time.sleep(0.02)
        metrics = server.metrics()
    print(f"aborted and freed {time.monotonic() - began:.2f} s after the death")
    assert all(story.end.startswith("broken") for story in telling.end())
    assert metrics["stepahead_frontend_adopted_total"] >= 8
    assert all_at_once(server, MODEL).end() == wanted
    wait_whole(server)


def test_deaths_while_draining() -> None:
    server = wait_ready(spawn("--max-len", "512", "--drain-seconds", "240"))
    wanted = all_at_once(server, MODEL).end()
    telling = all_at_once(server, MODEL)
    telling.wait_tokens(3)
    server.process.send_signal(signal.SIGTERM)
    for stage in ("scheduler", "gpu"):
        kill(server, stage)
    assert telling.end() == wanted
    assert server.process.wait(60) == 0, server.text()


def test_deaths_during_the_start() -> None:
    server = spawn("--max-len", "512")
    for stage in STAGES:
        kill(server, stage)
    wait_ready(server)
    assert all(story.end in ("length", "stop") for story in all_at_once(server, MODEL).end())
    assert server.stop() == 0, server.text()


def test_past_the_budget_every_client_is_told() -> None:
    server = wait_ready(spawn("--max-len", "512"))
    telling = all_at_once(server, MODEL, max_tokens=400, stop=None)
    telling.wait_tokens(3)
    exhaust(server, "scheduler")
    assert server.process.wait(60) == 1, server.text()
    assert "scheduler" in server.text().splitlines()[-1] and "times in a row" in server.text().splitlines()[-1]
    for story in telling.end():
        assert story.end.startswith(("event: ", "500: ")) and "scheduler" in story.end, story


@pytest.fixture(scope="module")
def drafting() -> Iterator[LiveServer]:
    with live_server("--max-len", "512", "--speculate", "mtp", "--draft-when", "always") as made:
        yield made


@pytest.mark.parametrize("stage", ["gpu", "scheduler"])
def test_drafts_are_as_good_after_a_death(drafting: LiveServer, wanted: list[Story], stage: str) -> None:
    telling = all_at_once(drafting, MODEL)
    telling.wait_tokens(3)
    kill(drafting, stage)
    assert telling.end() == wanted
    wait_whole(drafting)
    drafted = drafting.metrics()["stepahead_drafted_tokens_total"]
    assert all_at_once(drafting, MODEL).end() == wanted
    assert drafting.metrics()["stepahead_drafted_tokens_total"] > drafted
