"""The clocked model through the real step program: its answers, its drafts, its time, and what its folder may say."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.backend import open_backend
from gpu.device.protocol import DeviceError
from gpu.lanes import ResultSlot, StepSlot
from gpu.models.clocked import ClockedModel, pass_time
from procs.model_files import read_model_info
from shm.clocked_file import ClockedFile, times_ns
from shm.config import ConfigError, ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout
from shm.tensor_map import ModelError
from tests.gpu.test_declarations import AuditDevice
from tools.clocked_model import PRESETS, answer, between, constant, write

PROMPT = [7, 200, 0, 31, 255]


def config_of(folder: Path, **changes: Any) -> ServerConfig:
    """A small server of the clocked model in `folder`."""
    values = {"kv_tokens": 512, "max_len": 128, "max_running": 4, "prefill_chunk": 16, "threads": 1, "port": 1}
    info = read_model_info(folder)
    return ServerConfig(model=info, served_model_name="clocked", host="127.0.0.1", **(values | changes))


class Rig:
    """The step program of one server, one step after the other, for the request in row 0."""

    def __init__(self, config: ServerConfig) -> None:
        self.ledger = np.zeros((config.rows, config.max_len), np.int32)
        self.ledger[0, : len(PROMPT)] = PROMPT
        self.backend = open_backend(config, self.ledger, None)
        layout, results = StepLayout(config), ResultLayout(config)
        device = self.backend.device
        self.step = StepSlot.on(device, layout, np.zeros(layout.nbytes // 4, np.int32), "step")
        self.result = ResultSlot.on(device, results, np.zeros(results.nbytes // 4, np.int32), "result", 0)
        self.backend.program.capture()

    def run(self, **header: int) -> list[int]:
        """Queue what the descriptor says and wait; the tokens of the first row."""
        for name, value in header.items():
            setattr(self.step.view, name, value)
        self.backend.program.enqueue(self.step, self.result, lambda: None)
        self.backend.device.synchronize()
        view = self.result.view
        return view.tokens[: view.counts[0], 0].tolist()

    def prefill(self) -> list[int]:
        """The prompt, in pages 3 and 1 of the pool and entry 2."""
        view = self.step.view
        pages = self.backend.program.slots.table.array.shape[1]
        for index in range(pages):
            view.slot_writes[:, index] = (2, index, [3, 1, 2, 5, 4, 6, 7, 8, 9][index % 9])
        view.set_sampling(0, 2, 0.0, 1.0, 0.0, 0, 0)
        view.chunks[:, 0] = (2, 0, 0, len(PROMPT), 1, 0)
        return self.run(kind=STEP_MIXED, n_chunks=1, n_slot_writes=pages, n_sampling=1, step=1)

    def decode(self, drafts: int = 0) -> list[int]:
        """One step of the row."""
        self.step.view.decode_entries[0] = 2
        return self.run(kind=STEP_DECODE, n_decode=1, n_chunks=0, n_slot_writes=0, n_sampling=0, drafts=drafts)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_it_answers_as_the_plain_function_does(tmp_path: Path, seed: int) -> None:
    rig = Rig(config_of(write(tmp_path, ClockedFile({1: 100.0}, seed=seed))))
    made = rig.prefill()
    while len(made) < 60:
        made += rig.decode()
    assert made == answer(PROMPT, 60, seed)
    rig.backend.device.close()


@pytest.mark.parametrize(("accept", "windows"), [(0.0, {1}), (1.0, {4}), (0.766, {1, 2, 3, 4})])
def test_drafts_are_right_as_often_as_they_shall_be_and_change_no_answer(
    tmp_path: Path, accept: float, windows: set[int]
) -> None:
    file = ClockedFile({1: 50.0}, draft_us={1: 20.0}, extend_us={1: 20.0}, accept=accept)
    rig = Rig(config_of(write(tmp_path, file), speculate="clocked", window=4))
    made, gains = rig.prefill(), []
    while len(made) < 100:
        gained = rig.decode(drafts=3)
        gains.append(len(gained))
        made += gained
    assert made == answer(PROMPT, len(made))
    assert set(gains) == windows
    rig.backend.device.close()


def test_its_launches_touch_what_they_declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.device.host.HostDevice", lambda observer, guard: AuditDevice(observer))
    file = ClockedFile({1: 50.0}, draft_us={1: 20.0}, extend_us={1: 20.0}, accept=0.766)
    rig = Rig(config_of(write(tmp_path, file), speculate="clocked", window=4))
    made = rig.prefill() + rig.decode(drafts=3) + rig.decode() + rig.decode(drafts=3)
    assert made == answer(PROMPT, len(made))
    device = rig.backend.device
    assert isinstance(device, AuditDevice)
    assert {"model", "sample", "draft", "draft 2", "draft extend"} <= device.audited
    device.close()


def test_a_step_takes_its_passes_time_and_little_of_a_core(tmp_path: Path) -> None:
    file = ClockedFile({1: 30_000.0}, draft_us={1: 10_000.0}, extend_us={1: 10_000.0}, prompt_token_us=2_000.0)
    rig = Rig(config_of(write(tmp_path, file), speculate="clocked", window=4))
    rig.prefill()
    view = rig.result.view
    assert view.end_ns - view.begin_ns >= 30e6 + 10e6 + 4 * 2e6, "its row's time, and that of 4 more tokens"
    cpu_s = time.process_time()
    rig.decode(drafts=3)
    assert view.end_ns - view.begin_ns >= 30e6 + 2 * 10e6 + 10e6
    assert time.process_time() - cpu_s < 0.03, "it sleeps"
    rig.backend.device.close()


def test_time_runs_without_the_interpreter_lock() -> None:
    words = np.zeros(4, np.int64)
    begin = time.monotonic_ns()
    pass_time(5_000_000, words.ctypes.data)
    assert time.monotonic_ns() - begin >= 5_000_000


def test_a_page_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    model = ClockedModel(config_of(write(tmp_path, constant(0.0))), constant(0.0))
    ints = np.zeros(1, np.int32)
    pages = np.full((1, 8), 10_000, np.int32)
    with pytest.raises(DeviceError, match="out of range"):
        model.forward(ints, ints, ints, pages, ints, np.zeros((1, 256), np.float32), None)


def test_times_lie_on_straight_lines(tmp_path: Path) -> None:
    times = {1: 3400.0, 32: 4400.0, 64: 6000.0}
    ns = times_ns(times, 256).tolist()
    assert (ns[0], ns[1], ns[32], ns[48], ns[64], ns[128]) == tuple(
        int(us * 1000) for us in (3400, 3400, 4400, 5200, 6000, 9200)
    )
    assert all(abs(between(times, rows) * 1000 - ns[rows]) < 1 for rows in (1, 2, 31, 33, 64, 65, 256))
    assert times_ns({}, 2).tolist() == [0, 0, 0] and between({}, 2) == 0


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_read_as_it_was_written(tmp_path: Path, preset: str) -> None:
    file = PRESETS[preset].file
    assert ClockedFile.read(write(tmp_path / preset, file)) == file
    assert read_model_info(tmp_path / preset).format == "clocked"


def test_steps_of_the_presets_are_those_of_the_article() -> None:
    steps = {name: preset.step_us(1) / 1000 for name, preset in PRESETS.items()}
    assert steps == {"qwen3-8b": 3.4, "glm-5.3": 6.1, "glm-5.3-mtp": 8.2}
    assert PRESETS["glm-5.3"].step_us(64) == 21000
    p = PRESETS["glm-5.3-mtp"].file.accept
    assert 1 + p + p**2 + p**3 == pytest.approx(2.8, abs=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama", "architectures": ["X"]}, "architecture"),
        ({"pass_us": {}}, "pass_us"),
        ({"pass_us": {"0": 1.0}}, "rows below 1"),
        ({"draft_us": {"1": -1}}, "draft_us"),
        ({"extend_us": 3}, "no object"),
        ({"accept": 1.5}, "accept"),
        ({"seed": -1}, "seed"),
        ({"context_len": 1}, "context_len"),
        ({"speed": 1}, "speed is no key"),
    ],
)
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    import orjson

    folder = write(tmp_path, constant(100.0))
    content = orjson.loads((folder / "config.json").read_bytes()) | change
    (folder / "config.json").write_bytes(orjson.dumps(content))
    with pytest.raises(ModelError, match=said):
        read_model_info(folder)


def test_what_does_not_fit_a_clocked_model_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, constant(100.0))
    for changes, option in (
        ({"device": "cuda", "dtype": "float32"}, "device"),
        ({"speculate": "mtp", "drafter_file": "x", "window": 4}, "speculate"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_of(folder, **changes)
        assert caught.value.option == option
