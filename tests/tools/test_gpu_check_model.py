"""The part of the check for GPUs that compares the greedy file, on the host device with the default model."""

from pathlib import Path

import pytest

from tests.tools.test_gpu_check import check


@pytest.mark.model
def test_the_greedy_file(tmp_path: Path) -> None:
    from procs.model_files import resolve_model

    model = str(resolve_model("smollm2-135m-instruct"))
    report = check(tmp_path, "--part", "greedy", "--model", model, "--lines", "2")
    (greedy,) = report["parts"]
    assert greedy["status"] == "passed", report
    assert greedy["figures"]["overlap: equal ids"] == greedy["figures"]["no overlap: equal ids"]
