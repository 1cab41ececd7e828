"""Every fault point of every stage, one after the other, under requests: no token differs, whatever was stored."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shm.faults import NAMES, VARIABLE
from shm.limits import DEATHS_IN_A_ROW
from tests.e2e.live_server import descendants, live_server, spawn, wait_ready
from tests.e2e.stories import STAGES, STREAMS, Story, Telling, ask, body, health, wait_for, wait_whole
from tests.model_factory import TinyLlama

pytestmark = pytest.mark.model
MODEL = "tiny"
ACTIONS = ("crash", "exit", "raise", "stop", "abort", "segv")
STABLE_SECONDS = 1.1  # a stage that has served for so long begins a new row of deaths
BAD_SEED = 666
TEXT = "a question"
IDS = [3 + byte for byte in TEXT.encode()]  # id 3 is byte 0


def options(path: Path, max_len: int = 512) -> list[str]:
    return [str(path), "--served-model-name", MODEL, "--max-len", str(max_len)]


def requests() -> list[dict[str, Any]]:
    return [body(i, MODEL) for i in range(STREAMS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(seed=1, context=4096).write_hf(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def asked(path: Path) -> Iterator[tuple[list[dict[str, Any]], list[Story]]]:
    """The requests, one of them with a stop string that does come, and their answers without any fault."""
    with live_server(*options(path)) as server:
        plain = requests()
        text = Telling(server, plain).end()[5].text
        plain[5]["stop"] = [text[12:15]]
        yield plain, Telling(server, plain).end()


def points_of(stage: str) -> list[str]:
    return [name for name in NAMES if name.startswith(stage + ".")]


def served_s(name: str) -> float:
    """How long a stage serves before it dies there: long enough for every request to get on between two deaths, however
    busy the machine. Some places are only passed when a stage takes over.
    """
    return 0.0 if name in ("gpu.drop_published", "detokenizer.rebuilding") else STABLE_SECONDS


@pytest.mark.parametrize("stage", STAGES)
def test_every_point(path: Path, asked: tuple[list[dict[str, Any]], list[Story]], stage: str) -> None:
    points = points_of(stage)
    plans = [f"{name}={ACTIONS[i % len(ACTIONS)]}+{served_s(name)}#{i + 1}" for i, name in enumerate(points)]
    everything, wanted = asked
    with live_server(*options(path), env={VARIABLE: " ".join(plans)}) as server:
        for deaths in range(1, len(points) + 1):
            while health(server)[stage]["restarts"] < deaths:
                telling = Telling(server, everything)
                assert ask(server, IDS) == (200, TEXT)
                assert telling.end() == wanted, plans[deaths - 1]
            wait_whole(server)
        assert Telling(server, everything).end() == wanted
        assert {name: told["restarts"] for name, told in health(server).items() if told["restarts"]} == {
            stage: len(points)
        }
        server.wait_idle()
        assert server.metrics()["stepahead_open_rows"] == 0


def test_every_point_of_the_frontend(path: Path, asked: tuple[list[dict[str, Any]], list[Story]]) -> None:
    points = points_of("frontend")
    plans = [f"{name}=crash@3+{served_s(name)}#{i + 1}" for i, name in enumerate(points)]
    everything, wanted = asked
    with live_server(*options(path), env={VARIABLE: " ".join(plans)}) as server:
        for deaths in range(1, len(points) + 1):
            while health(server)["frontend"]["restarts"] < deaths:
                found = Telling(server, everything).end()
                assert all(is_right_or_cut(*pair) for pair in zip(found, wanted, strict=True))
            assert wait_whole(server)["frontend"]["restarts"] == deaths
            server.wait_idle()
            wait_for(lambda: server.metrics()["stepahead_open_rows"] == 0, "free rows")
        assert Telling(server, everything).end() == wanted


def is_right_or_cut(story: Story, right: Story) -> bool:
    return story == right or (story.end.startswith("broken") and right.text.startswith(story.text))


@pytest.mark.parametrize("point", points_of("supervisor"))
def test_the_supervisor_takes_everything_along(path: Path, point: str) -> None:
    plans = f"scheduler.step_pushed=crash@5 {point}=crash"
    server = wait_ready(spawn(*options(path), env={VARIABLE: plans}))
    pids = descendants(server.process.pid)
    found = Telling(server, requests()).end()
    assert server.process.wait(60) == -signal.SIGKILL
    assert all(story.end.startswith("broken") for story in found if story.end not in ("length", "stop"))
    wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}/status").exists() and alive(pid)], "end of all")


def alive(pid: int) -> bool:
    """Not merely waiting for init to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


KILLERS = {
    "tokenizer": "tokenizer.row_taken",
    "scheduler": "scheduler.row_admitted",
    "gpu": "gpu.step_seen",
    "detokenizer": "detokenizer.row_in_hand",
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_request_that_kills_a_stage_is_given_up_and_the_others_go_on(
    path: Path, asked: tuple[list[dict[str, Any]], list[Story]], stage: str
) -> None:
    everything, wanted = asked
    with live_server(*options(path), env={VARIABLE: f"{KILLERS[stage]}=crash#*?{BAD_SEED}"}) as server:
        before = 0
        # A client that tries again and again must not end the server, whichever stage it is that dies.
        for stream in (True, False, False, True)[: 4 if stage == "detokenizer" else 2]:
            bad = {**everything[0], "seed": BAD_SEED, "stream": stream}
            *found, given_up = Telling(server, [*everything, bad]).end()
            assert found == wanted
            assert given_up.end.startswith(("500: ", "event: ")), given_up
            assert f"the {stage} process died" in given_up.end
            assert stream or given_up.end.startswith("500: ")
            server.wait_idle()
            wait_whole(server)
            restarts = health(server)[stage]["restarts"]
            assert restarts - before <= 3
            before = restarts
        assert Telling(server, everything).end() == wanted


# As above, but each process gets on a little first: far enough for one death to be forgiven at the next.
LATE_KILLERS = {
    "tokenizer": ("tokenizer.planes_written", 1),
    "scheduler": ("scheduler.tokens_stored", 5),
    "gpu": ("gpu.step_launched", 5),
    "detokenizer": ("detokenizer.row_in_hand", 3),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_request_that_gets_on_between_deaths_is_given_up_too(
    path: Path, asked: tuple[list[dict[str, Any]], list[Story]], stage: str
) -> None:
    everything, wanted = asked
    name, times = LATE_KILLERS[stage]
    with live_server(*options(path, 4096), env={VARIABLE: f"{name}=crash@{times}#*?{BAD_SEED}"}) as server:
        bad = {**everything[0], "seed": BAD_SEED, "max_tokens": 4000}
        *found, given_up = Telling(server, [*everything[1:], bad]).end()
        assert found == wanted[1:]
        deaths = 2 if stage == "tokenizer" else DEATHS_IN_A_ROW + (stage != "detokenizer")
        said = re.search(rf"the {stage} process died (\d+) times", given_up.end)
        assert given_up.end.startswith(("500: ", "event: ")) and said, given_up
        restarts = wait_whole(server)[stage]["restarts"]
        assert deaths <= int(said[1]) == restarts <= deaths + 1, given_up
        if stage == "detokenizer":  # the client tries again
            *found, given_up = Telling(server, [*everything[1:], bad]).end()
            assert found == wanted[1:] and f"the {stage} process died" in given_up.end
        assert Telling(server, everything).end() == wanted


def test_the_question_that_kills_the_tokenizer_is_given_up_and_all_else_goes_on(
    path: Path, asked: tuple[list[dict[str, Any]], list[Story]]
) -> None:
    everything, wanted = asked
    bad = IDS * 5
    with (
        live_server(*options(path), env={VARIABLE: f"tokenizer.question_taken=crash#*?{len(bad)}"}) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        telling = Telling(server, everything)
        good = [pool.submit(ask, server, IDS * n) for n in (1, 2, 3)]
        status, error = ask(server, bad)
        assert (status, error["code"]) == (500, "poison") and "the tokenizer process died" in error["message"]
        assert [answer.result() for answer in good] == [(200, TEXT * n) for n in (1, 2, 3)]
        assert telling.end() == wanted
        assert health(server)["tokenizer"]["restarts"] <= 3
        wait_whole(server)
        assert ask(server, IDS) == (200, TEXT)


def test_a_question_that_was_not_answered_is_put_to_the_next_tokenizer(path: Path) -> None:
    with live_server(*options(path), env={VARIABLE: "tokenizer.question_taken=crash"}) as server:
        assert ask(server, IDS) == (200, TEXT)
        assert wait_whole(server)["tokenizer"]["restarts"] == 1
        assert server.metrics()["stepahead_frontend_resent_total"] == 1


# At one place of each stage's loop, and in a thread of the device, whose process goes on.
HANGS = {
    "tokenizer.row_ready": 1,
    "scheduler.step_pushed": 1,
    "gpu.step_launched": 1,
    "gpu.after_forward": 2,
    "detokenizer.text_sent": 1,
}


def test_who_hangs_is_started_again(path: Path, asked: tuple[list[dict[str, Any]], list[Story]]) -> None:
    plans = [f"{name}=hang+{STABLE_SECONDS}#{epoch}" for name, epoch in HANGS.items()]
    everything, wanted = asked
    with live_server(*options(path), env={VARIABLE: " ".join(plans)}) as server:
        due = {name.partition(".")[0]: epoch for name, epoch in HANGS.items()}
        while {stage: health(server)[stage]["restarts"] for stage in due} != due:
            assert Telling(server, everything).end() == wanted
        told = wait_whole(server)
        for stage in due:
            said = "Hung: a step on the device" if stage == "gpu" else "hung: asleep without a heartbeat"
            assert said in told[stage]["last_reason"], told[stage]
        assert Telling(server, everything).end() == wanted


def test_a_frontend_that_hangs_is_started_again(path: Path, asked: tuple[list[dict[str, Any]], list[Story]]) -> None:
    everything, wanted = asked
    with live_server(*options(path), env={VARIABLE: "frontend.text_taken=hang@3"}) as server:
        found = Telling(server, everything).end()
        assert any(story.end.startswith("broken") for story in found)
        assert all(is_right_or_cut(*pair) for pair in zip(found, wanted, strict=True))
        told = wait_whole(server)["frontend"]
        assert told["restarts"] == 1 and told["last_reason"].startswith("hung: asleep without a heartbeat")
        server.wait_idle()
        wait_for(lambda: server.metrics()["stepahead_open_rows"] == 0, "free rows")
        assert Telling(server, everything).end() == wanted
