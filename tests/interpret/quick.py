"""Calls between interpreted kernels without the preparation that has been done already.

Triton's interpreter replaces the members of `triton.language` at every call of a jitted function by another, which
takes some milliseconds. The kernel that was launched has replaced them, and nobody puts them back before it ends. Only
functions of Triton's own library see another module, `triton.language.core`; what a call has replaced there stays.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

_prepare_and_call = InterpretedFunction.__call__
_prepared: set[Any] = set()  # functions that have been called once


@functools.cache
def _sees_core(function: Any) -> bool:
    return any(value is tl.core for value in function.__globals__.values())


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _sees_core(self.fn) and self.fn not in _prepared:
        _prepared.add(self.fn)
        return _prepare_and_call(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def quick_calls() -> Iterator[None]:
    """For the tests of every module that imports this fixture."""
    patch = pytest.MonkeyPatch()
    patch.setattr(InterpretedFunction, "__call__", _call)
    yield
    patch.undo()
