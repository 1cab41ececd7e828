"""A stand-in for tokenizers where it cannot be installed: token ids go in and out, and nothing is made of text."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing


class _Missing:
    """Any class or module of the package: a name to mention, not to use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("tokenizers is not installed here: no text can be read or written")
