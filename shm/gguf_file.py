"""The GGUF parser: header, metadata and the table of tensors of a mapped file.

Owns the reading of the format (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian). Every length,
count and offset is checked against the bytes that are there before it is used, so a truncated or hostile file is a
ModelError and never an exception of another kind, a long loop or a large allocation. Knows nothing of what the metadata
mean. Written by hand because the gguf package takes seconds for a vocabulary that this reads in tens of milliseconds.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shm.tensor_map import BLOCKS, ModelError, TensorEntry, map_file, tensor_bytes

ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 16
DIMENSIONS_MAX = 4
# A key or tensor takes at least these bytes in the file, which bounds the counts in the header by the file's size.
ENTRY_BYTES_MIN = 13

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
# Types that files in the wild have and this server does not read: only for the error message.
KINDS_UNSUPPORTED = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

MetaValue: TypeAlias = int | float | bool | bytes | list[bytes] | NDArray[np.generic]

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GgufFile:
    """A mapped GGUF file. metadata: key -> value (strings as bytes); tensors: GGUF name -> TensorEntry."""

    def __init__(self, path: Path) -> None:
        """Parse the file's head, tens of milliseconds for a large vocabulary. Raises ModelError."""
        self.path = path
        self.metadata: dict[str, MetaValue] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self._bytes = map_file(path)
        self._size = len(self._bytes)
        self._position = 0
        self._read_head()

    def integer(self, key: str, default: int | None = None) -> int:
        """The value of an integer key. Raises ModelError if it is missing without a default, or of another type."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(f"{key} is not an integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """The value of a number key as float. Raises ModelError as `integer` does."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(f"{key} is not a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """The value of a string key. Raises ModelError as `integer` does, and for what is not UTF-8."""
        value = self._value(key, None if default is None else default.encode())
        if not isinstance(value, bytes):
            self._fail(f"{key} is not a string")
        return self._decode(value, key)

    def flag(self, key: str, default: bool) -> bool:
        """The value of a boolean key, or the default."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self._fail(f"{key} is not a boolean")
        return value

    def texts(self, key: str) -> list[str]:
        """The value of an array of strings. Raises ModelError as `text` does."""
        value = self._value(key, None)
        if not isinstance(value, list):
            self._fail(f"{key} is not an array of strings")
        return [self._decode(item, key) for item in value]

    def integers(self, key: str) -> list[int]:
        """The value of an array of integers. Raises ModelError as `integer` does."""
        value = self._value(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            self._fail(f"{key} is not an array of integers")
        result: list[int] = value.tolist()
        return result

    def _value(self, key: str, default: MetaValue | None) -> MetaValue:
        value = self.metadata.get(key, default)
        if value is None:
            self._fail(f"the metadata lack {key}")
        return value

    def _decode(self, value: bytes, what: str) -> str:
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: broken GGUF file: {reason}")

    def _read_head(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it does not begin with GGUF)")
        self._position = 4
        version = self._u32()
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3, little-endian, are)")
        tensors, keys = self._u64(), self._u64()
        if (tensors + keys) * ENTRY_BYTES_MIN > self._size:
            self._fail(f"{tensors} tensors and {keys} keys do not fit into {self._size} bytes")
        for _ in range(keys):
            self._read_key()
        heads = [self._read_tensor_head() for _ in range(tensors)]
        alignment = self.integer("general.alignment", ALIGNMENT_DEFAULT)
        if not 0 < alignment <= ALIGNMENT_MAX or alignment % 8:
            self._fail(f"general.alignment is {alignment}")
        data_begin = -(-self._position // alignment) * alignment
        for name, kind, shape, offset in heads:
            self._add_tensor(name, kind, shape, data_begin + offset)

    def _read_key(self) -> None:
        key = self._decode(self._string(), "a metadata key")
        if key in self.metadata:
            self._fail(f"{key} is there twice")
        kind = self._u32()
        if kind == STRING:
            self.metadata[key] = self._string()
        elif kind == ARRAY:
            self.metadata[key] = self._array(key)
        else:
            scalar = self._numbers(key, kind, 1)[0].item()
            self.metadata[key] = bool(scalar) if kind == BOOL else scalar

    def _read_tensor_head(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._decode(self._string(), "a tensor's name")
        dimensions = self._u32()
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            self._fail(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        number = self._u32()
        kind = KINDS.get(number)
        if kind is None:
            kind = KINDS_UNSUPPORTED.get(number, f"number {number}")
            supported = ", ".join(BLOCKS)
            raise ModelError(f"{self.path}: tensor {name} has type {kind}, which is not supported ({supported} are)")
        return name, kind, shape, self._u64()

    def _add_tensor(self, name: str, kind: str, shape: tuple[int, ...], begin: int) -> None:
        if name in self.tensors:
            self._fail(f"tensor {name} is there twice")
        try:
            nbytes = tensor_bytes(kind, shape)
        except ValueError as error:
            self._fail(f"tensor {name} {error}")
        if begin + nbytes > self._size:
            end = begin + nbytes
            self._fail(f"tensor {name} ends at byte {end} of a file of {self._size} bytes (a download cut short?)")
        self.tensors[name] = TensorEntry(name, kind, shape, np.frombuffer(self._bytes, np.uint8, nbytes, begin))

    def _array(self, key: str) -> MetaValue:
        kind, count = self._u32(), self._u64()
        if kind == STRING:
            return self._strings(key, count)
        # A copy: a value must not depend on the file's own alignment.
        return self._numbers(key, kind, count).copy()

    def _numbers(self, key: str, kind: int, count: int) -> NDArray[np.generic]:
        dtype = SCALARS.get(kind)
        if dtype is None:
            self._fail(f"{key} has unknown type {kind}")
        begin = self._skip(count * np.dtype(dtype).itemsize)
        return np.frombuffer(self._bytes, dtype, count, begin)

    def _strings(self, key: str, count: int) -> list[bytes]:
        # The one hot loop: a vocabulary and its merges are 10^5 to 10^6 strings.
        view, position, size, unpack = self._bytes, self._position, self._size, _U64.unpack_from
        if count > (size - position) // 8:
            self._fail(f"{key} claims {count} strings, more than the file has room for")
        strings = []
        for _ in range(count):
            if position + 8 > size:
                self._fail(f"it ends within {key}")
            begin = position + 8
            position = begin + unpack(view, position)[0]
            if position > size:
                self._fail(f"it ends within {key}")
            strings.append(view[begin:position])
        self._position = position
        return strings

    def _string(self) -> bytes:
        length = self._u64()
        begin = self._skip(length)
        return self._bytes[begin : begin + length]

    def _u32(self) -> int:
        result: int = _U32.unpack_from(self._bytes, self._skip(4))[0]
        return result

    def _u64(self) -> int:
        result: int = _U64.unpack_from(self._bytes, self._skip(8))[0]
        return result

    def _skip(self, nbytes: int) -> int:
        begin = self._position
        if begin + nbytes > self._size:
            self._fail(f"it ends at byte {self._size}, within its metadata (a download cut short?)")
        self._position = begin + nbytes
        return begin
