"""Raw bytes of a tensor to float32, in numpy.

Owns the layouts of the element types in shm.tensor_map.BLOCKS and their conversion. Blocks are those of ggml: 32
consecutive elements of a row share a scale (and Q4_1 a minimum); element i of a 4-bit block sits in the low half of
byte i, element i + 16 in the high half of the same byte. Never looks at a file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shm.tensor_map import BLOCKS, tensor_bytes

# Blocks converted at a time: what a chunk touches stays in the second-level cache.
CHUNK_BLOCKS = 4096


def to_float32(kind: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Convert one tensor. data: uint8[tensor_bytes(kind, shape)], any alignment; the result is new and owned by the
    caller.

    Raises ValueError if the bytes do not match the shape.
    """
    if data.size != tensor_bytes(kind, shape):
        raise ValueError(f"has {data.size} bytes, which do not match {kind} of shape {list(shape)}")
    out = np.empty(shape, np.float32)
    block, block_bytes = BLOCKS[kind]
    raw_blocks = data.reshape(-1, block_bytes)
    out_blocks = out.reshape(-1, block)
    step = CHUNK_BLOCKS if block > 1 else CHUNK_BLOCKS * 32
    for begin in range(0, len(raw_blocks), step):
        _convert_chunk(kind, raw_blocks[begin : begin + step], out_blocks[begin : begin + step])
    return out


def _convert_chunk(kind: str, raw: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """raw: uint8[blocks, block bytes]; out: float32[blocks, elements of a block]."""
    if kind in ("F32", "F16"):
        out[:, 0] = np.ascontiguousarray(raw).view("<f4" if kind == "F32" else "<f2")[:, 0]
    elif kind == "BF16":
        # The upper half of a float32.
        bits = np.ascontiguousarray(raw).view("<u2").astype(np.uint32)
        np.left_shift(bits, 16, out=out.view(np.uint32))
    elif kind == "Q8_0":
        np.multiply(raw[:, 2:].view(np.int8), _halves(raw[:, 0:2]), out=out)
    elif kind == "Q4_0":
        _unpack_nibbles(raw[:, 2:], out)
        np.subtract(out, 8, out=out)
        np.multiply(out, _halves(raw[:, 0:2]), out=out)
    else:
        _unpack_nibbles(raw[:, 4:], out)
        np.multiply(out, _halves(raw[:, 0:2]), out=out)
        np.add(out, _halves(raw[:, 2:4]), out=out)


def _halves(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8[blocks, 2], one float16 each -> float32[blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _unpack_nibbles(packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """uint8[blocks, 16] -> float32[blocks, 32], values 0 to 15."""
    np.copyto(out[:, :16], packed & 0x0F)
    np.copyto(out[:, 16:], packed >> 4)
