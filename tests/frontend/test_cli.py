"""The program as a person runs it: help at once, and every fault one line on stderr with nothing left running."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from frontend.cli import app

ROOT = Path(__file__).resolve().parents[2]
PANELS = ("Where it listens", "What it serves", "How much it holds", "How it runs")
OPTIONS = (
    *("--host", "--port", "--device", "--dtype", "--overlap", "--no-overlap", "--max-running", "--max-queued"),
    *("--kv-tokens", "--page-size", "--max-len", "--prefill-chunk", "--api-key", "--served-model-name"),
    *("--drain-seconds", "--threads", "--check-order", "--standby", "--no-standby"),
)


def test_help_groups_the_options_and_each_says_something() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for words in (*PANELS, *OPTIONS):
        assert words in shown
    for command in ("serve", "generate", "bench", "chaos"):
        assert command in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_option_says_what_it_is_or_costs(command: str) -> None:
    for parameter in typer.main.get_command(app).commands[command].params:  # type: ignore[attr-defined]
        assert parameter.name == "help" or len(parameter.help) > 20, parameter.name


def test_help_imports_neither_torch_nor_the_server() -> None:
    program = "import sys, json, frontend.cli; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "numba", "numpy", "zmq", "fastapi", "httpx", "tokenizers", "procs", "gpu", "shm"}
    assert heavy & set(json.loads(found.stdout)) == set()


def test_the_benchmark_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("tools.bench_serve.main", lambda arguments: seen.append(arguments) or 5)
    assert CliRunner().invoke(app, ["bench", "--concurrency", "1,2", "--help"]).exit_code == 5
    assert seen == [["--concurrency", "1,2", "--help"]]


@pytest.mark.parametrize("name", ["overlap", "floor", "engine", "ring", "serve"])
def test_so_is_each_instrument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(f"tools.bench_{name}.main", lambda arguments: seen.append(arguments) or 6)
    assert CliRunner().invoke(app, ["bench", name, "--help", "--json", "x"]).exit_code == 6
    assert seen == [["--help", "--json", "x"]]


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    (tmp_path / "weights.bin").write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such-model"], "no-such-model"),
        (["missing.gguf"], "missing.gguf"),
        (["broken.gguf"], "broken.gguf"),
        (["folder"], "folder"),
        (["weights.bin"], "weights.bin"),
        (["broken.gguf", "--port", "TAKEN"], r"port \d+ on 127.0.0.1 is in use"),
        (["broken.gguf", "--host", "no.invalid"], "--host no.invalid"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    bad: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(bad)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = [port if word == "TAKEN" else word for word in arguments]
        done = CliRunner().invoke(
            app, ["serve", *(arguments if "--port" in arguments else [*arguments, "--port", "0"])]
        )
    assert done.exit_code == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("stepahead: ") and re.search(told, lines[0]), done.stderr


@pytest.mark.parametrize(
    "option", [("--max-tokens", "0"), ("--temperature", "2.5"), ("--temperature", "nan"), ("--seed", str(2**63))]
)
@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_generate_refuses_a_question_before_it_starts_a_server(option: tuple[str, str], raw: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["generate", "Hello", "--model", "no-such-model", *option, *raw])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith(f"stepahead: {option[0]}: ")


def test_generate_tells_the_same_line_as_a_program() -> None:
    command = [sys.executable, "-m", "frontend.cli", "generate", "Hello", "--model", "no-such-model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
