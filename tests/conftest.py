"""What all tests share: no device runs unobserved; the order of what a test queues is proven while it runs."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

# How long a case takes is the machine's affair: no test is timed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

DEVICES = {"gpu.device.adversary": "AdversaryDevice", "gpu.device.cuda": "CudaDevice", "gpu.device.host": "HostDevice"}


@pytest.fixture(autouse=True)
def order_is_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices without an observer get an order checker, but in tests marked `unordered`: those that race on purpose."""
    if request.node.get_closest_marker("unordered") is not None:
        return
    if "gpu.device.protocol" not in sys.modules and "gpu" not in request.node.path.parts:
        return  # a test of another part: it makes no device, and need not wait for torch
    for module, name in DEVICES.items():
        device = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(device, "__init__", observed(device.__init__))


def observed(make: Callable[..., None]) -> Callable[..., None]:
    """`make`, the __init__ of a device, with an order checker where it is given no observer."""

    def made(device: Any, *arguments: Any, **named: Any) -> None:
        from gpu.device.order import OrderChecker

        make(device, *arguments, **named)
        if device.observer is None:
            device.observer = OrderChecker()

    return made
