"""The parts of the check for GPUs that need a model, on the host device."""

from pathlib import Path

import pytest

from tests.tools.test_gpu_check import check
from tools.random_qwen3 import QWEN3_TINY, write_random_qwen3


@pytest.mark.model
def test_the_greedy_file(tmp_path: Path) -> None:
    from procs.model_files import resolve_model

    model = str(resolve_model("smollm2-135m-instruct"))
    report = check(tmp_path, "--part", "greedy", "--model", model, "--lines", "2")
    (greedy,) = report["parts"]
    assert greedy["status"] == "passed", report
    assert greedy["figures"]["overlap: equal ids"] == greedy["figures"]["no overlap: equal ids"]


def test_the_speed_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_random_qwen3(folder, QWEN3_TINY, "cpu")
    report = check(tmp_path, "--part", "speed", "--model", str(folder))
    (speed,) = report["parts"]
    assert speed["status"] == "passed", report
    assert speed["figures"]["1 at once, overlap"]["tokens_per_s"] > 0
