"""The check for GPUs runs here on the host device, part by part, and a part that fails hides no other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_check
from tools.gpu_check import ROOT, Options, Part, main, run_part
from tools.gpu_check_engine import Answer
from tools.gpu_check_serving import compare
from tools.standins import orjson as slow_orjson

HOST = Options("host", None, str(gpu_check.GREEDY), True, 2)


def check(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    status = main(["--device", "host", "--quick", "--out", str(out), *arguments])
    report: dict[str, Any] = json.loads(out.read_text())
    report["status"] = status
    return report


@pytest.mark.parametrize("part", ["environment", "rings", "graphs", "guard", "step", "kernels", "speed-qwen3"])
def test_a_part_passes_on_the_host_device(part: str, tmp_path: Path) -> None:
    report = check(tmp_path, "--part", part)
    (outcome,) = report["parts"]
    assert outcome["status"] == "passed", outcome["reason"]
    assert outcome["figures"]
    if part == "speed-qwen3":
        assert outcome["figures"]["1 at once, overlap"]["tokens_per_s"] > 0
    assert report["status"] == 0


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


def test_a_part_that_hangs_or_dies_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = run_part(broken(tmp_path, monkeypatch, "import time; time.sleep(60)"), HOST, 1)
    assert (hung.status, hung.reason[:14]) == ("failed", "not done after")
    dead = run_part(broken(tmp_path, monkeypatch, "import os; os.abort()"), HOST, 60)
    assert dead.status == "failed" and "-6" in dead.reason


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
