"""Sampling by Triton, on the host and by the plain reference: the same tokens from the same inputs."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpu.kernels import plain_sampling, sampling, triton_sampling
from gpu.kernels.cuda_sampling_work import CHUNK, VOCAB_MAX, scratch_words
from gpu.kernels.plain_sampling import Parameters
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here

CHUNK_HERE = 32  # so that tiny rows have several
SLACK = 1e-5  # where a border between tokens lies this near, the implementations may differ in the token


class Case(NamedTuple):
    logits: np.ndarray  # f32[S, V]
    wanted: list[Parameters]
    position: np.ndarray  # i32[S]

    def columns(self) -> list[np.ndarray]:
        names = ("temperature", "top_p", "min_p")
        reals = [np.array([getattr(w, name) for w in self.wanted], np.float32) for name in names]
        top_k, seed = [w.top_k for w in self.wanted], [w.seed for w in self.wanted]
        return [*reals, np.array(top_k, np.int32), np.array(seed, np.uint64), self.position]


def tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array.view(np.int64) if array.dtype == np.uint64 else array))


def by_triton(case: Case, chunk: int = CHUNK_HERE) -> list[int]:
    rows, vocab = case.logits.shape
    out = torch.full((rows,), -9, dtype=torch.int32)
    scratch = torch.full((scratch_words(rows, vocab, chunk),), -(1 << 40) - 3)  # nothing may rest on what is there
    triton_sampling.sample(tensor(case.logits), *map(tensor, case.columns()), out, scratch, chunk)
    return out.tolist()


def by_host(case: Case) -> list[int]:
    out = np.empty(len(case.wanted), np.int32)
    try:
        sampling.sample(case.logits, *case.columns(), out)
    except FloatingPointError:
        assert out.min() < 0
    return out.tolist()


def by_reference(case: Case) -> list[int]:
    rows = zip(case.logits, case.position.tolist(), case.wanted, strict=True)
    return [plain_sampling.sample(logits, position, wanted) for logits, position, wanted in rows]


def is_near_a_border(logits: np.ndarray, position: int, wanted: Parameters) -> bool:
    """Whether a change of some bits in a weight might change the token."""
    if wanted.temperature < 1e-5 or plain_sampling.is_faulty(logits):
        return False
    u = plain_sampling.uniform(wanted.seed, position, 0)
    kept = plain_sampling.kept_weights(logits, wanted)
    near = {plain_sampling.draw_from(kept, u + d) for d in (-SLACK, 0, SLACK) if 0 <= u + d < 1}
    for d in (-SLACK, SLACK):
        moved = wanted._replace(top_p=wanted.top_p * (1 + d) if wanted.top_p < 1 else 1, min_p=wanted.min_p * (1 + d))
        if ((plain_sampling.kept_weights(logits, moved) > 0) != (kept > 0)).any():
            return True
    return len(near) > 1


def compare(case: Case) -> None:
    """All three agree, row by row, but near borders, which most rows are not."""
    rows = zip(case.logits, case.position.tolist(), case.wanted, strict=True)
    sure = [not is_near_a_border(*row) for row in rows]
    assert sum(sure) >= 0.75 * len(sure)
    found = [np.array(tokens)[sure].tolist() for tokens in (by_triton(case), by_host(case), by_reference(case))]
    assert found[0] == found[2]
    assert found[1] == found[2]


def make_case(seed: int, vocab: int, wanted: list[Parameters], *, ties: bool) -> Case:
    random = np.random.default_rng(seed)
    rows = len(wanted)
    logits = random.standard_normal((rows, vocab)) * 3
    logits = np.round(logits) if ties else logits
    wanted = [w._replace(seed=int(s)) for w, s in zip(wanted, random.integers(0, 2**64, rows, np.uint64), strict=True)]
    return Case(logits.astype(np.float32), wanted, random.integers(0, 4000, rows).astype(np.int32))


MIXED = [
    Parameters(0.0),
    Parameters(0.8),
    Parameters(1.0, top_k=1),
    Parameters(1.3, top_p=0.55),
    Parameters(0.7, min_p=1.0),
    Parameters(2.0, top_p=0.9, min_p=0.03, top_k=9),
    Parameters(1.0, top_p=1e-6),
    Parameters(0.9, top_k=10_000),
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [50, 1])
def test_all_filters_in_one_batch(vocab: int, ties: bool) -> None:
    compare(make_case(3, vocab, MIXED, ties=ties))


def test_random_filters() -> None:
    random = np.random.default_rng(0)
    wanted = [
        Parameters(
            float(random.uniform(0.2, 2)),
            float(random.choice([1, random.uniform(0, 1)])),
            float(random.choice([0, random.uniform(0, 0.2)])),
            int(random.choice([0, random.integers(1, 60)])),
        )
        for _ in range(6)
    ]
    compare(make_case(0, 64, wanted, ties=False))


def test_ties_with_the_bounds() -> None:
    """40 equal tokens, two chunks: top_k keeps them all, top_p those of the lowest ids, exactly."""
    logits = np.zeros((4, 40), np.float32)
    filters = [{"top_k": 3}, {"top_p": 0.825}, {"top_p": 0.75}, {"top_p": 0.0}]
    case = Case(logits, [Parameters(1.0, seed=s, **f) for s, f in enumerate(filters)], np.arange(4, dtype=np.int32))
    assert by_triton(case) == by_host(case) == by_reference(case)
    largest = max(by_reference(case._replace(position=np.full(4, p, np.int32)))[1] for p in range(400))
    assert largest == 32  # 33 of the 40: the bound lies within the second chunk


def test_rows_that_are_no_distribution() -> None:
    logits = np.random.default_rng(5).standard_normal((8, 50)).astype(np.float32)
    logits[0, 49] = logits[1, 0] = np.nan
    logits[2, 40] = np.inf
    logits[3] = -np.inf
    logits[4, 7:] = -np.inf
    logits[5, :-1] = -np.inf
    wanted = [Parameters(float(s % 2), top_p=0.9, seed=s) for s in range(8)]
    case = Case(logits, wanted, np.arange(8, dtype=np.int32))
    tokens = by_triton(case)
    assert tokens[:4] == [-1] * 4
    assert 0 <= tokens[4] < 7 and tokens[5] == 49
    assert tokens == by_host(case) == by_reference(case)


def test_a_token_depends_neither_on_its_neighbours_nor_on_the_cut() -> None:
    case = make_case(7, 60, [Parameters(0.9, 0.8, top_k=30), Parameters(1.1, 0.95), Parameters(0.0)], ties=False)
    together = by_triton(case)
    alone = [by_triton(Case(case.logits[s : s + 1], [case.wanted[s]], case.position[s : s + 1]))[0] for s in (0, 1)]
    assert alone == together[:2]
    assert by_triton(case, 64) == together


@triton.jit
def uniform_kernel(seeds, positions, out):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    for draw in tl.static_range(2):
        number = triton_sampling._uniform(tl.load(seeds + i), tl.load(positions + i), draw)
        tl.store(out + 2 * i + draw, number)


def test_uniform_numbers_are_those_of_the_host_bit_for_bit() -> None:
    random = np.random.default_rng(8)
    seeds = np.array([0, 1, 2**63, 2**64 - 1, *random.integers(0, 2**64, 20, np.uint64)], np.uint64)
    positions = np.array([0, 2**31 - 1, 1, 7, *random.integers(0, 2**31, 20)], np.int32)
    out = torch.zeros(len(seeds), 2, dtype=torch.float64)
    uniform_kernel[(len(seeds),)](tensor(seeds), tensor(positions), out)
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    assert out.tolist() == [[plain_sampling.uniform(*pair, draw) for draw in range(2)] for pair in pairs]
    # The host keeps its numbers to itself: of one, 16 bits show in which of 2^16 equal tokens it draws.
    wanted = [Parameters(1.0, seed=int(seed)) for seed in seeds]
    case = Case(np.zeros((len(seeds), 1 << 16), np.float32), wanted, positions)
    assert by_host(case) == [int(u * (1 << 16)) for u in out[:, 0].tolist()]


def test_scratch_that_is_too_small_and_vocabularies_that_are_too_large() -> None:
    case = make_case(1, 40, [Parameters(1.0)], ties=False)
    out, columns = torch.zeros(1, dtype=torch.int32), map(tensor, case.columns())
    with pytest.raises(ValueError, match="are needed"):
        scratch = torch.zeros(scratch_words(1, 40, CHUNK_HERE) - 1, dtype=torch.int64)
        triton_sampling.sample(tensor(case.logits), *columns, out, scratch, CHUNK_HERE)
    assert scratch_words(1, VOCAB_MAX, CHUNK) > 0
    with pytest.raises(ValueError, match="vocabulary"):
        scratch_words(1, VOCAB_MAX + 1, CHUNK)
