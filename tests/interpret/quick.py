"""Calls between interpreted kernels without the preparation that the outermost one has done already.

Triton's interpreter replaces the members of `triton.language` at every call of a jitted function by another, which
takes some milliseconds and changes nothing: the kernel that was launched has replaced them, and nobody puts them back
before it ends. Functions of Triton's own library see another module and are left as they are.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

_prepare_and_call = InterpretedFunction.__call__


@functools.cache
def _sees_core(function: Any) -> bool:
    return any(value is tl.core for value in function.__globals__.values())


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _sees_core(self.fn):
        return _prepare_and_call(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def quick_calls() -> Iterator[None]:
    """For the tests of every module that imports this fixture."""
    patch = pytest.MonkeyPatch()
    patch.setattr(InterpretedFunction, "__call__", _call)
    yield
    patch.undo()
