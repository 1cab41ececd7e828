"""KV caches in the server's memory: another model over it goes on where the one before was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.backend import open_backend
from gpu.models.caches import Caches, OwnCaches, open_caches
from gpu.models.host_drafters import HostDflash, HostMtp
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from procs.model_memory import cache_bytes
from procs.server_memory import CACHES_MAX
from shm.config import ServerConfig
from shm.drafter_file import DrafterFile
from shm.kv_memory import KvMemory, create_fd
from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES
from shm.segment import LayoutError
from tests.gpu.models.small_drafters import trained
from tests.model_factory import TinyLlama

PAGES, PAGE, TAPS = np.array([[3, 5]], np.int32), 16, (0, 1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = TinyLlama(seed=3).write_hf(tmp_path_factory.mktemp("tiny"))
    return ServerConfig(
        model=read_model_info(folder), served_model_name="tiny", host="127.0.0.1", port=0, dtype="float32",
        max_running=2, max_queued=1, kv_tokens=128, max_len=24, prefill_chunk=8, threads=1,
    )  # fmt: skip


@pytest.fixture
def made(config: ServerConfig) -> Iterator[tuple[int, int]]:
    fd, size = create_fd(1 << 20)
    yield fd, size
    os.close(fd)


def model_of(config: ServerConfig, dtype: str, caches: Caches) -> HostLlama:
    return HostLlama(
        config.model, open_weights(config.model), dtype, page_size=PAGE, pages=9, pages_per_row=2, max_tokens=32,
        max_seqs=4, threads=1, taps=TAPS, caches=caches,
    )  # fmt: skip


def passes(model: HostLlama, begin: int, end: int) -> Any:
    """Logits of the places begin..end-1 of one row, from the tokens that it has there."""
    at = np.arange(begin, end, dtype=np.int32)
    logits = np.zeros((len(at), model.info.vocab_size), np.float32)
    model.forward(at * 7, at, np.zeros(len(at), np.int32), PAGES, at - begin, logits)
    return logits


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_another_model_over_it_knows_what_was_said(config: ServerConfig, made: tuple[int, int], dtype: str) -> None:
    whole = passes(model_of(config, dtype, OwnCaches()), 0, 20)
    passes(model_of(config, dtype, KvMemory(*made, bytes(32))), 0, 16)
    goes_on = passes(model_of(config, dtype, KvMemory(*made, bytes(32))), 16, 20)
    np.testing.assert_array_equal(goes_on, whole[16:])
    knows_nothing = passes(model_of(config, dtype, OwnCaches()), 16, 20)
    assert (knows_nothing != whole[16:]).any()


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_the_caches_of_drafters_are_there_too(
    config: ServerConfig, made: tuple[int, int], kind: str, tmp_path: Path
) -> None:
    folder = TinyLlama(seed=3).write_hf(tmp_path)
    trained(folder, kind, TAPS)
    file = DrafterFile(folder / kind / "drafter.safetensors")
    config, models = replace(config, model=read_model_info(folder)), []
    for _ in range(2):
        memory = KvMemory(*made, bytes(32))
        target = model_of(config, "float32", memory)
        drafters: dict[str, Any] = {"mtp": HostMtp, "dflash": HostDflash}
        models.append(drafters[kind](target, open_weights(config.model), file, caches=memory))
    models[0].k_cache[:, 3], models[0].v_cache[:, 5] = 1.5, 2.5
    assert (models[1].k_cache[:, 3] == 1.5).all() and (models[1].v_cache[:, 5] == 2.5).all()
    wanted = replace(config, speculate=kind, window=2, drafter_file=str(file.path))
    used = sum(cache.nbytes for m in (target, models[1]) for cache in (m.k_cache, m.v_cache))
    assert used == cache_bytes(wanted)


def test_what_the_supervisor_makes_is_what_a_server_takes(config: ServerConfig) -> None:
    needed = HEADER_BYTES + cache_bytes(config)
    fd, size = create_fd(cache_bytes(config) + CACHES_MAX * CACHE_LINE_BYTES)
    try:
        plane = np.zeros((config.rows, config.max_len), np.int32)
        for is_kept in (False, True):
            backend = open_backend(replace(config, check_order=True), plane, None, None, (fd, size))
            assert isinstance(backend.caches, KvMemory)
            assert needed <= backend.caches._taken <= needed + CACHES_MAX * CACHE_LINE_BYTES <= size
            backend.settle(is_kept)
            audit: Any = backend.checks.audit
            assert audit._written.tolist() == [config.page_size if is_kept else 0] * config.pages
            backend.device.close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("change", [{"page_size": 32}, {"kv_tokens": 256}, {"dtype": "int8"}])
def test_another_layout_is_not_taken_over(config: ServerConfig, made: tuple[int, int], change: dict[str, Any]) -> None:
    open_caches(config, None, made).settle(is_kept=False)
    open_caches(config, None, made).settle(is_kept=True)
    with pytest.raises(LayoutError, match="laid out otherwise"):
        open_caches(replace(config, **change), None, made).settle(is_kept=True)


def test_without_the_servers_memory_it_is_the_process_own(config: ServerConfig) -> None:
    caches = open_caches(config, None, None)
    caches.settle(is_kept=False)
    caches.tend()
    assert isinstance(caches, OwnCaches) and not caches.array((4, 4), np.float32).any()
