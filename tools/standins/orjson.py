"""A stand-in for orjson where it cannot be installed: the same calls on top of the standard library, only slower.

Owns what this project uses of it: `dumps` of JSON values and dataclasses to bytes, `loads`, `JSONDecodeError`.
"""

import dataclasses
import json
from typing import Any

JSONDecodeError = json.JSONDecodeError


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def dumps(value: Any) -> bytes:
    """JSON as bytes, without blanks. Raises TypeError for what JSON has no form for."""
    return json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def loads(raw: bytes | bytearray | memoryview | str) -> Any:
    """The value of a JSON text. Raises JSONDecodeError."""
    return json.loads(raw if isinstance(raw, str) else bytes(raw))
