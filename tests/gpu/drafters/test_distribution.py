"""What a served step says at temperatures above 0 is distributed as the target's, whatever is drafted and how.

The sampler and the acceptance of the step itself, over a small vocabulary in which a token depends on the one before:
three tokens of each of many requests, step by step, against the exact probabilities of all triples.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu.kernels import plain_sampling
from gpu.kernels.host_step import accept
from gpu.kernels.plain_sampling import Parameters
from gpu.kernels.sampling import sample
from gpu.kernels.team import Team

VOCAB, WINDOW, REQUESTS, TOKENS, FIRST = 5, 3, 40_000, 3, 2
TABLE = np.random.default_rng(4).normal(0, 1.3, (VOCAB, VOCAB)).astype(np.float32)  # logits behind each token
DRAFTER = np.random.default_rng(5).dirichlet(np.full(VOCAB, 0.7), VOCAB)  # probabilities behind each, of others
BOUND = 124 + 5 * np.sqrt(2 * 124)  # of chi square over 125 triples

Int32 = NDArray[np.int32]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def drafts_of(kind: str, newest: Int32, random: np.random.Generator) -> Int32:
    """i32[requests, WINDOW - 1] behind the newest tokens."""
    drafts, before = np.zeros((len(newest), WINDOW - 1), np.int32), newest
    for w in range(WINDOW - 1):
        if kind == "likeliest":  # one for each token: the drafter's own favourite
            drafts[:, w] = DRAFTER[before].argmax(axis=1)
        else:  # drawn from what the drafter finds probable
            drafts[:, w] = (random.random((len(newest), 1)) > DRAFTER[before].cumsum(axis=1)[:, :-1]).sum(axis=1)
        before = drafts[:, w]
    return drafts


def served(kind: str, wanted: Parameters, team: Team, *, honest: bool = True) -> tuple[Int32, float]:
    """i32[requests, TOKENS], and tokens a window. honest: seeds are looked up by position, as they have to be."""
    random = np.random.default_rng(6)
    texts = np.full((REQUESTS, 1 + TOKENS + WINDOW), -1, np.int32)
    texts[:, 0] = FIRST
    lengths = np.ones(REQUESTS, np.int32)  # the newest token stands one before
    gained_in_all = windows = 0
    full = [np.full(REQUESTS * WINDOW, value, np.float32) for value in (wanted.temperature, wanted.top_p, wanted.min_p)]
    top_k = np.full(REQUESTS * WINDOW, wanted.top_k, np.int32)
    seeds = np.repeat(np.arange(REQUESTS, dtype=np.uint64) + 1, WINDOW)
    while lengths.min() <= TOKENS:
        newest = texts[np.arange(REQUESTS), lengths - 1]
        tokens = np.concatenate([newest[:, None], drafts_of(kind, newest, random)], axis=1).reshape(-1)
        positions = (np.repeat(lengths, WINDOW) + np.tile(np.arange(WINDOW), REQUESTS)).astype(np.int32)
        targets = np.zeros(REQUESTS * WINDOW, np.int32)
        sample(TABLE[tokens], *full, top_k, seeds, positions, targets, team=team)
        if not honest:  # a draft that is probable enough is taken for what the target said
            probable = plain_probabilities(wanted)[tokens[:-1], tokens[1:]] > 0.15
            targets[:-1] = np.where(probable, tokens[1:], targets[:-1])
        counts, last = np.zeros(REQUESTS, np.int32), np.zeros(REQUESTS, np.int32)
        gained, table = np.zeros((WINDOW, REQUESTS), np.int32), np.zeros(REQUESTS, np.int32)
        entries, at = np.arange(REQUESTS, dtype=np.int32), lengths.copy()
        accept(tokens, entries, at, targets, counts, gained, last, table, REQUESTS, 0, WINDOW)
        going = lengths <= TOKENS
        for w in range(WINDOW):
            rows = np.flatnonzero(going & (counts > w))
            texts[rows, lengths[rows] + w] = gained[w, rows]
        gained_in_all, windows = gained_in_all + int(counts[going].sum()), windows + int(going.sum())
        lengths = np.where(going, lengths + counts, lengths)
    return texts[:, 1 : 1 + TOKENS], gained_in_all / windows


def plain_probabilities(wanted: Parameters) -> NDArray[np.float64]:
    """f64[VOCAB, VOCAB]: how probable each token is behind each."""
    weights = np.array([plain_sampling.kept_weights(row, wanted) for row in TABLE], np.float64)
    return weights / weights.sum(axis=1, keepdims=True)


def chi_square(triples: Int32, wanted: Parameters) -> float:
    """Over all triples that can be; those that cannot may not have come."""
    step = plain_probabilities(wanted)
    exact = (step[FIRST][:, None, None] * step[:, :, None] * step[None, :, :]).reshape(-1) * len(triples)
    found = np.bincount(triples @ np.array([VOCAB * VOCAB, VOCAB, 1]), minlength=VOCAB**3)
    can = exact > 0
    assert found[~can].sum() == 0
    return float(((found[can] - exact[can]) ** 2 / exact[can]).sum())


FILTERS = [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 1.4}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["likeliest", "drawn"])
def test_what_is_served_is_distributed_as_the_target(team: Team, kind: str, filters: dict[str, float]) -> None:
    wanted = Parameters(**{"temperature": 0.9, **filters})
    triples, gained = served(kind, wanted, team)
    assert gained > 1.15, "drafts were meant to be taken"
    assert chi_square(triples, wanted) < BOUND


@pytest.mark.parametrize("kind", ["likeliest", "drawn"])
def test_drafts_change_no_seeded_answer(team: Team, kind: str) -> None:
    """The same seeds give the same tokens, whatever is drafted: those that are drawn one by one."""
    wanted = Parameters(temperature=0.9)
    triples, _ = served(kind, wanted, team)
    alone = np.full((REQUESTS, 1 + TOKENS), FIRST, np.int32)
    seeds = np.arange(REQUESTS, dtype=np.uint64) + 1
    reals = [np.full(REQUESTS, value, np.float32) for value in (wanted.temperature, wanted.top_p, wanted.min_p)]
    for place in range(TOKENS):
        position, out = np.full(REQUESTS, 1 + place, np.int32), np.zeros(REQUESTS, np.int32)
        sample(TABLE[alone[:, place]], *reals, np.zeros(REQUESTS, np.int32), seeds, position, out, team=team)
        alone[:, 1 + place] = out
    np.testing.assert_array_equal(triples, alone[:, 1:])


def test_wrong_acceptance_is_seen(team: Team) -> None:
    """Control: drafts that are taken because they are probable."""
    wanted = Parameters(temperature=0.9)
    triples, _ = served("drawn", wanted, team, honest=False)
    assert chi_square(triples, wanted) > 10 * BOUND
