"""The parts of the check for GPUs that need a model, on the host device."""

from pathlib import Path

import pytest

from tests.tools.test_gpu_check import check


@pytest.mark.model
def test_the_greedy_file_and_the_speed_of_the_model(tmp_path: Path) -> None:
    from procs.model_files import resolve_model

    model = str(resolve_model("smollm2-135m-instruct"))
    report = check(tmp_path, "--part", "greedy", "--part", "speed", "--model", model, "--lines", "2")
    greedy, speed = report["parts"]
    assert greedy["status"] == speed["status"] == "passed", report
    assert greedy["figures"]["overlap: equal ids"] == greedy["figures"]["no overlap: equal ids"]
    assert speed["figures"]["1 at once, overlap"]["tokens_per_s"] > 0
