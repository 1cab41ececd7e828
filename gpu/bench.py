"""Timings of the host kernels on a model of SmolLM2-135M's shape with random weights: `python -m gpu.bench`.

Owns nothing and serves nobody. Prints milliseconds of a pass: median and, in brackets, the least of the repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from gpu.kernels.sampling import sample
from gpu.models.llama import HostLlama
from shm.config import ModelInfo

PAGE_SIZE = 16
CONTEXT = 256  # keys of every row in the attention timing


SHAPE = ModelInfo(
    name="SmolLM2-135M with random weights",
    path="none",
    format="hf",
    vocab_size=49152,
    context_len=8192,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100000.0,
    rope_scaling=None,
    rms_eps=1e-5,
    tie_word_embeddings=True,
    qk_norm=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)


class RandomWeights:
    """Normal weights of a spread that keeps activations of a llama-like model near one."""

    def __init__(self, shape: ModelInfo) -> None:
        self._shape = shape
        self._random = np.random.default_rng(1)

    def names(self) -> Iterator[str]:
        """No tensor is kept, so none is named."""
        return iter(())

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A new random tensor of the shape that the name asks for."""
        s = self._shape
        attended, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        shapes = {
            "q_proj": (attended, s.hidden_size),
            "k_proj": (kv, s.hidden_size),
            "v_proj": (kv, s.hidden_size),
            "o_proj": (s.hidden_size, attended),
            "gate_proj": (s.intermediate_size, s.hidden_size),
            "up_proj": (s.intermediate_size, s.hidden_size),
            "down_proj": (s.hidden_size, s.intermediate_size),
            "embed_tokens": (s.vocab_size, s.hidden_size),
            "lm_head": (s.vocab_size, s.hidden_size),
        }
        kind = name.split(".")[-2]
        if kind not in shapes:
            return np.ones(s.hidden_size, np.float32)
        rows, k = shapes[kind]
        return self._random.standard_normal((rows, k), np.float32) / np.float32(np.sqrt(k))


def timed(run: Callable[[], None], seconds: float = 1.5) -> str:
    """Repeat for about `seconds`; "median (least)" in milliseconds."""
    run()
    spans: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spans) < 5:
        begin = time.perf_counter()
        run()
        spans.append((time.perf_counter() - begin) * 1e3)
    return f"{statistics.median(spans):7.2f} ({min(spans):6.2f})"


def rows_of(model: HostLlama, count: int, position: int, logit_count: int) -> Callable[[], None]:
    """A decode pass of `count` rows, each at `position` of its own sequence."""
    tokens = np.arange(count, dtype=np.int32)
    positions = np.full(count, position, np.int32)
    sequences = np.arange(count, dtype=np.int32)
    pages = np.arange(count * model.pages_per_row, dtype=np.int32).reshape(count, -1) % (model.pages - 1) + 1
    logit_rows = np.arange(logit_count, dtype=np.int32)
    logits = np.empty((logit_count, model.info.vocab_size), np.float32)
    return lambda: model.forward(tokens, positions, sequences, pages, logit_rows, logits)


def prompt_of(model: HostLlama, count: int) -> Callable[[], None]:
    """Prefill of one prompt of `count` tokens."""
    tokens = np.arange(count, dtype=np.int32)
    pages = np.arange(1, model.pages_per_row + 1, dtype=np.int32)[None]
    logits = np.empty((1, model.info.vocab_size), np.float32)
    last = np.array([count - 1], np.int32)
    sequences = np.zeros(count, np.int32)
    return lambda: model.forward(tokens, tokens, sequences, pages, last, logits)


def time_sampling(model: HostLlama, count: int) -> None:
    """Greedy, plain temperature, and filtered sampling of `count` rows."""
    logits = np.random.default_rng(2).standard_normal((count, model.info.vocab_size), np.float32) * 3
    out = np.empty(count, np.int32)
    seeds, positions = np.arange(count, dtype=np.uint64), np.arange(count, dtype=np.int32)

    def run(temperature: float, top_p: float, top_k: int) -> Callable[[], None]:
        heat, mass, floor = (np.full(count, v, np.float32) for v in (temperature, top_p, 0.0))
        ks = np.full(count, top_k, np.int32)
        return lambda: sample(logits, heat, mass, floor, ks, seeds, positions, out, team=model.team)

    greedy, plain, filtered = (timed(run(*a), 0.5) for a in ((0.0, 1.0, 0), (0.8, 1.0, 0), (0.8, 0.9, 50)))
    print(f"{count:4d} rows: greedy {greedy}  temperature {plain}  top_k+top_p {filtered}")


def main() -> None:
    """Parse the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="int8", choices=["int8", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    begin = time.perf_counter()
    model = HostLlama(SHAPE, RandomWeights(SHAPE), options.dtype, PAGE_SIZE, 2100, 64, 1024, 128, options.threads)
    print(f"{options.dtype}, {options.threads} threads; ready after {time.perf_counter() - begin:.1f} s; ms a pass")
    for count in options.rows:
        layers = timed(rows_of(model, count, 0, 0), options.seconds)
        whole = timed(rows_of(model, count, 0, count), options.seconds)
        attention = timed(rows_of(model, count, CONTEXT - 1, 0), options.seconds)
        print(f"{count:4d} rows: layers {layers}  with head {whole}  layers, {CONTEXT} keys {attention}", flush=True)
    for count in (128, 512):
        print(f"prompt of {count}: {timed(prompt_of(model, count), options.seconds)}", flush=True)
    for count in options.rows[:3]:
        time_sampling(model, count)
    model.close()


if __name__ == "__main__":
    main()
