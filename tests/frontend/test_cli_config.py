"""Options become a configuration that can be served, or one line that names the option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend import cli_config
from frontend.cli_config import KV_TOKENS_DEFAULT, CliError, Wanted, make_config, usable_cpus
from procs.model_memory import kv_bytes_per_token
from shm.config import ServerConfig
from shm.tensor_map import ModelError
from tests.model_factory import TinyLlama

WANTED = Wanted(
    model="",
    host="127.0.0.1",
    port=8000,
    device="host",
    dtype=None,
    overlap=True,
    max_running=64,
    max_queued=1024,
    kv_tokens=None,
    page_size=16,
    max_len=None,
    prefill_chunk=512,
    drain_seconds=30.0,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(context=512).write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def made(model: Path, **changes: object) -> ServerConfig:
    return make_config(replace(WANTED, model=str(model), **changes), lambda *_: None)  # type: ignore[arg-type]


def test_what_was_not_given_is_worked_out(model: Path) -> None:
    config = made(model)
    assert (config.served_model_name, config.model.path) == ("tiny", str(model))
    assert (config.kv_tokens, config.max_len, config.threads) == (KV_TOKENS_DEFAULT, 512, usable_cpus())
    assert made(model, served_model_name="other").served_model_name == "other"


def test_a_small_cache_shortens_requests_and_a_long_request_enlarges_the_cache(model: Path) -> None:
    assert made(model, kv_tokens=100).max_len == 96 - 2
    assert made(model, kv_tokens=100, page_size=32).max_len == 96 - 2
    assert made(model, kv_tokens=100, page_size=64).max_len == 64 - 2
    assert made(model, max_len=300).max_len == 300


def test_the_cache_takes_half_of_what_is_free_at_most(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(model)
    free = 4000 * kv_bytes_per_token(config.model, "int8")
    need = cli_config.memory_needed(replace(config, kv_tokens=512, max_len=2))
    monkeypatch.setattr(cli_config, "memory_available", lambda: need.weights + need.processes + 2 * free)
    assert made(model).kv_tokens == 4000


def test_too_little_memory_is_told_before_anything_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("procs.model_memory.memory_available", lambda *_: 1 << 20)
    monkeypatch.setattr(cli_config, "memory_available", lambda: 1 << 20)
    with pytest.raises(ModelError, match="too little memory"):
        made(model)


def test_the_type_of_numbers_follows_the_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_config, "CUDA_DRIVER", "libc.so.6")
    assert (made(model).device, made(model).dtype) == ("host", "int8")
    assert made(model, dtype="float32").dtype == "float32"
    assert (made(model, device="cuda").device, made(model, device="cuda").dtype) == ("cuda", "bfloat16")
    assert made(model, device="cuda", dtype="float32").dtype == "float32"
    with pytest.raises(CliError, match=r"^--dtype: must be one of bfloat16, float32 on the device cuda, got 'int8'$"):
        made(model, device="cuda", dtype="int8")


def test_a_gpu_has_its_own_memory_and_pages(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_config, "CUDA_DRIVER", "libc.so.6")
    monkeypatch.setattr(cli_config, "memory_available", lambda: 0)
    assert made(model, device="cuda").kv_tokens == KV_TOKENS_DEFAULT
    assert made(model, device="cuda", page_size=24).kv_tokens == KV_TOKENS_DEFAULT // 24 * 24


def test_without_a_driver_there_is_no_gpu_and_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_config, "CUDA_DRIVER", "libnone.so.1")
    with pytest.raises(CliError, match=r"^--device: cuda needs an NVIDIA GPU with its driver, .* libnone.so.1$"):
        made(Path("no-such-model"), device="cuda")


def test_the_order_is_checked_on_request(model: Path) -> None:
    assert not made(model).check_order
    assert made(model, check_order=True).check_order


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"max_len": 513}, "--max-len"),
        ({"max_len": 1}, "--max-len"),
        ({"max_len": 0}, "--max-len"),
        ({"kv_tokens": 0}, "--kv-tokens"),
        ({"kv_tokens": 64, "max_len": 64}, "--kv-tokens"),
        ({"page_size": 0}, "--page-size"),
        ({"page_size": 8}, "--page-size"),
        ({"page_size": 24}, "--page-size"),
        ({"max_running": 0}, "--max-running"),
        ({"max_queued": -1}, "--max-queued"),
        ({"prefill_chunk": 0}, "--prefill-chunk"),
        ({"threads": 0}, "--threads"),
        ({"drain_seconds": -1.0}, "--drain-seconds"),
        ({"dtype": "int3"}, "--dtype"),
        ({"device": "tpu"}, "--device"),
        ({"api_key": ""}, "--api-key"),
        ({"api_key": " k"}, "--api-key"),
        ({"api_key": "k\n"}, "--api-key"),
        ({"api_key": "k\tk"}, "--api-key"),
        ({"api_key": "clé"}, "--api-key"),
        ({"served_model_name": ""}, "--served-model-name"),
    ],
)
def test_a_value_that_cannot_be_is_one_line_with_its_option(
    model: Path, changes: dict[str, object], option: str
) -> None:
    with pytest.raises(CliError) as caught:
        made(model, **changes)
    assert str(caught.value).startswith(f"{option}: ") and "\n" not in str(caught.value)


sizes = st.none() | st.integers(-1, 2000)


@given(kv_tokens=sizes, max_len=sizes, page_size=st.sampled_from([0, 7, 16, 32, 48]))
def test_whatever_the_sizes_a_configuration_can_serve_its_longest_request(
    model: Path, kv_tokens: int | None, max_len: int | None, page_size: int
) -> None:
    try:
        config = made(model, kv_tokens=kv_tokens, max_len=max_len, page_size=page_size)
    except CliError:
        # Refused only for what was given: with everything left to us there is always a configuration.
        assert page_size in (0, 7) or kv_tokens is not None or max_len is not None
        return
    assert config.pages_per_row <= config.kv_tokens // config.page_size
    assert config.max_len == max_len or max_len is None
    assert config.kv_tokens == kv_tokens or kv_tokens is None
