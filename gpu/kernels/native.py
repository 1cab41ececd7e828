"""How native code is made: numba options, the disk cache, and function addresses that other native code can call.

Owns the place of the compile cache and the decorators that every kernel uses. It never compiles while a server
serves: entry points are compiled, or loaded from the cache, by `Entry.compile`, which the start of a process calls.
Importing it touches no file. In the cache it deletes nothing but what it has made itself, and a cache that cannot be
used costs time and a line on stderr, never the process.

The cache key of numba holds the CPU and its features, but only the file of the outermost function, so a change in a
file that it calls would leave stale machine code behind. Here the folder's name carries a hash over the sources of this
package and of the models, without the files that have nothing to do with native code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from numba import cfunc, njit
from numba.core import config

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

FOLDER = "stepahead-kernels"
MARKER = ".stepahead-kernels"  # in each folder of ours; its time is when the folder was last used
UNUSED_DAYS_MAX = 30
SOURCES = ("kernels", "models")
NOT_NATIVE = ("triton_", "cuda_", "plain", "flashinfer_", "attention_contract", "attention_cut")  # beginnings of names


def cache_root() -> Path:
    """Where compiled kernels are kept: a folder of our own in NUMBA_CACHE_DIR, else in XDG_CACHE_HOME or ~/.cache.

    Raises RuntimeError if the user has no home.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen) / FOLDER
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stepahead" / FOLDER


def source_hash() -> str:
    """Of all sources that native code is made of, and of what compiles it: 16 hexadecimal digits."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    package = Path(__file__).resolve().parent.parent
    for folder in SOURCES:
        for path in sorted((package / folder).glob("*.py")):
            if path.name.startswith(NOT_NATIVE):
                continue
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def purge(root: Path) -> None:
    """Delete the folders below `root` that we have made and nobody has used for long. Others may do so meanwhile."""
    oldest_s = time.time() - UNUSED_DAYS_MAX * 86400
    for folder in root.iterdir():
        if not re.fullmatch("[0-9a-f]{16}", folder.name) or folder.is_symlink():
            continue
        try:
            is_old = (folder / MARKER).stat().st_mtime < oldest_s
        except OSError:  # not ours, or gone
            continue
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)


def _open_folder(root: Path) -> Path:
    """Make the folder for the sources as they are, or take the one that is there. Raises OSError if it has no use."""
    folder = root / source_hash()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    with tempfile.TemporaryFile(dir=folder):  # an old marker proves nothing about new files
        pass
    purge(root)
    return folder


class KernelCache:
    """The cache of a process. Opened when it is first asked for; without a usable folder there is none."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._is_open = False
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path | None:
        """Where this process keeps its kernels, or None."""
        with self._lock:
            if not self._is_open:
                self._is_open = True
                try:
                    self._folder = _open_folder(cache_root())
                except (OSError, RuntimeError) as error:
                    self.give_up(error)
            return self._folder

    def give_up(self, error: Exception) -> None:
        """Do without from now on, and say so."""
        place = "" if self._folder is None else f" in {self._folder}"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._folder = None
        text = f"stepahead: the kernels are compiled anew at every start: they cannot be kept{place} ({reason})"
        with contextlib.suppress(OSError):  # nobody may be left to read it
            print(text, file=sys.stderr, flush=True)

    def attempt(self, make: Callable[[bool], T]) -> T:
        """Return `make(cached)`: with the cache if there is one, and without if that fails."""
        if self.folder is not None:
            # Each time, because numba reads its settings anew when a variable of the environment has changed.
            config.CACHE_DIR = str(self.folder)
            config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"  # here or nowhere
            try:
                return make(True)
            except Exception as error:  # noqa: BLE001 - numba names no kind; a fault of the code itself comes again
                self.give_up(error)
        return make(False)


CACHE = KernelCache()


def _name_apart(function: Callable[..., Any]) -> None:
    """Put what a closure closes over into its name.

    numba tells closures of one source apart by a number that counts functions of the process. Kernels from the cache
    bring the numbers of the processes that compiled them, and where two of the same name and number meet, the linker
    takes one for both: a pass would silently run the kernels of another precision.
    """
    parts = []
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = getattr(value, "py_func", None)  # another kernel, whose name is apart already
        parts.append(inner.__qualname__ if inner is not None else getattr(value, "__name__", repr(value)))
    if parts:
        function.__qualname__ += "_" + hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def kernel(function: F) -> F:
    """Native function for use by other native code only (Python cannot call it). Division by zero gives inf or NaN."""
    _name_apart(function)
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
            self._compiled = CACHE.attempt(
                lambda cached: cfunc(signature, cache=cached, error_model="numpy")(self._function)
            )
        return int(self._compiled.address)


def entry(function: Callable[..., None]) -> Entry:
    """Decorator for `Entry`."""
    return Entry(function)


class HostKernel:
    """A native function that Python calls with arrays, compiled on its first call and cached on disk.

    It runs without the interpreter lock. The body must not raise: an exception means that it could not be compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run it; compile, or load from the disk cache, when it has not run before."""
        if self._compiled is not None:
            return self._compiled(*arguments)

        def first(cached: bool) -> Any:
            compiled = njit(nogil=True, cache=cached)(self._function)
            result = compiled(*arguments)
            self._compiled = compiled
            return result

        return CACHE.attempt(first)


def host_kernel(function: Callable[..., Any]) -> HostKernel:
    """Decorator for `HostKernel`."""
    return HostKernel(function)
