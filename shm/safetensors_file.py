"""The safetensors parser: the tensors of one file, or of all shards in a folder.

Owns the reading of the format (u64 length, JSON header, data) over a read-only map; every offset is checked against
the file before it is used. The safetensors package is not used because its numpy interface cannot give bfloat16 and
copies a tensor before one can look at it. Never opens a file that an index names outside of the model's own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import orjson

from shm.tensor_map import BLOCKS, ModelError, TensorEntry, map_file, tensor_bytes

# The format's own limit.
HEADER_BYTES_MAX = 100_000_000
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, TensorEntry]:
    """HF name -> TensorEntry of model.safetensors, or of the shards that its index lists. Raises ModelError."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return read_file(folder / SINGLE_FILE)
    index = read_json(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_path}: it has no weight_map from tensor to file")
    entries: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise ModelError(f"{index_path}: it names {file_name!r}, which is not a file of the same folder")
        shard = read_file(folder / file_name)
        entries |= {name: entry for name, entry in shard.items() if weight_map.get(name) == file_name}
    missing = weight_map.keys() - entries.keys()
    if missing:
        name = min(missing)
        raise ModelError(f"{folder / weight_map[name]}: tensor {name} is missing")
    return entries


def read_file(path: Path) -> dict[str, TensorEntry]:
    """HF name -> TensorEntry of one file. Raises ModelError."""
    mapped = map_file(path)
    size = len(mapped)
    header_bytes = int.from_bytes(mapped[:8], "little")
    data_begin = 8 + header_bytes
    if size < 8 or header_bytes > HEADER_BYTES_MAX or data_begin > size:
        raise ModelError(
            f"{path}: not a safetensors file, or one cut short (its header does not fit into {size} bytes)"
        )
    try:
        header = orjson.loads(mapped[8:data_begin])
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: broken safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: broken safetensors file: its header is not an object")
    entries: dict[str, TensorEntry] = {}
    for name, record in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape, begin, end = _checked(record, size - data_begin)
        except ValueError as error:
            raise ModelError(f"{path}: broken safetensors file: tensor {name} {error}") from None
        data = np.frombuffer(mapped, np.uint8)[data_begin + begin : data_begin + end]
        entries[name] = TensorEntry(name, kind, shape, data)
    return entries


def _checked(record: Any, data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, begin and end of a header's record. Raises ValueError with what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError("has no record")
    kind, shape, offsets = record.get("dtype"), record.get("shape"), record.get("data_offsets")
    if not isinstance(kind, str) or not _natural_numbers(shape) or not _natural_numbers(offsets) or len(offsets) != 2:
        raise ValueError("has a record without dtype, shape and data_offsets")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise ValueError(f"ends at byte {end} of the data, but there are only {data_bytes} (a download cut short?)")
    # Quantised ggml kinds are not types of this format; what is not read here is left for check_tensors to refuse.
    if kind in BLOCKS and end - begin != tensor_bytes(kind, tuple(shape)):
        raise ValueError(f"has {end - begin} bytes, which do not match {kind} of shape {shape}")
    return kind, tuple(shape), begin, end


def _natural_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if the file is missing, not JSON, or not an object."""
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content
