"""The guard for torch memory: a `LaunchGuard` that also sees what torch does in the launching thread.

Owns two modes of torch, entered with the section: one for calls from Python (`tolist`, `numpy`, `cpu`, `tensor`), which
may never reach an operator, and one for the operators beneath everything else. On CUDA it also turns torch's own debug
mode for synchronisation to errors, and gives them the line. It sees each call only in the launching thread, which is
where it matters.

Device memory is what lies on CUDA, what was given to `watch`, and whatever is computed from either. An operator of
torch's own may take device memory alone; of the host it may take numbers (tensors of no dimension that it only reads).
Copies between the two must be asynchronous, and on the host's side pinned: a copy of pageable memory waits, whatever it
was told. An operator also waits where the size or the value of its result depends on data: torch tags those, and names
are listed for what neither rule can see. Not seen are `synchronize` of torch.Event and torch.Stream, which cannot be
replaced (torch.cuda's own are), and what an operator of somebody else's does with memory of the host.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu.device.guard import LaunchGuard, asking

_BLOCKING = {
    "__array__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "__str__", "cpu", "item",
    "new_tensor", "numpy", "tolist",
}  # fmt: skip
_FROM_DATA = {"as_tensor", "asarray", "tensor"}
_BY_INDEX = {"_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"}
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CHECKS_DATA = {"_to_sparse", "embedding_renorm_", "multinomial"}
_CHECKS_ARGUMENT = {"masked_fill": 2, "masked_fill_": 2, "normal": 1}  # its position: looked at if it is a tensor
_LINALG_WITHOUT_CHECKS = {"linalg_cross", "linalg_vector_norm"}  # the others look at what their solver says
_ERROR_OF_TORCH = "called a synchronizing CUDA operation"
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
            for owner in (torch.accelerator, torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                stack.enter_context(asking(owner, "synchronize", self._refusing(f"{owner.__name__}.synchronize")))
            stack.enter_context(asking(torch.cuda, "empty_cache", self._refusing("torch.cuda.empty_cache")))
            stack.enter_context(_PythonCalls(self))
            stack.enter_context(_Operators(self))
            yield

    def _refusing(self, what: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: self.refuse(what)

    def watch(self, array: Any) -> Any:
        """Device memory, in the form in which it is handed out."""
        if not isinstance(array, torch.Tensor):
            return super().watch(array)
        self._device_storages.add(array.untyped_storage().data_ptr())
        return array

    def pin(self, array: Any) -> Any:
        """Pinned host memory, in the form in which it is handed out. The launching thread may touch it."""
        if not isinstance(array, torch.Tensor):
            return super().pin(array)
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
    """Refuses calls that bring data to the host or to the device without an operator, or with one that says less.

    What torch's own debug mode raises within any call becomes a DeviceError with the line.
    """

    def __init__(self, guard: TorchGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        guard = self._guard
        if not guard.is_on:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _FROM_DATA:
            self._check_data(name, args, kwargs)
        elif args and guard.is_device(args[0]):
            targets = (*args[1:], *kwargs.values())
            if name in _BLOCKING or (name == "to" and any(_names_host(target) for target in targets)):
                guard.refuse(f"Tensor.{name}")
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if _ERROR_OF_TORCH in str(error):
                raise guard.refusal(f"torch {name}") from error
            raise

    def _check_data(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A tensor is made where its data is, and not of single elements of device memory."""
        guard, device = self._guard, kwargs.get("device")
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        from_device = guard.is_device(data)
        to_device = from_device if device is None else not _names_host(device)
        if from_device != to_device or (not from_device and any(map(guard.is_device, tree_leaves(data)))):
            guard.refuse(f"torch.{name}")


def _names_host(target: Any) -> bool:
    """Whether an argument that may name a device, or be a tensor on it, asks for the host."""
    if isinstance(target, torch.Tensor):
        target = target.device
    return str(target).partition(":")[0] == "cpu"


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
        name = func.overloadpacket.__name__
        makes_device_memory = self._check(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if makes_device_memory:
            for tensor in _tensors(result):
                setattr(tensor, _MARK, True)
        return result

    def _check(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Raise DeviceError if the operator waits; else tell whether its results lie in device memory."""
        guard = self._guard
        if name == "copy_":
            self._check_copy(*args, **kwargs)
            return False  # the result is the target, and stays what it is
        if name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                self._check_copy(target, source, *args[2:], **kwargs)
            return False
        if name == "_to_copy":
            return self._check_move(args[0], kwargs.get("device"), kwargs.get("non_blocking", False))
        tensors = _tensors((args, kwargs))
        host = [tensor for tensor in tensors if not guard.is_device(tensor)]
        if len(host) == len(tensors):
            return False
        if self._looks_at_data(name, func, args, kwargs):
            guard.refuse(f"torch {name}")
        written = {id(tensor) for tensor in _written(func, args, kwargs)}
        if func.namespace == "aten" and any(t.ndim > 0 or name in _BY_INDEX or id(t) in written for t in host):
            guard.refuse(f"torch {name} of device and host memory together")
        return True

    def _check_copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        to_device = self._guard.is_device(target)
        if to_device != self._guard.is_device(source):
            self._check_transfer(source if to_device else target, non_blocking)

    def _check_move(self, source: torch.Tensor, device: torch.device | None, non_blocking: bool) -> bool:
        """The same for a copy into new memory."""
        from_device = self._guard.is_device(source)
        to_device = from_device if device is None else not _names_host(device)
        if to_device != from_device:
            self._check_transfer(source if to_device else None, non_blocking)
        return to_device

    def _check_transfer(self, host: torch.Tensor | None, non_blocking: bool) -> None:
        """Refuse a copy that waits. host: its side on the host, None if that is new."""
        if not non_blocking:
            self._guard.refuse("a blocking copy between device and host")
        if host is None or not self._guard.is_pinned(host):
            self._guard.refuse("a copy between the device and pageable memory")

    def _looks_at_data(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the host has to know something of the data before the operator is done."""
        if name in _BY_INDEX:
            return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))  # by a mask
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name == "histc":
            return args[2:3] == args[3:4]  # without bounds: it looks for them
        if name in _CHECKS_ARGUMENT:
            at = _CHECKS_ARGUMENT[name]
            return any(map(self._guard.is_device, args[at : at + 1]))
        if name.lstrip("_").startswith(("cholesky", "linalg_")):
            return name not in _LINALG_WITHOUT_CHECKS
        return name in _CHECKS_DATA or not _DEPENDS_ON_DATA.isdisjoint(func.tags)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator writes."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    return _tensors([given.get(argument.name) for argument in arguments if argument.is_write])
