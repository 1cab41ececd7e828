"""Sampling: its distribution, its filters against a plain reference, and what a row's token may depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.kernels.sampling import sample
from gpu.kernels.team import Team

CHI_SQUARE_99_9 = {9: 27.9, 4: 18.5}  # by degrees of freedom


def draw(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: np.ndarray | int = 0,
    position: np.ndarray | int = 0,
    team: Team | None = None,
) -> np.ndarray:
    rows = len(logits)
    out = np.empty(rows, np.int32)
    floats = [np.full(rows, v, np.float32) for v in (temperature, top_p, min_p)]
    seeds, places = np.full(rows, seed, np.uint64), np.full(rows, position, np.int32)
    sample(np.ascontiguousarray(logits, np.float32), *floats, np.full(rows, top_k, np.int32), seeds, places, out, team)
    return out


def kept(logits: np.ndarray, temperature: float, top_p: float, min_p: float, top_k: int) -> np.ndarray:
    """Probabilities that the filters leave of one row, in float64: temperature, min_p, top_k, top_p."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    weights[weights < min_p] = 0
    if top_k > 0:
        weights[weights < np.sort(weights)[::-1][min(top_k, len(weights)) - 1]] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[(before >= top_p * weights.sum()) & (np.arange(len(order)) > 0)]] = 0
    return weights / weights.sum()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    used = expected > 0
    assert counts[~used].sum() == 0
    return float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    logits = np.random.default_rng(1).standard_normal(10).astype(np.float32) * 1.5
    tokens = draw(np.tile(logits, (20000, 1)), temperature, seed=7, position=np.arange(20000))
    counts = np.bincount(tokens, minlength=10)
    assert chi_square(counts, kept(logits, temperature, 1, 0, 0)) < CHI_SQUARE_99_9[9]


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9}])
def test_filtered_tokens_come_as_often_as_their_probability(filters: dict[str, float]) -> None:
    logits = np.array([0.1, 2.0, 1.2, -0.5, 1.9, 0.7, 1.4, -3.0], np.float32)
    tokens = draw(np.tile(logits, (20000, 1)), 0.9, seed=np.arange(20000), **filters)
    whole = {"top_p": 1.0, "min_p": 0.0, "top_k": 0} | filters
    probabilities = kept(logits, 0.9, **whole)
    counts = np.bincount(tokens, minlength=8)
    assert (counts > 0).tolist() == (probabilities > 0).tolist()
    assert chi_square(counts, probabilities) < 27.9


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 7, 64, 100, 1000, 5000]),
    spread=st.floats(0.01, 10),
    temperature=st.floats(0.1, 3),
    top_p=st.one_of(st.just(1.0), st.just(0.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    top_k=st.one_of(st.just(0), st.integers(1, 6000)),
)
def test_no_filtered_token_is_drawn(
    seed: int, vocab: int, spread: float, temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)
    tokens = draw(np.tile(logits, (40, 1)), temperature, top_p, min_p, top_k, seed, np.arange(40))
    slack = 1e-5  # a bound that lies this near to a token may fall on either side of it
    loose = kept(logits, temperature, min(1.0, top_p + slack), max(0.0, min_p - slack), top_k)
    assert (loose[tokens] > 0).all()


def test_every_token_that_stays_can_be_drawn() -> None:
    logits = np.zeros(130, np.float32)
    for filters, count in (({}, 130), ({"top_p": 0.5}, 65), ({"top_k": 1}, 130), ({"top_p": 0.0}, 1)):
        tokens = draw(np.tile(logits, (4000, 1)), seed=3, position=np.arange(4000), **filters)
        assert set(tokens.tolist()) == set(range(count)), filters


def test_greedy_takes_the_first_of_the_largest() -> None:
    random = np.random.default_rng(2)
    for vocab in (5, 64, 1000):
        logits = random.integers(-20, 20, (50, vocab)).astype(np.float32)
        np.testing.assert_array_equal(draw(logits, 0.0, top_p=0.1, top_k=3), logits.argmax(1))


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(200, -np.inf, np.float32)
    logits[[17, 180]] = (1.0, 1.5)
    rows = np.tile(logits, (200, 1))
    for filters in ({}, {"top_p": 0.999}, {"top_k": 100}):
        assert set(draw(rows, seed=np.arange(200), **filters).tolist()) == {17, 180}
    assert set(draw(rows, 0.0).tolist()) == {180}


def test_a_token_depends_on_its_own_row_only() -> None:
    random = np.random.default_rng(4)
    logits = (random.standard_normal((32, 3000)) * 2).astype(np.float32)
    seeds, places = random.integers(0, 2**63, 32, dtype=np.uint64), random.integers(0, 4000, 32).astype(np.int32)
    team = Team(2)
    for filters in ({}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.01}):
        together = draw(logits, 0.8, seed=seeds, position=places, **filters)
        np.testing.assert_array_equal(together, draw(logits, 0.8, seed=seeds, position=places, team=team, **filters))
        alone = [draw(logits[i : i + 1], 0.8, seed=seeds[i], position=places[i], **filters)[0] for i in range(32)]
        np.testing.assert_array_equal(together, alone)
    team.close()


def test_seed_and_position_both_matter() -> None:
    logits = np.zeros((500, 1000), np.float32)
    by_seed, by_position = draw(logits, seed=np.arange(500)), draw(logits, position=np.arange(500))
    assert len(set(by_seed.tolist())) > 300
    assert len(set(by_position.tolist())) > 300
    assert (by_seed[1:] != by_position[1:]).mean() > 0.9


@pytest.mark.parametrize("fault", [np.nan, np.inf, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_distribution_are_named_and_the_others_are_right(
    fault: float | None, temperature: float
) -> None:
    logits = np.random.default_rng(5).standard_normal((6, 500)).astype(np.float32)
    right = draw(logits, temperature)
    broken = logits.copy()
    if fault is None:
        broken[[1, 4]] = -np.inf
    else:
        broken[1, 499] = broken[4, 0] = fault
    out = np.empty(6, np.int32)
    columns = [np.full(6, v, np.float32) for v in (temperature, 1, 0)]
    with pytest.raises(FloatingPointError, match=r"rows \[1, 4\]"):
        sample(broken, *columns, np.zeros(6, np.int32), np.zeros(6, np.uint64), np.zeros(6, np.int32), out)
    fine = [0, 2, 3, 5]
    np.testing.assert_array_equal(out[fine], right[fine])


def test_no_rows_and_wrong_types() -> None:
    assert draw(np.empty((0, 10), np.float32)).size == 0
    with pytest.raises(ValueError, match="float32"):
        sample(*[np.zeros((1, 4))] * 8)
