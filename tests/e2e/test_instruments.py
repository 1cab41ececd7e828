"""The instruments that show whether the device waits, against real servers of models whose time is known: what they
write is whole, every answer is right, and with overlap most steps are queued before the one in front of them ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.live_server import ROOT, descendants
from tools.bench_rings import rings_serving
from tools.bench_run import Ask, prompts
from tools.clocked_model import answer, constant, write
from tools.step_figures import starved_ns

pytestmark = pytest.mark.model
SMALL = "--start=--check-order --no-standby --threads 1"  # of servers


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "frontend.cli", "bench", *arguments]


def bench(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run one; its document, and what it printed."""
    before = set(descendants(os.getpid()))
    files = ["--json", str(folder / "figures.json"), "--picture", str(folder / "picture.svg")]
    done = subprocess.run(command(*arguments, *files), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(descendants(os.getpid())) <= before, "it ends what it started"
    ElementTree.parse(folder / "picture.svg")
    return json.loads((folder / "figures.json").read_text()), done.stdout


def test_overlap(tmp_path: Path) -> None:
    small = ("--preset", "glm-5.3-mtp", "--concurrency", "1,4", "--seconds", "0.6", SMALL)
    document, said = bench(tmp_path, "overlap", *small)
    rows = document["rows"]
    assert [(row["at_once"], row["overlap"]) for row in rows] == [(1, True), (1, False), (4, True), (4, False)]
    for row, without in zip(rows, [rows[1], rows[1], rows[3], rows[3]], strict=True):
        assert row["wrong"] == row["failed"] == row["missed"] == 0, row
        assert row["steps"]["step_us"] >= row["passes_us"], "passes take their time"
        assert row["cpu_us"]["scheduler"] > 0 and row["steps"]["prepare_us"] > 0
        if row["overlap"]:
            assert row["steps"]["starved_steps"] < without["steps"]["starved_steps"], "steps are queued ahead"
        else:
            assert row["steps"]["starved_steps"] > 0.9, "no step is"
    lengths = {(row["at_once"], row["accept_length"]) for row in rows}
    assert len(lengths) == 2 and all(2.2 < length < 3.4 for _, length in lengths), "the same on and off"
    assert len(document["typical_steps"]["glm-5.3-mtp"]["overlap"]["step"]) == 3
    assert "article" in said


def test_floor(tmp_path: Path) -> None:
    span = ("--first-us", "4000", "--least-us", "3000", "--starved", "0.95", "--seconds", "0.3", SMALL)
    document, said = bench(tmp_path, "floor", "--concurrency", "1,4", *span)
    assert [floor["at_once"] for floor in document["floors"]] == [1, 4]
    for floor in document["floors"]:
        found = floor["found"]
        assert found["pass_us"] == pytest.approx(3200) and found["starved"] <= 0.95, floor
        assert found["step_us"] >= 3200 and found["steps"] > 20, "the clock was changed while the server ran"
    assert "at most 95%" in said


def test_without_the_text_stages(tmp_path: Path) -> None:
    small = ("--preset", "qwen3-8b", "--concurrency", "4", "--seconds", "0.6", "--client", "rings")
    document, _ = bench(tmp_path, "overlap", *small)
    on, off = document["rows"]
    assert on["wrong"] == on["failed"] == off["wrong"] == off["failed"] == 0
    assert on["steps"]["starved_steps"] < off["steps"]["starved_steps"] > 0.9
    assert set(on["cpu_us"]) == {"scheduler", "gpu"} and on["ttft_ms"] > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_the_trace_and_the_counters_tell_the_same(tmp_path: Path, overlap: bool) -> None:
    model = write(tmp_path / "clocked", constant(2000.0))
    drawn = prompts("0", 3, 8, 256)
    asks = [Ask(prompt, 60, answer(prompt, 60)) for prompt in drawn]
    with rings_serving(model, 2, 128, 0, overlap) as bench:
        bench.run(asks[:1], 1)
        load, seen = bench.run(asks, 2)
    assert (load.wrong, load.failed, load.requests, load.tokens, seen.missed) == (0, 0, 3, 180, 0)
    steps, gaps, starved = starved_ns(seen.spans)
    assert len(steps) == seen.counted("gpu", "gaps_total") > 100
    assert int(gaps.sum()) == seen.counted("gpu", "device_idle_ns_total")
    # The counter takes the time a moment earlier than the span does.
    assert int(starved.sum()) == pytest.approx(seen.counted("gpu", "starved_ns_total"), rel=0.05, abs=200_000)


def test_engine(tmp_path: Path) -> None:
    document, said = bench(tmp_path, "engine", "--concurrency", "1,4", "--output-tokens", "12", "--rounds", "1", SMALL)
    assert [(row["at_once"], row["streamed"]) for row in document["rows"]] == [
        (at_once, streamed) for at_once in (1, 4) for streamed in (False, True)
    ]
    assert all(row["wrong"] == row["failed"] == 0 and row["tokens_per_s"] > 0 for row in document["rows"])
    assert all(row["cpu_us"][stage] > 0 for row in document["rows"] for stage in ("scheduler", "gpu", "frontend"))
    assert "streamed" in said


def test_serve(tmp_path: Path) -> None:
    model = write(tmp_path / "clocked", constant(1000.0))
    server = f"--start={model} --max-len 128 --kv-tokens 4096 --check-order --no-standby"
    asked = ("--dataset", "prefix", "--prefixes", "2", "--prefix-tokens", "32", "--input-tokens", "8", "--seed", "3")
    small = ("--rate", "20,40", "--requests", "8", "--repeat", "2", "--output-tokens", "12", "--id-range", "1,200")
    document, said = bench(tmp_path, "serve", server, f"{server} --no-overlap", *asked, *small)
    (on, off) = document["medians"].values()
    for one in (*on, *off):
        assert (one["requests"], one["failed"], one["output_tokens"]) == (8, 0, 96)
        assert 0 < one["ttft_ms_p50"] <= one["whole_ms_p50"] <= one["whole_ms_p99"] and one["steps_per_s"] > 0
    assert [one["rate"] for one in on] == [20, 40] and "under way" in said
    assert all(one["ratio"] == 1 for one in on) and all(one["whole_ratio"] > 0 for one in off)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_whoever_is_interrupted_ends_its_servers(sent: signal.Signals) -> None:
    before = set(descendants(os.getpid()))
    process = subprocess.Popen(
        command("overlap", "--preset", "qwen3-8b", "--concurrency", "2", "--seconds", "60"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end_s = time.monotonic() + 60
    while len(descendants(process.pid)) < 12 and time.monotonic() < end_s:
        time.sleep(0.1)
    process.send_signal(sent)
    assert process.wait(60) == 130
    assert set(descendants(os.getpid())) <= before
