"""The model on the host against the plain reference, and against itself: in batches, in chunks, on more threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu.models.llama import HostLlama
from gpu.models.reference import reference_logits
from tests.model_factory import TinyLlama, TinyQwen3

PAGE_SIZE, PAGES_PER_ROW, ROWS = 16, 5, 33
DTYPES = ("int8", "bfloat16", "float32")
TINIES = {"llama": TinyLlama(seed=3), "qwen3": TinyQwen3(seed=3, heads=6, kv_heads=2, tied=True)}
TINY = TINIES["llama"]
# What the rounding of activations and of the cache may cost: root mean square error, relative to that of the logits.
CLOSE = {"int8": 1e-2, "bfloat16": 2e-2, "float32": 1e-5}


class Source:
    """Weights out of a dictionary."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        return self._tensors[name]


def shape_of(tiny: TinyLlama, vocab: int = 304) -> Any:
    return SimpleNamespace(
        vocab_size=vocab,
        hidden_size=tiny.hidden,
        num_layers=tiny.layers,
        num_heads=tiny.heads,
        num_kv_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        intermediate_size=tiny.intermediate,
        rope_theta=tiny.rope_theta,
        rope_scaling=None,
        rms_eps=1e-5,
        tie_word_embeddings=tiny.tied,
        qk_norm=tiny.qk_norm,
    )


def round_weights(tensor: np.ndarray, dtype: str) -> np.ndarray:
    """The values that a matrix has after packing."""
    if tensor.ndim == 1 or dtype == "float32":
        return tensor
    if dtype == "bfloat16":
        return torch.from_numpy(tensor).bfloat16().float().numpy()
    scale = np.abs(tensor).max(1, keepdims=True) / np.float32(127)
    return np.rint(tensor / scale) * scale


WEIGHTS = {name: Source(tiny.weights()) for name, tiny in TINIES.items()}


def build(dtype: str, threads: int = 1, name: str = "llama", **other: Any) -> HostLlama:
    sizes = {"page_size": PAGE_SIZE, "pages": 1 + ROWS * PAGES_PER_ROW, "pages_per_row": PAGES_PER_ROW}
    sizes |= {"max_tokens": 900, "max_seqs": 900} | other
    return HostLlama(shape_of(TINIES[name]), WEIGHTS[name], dtype, threads=threads, **sizes)


@pytest.fixture(scope="module")
def models() -> Iterator[Callable[..., HostLlama]]:
    made: dict[tuple[str, int, str], HostLlama] = {}

    def get(dtype: str, threads: int = 1, name: str = "llama") -> HostLlama:
        if (dtype, threads, name) not in made:
            made[dtype, threads, name] = build(dtype, threads, name)
        return made[dtype, threads, name]

    yield get
    for model in made.values():
        model.close()


def shuffled_pages(seed: int) -> np.ndarray:
    """Page rows in which no page is where it would be by accident."""
    pages = np.random.default_rng(seed).permutation(ROWS * PAGES_PER_ROW) + 1
    return pages.reshape(ROWS, PAGES_PER_ROW).astype(np.int32)


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 304, random.integers(3, 40)).tolist() for _ in range(count)]


def run(model: HostLlama, parts: list[tuple[int, int, list[int]]], pages: np.ndarray) -> list[np.ndarray]:
    """One pass over parts (sequence, first position, tokens); the logits after every token of each part."""
    tokens = np.array([t for _, _, part in parts for t in part], np.int32)
    positions = np.array([first + i for _, first, part in parts for i in range(len(part))], np.int32)
    sequences = np.array([row for row, _, part in parts for _ in part], np.int32)
    logits = np.empty((len(tokens), model.info.vocab_size), np.float32)
    model.forward(tokens, positions, sequences, pages, np.arange(len(tokens), dtype=np.int32), logits)
    ends = np.cumsum([len(part) for _, _, part in parts])
    return np.split(logits, ends[:-1])


@pytest.mark.parametrize("name", TINIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_the_reference(models: Any, dtype: str, name: str) -> None:
    prompt = prompts(1, seed=9)[0] * 2
    (logits,) = run(models(dtype, name=name), [(0, 0, prompt)], shuffled_pages(1))
    rounded = Source({name: round_weights(tensor, dtype) for name, tensor in TINIES[name].weights().items()})
    expected = reference_logits(shape_of(TINIES[name]), rounded, prompt)
    error = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert error < CLOSE[dtype], error


@pytest.mark.parametrize("name", TINIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [7, 32])
def test_a_row_is_the_same_bits_alone_and_in_a_batch(models: Any, dtype: str, count: int, name: str) -> None:
    model, asked = models(dtype, name=name), prompts(count)
    together = run(model, [(i, 0, p) for i, p in enumerate(asked)], shuffled_pages(2))
    decoded = run(model, [(i, len(p), [7]) for i, p in enumerate(asked)], shuffled_pages(2))
    for i in (0, count // 2, count - 1):
        pages = shuffled_pages(3 + i)
        (alone,) = run(model, [(4, 0, asked[i])], pages)
        np.testing.assert_array_equal(alone, together[i])
        (alone,) = run(model, [(4, len(asked[i]), [7])], pages)
        np.testing.assert_array_equal(alone, decoded[i])


@pytest.mark.parametrize("name", TINIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_do_not_show(models: Any, dtype: str, chunk: int, name: str) -> None:
    model, prompt = models(dtype, name=name), [int(t) for t in np.random.default_rng(6).integers(0, 304, 75)]
    (whole,) = run(model, [(0, 0, prompt)], shuffled_pages(4))
    pages = shuffled_pages(5)
    parts = [run(model, [(2, i, prompt[i : i + chunk])], pages)[0] for i in range(0, len(prompt), chunk)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", TINIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_show(models: Any, dtype: str, name: str) -> None:
    asked = prompts(32, seed=8)
    passes = [(i, 0, p) for i, p in enumerate(asked)], [(i, len(p), [3]) for i, p in enumerate(asked)]
    for parts in passes:
        one, two = (run(models(dtype, threads, name), list(parts), shuffled_pages(6)) for threads in (1, 2))
        np.testing.assert_array_equal(np.concatenate(one), np.concatenate(two))


def test_what_a_page_held_before_does_not_show(models: Any) -> None:
    model, prompt = models("int8"), prompts(1, seed=12)[0]
    (before,) = run(model, [(0, 0, prompt)], shuffled_pages(7))
    model.k_cache[:] = 0x7FC0  # bfloat16 NaN
    model.v_cache[:] = 0x7FC0
    (after,) = run(model, [(0, 0, prompt)], shuffled_pages(7))
    np.testing.assert_array_equal(before, after)


def test_padding_rows_do_not_show(models: Any) -> None:
    model, asked = models("int8"), prompts(3, seed=13)
    pages = shuffled_pages(8)
    pages[ROWS - 1] = 0
    run(model, [(i, 0, p) for i, p in enumerate(asked)], pages)
    parts = [(i, len(p), [9]) for i, p in enumerate(asked)]
    plain = run(model, parts, pages)
    padded = run(model, [*parts, *[(ROWS - 1, 0, [0])] * 5], pages)
    np.testing.assert_array_equal(np.concatenate(plain), np.concatenate(padded[:3]))


def test_logits_of_chosen_rows_only(models: Any) -> None:
    model, prompt, pages = models("int8"), prompts(1, seed=14)[0], shuffled_pages(9)
    (every,) = run(model, [(0, 0, prompt)], pages)
    tokens, places = np.array(prompt, np.int32), np.arange(len(prompt), dtype=np.int32)
    sequences, chosen = np.zeros_like(tokens), np.array([len(prompt) - 1, 0], np.int32)
    logits = np.empty((2, 304), np.float32)
    model.forward(tokens, places, sequences, pages, chosen, logits)
    np.testing.assert_array_equal(logits, every[chosen])
    model.forward(tokens, places, sequences, pages, chosen[:0], logits[:0])


def test_a_vocabulary_that_fills_no_whole_panel() -> None:
    tensors = TINY.weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:301]
    shape, source = shape_of(TINY, vocab=301), Source(tensors)
    model = HostLlama(shape, source, "float32", PAGE_SIZE, 9, 8, 64, 64, 2)
    prompt = [t % 301 for t in prompts(1, seed=15)[0]]
    (logits,) = run(model, [(0, 0, prompt)], np.arange(1, 9, dtype=np.int32)[None])
    np.testing.assert_allclose(logits, reference_logits(shape, source, prompt), rtol=1e-4, atol=1e-4)
    model.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 304}, "token"),
        ({"tokens": -1}, "token"),
        ({"positions": PAGE_SIZE * PAGES_PER_ROW}, "position"),
        ({"seqs": ROWS}, "sequence"),
        ({"page_rows": 1 + ROWS * PAGES_PER_ROW}, "page"),
        ({"logit_rows": 3}, "logit row"),
    ],
)
def test_a_number_out_of_range_is_refused(models: Any, change: dict[str, int], message: str) -> None:
    arguments = {
        "tokens": np.array([1, 2, 3], np.int32),
        "positions": np.arange(3, dtype=np.int32),
        "seqs": np.zeros(3, np.int32),
        "page_rows": shuffled_pages(1),
        "logit_rows": np.array([2], np.int32),
        "logits": np.empty((1, 304), np.float32),
    }
    models("int8").forward(**arguments)
    for name, value in change.items():
        arguments[name].flat[0] = value
    with pytest.raises(ValueError, match=message):
        models("int8").forward(**arguments)


def test_a_shape_that_the_kernels_cannot_do_is_named() -> None:
    with pytest.raises(ValueError, match="page_size is 8"):
        build("int8", page_size=8)
    with pytest.raises(ValueError, match="dtype"):
        build("float16")
