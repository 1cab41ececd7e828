"""Acceptance of drafts: the output is distributed as the target's, whatever was drafted, and follows the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from gpu.kernels import plain_sampling
from gpu.kernels.plain_sampling import Parameters
from gpu.kernels.sampling import sample
from gpu.kernels.team import Team
from gpu.kernels.window import accept

VOCAB = 6
CHI_SQUARE_99_9 = {5: 20.5, 35: 66.6}  # by degrees of freedom
LOGITS = np.array([[0.1, 2.0, 1.2, -0.5, 1.9, 0.7], [1.0, -1.0, 0.3, 0.2, -2.0, 1.4]], np.float32)
DRAFTER = np.array([[0.3, 0.05, 0.1, 0.3, 0.2, 0.05]], np.float32)  # far from the target


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


class Gained(NamedTuple):
    tokens: np.ndarray  # i32[W, S]
    counts: np.ndarray
    lengths: np.ndarray


def run(
    team: Team,
    logits: np.ndarray,
    drafts: np.ndarray,
    probs: np.ndarray | None,
    wanted: list[Parameters],
    position: np.ndarray,
    lengths: np.ndarray | None = None,
) -> Gained:
    requests, window = len(wanted), len(drafts) + 1
    out = Gained(*(np.full(shape, -9, np.int32) for shape in ((window, requests), requests, requests)))
    reals = [np.array([getattr(w, name) for w in wanted], np.float32) for name in ("temperature", "top_p", "min_p")]
    top_k, seed = np.array([w.top_k for w in wanted], np.int32), np.array([w.seed for w in wanted], np.uint64)
    before = position if lengths is None else lengths
    inputs = (logits.reshape(requests * window, logits.shape[2]), drafts, probs, *reals, top_k, seed, position)
    accept(*inputs, before, out.tokens, out.counts, out.lengths, team)
    return out


def expected(
    logits: np.ndarray, drafts: np.ndarray, probs: np.ndarray | None, wanted: list[Parameters], position: np.ndarray
) -> list[list[int]]:
    return [
        plain_sampling.accept(
            logits[s], drafts[:, s], None if probs is None else probs[:, s], int(position[s]), wanted[s]
        )[0]
        for s in range(len(wanted))
    ]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    wanted = probabilities * counts.sum()
    used = wanted > 0
    assert counts[~used].sum() == 0
    return float(((counts[used] - wanted[used]) ** 2 / wanted[used]).sum())


def target(logits: np.ndarray, wanted: Parameters) -> np.ndarray:
    weights = plain_sampling.kept_weights(logits, wanted)
    return weights / weights.sum()


def drafted(kind: str, count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Drafts of one token for `count` requests, and what they were drawn from."""
    if kind == "sure":  # the drafts vary, each is sure
        return np.random.default_rng(1).integers(0, VOCAB, (1, count)).astype(np.int32), None
    drafts = np.random.default_rng(2).choice(
        VOCAB, (1, count), p=DRAFTER[0].astype(np.float64) / DRAFTER[0].astype(np.float64).sum()
    )
    return drafts.astype(np.int32), np.tile(DRAFTER[:, None], (1, count, 1))


def pairs(tokens: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """How often each first token came, and each second one where there is one, by the first."""
    first, second = np.zeros(VOCAB), np.zeros((VOCAB, VOCAB))
    for gained in tokens:
        first[gained[0]] += 1
        if len(gained) > 1:
            second[gained[0], gained[1]] += 1
    return first, second


FILTERS = [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.3, "temperature": 1.3}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["sure", "full"])
@pytest.mark.parametrize("implementation", ["plain", "host"])
def test_every_token_is_distributed_as_the_target(team: Team, implementation: str, kind: str, filters: dict) -> None:
    count = 4000 if implementation == "plain" else 40000
    wanted = [Parameters(**{"temperature": 0.9, **filters}, seed=seed) for seed in range(count)]
    drafts, probs = drafted(kind, count)
    logits, position = np.tile(LOGITS, (count, 1, 1)), np.full(count, 5, np.int32)
    if implementation == "plain":
        tokens = expected(logits, drafts, probs, wanted, position)
    else:
        gained = run(team, logits, drafts, probs, wanted, position)
        tokens = [gained.tokens[: gained.counts[s], s].tolist() for s in range(count)]
    first, second = pairs(tokens)
    assert chi_square(first, target(LOGITS[0], wanted[0])) < CHI_SQUARE_99_9[5]
    assert chi_square(second.sum(0), target(LOGITS[1], wanted[0])) < CHI_SQUARE_99_9[5]
    rate = np.minimum(target(LOGITS[0], wanted[0]), DRAFTER[0]).sum() if kind == "full" else 1 / VOCAB
    assert abs(second.sum() / count - rate) < 4 * np.sqrt(rate / count)


@pytest.mark.parametrize("kind", ["sure", "full"])
def test_wrong_acceptance_does_not_pass_for_the_target(team: Team, kind: str) -> None:
    """Control: drafts from another distribution than the one that is stated, and a draft accepted whenever likely."""
    count = 40000
    wanted = [Parameters(0.9, seed=seed) for seed in range(count)]
    drafts, probs = drafted(kind, count)
    if kind == "full":
        probs = np.roll(probs, 1, axis=2)
    else:
        probs = np.full((1, count, VOCAB), 1 / VOCAB, np.float32)
        drafts[:] = 1
    gained = run(team, np.tile(LOGITS, (count, 1, 1)), drafts, probs, wanted, np.full(count, 5, np.int32))
    first = np.bincount(gained.tokens[0], minlength=VOCAB)
    assert chi_square(first, target(LOGITS[0], wanted[0])) > 10 * CHI_SQUARE_99_9[5]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("vocab", [1, 7, 64, 300])
def test_host_follows_the_reference(team: Team, vocab: int, full: bool) -> None:
    random = np.random.default_rng(vocab)
    requests, window = 60, 4
    logits = (random.standard_normal((requests, window, vocab)) * 2).astype(np.float32)
    probs = random.dirichlet(np.full(vocab, 0.5), (window - 1, requests)).astype(np.float32) if full else None
    drafts = random.integers(0, vocab, (window - 1, requests)).astype(np.int32)
    likely = logits.argmax(2)[:, :-1].T
    drafts = np.where(random.random(drafts.shape) < 0.6, likely, drafts).astype(np.int32)
    drafts[1, :3] = (-1, vocab, 2**31 - 1)  # no tokens
    wanted = [Parameters(*random.choice([(0, 1), (0.5, 1), (1, 0.7), (2, 1)]), seed=int(s)) for s in range(requests)]
    wanted = [w._replace(top_k=int(random.choice([0, 1, 5]))) for w in wanted]
    position = random.integers(1, 1000, requests).astype(np.int32)
    gained = run(team, logits, drafts, probs, wanted, position)
    rows = expected(logits, drafts, probs, wanted, position)
    assert [gained.tokens[:n, s].tolist() for s, n in enumerate(gained.counts)] == rows
    assert all((gained.tokens[n:, s] == -1).all() for s, n in enumerate(gained.counts))
    np.testing.assert_array_equal(gained.lengths, position + gained.counts - 1)
    assert len(set(gained.counts.tolist())) > 1 or vocab == 1


def test_a_window_of_one_is_sampling(team: Team) -> None:
    random = np.random.default_rng(3)
    logits = (random.standard_normal((50, 3000)) * 3).astype(np.float32)
    wanted = [Parameters(0.8, *random.choice([(1, 0), (0.9, 0.01)]), int(random.choice([0, 40])), s) for s in range(50)]
    position = np.arange(50, dtype=np.int32)
    gained = run(team, logits[:, None], np.empty((0, 50), np.int32), None, wanted, position)
    out = np.empty(50, np.int32)
    columns = [np.array([getattr(w, k) for w in wanted], np.float32) for k in ("temperature", "top_p", "min_p")]
    top_k, seed = np.array([w.top_k for w in wanted], np.int32), np.arange(50, dtype=np.uint64)
    sample(logits, *columns, top_k, seed, position, out)
    np.testing.assert_array_equal(gained.tokens, out[None])
    np.testing.assert_array_equal(gained.lengths, position)


def test_greedy_takes_the_longest_right_run(team: Team) -> None:
    logits = np.zeros((4, 4, 9), np.float32)
    for s in range(4):
        logits[s, np.arange(4), [3, 1, 4, 5]] = 1
    drafts = np.array([[3, 3, 0, 3], [1, 1, 1, 0], [4, 0, 4, 4]], np.int32)
    gained = run(
        team, logits, drafts, None, [Parameters(0)] * 4, np.full(4, 7, np.int32), np.array([6, 6, 6, 0], np.int32)
    )
    assert gained.counts.tolist() == [4, 3, 1, 2]
    assert gained.tokens.T.tolist() == [[3, 1, 4, 5], [3, 1, 4, -1], [3, -1, -1, -1], [3, 1, -1, -1]]
    assert gained.lengths.tolist() == [9, 8, 6, 0]  # the last one is padding


def test_a_drafter_that_is_the_target_is_always_accepted(team: Team) -> None:
    count = 300
    wanted = [Parameters(0.7, seed=s) for s in range(count)]
    p = np.stack([target(row, wanted[0]) for row in LOGITS[:1]]).astype(np.float32)
    drafts = (
        np.random.default_rng(4)
        .choice(VOCAB, (1, count), p=p[0].astype(np.float64) / p[0].astype(np.float64).sum())
        .astype(np.int32)
    )
    gained = run(
        team,
        np.tile(LOGITS, (count, 1, 1)),
        drafts,
        np.tile(p[:, None], (1, count, 1)),
        wanted,
        np.arange(count, dtype=np.int32),
    )
    assert gained.counts.min() == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_faulty_row_is_named_when_it_is_reached(team: Team, temperature: float) -> None:
    logits = np.zeros((3, 2, 8), np.float32)
    logits[:, 0, 2] = 50
    logits[0, 1] = logits[1, 1, 3] = np.nan
    drafts = np.array([[2, 1, 2]], np.int32)
    with pytest.raises(FloatingPointError, match=r"requests \[0\]"):
        run(team, logits, drafts, None, [Parameters(temperature)] * 3, np.ones(3, np.int32))
    logits[0] = 0
    logits[2, 0] = -np.inf
    with pytest.raises(FloatingPointError, match=r"requests \[2\]"):
        run(team, logits, drafts, None, [Parameters(temperature)] * 3, np.ones(3, np.int32))


def test_a_result_depends_on_its_own_request_only(team: Team) -> None:
    random = np.random.default_rng(6)
    logits = random.standard_normal((20, 3, 500)).astype(np.float32) * 3
    drafts = logits.argmax(2)[:, :2].T.astype(np.int32).copy()
    wanted = [Parameters(0.8, 0.9, seed=s) for s in range(20)]
    position = np.arange(20, dtype=np.int32)
    together = run(team, logits, drafts, None, wanted, position)
    for s in range(20):
        alone = run(team, logits[s : s + 1], drafts[:, s : s + 1].copy(), None, wanted[s : s + 1], position[s : s + 1])
        np.testing.assert_array_equal(alone.tokens[:, 0], together.tokens[:, s])


def test_no_requests_and_wrong_arrays(team: Team) -> None:
    empty = run(team, np.empty((0, 2, 9), np.float32), np.empty((1, 0), np.int32), None, [], np.empty(0, np.int32))
    assert empty.tokens.shape == (2, 0)
    with pytest.raises(ValueError, match=r"array 1 must be contiguous int32 \[1, 1\]"):
        run(
            team,
            np.zeros((1, 2, 9), np.float32),
            np.zeros((1, 2), np.int32),
            None,
            [Parameters(1)],
            np.ones(1, np.int32),
        )
    with pytest.raises(ValueError, match="float32"):
        run(team, np.zeros((1, 2, 9)), np.zeros((1, 1), np.int32), None, [Parameters(1)], np.ones(1, np.int32))
