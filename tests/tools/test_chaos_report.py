"""The table, the document and the picture of a run say what was seen."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

from tools import chaos
from tools.chaos_check import Fault
from tools.chaos_history import History
from tools.chaos_kill import Cell, Death, Kill, Strike
from tools.chaos_load import Told
from tools.chaos_picture import picture
from tools.chaos_processes import Leaks
from tools.chaos_report import (
    Line,
    Phase,
    Story,
    document_of,
    faults_text,
    lines_in,
    next_ms,
    phase_text,
    row_of,
    rows_of,
    silence_ms,
    step_ms,
    table_text,
)
from tools.chaos_requests import requests_of
from tools.openai_stream import Answer

DATA = Path(__file__).parents[1] / "data"
SVG = "{http://www.w3.org/2000/svg}"
MS = 1_000_000
REQUESTS = requests_of(1, 15, "tiny", ["once upon a time"], 512, 16)
GREEDY, SLOW, LEAVE = (next(r for r in REQUESTS if r.kind == kind) for kind in ("greedy", "slow", "leave"))
GPU, FRONTEND = Cell("gpu+scheduler", "KILL"), Cell("frontend", "STOP")


def story(request: object, lane: int, times_ms: list[int], end_ms: int, fault: Fault | None = None) -> Story:
    """One request: sent at the first time, events at the others."""
    answer = Answer(status=200, times_ns=[ms * MS for ms in times_ms[1:]], events=[b""] * (len(times_ms) - 1))
    told = Told(request, lane, times_ms[0] * MS, answer, end_ms * MS, request is LEAVE)  # type: ignore[arg-type]
    return Story(told, History((), told.end, end_ms * MS), [fault] if fault else [])


def strike(cell: Cell, at_ms: int, back_ms: int | None, seen_ms: int) -> Strike:
    deaths = [
        Death(
            *(stage, cell.how, 10 + i, (at_ms + i) * MS, (at_ms + seen_ms - 1) * MS, (at_ms + seen_ms + i) * MS),
            replaced_ns=(at_ms + seen_ms + 10 + i) * MS if back_ms else 0,
        )
        for i, stage in enumerate(cell.stages)
    ]
    return Strike(Kill(cell, 0.5, (0.0,) * len(deaths)), deaths, back_ms * MS if back_ms else 0)


def planned(cell: Cell, kills: int) -> list[Kill]:
    return [Kill(cell, 0.5, (0.0,) * len(cell.stages))] * kills


@pytest.fixture
def phases() -> list[Phase]:
    gpu = Phase(planned(GPU, 2))
    gpu.strikes = [strike(GPU, 1500, 1901, 4), strike(GPU, 4000, 4301, 8)]
    gpu.stories = [
        story(GREEDY, 0, [1000, 1100, 1200, 1900, 2000], 2010),
        story(SLOW, 1, [1000, 1100, 3500], 3510),
        story(LEAVE, 2, [1300, 1950], 1951),
        story(GREEDY, 0, [3900, 3990, 4250], 4600, Fault("doubled", "tokens", 4250 * MS, 0, 2, "(4, 5) once more")),
    ]
    gpu.lines = [Line("gpu", "killed by SIGKILL", 0.35, 2, 3, "requests were queued again")]
    frontend = Phase(planned(FRONTEND, 3))
    frontend.strikes = [strike(FRONTEND, 6000, None, 70)]
    frontend.stories = [story(GREEDY, 0, [5500, 5600, 5700], 6071)]
    frontend.leaks, frontend.extra_restarts = Leaks(fds=2, memfd_bytes=4096), 1
    frontend.notes = ["kill 1: it does not serve 30 s later"]
    return [gpu, frontend]


def test_a_silence_counts_where_it_reaches_into_the_time_asked_for() -> None:
    streams = [[0, 10 * MS, 40 * MS, 45 * MS], [200 * MS, 300 * MS], []]
    assert silence_ms(streams, 20 * MS, 30 * MS) == 30
    assert silence_ms(streams, 41 * MS, 50 * MS) == 5
    assert silence_ms(streams, 60 * MS, 70 * MS) == 0


def test_the_next_token_is_the_one_behind_the_longest_silence_of_all() -> None:
    moments = [0, 10 * MS, 12 * MS, 40 * MS, 45 * MS, 90 * MS]
    assert next_ms(moments, 11 * MS, 44 * MS) == 29, "what was still under way at 12 is not it"
    assert next_ms(moments, 41 * MS, 43 * MS) == 4
    assert next_ms(moments, 91 * MS, 99 * MS) == 0


@pytest.mark.parametrize(("under_way_ms", "next_after_ms"), [(1614, 899), (1616, 115)])
def test_what_the_dead_had_let_go_of_is_not_the_next_token(under_way_ms: int, next_after_ms: int) -> None:
    """The second successor is there at 1515, and what comes within 0.1 s of it may be of before."""
    phase = Phase(planned(GPU, 1))
    phase.strikes = [strike(GPU, 1500, 4000, 4)]
    phase.stories = [story(GREEDY, 0, [1000, 1450, under_way_ms, 2400, 3900], 4000)]
    assert row_of(GPU, [phase]).next_ms == [next_after_ms]


def test_calm_is_measured_as_kills_are(phases: list[Phase]) -> None:
    calm = Phase(stories=phases[0].stories[:2], probes=[(1050 * MS, 1300 * MS), (1250 * MS, 1950 * MS)])
    row = row_of(None, [calm, *phases])
    assert (row.stage, row.signal, row.kills, row.is_clean) == ("none", "-", 0, True)
    assert (row.recovery_ms, row.next_ms, row.pause_ms) == ([250, 700], [150, 650], [700, 700])


def test_a_row_sums_up_its_kills(phases: list[Phase]) -> None:
    row = row_of(GPU, phases)
    assert (row.kills, row.recovered, row.requests, row.is_clean) == (2, 2, 4, False)
    assert row.faulty == {"lost": 0, "missing": 0, "doubled": 1, "different": 0}
    assert row.detection_ms == [4, 4, 8, 8]
    assert row.pause_ms == [700, 350], "the slow reader's silences are its own"
    assert row.next_ms == [399, 249]
    assert row.recovery_ms == [400, 300], "from the second of two deaths"
    assert row.untold == 3
    assert step_ms(phases[0].stories) == 180


def test_in_a_mixed_phase_a_request_counts_where_it_met_a_kill_and_what_is_left_everywhere(phases: list[Phase]) -> None:
    gpu, frontend = phases
    mixed = Phase([*gpu.planned, *frontend.planned])
    mixed.strikes = gpu.strikes + frontend.strikes
    mixed.stories = [*gpu.stories, story(GREEDY, 0, [1950, 2000, 2300], 2400), *frontend.stories]
    mixed.leaks = Leaks(fds=1)
    rows = rows_of([mixed])
    assert [(row.stage, row.kills, row.recovered, row.requests) for row in rows] == [
        ("frontend", 3, 0, 1), ("gpu+scheduler", 2, 2, 4),
    ]  # fmt: skip
    assert [row.leaks.fds for row in rows] == [1, 1] and mixed.name == "2 ways"
    fault = Fault("lost", "end", 2400 * MS, 0, 1, "never came")
    mixed.stories.append(story(GREEDY, 0, [1950, 2000, 2300], 2400, fault))
    assert [row.faulty["lost"] for row in rows_of([mixed])] == [1, 1], "whoever met no kill, and lost something"
    assert rows[1].pause_ms == row_of(GPU, phases).pause_ms


def test_a_row_is_clean_only_if_nobody_noticed_and_nothing_is_left(phases: list[Phase]) -> None:
    clean = phases[0]
    clean.stories, clean.lines = clean.stories[:3], clean.lines * 4
    assert row_of(GPU, [clean]).is_clean
    for change in (
        {"leaks": Leaks(zombies=1)},
        {"extra_restarts": 1},
        {"unheard": 1},
        {"planned": planned(GPU, 3)},
        {"lines": clean.lines[:3]},
        {"strikes": clean.strikes[:1]},
    ):
        harmed = Phase(**{**clean.__dict__, **change})
        assert not row_of(GPU, [harmed]).is_clean, change


def test_the_table_is_the_golden_one(phases: list[Phase]) -> None:
    """If it has to change: look at it, then write what is printed to the file."""
    text = table_text(rows_of(phases), 12.0) + "\n" + faults_text(phases) + "\n"
    print(text)
    assert text == (DATA / "chaos_table.txt").read_text()
    assert phase_text(phases[0]) == (
        "gpu+scheduler, KILL: 2 of 2 served again; 4 requests, 0 lost, 0 missing, 1 doubled, 0 different"
    )


def test_the_picture_is_the_golden_one(phases: list[Phase]) -> None:
    """If it has to change: look at it, then write what `picture` returns to the file."""
    assert picture(phases, 12.0) == (DATA / "chaos_picture.svg").read_text()


def test_the_picture_shows_requests_and_kills(phases: list[Phase]) -> None:
    drawn = ElementTree.fromstring(picture(phases, 12.0))
    kinds = [one.attrib["class"] for one in drawn.iter() if "class" in one.attrib]
    assert kinds.count("kill") == 5 and kinds.count("back") == 2
    assert (kinds.count("faulty"), kinds.count("left")) == (1, 1)
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "gpu+scheduler, KILL" in texts and "frontend, STOP" in texts
    assert ElementTree.fromstring(picture([], 0.0)).tag == f"{SVG}svg"


def test_the_document_holds_everything(phases: list[Phase]) -> None:
    document = orjson.loads(orjson.dumps(document_of(phases, 12.0, {"seed": 7})))
    assert (document["seed"], document["is_clean"], document["step_ms"]) == (7, False, 12.0)
    assert [row["stage"] for row in document["rows"]] == ["frontend", "gpu+scheduler"]
    assert document["rows"][1]["pause_ms_p50"] == 525 and document["rows"][0]["recovery_ms_p99"] is None
    assert document["strikes"][0]["at_ms"] == 500 and document["strikes"][0]["deaths"][1]["after_ms"] == 1
    assert document["faults"] == [
        {
            "kills": "gpu+scheduler, KILL",
            "request": GREEDY.number,
            "request_kind": "greedy",
            "kind": "doubled",
            "what": "tokens",
            "at_ns": 4250 * MS,
            "choice": 0,
            "count": 2,
            "detail": "(4, 5) once more",
            "at_ms": 3250.0,
        }
    ]


def test_lines_about_deaths_are_read_from_the_log() -> None:
    log = (
        "stepahead: 3 running\n"
        "stepahead: gpu died (killed by SIGKILL (is memory short?)), back after 1.20 s in epoch 3; 5 requests were x\n"
        "stepahead: gpu died (stopped by a signal); it is not back after 5 s, requests wait for it\n"
        "stepahead: gpu died (stopped by a signal), and again 6.10 s later while it started\n"
    )
    assert lines_in(log) == [
        Line("gpu", "killed by SIGKILL (is memory short?)", 1.2, 3, 5, "requests were x"),
        Line("gpu", "stopped by a signal", 0.0, 0, 0, "died again"),
    ]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [([], 1), (["--expect", "doubled"], 0), (["--expect", "lost,doubled"], 0), (["--expect", "missing"], 1)],
)
def test_the_status_says_whether_all_is_as_expected(
    arguments: list[str], status: int, phases: list[Phase], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def run(_options: object, _progress: object, seen: list[Phase]) -> float:
        seen += phases
        return 12.0

    monkeypatch.setattr(chaos, "run", run)
    files = ["--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.svg")]
    assert chaos.main([*arguments, *files]) == status
    assert orjson.loads((tmp_path / "a.json").read_bytes())["kills"] == 50
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "arguments", [["--apart", "2,1"], ["--expect", "nothing"], ["--kills", "many"], ["--no-such-option"]]
)
def test_a_command_line_that_cannot_be_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        chaos.parse(arguments)
    assert refused.value.code == 2


@pytest.mark.parametrize("arguments", [["--stage", "gpus"], ["--signal", "HUG"], ["--prompts", "/nowhere.jsonl"]])
def test_what_can_be_mended_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(arguments) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
