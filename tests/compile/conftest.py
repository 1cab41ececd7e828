"""What the tests of compiled kernels share: Triton as a compiler, and one cache of compiled kernels for the session.

Triton decides at import whether kernels are compiled or interpreted, so these tests have no meaning in a process with
TRITON_INTERPRET, where they are skipped.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder where kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="TRITON_INTERPRET is set: kernels are interpreted, not compiled"))


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels go to a folder that all workers of this session share, among pytest's temporary ones."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(root / "triton"))
        yield
