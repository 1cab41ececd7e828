"""The guard against blocking calls: inside the launch loop, whatever would wait for the device raises DeviceError.

Owns the knowledge of who may read device memory: a launched operation, or any thread outside the launch loop, but never
the launching thread while it is inside `section`. The error names the file and line. A device asks it in three places:
`watch` for memory that it hands out, `refuse` at the start of every call that blocks, and, where a device runs its
operations in the launching thread itself, `lifted` around them. Never used while serving, unless asked for: a device
without a guard hands out plain arrays.

numpy reads the memory of a subclass without asking in `plain[...] = watched`, `plain[watched]`, `numpy.array(watched)`
and, before Python 3.12, in `memoryview(watched)`; native code that is called with it does too. These are not seen.
Torch memory has no such gap, see `guard_torch`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import numpy as np

from gpu.device.protocol import DeviceError

_HERE = str(Path(__file__).parent)
_LIBRARIES = tuple(f"/site-packages/{name}/" for name in ("numpy", "torch", "triton", "numba"))


def call_site() -> str:
    """`file:line` of the innermost frame that is neither a library's nor a device's, and of its caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    caller = frame.f_back
    behind = "" if caller is None else f", called from {caller.f_code.co_filename}:{caller.f_lineno}"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}{behind}"


def _is_inside(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_HERE) or "/contextlib.py" in name or any(library in name for library in _LIBRARIES)


class LaunchGuard:
    """Knows which thread launches, and whether it is inside the launch loop."""

    def __init__(self) -> None:
        self._launching: int | None = None  # the thread's ident while it is inside the section
        self._lifted = 0

    @property
    def is_on(self) -> bool:
        """Whether the calling thread is one that must not wait now."""
        return self._launching == get_ident() and not self._lifted

    def refuse(self, what: str) -> None:
        """Raise DeviceError if the calling thread must not wait now; `what` is the call that would."""
        if self._launching == get_ident() and not self._lifted:
            raise DeviceError(f"{what} would wait for the device in the launch loop: {call_site()}")

    def section(self) -> AbstractContextManager[None]:
        """The launch loop: from here on the calling thread must not wait. One thread, not nested."""
        return self._section()

    @contextmanager
    def _section(self) -> Iterator[None]:
        assert self._launching is None, "the launch loop is entered once"
        self._launching = get_ident()
        try:
            yield
        finally:
            self._launching = None

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """What the launching thread does here it does in the place of the device."""
        self._lifted += 1
        try:
            yield
        finally:
            self._lifted -= 1

    def watch(self, array: Any) -> Any:
        """Device memory, in the form in which it is handed out."""
        watched = array.view(WatchedArray)
        watched.guard = self
        return watched

    def pin(self, array: Any) -> Any:
        """Pinned host memory, in the form in which it is handed out. The launching thread may touch it."""
        return array


class WatchedArray(np.ndarray[Any, Any]):
    """An array on device memory. Views of it may be made anywhere; its data is closed to the launching thread."""

    guard: LaunchGuard | None

    def __array_finalize__(self, obj: Any) -> None:
        self.guard = getattr(obj, "guard", None)

    def _touch(self, what: str) -> None:
        if self.guard is not None:
            self.guard.refuse(what)

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is Ellipsis or _is_plain_index(part) for part in parts):
            self._touch("reading device memory by an array of indices")
            return plain(self)[key]
        found = super().__getitem__(key)
        if not isinstance(found, np.ndarray):
            self._touch("reading an element of device memory")
        return found

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 1:  # else it yields views
            self._touch("iterating over device memory")
        return (self[index] for index in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        self._touch(f"{ufunc.__name__} on device memory")
        out = kwargs.get("out", ())
        if out:
            kwargs["out"] = tuple(plain(array) for array in out)
        result = getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        return out[0] if len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in _HARMLESS:
            self._touch(f"numpy.{func.__name__} on device memory")
        return super().__array_function__(func, types, args, kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """A view if there can be one; else it is a copy."""
        if not self.flags.c_contiguous:
            self._touch("reshape, which copies here,")
        return super().reshape(*shape, **kwargs)

    @property
    def data(self) -> Any:
        """The memory itself."""
        self._touch("data of device memory")
        return super().data

    @property
    def flat(self) -> Any:
        """An iterator over the elements."""
        self._touch("flat of device memory")
        return super().flat


def _is_plain_index(part: Any) -> bool:
    """Whether it makes a view, or one element; a bool is a mask."""
    return isinstance(part, int | slice | np.integer) and not isinstance(part, bool)


def plain(array: Any) -> Any:
    """The same memory without a guard."""
    return array.view(np.ndarray) if isinstance(array, WatchedArray) else array


_HARMLESS = {np.shape, np.ndim, np.size, np.shares_memory, np.may_share_memory}
_READS = (
    "__array__", "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__",
    "__index__", "__int__", "__reduce__", "__reduce_ex__", "__repr__", "__setitem__", "__str__", "all",
    "any", "argmax", "argmin", "argpartition", "argsort", "astype", "byteswap", "choose", "clip", "compress", "copy",
    "cumprod", "cumsum", "diagonal", "dot", "dump", "dumps", "fill", "flatten", "item", "max", "mean", "min",
    "nonzero", "partition", "prod", "put", "ravel", "repeat", "round", "searchsorted", "sort", "std", "sum", "take",
    "tobytes", "tofile", "tolist", "trace", "var", "__buffer__",
)  # fmt: skip


def _checked(name: str) -> Callable[..., Any]:
    method = getattr(np.ndarray, name)

    def read(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        self._touch(f"{name} of device memory")
        return method(plain(self), *(plain(argument) for argument in args), **kwargs)

    read.__name__ = name
    return read


for _name in _READS:
    if hasattr(np.ndarray, _name):
        setattr(WatchedArray, _name, _checked(_name))
