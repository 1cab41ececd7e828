"""The guard for torch memory: a `LaunchGuard` that also sees what torch does in the launching thread.

Owns two modes of torch, entered with the section: one for calls from Python (`tolist`, `numpy`, `cpu`, `to`), which may
never reach an operator, and one for the operators beneath everything else. On CUDA it also turns torch's own debug
mode for synchronisation to errors. It sees each call only in the launching thread, which is where it matters.

Device memory is what lies on CUDA, what was given to `watch`, and whatever is computed from either. Copies between it
and the host must be asynchronous, and on the host's side pinned: a copy of pageable memory waits, whatever it was told.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu.device.guard import LaunchGuard

_TO_HOST = {
    "__array__", "__dlpack__", "__format__", "__repr__", "__str__", "__reduce_ex__", "__deepcopy__", "cpu", "item",
    "numpy", "tolist",
}  # fmt: skip
_SYNCS = {
    "_local_scalar_dense", "_unique", "_unique2", "argwhere", "bincount", "equal", "is_nonzero", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_MARK = "_is_device_memory"


class TorchGuard(LaunchGuard):
    """A guard whose section also watches torch. `cuda`: there is a real device, whose own debug mode helps."""

    def __init__(self, *, cuda: bool = False) -> None:
        super().__init__()
        self._cuda = cuda
        self._device_storages: set[int] = set()
        self._pinned_storages: set[int] = set()

    def section(self) -> AbstractContextManager[None]:
        """The launch loop: from here on the calling thread must not wait. One thread, not nested."""
        return self._torch_section()

    @contextmanager
    def _torch_section(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._section())
            if self._cuda:
                before = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("error")
                stack.callback(torch.cuda.set_sync_debug_mode, before)
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                stack.enter_context(self._refusing(owner))
            stack.enter_context(_PythonCalls(self))
            stack.enter_context(_Operators(self))
            yield

    @contextmanager
    def _refusing(self, owner: Any) -> Iterator[None]:
        """`owner.synchronize` is refused to the launching thread."""
        waits = owner.synchronize

        def synchronize(*arguments: Any, **named: Any) -> Any:
            self.refuse(f"{owner.__name__}.synchronize")
            return waits(*arguments, **named)

        owner.synchronize = synchronize
        try:
            yield
        finally:
            owner.synchronize = waits

    def watch(self, array: Any) -> Any:
        """Device memory, in the form in which it is handed out."""
        if not isinstance(array, torch.Tensor):
            return super().watch(array)
        self._device_storages.add(array.untyped_storage().data_ptr())
        return array

    def pin(self, array: Any) -> Any:
        """Pinned host memory, in the form in which it is handed out. The launching thread may touch it."""
        if isinstance(array, torch.Tensor):
            self._pinned_storages.add(array.untyped_storage().data_ptr())
        return array

    def is_device(self, value: Any) -> bool:
        """Whether it is a tensor in device memory."""
        if not isinstance(value, torch.Tensor):
            return False
        known = getattr(value, _MARK, False) or value.device.type != "cpu"
        return known or value.untyped_storage().data_ptr() in self._device_storages

    def is_pinned(self, value: torch.Tensor) -> bool:
        """Whether a tensor on the host lies in pinned memory."""
        return value.untyped_storage().data_ptr() in self._pinned_storages or (self._cuda and value.is_pinned())


class _PythonCalls(TorchFunctionMode):  # type: ignore[misc]
    """Refuses calls that bring data to the host without an operator, or with one that says less."""

    def __init__(self, guard: TorchGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        guard = self._guard
        if guard.is_on and args and guard.is_device(args[0]):
            name = getattr(func, "__name__", "")
            targets = (*args[1:], *kwargs.values())
            if name in _TO_HOST or (name == "to" and any(_names_host(target) for target in targets)):
                guard.refuse(f"Tensor.{name}")
        return func(*args, **kwargs)


def _names_host(target: Any) -> bool:
    """Whether an argument of `Tensor.to` asks for the host."""
    if isinstance(target, torch.Tensor):
        target = target.device
    return str(target) == "cpu" or (isinstance(target, torch.device) and target.type == "cpu")


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Refuses operators that wait for the device, and passes the mark of device memory on to what they compute."""

    def __init__(self, guard: TorchGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        guard = self._guard
        if not guard.is_on:
            return func(*args, **kwargs)
        on_device = [leaf for leaf in tree_leaves((args, kwargs)) if guard.is_device(leaf)]
        if not on_device:
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor) and func.overloadpacket.__name__ != "copy_"
            ):  # its target stays what it is
                setattr(leaf, _MARK, True)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guard, name = self._guard, func.overloadpacket.__name__
        if name in _SYNCS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            guard.refuse(f"torch {name}")
        if name in _BY_MASK and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in _tensors(args[1])):
            guard.refuse(f"torch {name} by a mask")
        if name == "copy_":
            target, source = args[0], args[1]
            self._check_copy(target, source, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        elif name == "_to_copy" and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            guard.refuse("torch _to_copy to the host")

    def _check_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        guard = self._guard
        if guard.is_device(target) == guard.is_device(source):
            return
        host = source if guard.is_device(target) else target
        if host.ndim == 0 and host is source and not guard.is_pinned(host):
            return  # a number of the host's own, which travels with the launch
        if not non_blocking:
            guard.refuse("a blocking copy between device and host")
        if not guard.is_pinned(host):
            guard.refuse("a copy between the device and pageable memory")


def _tensors(indices: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(indices) if isinstance(leaf, torch.Tensor)]
