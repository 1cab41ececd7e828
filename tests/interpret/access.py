"""What kernels and torch operators really read and write: every byte, while they run on the CPU.

Owns the hooks in Triton's interpreter and in torch's dispatcher. A traced kernel raises before it touches a byte that
lies in none of the tensors that it was given, and when it has run if two of its programs race: one writes what another
one touches, and not both by an atomic operation. The order in which atomic operations happen counts for nothing here,
so a kernel whose programs wait for each other would be refused. Two lanes of one store that write different values to
one place are an error too. A torch operator counts as touching all that its arguments span, whatever its indices say.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from gpu.device.guard_torch import TorchGuard
from gpu.device.protocol import Regions

Addresses = NDArray[np.uint64]
Program = tuple[int, int, int]
READ, WRITE, ATOMIC = range(3)
_WORDS = ("reads", "writes", "updates")


class OutOfBoundsError(IndexError):
    """A kernel was about to touch memory that it was not given."""


class RaceError(RuntimeError):
    """What a kernel leaves behind depends on the order of its programs or lanes."""


class _Bytes:
    """A set of bytes, by address."""

    def __init__(self) -> None:
        self._parts: list[Addresses] = []

    def add(self, addresses: Addresses, size: int) -> None:
        at = np.unique(addresses)[:, None] + np.arange(size, dtype=np.uint64)
        self._parts.append(np.unique(at))

    def inside(self, low: int, nbytes: int) -> NDArray[np.bool_]:
        """Which of the bytes [low, low + nbytes) are in the set."""
        if len(self._parts) > 1:
            self._parts = [np.unique(np.concatenate(self._parts))]
        found = np.zeros(nbytes, np.bool_)
        for part in self._parts:
            first, last = np.searchsorted(part, np.array([low, low + nbytes], np.uint64))
            found[(part[first:last] - np.uint64(low)).astype(np.int64)] = True
        return found


class Trace:
    """All that happened inside of `trace`."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.operators: list[str] = []
        self._read = _Bytes()
        self._written = _Bytes()

    def add(self, kind: int, addresses: Addresses, size: int) -> None:
        """An access to `size` bytes at each of the addresses; an atomic operation reads and writes."""
        if kind != WRITE:
            self._read.add(addresses, size)
        if kind != READ:
            self._written.add(addresses, size)

    def read(self, tensor: Any) -> NDArray[np.bool_]:
        """Which elements of a contiguous tensor were read, in its shape."""
        return self._elements(self._read, tensor)

    def written(self, tensor: Any) -> NDArray[np.bool_]:
        """Which elements of a contiguous tensor were written, in its shape."""
        return self._elements(self._written, tensor)

    def undeclared(self, buffers: Sequence[Any], reads: Regions, writes: Regions) -> list[str]:
        """What happened to the buffers without being declared. Who declares a write may also read there."""
        wrong = []
        for word, happened, declared in (
            ("reads", self._read, (*reads, *writes)),
            ("writes", self._written, writes),
        ):
            for buffer in buffers:
                stray = happened.inside(buffer.array.data_ptr(), buffer.nbytes)
                for region in declared:
                    if region.buffer is buffer:
                        stray[region.lo : region.hi] = False
                if stray.any():
                    at = np.flatnonzero(stray)
                    wrong.append(f"{word} {buffer.name}[{at[0]}:{at[-1] + 1}], undeclared")
        return wrong

    @staticmethod
    def _elements(happened: _Bytes, tensor: Any) -> NDArray[np.bool_]:
        assert tensor.is_contiguous()
        found = happened.inside(tensor.data_ptr(), tensor.nbytes)
        elements: NDArray[np.bool_] = found.reshape(*tensor.shape, tensor.element_size()).any(axis=-1)
        return elements


class _Launch:
    """One kernel while it runs: what it may touch, and who touched what."""

    def __init__(self, trace: Trace, name: str, tensors: dict[str, Any]) -> None:
        self._trace = trace
        self._name = name
        self._spans = {given: _span(tensor) for given, tensor in tensors.items() if tensor.numel()}
        self._programs: dict[Program, int] = {}
        self._seen: list[tuple[int, int, Addresses, int]] = []  # kind, program, addresses, size

    def touch(self, kind: int, program: Program, handle: Any, mask: Any, size: int) -> NDArray[np.bool_]:
        """Check and keep one access. Returns which lanes take part."""
        pointers = np.asarray(handle.data, np.uint64)
        active = np.broadcast_to(np.asarray(mask, np.bool_), pointers.shape)
        addresses = pointers[active].ravel()
        inside = np.zeros(addresses.shape, np.bool_)
        for low, high in self._spans.values():
            inside |= (addresses >= low) & (addresses + np.uint64(size) <= high)
        if not inside.all():
            lost = ", ".join(self._where(int(address)) for address in addresses[~inside][:3])
            raise OutOfBoundsError(f"{self._name} {_WORDS[kind]} out of bounds in program {program}: {lost}")
        if addresses.size:
            number = self._programs.setdefault(program, len(self._programs))
            self._seen.append((kind, number, addresses, size))
            self._trace.add(kind, addresses, size)
        return active

    def store(self, program: Program, handle: Any, value: Any, mask: Any, size: int) -> None:
        """Check and keep one store, whose lanes may only meet with the same value."""
        active = self.touch(WRITE, program, handle, mask, size)
        addresses = np.asarray(handle.data, np.uint64)[active].ravel()
        values = np.ascontiguousarray(np.broadcast_to(value, active.shape)[active].ravel()).view(f"u{size}")
        order = np.lexsort((values, addresses))
        same = addresses[order][1:] == addresses[order][:-1]
        unlike = same & (values[order][1:] != values[order][:-1])
        if unlike.any():
            place = self._where(int(addresses[order][1:][unlike][0]))
            raise RaceError(f"{self._name}: lanes of program {program} write different values to {place}")

    def check_races(self) -> None:
        """Raise RaceError if programs touch the same bytes and not all of them read, or all by atomic operations."""
        if len(self._programs) < 2:
            return
        places, programs, kinds = [], [], []
        for kind, program, addresses, size in self._seen:
            at = (np.unique(addresses)[:, None] + np.arange(size, dtype=np.uint64)).ravel()
            places.append(at)
            programs.append(np.full(at.size, program))
            kinds.append(np.full(at.size, kind))
        place, program, kind = (np.concatenate(column) for column in (places, programs, kinds))
        _, byte = np.unique(place, return_inverse=True)
        lowest, highest = (_per_byte(reduce, byte, program) for reduce in (np.minimum, np.maximum))
        mildest, worst = (_per_byte(reduce, byte, kind) for reduce in (np.minimum, np.maximum))
        alike = (mildest == worst) & (mildest != WRITE)
        wrong = np.flatnonzero((lowest != highest) & ~alike)
        if wrong.size:
            at = int(place[byte == wrong[0]][0])
            names = list(self._programs)
            first, second = names[lowest[wrong[0]]], names[highest[wrong[0]]]
            raise RaceError(f"{self._name}: programs {first} and {second} race for {self._where(at)}")

    def _where(self, address: int) -> str:
        """The address as an offset from the tensor that it lies in, or next to."""
        if not self._spans:
            return hex(address)
        name = min(self._spans, key=lambda given: _distance(address, *self._spans[given]))
        return f"{name} {address - int(self._spans[name][0]):+d} bytes"


def _per_byte(reduce: Any, byte: Any, values: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(byte, kind="stable")
    begins = np.flatnonzero(np.diff(byte[order], prepend=-1))
    reduced: NDArray[np.int64] = reduce.reduceat(values[order], begins)
    return reduced


def _distance(address: int, low: int, high: int) -> int:
    return max(int(low) - address, address - int(high) + 1, 0)


def _span(tensor: Any) -> tuple[int, int]:
    """The addresses [low, high) between the first and the last element of a tensor."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _addresses(tensor: Any) -> Addresses:
    """The address of every element."""
    at = np.zeros(1, np.int64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + np.arange(n) * stride).ravel()
    return (tensor.data_ptr() + at * tensor.element_size()).astype(np.uint64)


class _Hooks:
    """Stand-ins for methods of the interpreter, for the time of a trace."""

    def __init__(self, trace: Trace, guard: TorchGuard | None) -> None:
        self._trace = trace
        self._guard = guard
        self.launch: _Launch | None = None

    def installed(self) -> ExitStack:
        """The hooks, until the stack is closed."""
        stack, builder = ExitStack(), interpreter.InterpreterBuilder
        hooks: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
            "create_masked_load": self._load,
            "create_masked_store": self._store,
            "create_atomic_rmw": self._atomic_rmw,
            "create_atomic_cas": self._atomic_cas,
        }
        for name, hook in hooks.items():
            stack.enter_context(patch.object(builder, name, hook(getattr(builder, name))))
        executor = interpreter.GridExecutor
        stack.enter_context(patch.object(executor, "__call__", self._kernel(executor.__call__)))
        return stack

    def _kernel(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def traced(executor: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
            tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
            name = executor.fn.__name__
            self._trace.kernels.append(name)
            self.launch = _Launch(self._trace, name, tensors)
            try:
                with nullcontext() if self._guard is None else self._guard.lifted():
                    run(executor, *args, **kwargs)
                self.launch.check_races()
            except interpreter.InterpreterError as error:
                cause: BaseException = error
                while isinstance(cause, interpreter.InterpreterError) and cause.__cause__:
                    cause = cause.__cause__  # one is wrapped around another for each function on the way
                raise cause from None
            finally:
                self.launch = None

        return traced

    def _load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def traced(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            assert self.launch is not None
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            self.launch.touch(READ, builder.grid_idx, pointers, mask.data, size)
            return load(builder, pointers, mask, *rest)

        return traced

    def _store(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def traced(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            assert self.launch is not None
            self.launch.store(builder.grid_idx, pointers, value.data, mask.data, value.data.itemsize)
            return store(builder, pointers, value, mask, *rest)

        return traced

    def _atomic_rmw(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def traced(builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            assert self.launch is not None
            self.launch.touch(ATOMIC, builder.grid_idx, pointers, mask.data, value.data.itemsize)
            return update(builder, op, pointers, value, mask, *rest)

        return traced

    def _atomic_cas(self, swap: Callable[..., Any]) -> Callable[..., Any]:
        def traced(builder: Any, pointers: Any, compared: Any, value: Any, *rest: Any) -> Any:
            assert self.launch is not None
            self.launch.touch(ATOMIC, builder.grid_idx, pointers, True, value.data.itemsize)
            return swap(builder, pointers, compared, value, *rest)

        return traced


class _Operators(TorchDispatchMode):
    """Keeps what torch operators touch; what the interpreter does with its own arguments does not count."""

    def __init__(self, trace: Trace, hooks: _Hooks) -> None:
        super().__init__()
        self._trace = trace
        self._hooks = hooks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._hooks.launch is None and not _is_view(func):
            self._trace.operators.append(func.overloadpacket.__name__)
            for i, declared in enumerate(func._schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(declared.name)
                written = declared.alias_info is not None and declared.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor) and tensor.numel():
                        self._trace.add(WRITE if written else READ, _addresses(tensor), tensor.element_size())
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    """Whether an operator only makes another view of its argument."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@contextmanager
def trace(guard: TorchGuard | None = None) -> Iterator[Trace]:
    """Trace the kernels and torch operators that run inside. Not nested.

    guard: its section is entered, so that torch calls raise DeviceError if they would wait for the device; kernels are
    not asked, because the interpreter plays the device.
    """
    traced = Trace()
    hooks = _Hooks(traced, guard)
    with hooks.installed(), nullcontext() if guard is None else guard.section(), _Operators(traced, hooks):
        yield traced
