"""The part of the check for GPUs that compares the greedy file, on the host device with the default model."""

import json
from pathlib import Path

import pytest

from tests.tools.test_gpu_check import check
from tools.gpu_check import GREEDY


@pytest.mark.model
def test_the_greedy_file(tmp_path: Path) -> None:
    """Some lines of it whose answers are short."""
    from procs.model_files import resolve_model

    model, file = str(resolve_model("smollm2-135m-instruct")), tmp_path / "greedy.jsonl"
    lines = [line for line in GREEDY.read_text().splitlines() if 2 <= len(json.loads(line)["token_ids"]) <= 16]
    assert len(lines) >= 3
    file.write_text("\n".join(lines))
    report = check(tmp_path, "--part", "greedy", "--model", model, "--greedy", str(file))
    (greedy,) = report["parts"]
    assert greedy["status"] == "passed", report
    total = sum(len(json.loads(line)["token_ids"]) for line in lines)
    for name in ("overlap", "no overlap"):
        assert greedy["figures"][f"{name}: equal ids"] == f"{total} of {total}"
