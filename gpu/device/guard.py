"""The guard against blocking calls: inside the launch loop, whatever would wait for the device raises DeviceError.

Owns the knowledge of who may read device memory: a launched operation, or any thread outside the launch loop, but never
the launching thread while it is inside `section`. The error names the file and line. A device asks it in four places:
`watch` for memory that it hands out, `pin` for the host's, `refuse` at the start of every call that blocks, and, where
it runs its operations in the launching thread itself, `lifted` around them. Never used while serving, unless asked for:
a device without a guard hands out plain arrays.

Numpy memory is watched as a subclass, of which all is closed but what makes a view or tells where it lies. What numpy
reads of a subclass without asking it is closed from the other end: its constructors and torch's ask while a section is
entered, and pinned memory asks what is assigned to it and what it is indexed by. Native code that gets hold of a
watched array in another way asks nobody, and is not seen: plain arrays (`plain[...] = watched`, `plain[watched]`,
`plain.dot(watched)`), ufuncs and reductions of a list that holds it, classes, which cannot be replaced
(`numpy.ndarray.item(watched)`, `numpy.broadcast(watched)`, `torch.Tensor(watched)`), functions that somebody bound
before (`from numpy import array`), compiled code that is given its address, and before Python 3.12 the buffer protocol
(`memoryview(watched)`). Torch memory: see `guard_torch`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
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


@contextmanager
def asking(owner: Any, name: str, ask: Callable[..., None]) -> Iterator[None]:
    """Until the block is left, calls of `owner.name` call `ask` first, with the same arguments."""
    asked = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        ask(*args, **kwargs)
        return asked(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, asked)


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
            raise self.refusal(what)

    def refusal(self, what: str) -> DeviceError:
        """The error that names the line of the caller."""
        return DeviceError(f"{what} would wait for the device in the launch loop: {call_site()}")

    def section(self) -> AbstractContextManager[None]:
        """The launch loop: from here on the calling thread must not wait. One thread, not nested."""
        return self._section()

    @contextmanager
    def _section(self) -> Iterator[None]:
        assert self._launching is None, "the launch loop is entered once"
        self._launching = get_ident()
        try:
            with ExitStack() as stack:
                for module, name in _CONSTRUCTORS:
                    if hasattr(owner := sys.modules.get(module), name):
                        stack.enter_context(asking(owner, name, partial(_touch_all, f"{module}.{name}")))
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
        return array.view(PinnedArray)


class PinnedArray(np.ndarray[Any, Any]):
    """An array on pinned memory: the host's own, but to fill it from device memory or to index it by some is a read."""

    def __getitem__(self, key: Any) -> Any:
        _touch_all("indexing by device memory", key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _touch_all("copying device memory", key, value)
        super().__setitem__(key, value)


class WatchedArray(np.ndarray[Any, Any]):
    """An array on device memory. Views of it may be made anywhere; its data is closed to the launching thread."""

    guard: LaunchGuard | None

    def __array_finalize__(self, obj: Any) -> None:
        self.guard = getattr(obj, "guard", None)
        if self.flags.owndata:  # else it is a view
            self.touch("a copy of device memory")

    def touch(self, what: str) -> None:
        """Raise DeviceError if the calling thread must not read it now; `what` is the call that would."""
        if self.guard is not None:
            self.guard.refuse(what)

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is Ellipsis or _is_plain_index(part) for part in parts):
            self.touch("reading device memory by an array of indices")
            return plain(self)[key]
        found = super().__getitem__(key)
        if not isinstance(found, np.ndarray):
            self.touch("reading an element of device memory")
        return found

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 1:  # else it yields views
            self.touch("iterating over device memory")
        return (self[index] for index in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        self.touch(f"{ufunc.__name__} on device memory")
        out = kwargs.get("out", ())
        if out:
            kwargs["out"] = tuple(plain(array) for array in out)
        result = getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        return out[0] if len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in _HARMLESS:
            self.touch(f"numpy.{func.__name__} on device memory")
        return super().__array_function__(func, types, args, kwargs)

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """The same memory as another type, still watched; a plain view would open it to everybody."""
        found = super().view(*args, **kwargs)
        if not isinstance(found, WatchedArray):
            self.touch("reading device memory by an unwatched view")
        return found


def _is_plain_index(part: Any) -> bool:
    """Whether it makes a view, or one element; a bool is a mask."""
    return isinstance(part, int | slice | np.integer) and not isinstance(part, bool)


def plain(array: Any) -> Any:
    """The same memory without a guard."""
    return np.ndarray.view(array, np.ndarray) if isinstance(array, WatchedArray) else array


def _touch_all(what: str, /, *args: Any, **kwargs: Any) -> None:
    """Touch the watched arrays among the arguments, and in the lists and tuples among them."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, WatchedArray):
            value.touch(what)
        elif isinstance(value, list | tuple):
            _touch_all(what, *value)


_HARMLESS = {np.shape, np.ndim, np.size, np.shares_memory, np.may_share_memory}
_CONSTRUCTORS = [
    *(("numpy", name) for name in ("array", "asarray", "asarray_chkfinite", "ascontiguousarray", "asfortranarray")),
    *(("numpy", name) for name in ("frombuffer", "fromiter", "nditer", "nested_iters")),
    *(("torch", name) for name in ("as_tensor", "asarray", "from_numpy", "frombuffer", "tensor")),
]
_OPEN = {
    "T", "ctypes", "device", "dtype", "flags", "getfield", "itemsize", "mT", "nbytes", "ndim", "reshape", "setflags",
    "shape", "size", "squeeze", "strides", "swapaxes", "to_device", "transpose", "view",
}  # fmt: skip
_CLOSED = (
    "__array__", "__array_interface__", "__array_struct__", "__bool__", "__buffer__", "__complex__", "__contains__",
    "__copy__", "__deepcopy__", "__dlpack__", "__float__", "__format__", "__index__", "__int__", "__reduce__",
    "__reduce_ex__", "__repr__", "__setitem__", "__str__",
    *(name for name in dir(np.ndarray) if not name.startswith("_") and name not in _OPEN),
)  # fmt: skip


def _closed(name: str) -> Any:
    """A method or property that touches first."""
    inherited = getattr(np.ndarray, name)
    what = f"{name} of device memory"

    def call(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        self.touch(what)
        return inherited(plain(self), *(plain(argument) for argument in args), **kwargs)

    def get(self: WatchedArray) -> Any:
        self.touch(what)
        return inherited.__get__(self)

    def put(self: WatchedArray, value: Any) -> None:
        self.touch(what)
        inherited.__set__(self, value)

    call.__name__ = name
    return call if callable(inherited) else property(get, put)


for _name in _CLOSED:
    if hasattr(np.ndarray, _name):
        setattr(WatchedArray, _name, _closed(_name))
