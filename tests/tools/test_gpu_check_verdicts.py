"""What the parts of the GPU check conclude: a part in which something is wrong fails, whatever else was right."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu.device.guard import LaunchGuard
from tools import gpu_check_compile, gpu_check_device, gpu_check_kernels, gpu_check_serving
from tools.gpu_check import GREEDY, Options
from tools.gpu_check_engine import Answer
from tools.gpu_check_part import Figures

HOST = Options("host", "/a model", str(GREEDY), True, 3)


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    return Figures(tmp_path / "figures.json")


@pytest.mark.parametrize("wrong", ["", "compare_model", "compare_sampling", "compare_step", "compare_copies"])
def test_one_wrong_kernel_fails_the_part(monkeypatch: pytest.MonkeyPatch, figures: Figures, wrong: str) -> None:
    for name in (
        "compare_model",
        "compare_sampling",
        "compare_step",
        "compare_copies",
        "compare_ngram",
        "compare_trained",
    ):
        found = 9.0 if name == wrong else 0.0
        tuples = ("operation", found, 1.0) if name == "compare_sampling" else ("operation", found)
        monkeypatch.setattr(gpu_check_kernels, name, lambda *_, tuples=tuples: iter([tuples]))
    with pytest.raises(AssertionError, match="differs from the reference: operation") if wrong else fine():
        gpu_check_kernels.kernels(HOST, figures)


def fine() -> Any:
    return contextlib.nullcontext()


@pytest.mark.parametrize("spoil", ["", "a token", "an end"])
def test_one_wrong_token_fails_the_greedy_file(monkeypatch: pytest.MonkeyPatch, figures: Figures, spoil: str) -> None:
    lines = [json.loads(line) for line in GREEDY.read_text().splitlines()]

    @contextlib.contextmanager
    def running(config: Any, ready_s: float) -> Iterator[Any]:
        def generate(prompts: list[Any], at_once: int, seconds: float) -> list[Answer]:
            answers = [Answer(list(line["token_ids"]), "stop", 0.0, 1.0) for line in lines[: len(prompts)]]
            if spoil == "a token":
                answers[1].ids[0] += 1
            elif spoil == "an end":
                answers[2].ids.pop()
            return answers

        yield SimpleNamespace(generate=generate)

    monkeypatch.setattr(gpu_check_serving, "describe", lambda path: None)
    monkeypatch.setattr(gpu_check_serving, "configure", lambda *_, **__: None)
    monkeypatch.setattr(gpu_check_serving, "running", running)
    with pytest.raises(AssertionError, match="ids") if spoil else fine():
        gpu_check_serving.greedy(HOST, figures)


def test_one_variant_that_does_not_compile_fails_the_part(monkeypatch: pytest.MonkeyPatch, figures: Figures) -> None:
    class Pool:
        """Runs everything here, and fails at one."""

        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def submit(self, fn: Any, *arguments: Any) -> Any:
            def result() -> Any:
                if arguments:
                    raise RuntimeError("no")
                return fn()

            return SimpleNamespace(result=result)

    monkeypatch.setattr(gpu_check_compile, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(gpu_check_compile, "names", lambda: [gpu_check_compile.SMALL])
    with pytest.raises(AssertionError, match="do not compile"):
        gpu_check_compile.compile_all(HOST, figures)


def test_a_wait_that_is_not_refused_fails_the_guard(monkeypatch: pytest.MonkeyPatch, figures: Figures) -> None:
    gpu_check_device.guard(HOST, figures)
    monkeypatch.setattr(LaunchGuard, "refuse", lambda *_: None)
    with pytest.raises(AssertionError, match="not refused"):
        gpu_check_device.guard(HOST, figures)


def test_memory_that_others_do_not_see_fails_the_rings(monkeypatch: pytest.MonkeyPatch, figures: Figures) -> None:
    seen = SimpleNamespace(stdout=b"(1, 2, 3, 4, 5, 6, 7, 9)\n")
    monkeypatch.setattr(gpu_check_device.subprocess, "run", lambda *_, **__: seen)
    with pytest.raises(AssertionError):
        gpu_check_device.rings(HOST, figures)
