"""The configuration: its JSON form, and that every bad value names its option."""

import dataclasses
import typing

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm import limits
from shm.config import DTYPES, ConfigError, ModelInfo, ServerConfig
from tests.shm.small import MODEL, config, model

BAD_MODEL = [
    ("name", ""),
    ("path", ""),
    ("path", 7),
    ("format", "onnx"),
    ("vocab_size", 0),
    ("vocab_size", 10.0),
    ("context_len", 1),
    ("context_len", limits.CONTEXT_LEN_MAX + 1),
    ("hidden_size", 0),
    ("num_layers", 0),
    ("num_heads", 0),
    ("num_kv_heads", 0),
    ("num_kv_heads", 3),
    ("head_dim", 0),
    ("intermediate_size", 0),
    ("rope_theta", 0.0),
    ("rope_theta", float("inf")),
    ("rope_theta", "10000"),
    ("rope_scaling", "linear"),
    ("rms_eps", 0.0),
    ("rms_eps", float("nan")),
    ("tie_word_embeddings", 1),
    ("qk_norm", 0),
    ("eos_token_ids", (128,)),
    ("eos_token_ids", (-1,)),
    ("eos_token_ids", 2),
    ("eos_token_ids", ("2",)),
    ("bos_token_id", 128),
    ("bos_token_id", "1"),
]
BAD_SERVER = [
    ("model", None),
    ("model", 3),
    ("served_model_name", ""),
    ("host", ""),
    ("host", None),
    ("port", -1),
    ("port", 65536),
    ("port", True),
    ("device", "tpu"),
    ("dtype", "float64"),
    ("overlap", 1),
    ("max_running", 0),
    ("max_running", limits.MAX_RUNNING_MAX + 1),
    ("max_queued", -1),
    ("max_queued", limits.MAX_QUEUED_MAX + 1),
    ("kv_tokens", 0),
    ("kv_tokens", 64),  # max_len alone, without the windows
    ("kv_tokens", 79),  # enough tokens, but the last page is not whole
    ("kv_tokens", limits.KV_TOKENS_MAX + 1),
    ("page_size", 0),
    ("page_size", limits.PAGE_SIZE_MAX + 1),
    ("max_len", 1),
    ("max_len", 257),
    ("prefill_chunk", 0),
    ("prefill_chunk", limits.PREFILL_CHUNK_MAX + 1),
    ("api_key", ""),
    ("api_key", 5),
    ("drain_seconds", -1.0),
    ("drain_seconds", float("nan")),
    ("log_seconds", -1.0),
    ("log_seconds", limits.LOG_SECONDS_MAX + 1),
    ("window", 0),
    ("window", limits.WINDOW_MAX + 1),
    ("speculate", "guess"),
    ("drafter", "a model"),
    ("drafter_file", "a file"),
    ("draft_when", "never"),
    ("ngram_shared", True),
    ("threads", 0),
    ("threads", limits.THREADS_MAX + 1),
    ("poison", "yes"),
    ("check_order", 1),
    ("standby", "no"),
]


@pytest.mark.parametrize(("option", "value"), BAD_MODEL)
def test_a_bad_model_field_is_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: ") as caught:
        model(**{option: value})
    assert caught.value.option == option
    assert caught.value.message


@pytest.mark.parametrize(("option", "value"), BAD_SERVER)
def test_a_bad_server_field_is_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: ") as caught:
        config(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("device", "dtype", "told"),
    [
        ("cuda", "int8", "must be one of bfloat16, float32 on the device cuda, got 'int8'"),
        ("host", "float16", "must be one of int8, float32, bfloat16, got 'float16'"),
        *[(device, dtype, "") for device, dtypes in DTYPES.items() for dtype in dtypes],
    ],
)
def test_each_device_computes_in_its_own_dtypes(device: str, dtype: str, told: str) -> None:
    if not told:
        assert config(device=device, dtype=dtype).dtype == dtype
        return
    with pytest.raises(ConfigError) as caught:
        config(device=device, dtype=dtype)
    assert (caught.value.option, caught.value.message) == ("dtype", told)


@pytest.mark.parametrize(("device", "dtype"), [("host", "int8"), ("cuda", "bfloat16")])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_trained_drafter_runs_on_every_device_and_has_a_file(device: str, dtype: str, kind: str) -> None:
    options = {"device": device, "dtype": dtype, "speculate": kind, "window": 2}
    assert config(**options, drafter_file="a file").speculate == kind
    with pytest.raises(ConfigError, match="drafter_file: is for a trained drafter"):
        config(**options)


def test_every_field_has_a_bad_value_above() -> None:
    assert {name for name, _ in BAD_MODEL} == {f.name for f in dataclasses.fields(ModelInfo)}
    assert {name for name, _ in BAD_SERVER} == {f.name for f in dataclasses.fields(ServerConfig)}


def test_from_json_names_what_is_unknown_missing_or_malformed() -> None:
    value = orjson.loads(config().to_json())
    for wrong, option in [
        ({**value, "max_runing": 3}, "max_runing"),
        ({k: v for k, v in value.items() if k != "kv_tokens"}, "kv_tokens"),
        ({**value, "model": {**value["model"], "layers": 3}}, "layers"),
        ([], "ServerConfig"),
    ]:
        with pytest.raises(ConfigError) as caught:
            ServerConfig.from_json(orjson.dumps(wrong))
        assert caught.value.option == option
    with pytest.raises(ConfigError, match="not valid JSON"):
        ServerConfig.from_json(b"{")


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().port = 1  # type: ignore[misc]


def test_the_smallest_pool_holds_exactly_one_request() -> None:
    small = config(kv_tokens=80, max_len=64, page_size=16)
    assert small.pages_per_row == 5 == small.pages - 1


@st.composite
def configs(draw: st.DrawFn) -> ServerConfig:
    heads = draw(st.sampled_from([1, 2, 6]))
    info = model(
        name=draw(st.text(st.characters(codec="utf-8"), min_size=1)),
        format=draw(st.sampled_from(["gguf", "hf"])),
        num_heads=heads * 2,
        num_kv_heads=heads,
        rope_theta=draw(st.floats(1, 1e7)),
        rope_scaling=draw(st.none() | st.dictionaries(st.sampled_from("ab"), st.floats(-1, 1))),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 127), max_size=4))),
        bos_token_id=draw(st.none() | st.integers(0, 127)),
        qk_norm=draw(st.booleans()),
    )
    device = draw(st.sampled_from(["host", "cuda"]))
    max_len, window, page_size = draw(st.integers(2, 256)), draw(st.integers(1, 16)), draw(st.integers(1, 64))
    least = -(-(max_len + 2 * window) // page_size) * page_size
    return config(
        model=info,
        max_len=max_len,
        window=window,
        page_size=page_size,
        kv_tokens=draw(st.integers(least, least * 9)),
        max_running=draw(st.integers(1, 4096)),
        max_queued=draw(st.integers(0, 4096)),
        device=device,
        dtype=draw(st.sampled_from(DTYPES[device])),
        check_order=draw(st.booleans()),
        standby=draw(st.booleans()),
        overlap=draw(st.booleans()),
        api_key=draw(st.none() | st.text(st.characters(codec="ascii"), min_size=1)),
        drain_seconds=draw(st.floats(0, 100)),
    )


@settings(max_examples=60, deadline=None)
@given(configs())
def test_round_trip_through_json_and_derived_counts(value: ServerConfig) -> None:
    again = ServerConfig.from_json(value.to_json())
    assert again == value
    assert type(again.model.eos_token_ids) is tuple
    assert type(again.drain_seconds) is float
    assert value.rows == value.max_running + value.max_queued
    assert value.entries == value.max_running + 1
    assert (value.pages - 1) * value.page_size <= value.kv_tokens < value.pages * value.page_size
    assert value.pages_per_row * value.page_size >= value.max_len + 2 * value.window
    assert value.pages_per_row <= value.pages - 1


def test_defaults_are_those_of_the_declaration() -> None:
    given_fields = {f.name for f in dataclasses.fields(ServerConfig) if f.default is dataclasses.MISSING}
    assert given_fields == {
        "model",
        "served_model_name",
        "host",
        "port",
        "kv_tokens",
        "max_len",
        "threads",
    }
    assert set(MODEL) == set(typing.get_type_hints(ModelInfo))
