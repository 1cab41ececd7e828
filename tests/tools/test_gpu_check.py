"""The check for GPUs runs here on the host device, part by part, and a part that fails hides no other."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import gpu_check, gpu_check_serving
from tools.gpu_check import PARTS, ROOT, Options, Part, main, run_part
from tools.gpu_check_engine import Answer, Prompt
from tools.gpu_check_serving import compare
from tools.standins import orjson as slow_orjson

HOST = Options("host", None, str(gpu_check.GREEDY), True, 2)


def check(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    status = main(["--device", "host", "--quick", "--out", str(out), *arguments])
    report: dict[str, Any] = json.loads(out.read_text())
    report["status"] = status
    return report


@pytest.mark.parametrize("part", ["environment", "compile", "step", "kernels", "speed-qwen3"])
def test_a_part_passes_on_the_host_device(part: str, tmp_path: Path) -> None:
    report = check(tmp_path, "--part", part)
    (outcome,) = report["parts"]
    assert outcome["status"] == "passed", outcome["reason"]
    assert outcome["figures"]
    if part == "step":
        check_mutants(outcome["figures"])
    if part == "speed-qwen3":
        assert outcome["figures"]["1 at once, overlap"]["tokens_per_s"] > 0
    assert report["status"] == 0


DEVICE_PARTS = """
from tools.gpu_check_device import graphs, guard, rings
from tools.gpu_check_part import run
def every(options, figures):
    for part in (rings, graphs, guard):
        part(options, figures)
run({"broken": every})
"""


def test_the_parts_of_the_device_pass_on_the_host_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, which spends most of its time on imports."""
    outcome = run_part(broken(tmp_path, monkeypatch, DEVICE_PARTS), HOST, 60)
    assert outcome.status == "passed", outcome.reason
    assert {"copy_issue_us_median", "second_half_ms_median", "item"} <= set(outcome.figures)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_is_known_to_its_module(part: Part) -> None:
    text = Path(ROOT, *part.module.split(".")).with_suffix(".py").read_text()
    assert f'"{part.name}": ' in text.rpartition("run({")[2]


def test_the_parts_leave_time_for_each_other() -> None:
    assert sum(part.least for part in PARTS) < 470


def check_mutants(figures: dict[str, Any]) -> None:
    """Every edge is among them, and the comparison with the right tokens and lengths is not empty."""
    mutants = {name: text for name, text in figures.items() if name.endswith(("dropped", "too early"))}
    assert sum(name.endswith("dropped") for name in mutants) == 12
    assert sum(name.endswith("too early") for name in mutants) == 5
    assert all(text.startswith("flagged") for text in mutants.values()), mutants
    assert any("wrong in 2 of 2" in text for text in mutants.values()), mutants
    assert figures["processes"] == 1


def test_a_part_that_needs_a_model_is_skipped_without_one(tmp_path: Path) -> None:
    report = check(tmp_path, "--part", "greedy")
    assert report["parts"][0]["status"] == "skipped"
    assert report["status"] == 0


def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Part:
    """A part whose module is `text`."""
    (tmp_path / "broken_part.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Part("broken", "broken_part", "breaks", 30)


def sound(tmp_path: Path) -> Part:
    """A part that passes, beside a broken one."""
    (tmp_path / "sound_part.py").write_text("")
    return Part("sound", "sound_part", "does nothing", 60)


def test_a_part_that_fails_says_why_and_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from tools.gpu_check_part import run\ndef bad(o, f): f.add('found', 1); assert False, 'no luck'\n"
    text += "run({'broken': bad})"
    outcome = run_part(broken(tmp_path, monkeypatch, text), HOST, 60)
    assert (outcome.status, outcome.figures) == ("failed", {"found": 1})
    assert "exit status 1" in outcome.reason and "no luck" in outcome.reason


def test_a_part_that_finds_nothing_to_check_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "from tools.gpu_check_part import Skipped, run\ndef skip(o, f): f.add('found', 1); raise Skipped('no\\nluck')"
    )
    outcome = run_part(broken(tmp_path, monkeypatch, f"{text}\nprint('noise')\nrun({{'broken': skip}})"), HOST, 60)
    assert (outcome.status, outcome.reason, outcome.figures) == ("skipped", "no luck", {"found": 1})


def test_a_part_that_hangs_or_dies_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it whatever it has started, which here holds a lock."""
    lock = tmp_path / "lock"
    holds = f"import fcntl, time; file = open({str(lock)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(60)"
    text = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {holds!r}]); time.sleep(60)"
    hung = run_part(broken(tmp_path, monkeypatch, text), HOST, 1)
    assert (hung.status, hung.reason[:14]) == ("failed", "not done after")
    with lock.open() as file:
        deadline_s = time.monotonic() + 10
        while not locks(file):
            assert time.monotonic() < deadline_s, "what the part has started lives on"
            time.sleep(0.01)
    dead = run_part(broken(tmp_path, monkeypatch, "import os; os.abort()"), HOST, 60)
    assert dead.status == "failed" and "-6" in dead.reason


def locks(file: Any) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_one_failure_hides_no_other_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (broken(tmp_path, monkeypatch, "raise SystemExit(3)"), sound(tmp_path))
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    report = check(tmp_path)
    assert [part["status"] for part in report["parts"]] == ["failed", "passed"]
    assert report["status"] == 1


def test_a_part_that_takes_all_the_time_leaves_some_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = broken(tmp_path, monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(gpu_check, "PARTS", (hangs, sound(tmp_path)))
    report = check(tmp_path, "--seconds", "22")
    assert [part["status"] for part in report["parts"]] == ["failed", "passed"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "/nowhere"],
        ["--greedy", "/nowhere"],
        ["--device", "tpu"],
        ["--out", "/nowhere/x"],
        ["--seconds", "0"],
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_ids_behind_a_difference_do_not_count() -> None:
    lines = [{"token_ids": [1, 2, 3], "margin": [1.0, 0.5, 2.0]}, {"token_ids": [4], "margin": [1.0]}]
    right = [Answer([1, 2, 3], "stop", 0, 0), Answer([4], "stop", 0, 0)]
    assert compare(right, lines) == (4, 4, "")
    assert compare([Answer([1, 9, 3], "stop", 0, 0), right[1]], lines) == (2, 4, "line 0, token 1, margin 0.5000")
    assert compare([Answer([1, 2], "stop", 0, 0), right[1]], lines)[:2] == (3, 4)
    assert compare([Answer([1, 2, 3, 4], "length", 0, 0), right[1]], lines)[2] == "line 0 ends after 4 tokens (length)"


class Bursts:
    """An engine that notes what it is asked for, and answers at once."""

    def __init__(self) -> None:
        self.asked: list[list[Prompt]] = []

    def generate(self, prompts: Sequence[Prompt], at_once: int, seconds: float) -> list[Answer]:
        assert at_once == len(prompts)
        self.asked.append(list(prompts))
        return [Answer([0] * prompt.max_new, "length", 0.1, 0.2) for prompt in prompts]

    def gpu_stats(self) -> dict[str, float]:
        names = ("device_busy_ns", "device_idle_ns", "gaps", "steps", "starved", "launch_ns")
        return dict.fromkeys((f"{name}_total" for name in names), 1.0)


def test_each_size_runs_once_before_it_is_measured_with_prompts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, figures = Bursts(), {}

    @contextlib.contextmanager
    def running(*_: Any) -> Iterator[Bursts]:
        yield engine

    monkeypatch.setattr(gpu_check_serving, "running", running)
    monkeypatch.setattr(gpu_check_serving, "configure", lambda *_, **__: None)
    monkeypatch.setattr(gpu_check_serving, "describe", {"a.gguf": SimpleNamespace(vocab_size=1000)}.__getitem__)
    sink = SimpleNamespace(add=figures.__setitem__)
    gpu_check_serving.speed(replace(HOST, model="a.gguf"), sink)  # type: ignore[arg-type]
    assert [len(prompts) for prompts in engine.asked] == [1, 1, 4, 4] * 2
    assert len(figures) == 4
    every = [tuple(prompt.ids) for prompts in engine.asked for prompt in prompts]
    assert len(set(every)) == len(every) == 20
    assert [prompts[0].max_new for prompts in engine.asked] == [2, 16] * 4


BARE = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"numba", "llvmlite"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import gpu.step, gpu.lanes, gpu.warm_up, gpu.backend, gpu.cuda_backend, gpu.device.cuda, gpu.models.cuda_llama
import procs.executor, procs.scheduler, procs.server_memory, procs.stage_process, procs.model_info
import tools.gpu_check_engine, tools.gpu_check_serving, tools.gpu_check_kernels, tools.gpu_check_step
import tools.gpu_check_compile, tools.gpu_check_flashinfer
import orjson, setproctitle
assert "standins" in orjson.__file__ and "standins" in setproctitle.__file__
"""


def test_the_cuda_path_needs_no_compiler_for_cpus_and_no_package_but_torch_and_triton() -> None:
    standins = str(ROOT / "tools" / "standins")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([standins, str(ROOT)])}
    subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, env=environment, check=True)


def test_the_stand_in_for_orjson_agrees_with_it() -> None:
    import orjson

    value = {"text": "ü\n", "number": 1.5, "list": [1, None, True], "nested": {"a": HOST}}
    assert slow_orjson.loads(slow_orjson.dumps(value)) == orjson.loads(orjson.dumps(value))
    with pytest.raises(slow_orjson.JSONDecodeError):
        slow_orjson.loads(b"{")
