"""Models over the server's memory for packed weights: the second one packs nothing, reads no file, says the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.backend import open_backend
from gpu.kernels.packing import Packer
from gpu.models import packed_weights, words
from gpu.models.host_drafters import HostDflash, HostMtp
from gpu.models.llama import HostLlama
from gpu.models.packed_weights import OwnWeights, PackedWeights, SharedWeights, weights_digest
from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from procs.model_memory import packed_bytes
from shm.config import ServerConfig
from shm.drafter_file import DrafterFile
from shm.limits import HEADER_BYTES
from shm.weights_memory import BYTES_AT, PACKING, STATE_AT, WeightsMemory, create_fd
from tests.gpu.models.small_drafters import trained
from tests.model_factory import TinyLlama, TinyQwen3

DTYPES = ("int8", "bfloat16", "float32")
TINIES = {"llama": TinyLlama(seed=3), "qwen3": TinyQwen3(seed=3, heads=6, kv_heads=2, tied=True)}
DIGEST = bytes(range(32))
PAGES, PAGE = np.array([[3, 5]], np.int32), 16
TAPS = (0, 1)
Float32 = Any
Create = Callable[..., tuple[int, int]]


@pytest.fixture
def create() -> Iterator[Create]:
    fds: list[int] = []

    def make(nbytes: int = 1 << 20) -> tuple[int, int]:
        fd, size = create_fd(nbytes)
        fds.append(fd)
        return fd, size

    yield make
    for fd in fds:
        os.close(fd)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny.write_hf(tmp_path_factory.mktemp(name)) for name, tiny in TINIES.items()}


class Nothing:
    """Weights that nobody may ask for."""

    def names(self) -> list[str]:
        return []

    def tensor(self, name: str, /) -> Float32:
        raise AssertionError(f"{name} is packed already")


def config_of(folder: Path, **changes: Any) -> ServerConfig:
    given: dict[str, Any] = {
        "model": read_model_info(folder), "served_model_name": "tiny", "host": "127.0.0.1", "port": 0,
        "max_running": 2, "max_queued": 1, "kv_tokens": 128, "max_len": 32, "prefill_chunk": 8, "threads": 1,
    }  # fmt: skip
    return ServerConfig(**(given | changes))


def load(folder: Path, dtype: str, packed: PackedWeights | None, source: Any = None) -> HostLlama:
    info = read_model_info(folder)
    return HostLlama(
        info, source or open_weights(info), dtype, page_size=PAGE, pages=8, pages_per_row=2, max_tokens=32, max_seqs=4,
        threads=2, taps=TAPS, packed=packed,
    )  # fmt: skip


def said(model: HostLlama) -> Float32:
    """Its logits behind a few tokens."""
    at = np.arange(9, dtype=np.int32)
    logits = np.zeros((9, model.info.vocab_size), np.float32)
    model.forward(at * 7, at, np.zeros(9, np.int32), PAGES, at, logits)
    return logits


def no_packing(*_given: Any) -> None:
    raise AssertionError("packed already")


@pytest.mark.parametrize("name", TINIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_model_packs_nothing_and_says_the_same_bit_for_bit(
    folders: dict[str, Path], create: Create, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = said(load(folders[name], dtype, OwnWeights()))
    made = create()
    memory = WeightsMemory(*made, DIGEST)
    first = load(folders[name], dtype, SharedWeights(memory))
    memory.complete()
    np.testing.assert_array_equal(said(first), alone)
    monkeypatch.setattr(Packer, "pack", no_packing)
    memory = WeightsMemory(*made, DIGEST)
    second = load(folders[name], dtype, SharedWeights(memory), Nothing())
    memory.complete()
    np.testing.assert_array_equal(said(second), alone)
    assert memory.is_complete and np.abs(alone).max() > 0.01
    begin, addresses = memory._bytes.ctypes.data, second._layers[:, : words.LAYER_TAP]
    assert begin < addresses.min() and addresses.max() < begin + made[1], "there is no second copy"
    used = int(np.frombuffer(os.pread(made[0], 8, 8 * BYTES_AT), np.uint64)[0])
    assert used <= packed_bytes(config_of(folders[name], dtype=dtype)) < 1.05 * used


def drafter_of(kind: Any, target: HostLlama, source: Any, file: DrafterFile, packed: PackedWeights) -> tuple[Any, ...]:
    """What a drafter answers to a few states: its logits, and what it leaves in `residual`."""
    drafter = kind(target, source, file, packed)
    at, none = np.arange(6, dtype=np.int32), np.zeros((0, len(drafter.vocabulary)), np.float32)
    states = np.random.default_rng(3).standard_normal((6, len(TAPS), target.info.hidden_size), np.float32)
    places = np.zeros(6, np.int32), PAGES, np.zeros(0, np.int32), none
    drafter.know(states, at, at, *places) if kind is HostDflash else drafter.learn(states, at + 20, at, *places)
    logits, last = np.zeros((1, len(drafter.vocabulary)), np.float32), np.array([6], np.int32)
    rows = np.zeros(1, np.int32), PAGES, np.zeros(1, np.int32), logits
    joined = drafter.residual[5][None, None].copy()
    given = (joined, last, last + 40, last, *rows) if kind is HostDflash else (joined, last + 40, last, *rows)
    drafter.draft(*given)
    return logits, drafter.residual[0].copy()


@pytest.mark.parametrize("kind", [HostMtp, HostDflash])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trained_drafter_is_found_packed_behind_its_target(
    folders: dict[str, Path], create: Create, kind: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["llama"]
    file = DrafterFile(trained(folder, "mtp" if kind is HostMtp else "dflash", TAPS).file)
    weights = open_weights(read_model_info(folder))
    alone = drafter_of(kind, load(folder, dtype, None), weights, file, OwnWeights())
    made = create()
    for source in (weights, Nothing()):
        memory = WeightsMemory(*made, DIGEST)
        packed = SharedWeights(memory)
        answer = drafter_of(kind, load(folder, dtype, packed, source), source, file, packed)
        memory.complete()
        for found, wanted in zip(answer, alone, strict=True):
            np.testing.assert_array_equal(found, wanted)
        monkeypatch.setattr(Packer, "pack", no_packing)
    assert np.abs(alone[0]).max() > 0.01


@pytest.mark.unordered
@pytest.mark.parametrize("speculate", ["off", "ngram", "standalone", "mtp", "dflash"])
def test_a_server_packs_all_of_its_models_once_and_has_room_for_them(
    folders: dict[str, Path], create: Create, speculate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["llama"]
    changes: dict[str, Any] = {} if speculate == "off" else {"speculate": speculate, "window": 3}
    if speculate == "standalone":
        changes["drafter"] = read_model_info(folders["qwen3"])
    if speculate in ("mtp", "dflash"):
        changes["drafter_file"] = str(trained(folder, speculate, TAPS).file)
    config = config_of(folder, **changes)
    made = create(packed_bytes(config))
    packs = 0
    pack = Packer.pack

    def counted(*given: Any) -> None:
        nonlocal packs
        packs += 1
        pack(*given)

    monkeypatch.setattr(Packer, "pack", counted)
    for count in range(2):
        backend = open_backend(config, np.zeros((config.rows, config.max_len), np.int32), None, made)
        backend.device.close()
        if count == 0:
            packs_once = packs
    assert packs == packs_once > 0
    used = int(np.frombuffer(os.pread(made[0], 8, 8 * BYTES_AT), np.uint64)[0])
    assert used <= packed_bytes(config)


def test_a_death_anywhere_while_packing_costs_another_packing_and_nothing_else(
    folders: dict[str, Path], create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory as it is before and behind every step of packing is what a process that dies there leaves behind."""
    folder, dtype = folders["qwen3"], "int8"
    alone = said(load(folder, dtype, OwnWeights()))
    made = create()
    states = [os.pread(*made, 0)]

    def watch(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            result = inner(*given, **named)
            states.append(os.pread(*made, 0))
            return result

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((Packer, "pack"), (HostLlama, "_copy"), (WeightsMemory, "_store"), (WeightsMemory, "take")):
        watch(owner, name)
    memory = WeightsMemory(*made, DIGEST)
    load(folder, dtype, SharedWeights(memory))
    memory.complete()
    monkeypatch.undo()
    garbage = bytearray(np.random.default_rng(1).bytes(made[1]))
    garbage[:HEADER_BYTES] = bytes(HEADER_BYTES)
    garbage[8 * STATE_AT] = PACKING
    states[1:1] = [bytes(garbage)]
    assert len(states) > 40
    for number, state in enumerate(dict.fromkeys(states)):
        left = create()
        os.pwrite(left[0], state, 0)
        memory = WeightsMemory(*left, DIGEST)
        assert memory.is_complete == (state == states[-1]), number
        model = load(folder, dtype, SharedWeights(memory))
        memory.complete()
        np.testing.assert_array_equal(said(model), alone)
        assert os.pread(*left, 0)[:HEADER_BYTES] == states[-1][:HEADER_BYTES]
        model.close()


def test_the_digest_says_all_that_decides_what_is_packed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders["llama"]
    config, file = config_of(folder), DrafterFile(trained(folder, "mtp", TAPS).file)
    digest = weights_digest(config, None)
    assert digest == weights_digest(replace(config, kv_tokens=256, max_running=1, threads=2, port=80), None)
    other = DrafterFile(file.path)
    other.vocabulary = file.vocabulary[1:]
    standalone = replace(config, speculate="standalone", drafter=config.model, window=2)
    found = [
        digest,
        weights_digest(replace(config, dtype="float32"), None),
        weights_digest(config_of(folders["qwen3"]), None),
        weights_digest(standalone, None),
        weights_digest(config, file),
        weights_digest(config, other),
    ]
    monkeypatch.setattr(packed_weights, "source_hash", lambda: "of other sources")
    found.append(weights_digest(config, None))
    assert len(set(found)) == len(found)
