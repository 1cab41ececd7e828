"""The safetensors parser: agrees with the reference package, and says ModelError for whatever is wrong with a file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm.safetensors_file import INDEX_FILE, read_file, read_folder
from shm.tensor_map import ModelError
from tests.model_factory import TinyLlama, write_json, write_safetensors


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def record(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_agrees_with_the_reference_package(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.float16), "c": np.arange(2)}
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "pt"})
    entries = read_file(tmp_path / "m.safetensors")
    assert {name: (entry.kind, entry.shape) for name, entry in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (3,)),
        "c": ("I64", (2,)),
    }
    assert all(entries[name].data.tobytes() == array.tobytes() for name, array in arrays.items())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"1234", "not a safetensors file"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 3) + b"{}", "not a safetensors file"),
        (file_of(b"{nope"), "not JSON"),
        (file_of([]), "not an object"),
        (file_of({"t": 1}), "tensor t has no record"),
        (file_of({"t": record(dtype=1)}, b"1234"), "tensor t has a record without"),
        (file_of({"t": record(shape=[-1])}, b"1234"), "tensor t has a record without"),
        (file_of({"t": record(shape=[True])}, b"1234"), "tensor t has a record without"),
        (file_of({"t": record(offsets=[0])}, b"1234"), "tensor t has a record without"),
        (file_of({"t": record(offsets=[4, 0])}, b"1234"), "tensor t ends at byte"),
        (file_of({"t": record()}, b"123"), "tensor t ends at byte 4 of the data, but there are only 3"),
        (file_of({"t": record(offsets=[2**62, 2**62 + 4])}, b"1234"), "tensor t ends at byte"),
        (file_of({"t": record(shape=[2])}, b"1234"), "tensor t has 4 bytes, which do not match F32"),
        (file_of({"t": record(shape=[2**60, 2**60])}, b"1234"), "tensor t has the impossible shape"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=says) as caught:
        read_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_mutations_parse_or_are_model_errors(tmp_path: Path, at: int, patch: bytes) -> None:
    path = tmp_path / "m.safetensors"
    content = bytearray(file_of({f"t{n}": record(offsets=[4 * n, 4 * n + 4]) for n in range(5)}, bytes(20)))
    content[at : at + len(patch)] = patch
    path.write_bytes(content)
    try:
        read_file(path)
    except ModelError as error:
        assert "\n" not in str(error)


def test_shards(tmp_path: Path) -> None:
    model = TinyLlama()
    whole = read_folder(model.write_hf(tmp_path / "one"))
    parts = read_folder(model.write_hf(tmp_path / "three", shards=3))
    assert whole.keys() == parts.keys() == model.weights().keys()
    assert all(whole[name].data.tobytes() == parts[name].data.tobytes() for name in whole)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        (None, "no weight_map"),
        ({"t": 5}, "no weight_map"),
        ({"t": "../outside.safetensors"}, "not a file of the same folder"),
        ({"t": "/etc/passwd"}, "not a file of the same folder"),
        ({"t": ".."}, "cannot be read"),
        ({"t": "x\0y"}, "cannot be read"),
        ({"t": "absent.safetensors"}, "absent.safetensors: no such file"),
        ({"t": "shard.safetensors", "u": "shard.safetensors"}, "tensor u is missing"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, weight_map: Any, says: str) -> None:
    write_safetensors(tmp_path / "shard.safetensors", {"t": np.zeros(2, np.float32)})
    write_json(tmp_path / INDEX_FILE, {"weight_map": weight_map})
    with pytest.raises(ModelError, match=says):
        read_folder(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_folder(tmp_path)
    (tmp_path / INDEX_FILE).write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        read_folder(tmp_path)
