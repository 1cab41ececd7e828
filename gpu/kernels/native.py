"""How native code is made: numba options, the disk cache, and function addresses that other native code can call.

Owns the place of the compile cache and the two decorators that every kernel uses. It never compiles while a server
serves: entry points are compiled, or loaded from the cache, by `Entry.compile`, which the start of a process calls.

The cache key of numba holds only the file of the outermost function, so a change in a file that it calls would leave
stale machine code behind. Here the folder's name carries a hash over all sources of this package and of the models.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from numba import cfunc, njit
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])

CACHE_UNUSED_DAYS_MAX = 30
SOURCES = ("kernels", "models")


def cache_root() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, else stepahead/numba below XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "stepahead" / "numba"


def _source_hash() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    package = Path(__file__).resolve().parent.parent
    for folder in SOURCES:
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _use_cache_folder() -> Path:
    root = cache_root()
    folder = root / _source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    oldest_s = time.time() - CACHE_UNUSED_DAYS_MAX * 86400
    for other in root.iterdir():
        if other != folder and len(other.name) == 16 and other.stat().st_mtime < oldest_s:
            shutil.rmtree(other, ignore_errors=True)
    config.CACHE_DIR = str(folder)
    return folder


CACHE_FOLDER = _use_cache_folder()


def kernel(function: F) -> F:
    """Native function for use by other native code only (Python cannot call it). Division by zero gives inf or NaN."""
    return cast(F, njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


class Entry:
    """A native function `void(int64, ...)` with a C address, compiled on demand and cached on disk.

    Arguments are addresses and counts only. The body must not raise: nothing could carry the exception.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.name = function.__name__
        self._function = function
        self._compiled: Any = None

    def compile(self) -> int:
        """Compile, or load from the disk cache, and return the address. Idempotent."""
        if self._compiled is None:
            count = self._function.__code__.co_argcount
            signature = numba.void(*[numba.int64] * count)
            self._compiled = cfunc(signature, cache=True, error_model="numpy")(self._function)
        return int(self._compiled.address)


def entry(function: Callable[..., None]) -> Entry:
    """Decorator for `Entry`."""
    return Entry(function)
