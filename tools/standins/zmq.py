"""A stand-in for pyzmq where it cannot be installed: there are no channels, and whoever needs one is told so.

Only the text stages use channels; the scheduler and the gpu process merely import what mentions them.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing


class _Missing:
    """Any class of the package: a name to mention, not to use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("pyzmq is not installed here: no channel can be opened")
