"""The mill: a model of a few lines whose every token depends on all tokens before it, as plain functions.

Owns the hash that everybody computes who runs it: `tools.torch_mill` on tensors, the tests on arrays. Each slot of a
cache holds a hash of token and position; the next token is a hash of the slots of all positions so far.
"""

from collections.abc import Iterable
from typing import Any

VOCAB = 101
PRIME, MASK = 1000003, 2147483647


def slot_value(token: Any, position: Any) -> tuple[Any, Any]:
    """What the two caches hold for a token at a position: ints, or i64 tensors of one shape."""
    return (token * 7919 + 12345) % PRIME, (position * 104729 + token) % PRIME


def next_token(values: Iterable[tuple[int, int]]) -> int:
    """The greedy token behind a sequence of slot values."""
    total = 0
    for i, (k, v) in enumerate(values):
        total = (total * 31 + int(k) * 7 + int(v) + i) % MASK
    return total % VOCAB


def reference(prompt: list[int], n: int) -> list[int]:
    """The n greedy tokens after `prompt`, without pages, steps or streams."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token([slot_value(t, p) for p, t in enumerate(tokens)]))
    return tokens[len(prompt) :]
