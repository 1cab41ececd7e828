"""`serve` and `generate` with a real, tiny model: an answer comes, and the processes go."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import plain_http
from tests.model_factory import TinyLlama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "frontend.cli", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))  # of the test run itself
    yield
    left = [
        p for p in psutil.Process().children(recursive=True) if p not in before and p.status() != psutil.STATUS_ZOMBIE
    ]
    assert left == []


@pytest.mark.usefixtures("nothing_left")
def test_generate_answers_the_same_text_twice(model: Path) -> None:
    answers = []
    for _ in range(2):
        process = started("generate", "the sea", "--model", str(model), "--raw", "--max-tokens", "12")
        out, errors = process.communicate(timeout=240)
        assert (process.returncode, errors) == (0, "")
        answers.append(out)
    assert answers[0] == answers[1]
    assert answers[0].strip()


@pytest.mark.usefixtures("nothing_left")
def test_generate_tells_what_the_server_refuses(model: Path) -> None:
    process = started("generate", "the sea", "--model", str(model), "--max-tokens", "100000")
    out, errors = process.communicate(timeout=240)
    assert (process.returncode, out) == (1, "")
    assert errors.startswith("stepahead: ") and "max_tokens" in errors and len(errors.splitlines()) == 1


@pytest.mark.usefixtures("nothing_left")
def test_ctrl_c_ends_generate_at_once(model: Path) -> None:
    process = started(
        "generate", "the sea", "--model", str(model), "--raw", "--max-tokens", "450", "--temperature", "1"
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode in (130, 0)  # 0: it was done already
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("nothing_left")
def test_serve_says_where_it_is_and_how_to_ask_it(model: Path) -> None:
    process = started("serve", str(model), "--port", "0", "--api-key", "secret", "--served-model-name", "sea")
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines[0].startswith("sea in int8 is ready after ")
    assert "curl http://127.0.0.1:" in lines[1] and "secret" not in lines[1]
    found = re.search(r"http://\S+", lines[0])
    assert found is not None
    assert plain_http.get(f"{found[0]}/v1/models").status_code == 401
    listed = plain_http.get(f"{found[0]}/v1/models", headers={"Authorization": "Bearer secret"})
    assert listed.json()["data"][0]["id"] == "sea"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
