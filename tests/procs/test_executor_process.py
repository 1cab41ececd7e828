"""The executor as a process with a tiny random model: ready, right, ended by SIGTERM or with its reason."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from procs.child_specs import CHILD_SPECS, child_environment
from procs.model_info import read_model_info
from procs.server_memory import ServerMemory
from procs.stage_process import Said, StageProcess
from shm.config import ModelInfo, ServerConfig
from shm.control import DRAINING
from shm.ledger import Ledger
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout, ring_specs
from shm.ring import Ring
from tests.model_factory import TinyLlama

(SPEC,) = (spec for spec in CHILD_SPECS if spec.stage == "gpu")
READY_S = 300.0  # a first run compiles the kernels
PROMPTS = {1: [5, 9, 20, 31, 44], 2: [70, 8, 8], 3: [12] * 17}


class ExecutorRig:
    """The process, and the scheduler's ends of its rings."""

    def __init__(self, model: ModelInfo, **changes: Any) -> None:
        options: dict[str, Any] = {
            "model": model,
            "served_model_name": "tiny",
            "host": "127.0.0.1",
            "port": 0,
            "dtype": "float32",
            "max_running": 4,
            "max_queued": 4,
            "kv_tokens": 512,
            "max_len": 128,
            "prefill_chunk": 32,
            "threads": 1,
        }
        self.config = ServerConfig(**(options | changes))
        self.memory = ServerMemory(self.config)
        self.ledger = Ledger(self.memory.segments["ledger"], self.config.rows, self.config.max_len)
        bells = {stage: self.memory.control.doorbell(stage, fd) for stage, fd in self.memory.doorbell_fds.items()}
        self.rings = {
            name: Ring(self.memory.segments[name], bells[spec.consumer], bells[spec.producer], spec.schema)
            for name, spec in ring_specs(self.config).items()
        }
        self.steps = self.rings["step"].attach_producer()
        self.results = self.rings["result"].attach_consumer()
        self.said: list[Said] = []
        self.start()
        for row, prompt in PROMPTS.items():
            self.ledger.tokens[row, : len(prompt)] = prompt

    def start(self) -> None:
        self.memory.control.set_epoch("gpu", self.memory.control.epoch("gpu") + 1)
        self.process = StageProcess(SPEC, self.memory, child_environment(SPEC, self.config, os.environ), None)
        self.said.clear()

    def wait(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.said += self.process.listen()
            assert not self.process.silent or condition(), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)

    def until_ready(self) -> None:
        self.wait(lambda: any(said.event == "ready" for said in self.said), READY_S)

    def last_words(self) -> str:
        assert self.process.wait_exit(READY_S)
        self.said += self.process.listen()
        return self.process.error

    def push(self, number: int, decode: list[int], chunk: tuple[int, ...] | None = None, pages: int = 0) -> None:
        view = StepLayout(self.config).view(self.steps.slot())
        view.clear()
        view.step, view.gpu_epoch = number, self.memory.control.epoch("gpu")
        view.kind = STEP_MIXED if chunk else STEP_DECODE
        view.n_decode, view.n_chunks, view.n_slot_writes = len(decode), int(chunk is not None), pages
        view.decode_entries[: len(decode)] = decode
        if chunk is not None:
            view.chunks[:5, 0] = chunk
            for i in range(pages):
                view.slot_writes[:, i] = chunk[0], i, 1 + 7 * chunk[0] + i
        self.steps.publish(view.used_nbytes, view.kind)

    def result(self) -> list[int]:
        self.wait(lambda: self.results.available() > 0)
        record = self.results.peek()
        view = ResultLayout(self.config).view(self.rings["result"].payloads[record.seq % self.rings["result"].slots])
        tokens = view.tokens[0, : view.n_rows].tolist()
        self.results.release()
        return tokens

    def close(self) -> None:
        self.process.reap()
        self.memory.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return read_model_info(TinyLlama().write_hf(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def start() -> Iterator[Callable[..., ExecutorRig]]:
    rigs: list[ExecutorRig] = []

    def begin(*args: Any, **changes: Any) -> ExecutorRig:
        rigs.append(ExecutorRig(*args, **changes))
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_has_the_same_tokens_alone_and_among_others(
    start: Callable[..., ExecutorRig], model: ModelInfo, dtype: str
) -> None:
    """Queued one step ahead, in whole prompts and in chunks, in batches of 1 to 3 (padded to the graphs' sizes)."""
    rig = start(model, dtype=dtype)
    rig.until_ready()
    alone: dict[int, list[int]] = {}
    number = 0
    for entry, prompt in PROMPTS.items():
        rig.push(number := number + 1, [], (entry, entry, 0, len(prompt), 1), 6)
        rig.push(number := number + 1, [entry])
        alone[entry] = rig.result()
        for _ in range(6):
            rig.push(number := number + 1, [entry])
            alone[entry] += rig.result()
        alone[entry] += rig.result()
    together: dict[int, list[int]] = {entry: [] for entry in PROMPTS}
    running: list[int] = []
    for entry, prompt in PROMPTS.items():
        rig.push(number := number + 1, running, (entry, entry, 0, 2, 0), 6)
        rig.push(number := number + 1, running, (entry, entry, 2, len(prompt) - 2, 1))
        for rows in (running, [*running, entry]):
            for row, token in zip(rows, rig.result(), strict=True):
                together[row].append(token)
        running.append(entry)
    for _ in range(8):
        rig.push(number := number + 1, running)
        for row, token in zip(running, rig.result(), strict=True):
            together[row].append(token)
    for entry, tokens in alone.items():
        assert len(tokens) == 8
        assert len(set(tokens)) > 1, "a model that repeats itself proves little"
        assert together[entry][:8] == tokens
    rig.memory.control.state = DRAINING
    rig.process.terminate()
    assert rig.process.wait_exit(5)
    assert rig.process.reap() == 0
    assert rig.memory.stats.read()["gpu"]["steps_total"] == number
    assert rig.said[0] == Said("progress", f"loading {rig.config.model.name}")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_after_a_death_the_weights_are_there_though_the_model_is_gone(
    start: Callable[..., ExecutorRig], tmp_path: Path, dtype: str
) -> None:
    folder = TinyLlama().write_hf(tmp_path / "model")
    rig = start(read_model_info(folder), dtype=dtype)
    answers: list[list[int]] = []
    for number in range(2):
        rig.until_ready()
        rig.push(3 * number + 1, [], (1, 1, 0, len(PROMPTS[1]), 1), 6)
        for step in (2, 3):
            rig.push(3 * number + step, [1])
        answers.append([token for _ in range(3) for token in rig.result()])
        was_said = [said.text for said in rig.said]
        assert any(text.startswith("packing layer") for text in was_said) == (number == 0)
        assert ("taking packed weights" in was_said) == (number == 1)
        if number == 0:
            (folder / "model.safetensors").unlink()
            rig.process.kill()
            rig.process.reap()
            rig.start()
    assert answers[0] == answers[1] and len(answers[0]) == 3


def answer(rig: ExecutorRig, number: int) -> list[int]:
    rig.push(number, [], (1, 1, 0, len(PROMPTS[1]), 1), 6)
    for step in (1, 2):
        rig.push(number + step, [1])
    return [token for _ in range(3) for token in rig.result()]


def prepared(rig: ExecutorRig) -> StageProcess:
    """A standby that has nothing left to do without the word."""
    standby = StageProcess(SPEC, rig.memory, child_environment(SPEC, rig.config, os.environ), None, standby=True)
    deadline = time.monotonic() + READY_S
    while not standby.is_prepared:
        rig.said += standby.listen()
        assert not standby.silent and time.monotonic() < deadline, rig.said
        time.sleep(0.01)
    return standby


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_standby_leaves_the_living_alone_and_goes_on_with_the_same_tokens(
    start: Callable[..., ExecutorRig], model: ModelInfo, dtype: str
) -> None:
    rig = start(model, dtype=dtype)
    rig.until_ready()
    first = answer(rig, 1)
    before = {name: bytes(segment.buf) for name, segment in rig.memory.segments.items() if name != "control"}
    standby = prepared(rig)
    assert "taking packed weights" in [said.text for said in rig.said]
    assert {name: bytes(segment.buf) for name, segment in rig.memory.segments.items() if name != "control"} == before
    assert answer(rig, 4) == first
    rig.process.kill()
    rig.process.reap()
    rig.process = standby
    rig.memory.control.set_epoch("gpu", 2)
    standby.take_over(2)
    rig.said.clear()
    rig.until_ready()
    assert answer(rig, 7) == first and len(set(first)) > 1


def test_a_standby_that_would_have_to_pack_waits_for_the_word(
    start: Callable[..., ExecutorRig], model: ModelInfo
) -> None:
    """As one does that was started before the server's weights are there, or after its sources have changed."""
    rig = start(model)
    rig.process.kill()
    rig.process.reap()
    rig.process = prepared(rig)
    assert not [said for said in rig.said if said.text.startswith("packing")]
    assert rig.memory.weights is not None and os.pread(rig.memory.weights[0], 64, 0) == bytes(64)
    rig.process.take_over(rig.memory.control.epoch("gpu"))
    rig.until_ready()
    assert len(answer(rig, 1)) == 3


def test_a_broken_step_ends_the_process_with_the_reason(start: Callable[..., ExecutorRig], model: ModelInfo) -> None:
    rig = start(model)
    rig.until_ready()
    rig.push(1, [3])
    assert "gather on stream forward: DeviceError: entry 3 reaches a position" in rig.last_words()
    assert rig.process.reap() == 1


def test_a_broken_model_is_told_in_one_line(start: Callable[..., ExecutorRig], tmp_path: Path) -> None:
    folder = TinyLlama().write_hf(tmp_path / "cut")
    info = read_model_info(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    rig = start(info)
    words = rig.last_words()
    assert str(folder) in words
    assert "\n" not in words
    assert rig.process.reap() == 1


def test_an_import_that_fails_is_told_as_the_reason(
    start: Callable[..., ExecutorRig], model: ModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('this numba is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rig = start(model)
    assert "this numba is broken" in rig.last_words()
    assert rig.process.reap() == 1


def test_a_process_behind_one_that_was_killed_finds_its_pages(
    model: ModelInfo, start: Callable[..., ExecutorRig]
) -> None:
    """The first page of the prompt is not computed again, and what follows is what it was."""
    rig = start(model, speculate="off")
    rig.until_ready()
    rig.push(1, [], (3, 3, 0, 17, 1), 3)
    rig.push(2, [3])
    wanted = [rig.result(), rig.result()]
    for kept in (True, False):
        rig.process.reap()
        epoch = rig.memory.control.epoch("gpu") + 1
        if not kept:
            rig.memory.control.set_memory("gpu", epoch)
        rig.start()
        rig.until_ready()
        rig.push(3, [], (3, 3, 16, 1, 1), 3)
        rig.push(4, [3])
        assert [rig.result(), rig.result()] == wanted, "nothing is cleared, whoever counts on it"
