"""Tests that run Triton kernels in Triton's interpreter, on CPU tensors.

The interpreter is chosen when a kernel is defined, so these tests need a process of their own.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from tests.interpret.bf16 import correct_bf16

    correct_bf16()
    REASON = None
elif find_spec("triton"):
    REASON = "runs in a process of its own: TRITON_INTERPRET=1 python -m pytest tests/interpret"
else:
    REASON = "needs triton, which is not installed"
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REASON is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))
