"""Acceptance of drafts by Triton, on the host and by the plain reference: the same tokens from the same inputs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu.kernels import plain_sampling, triton_sampling, triton_window, window
from gpu.kernels.cuda_sampling_work import scratch_words
from gpu.kernels.plain_sampling import Parameters
from gpu.kernels.team import Team
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here

CHUNK = 16
Result = tuple[list[list[int]], list[int], list[int]]  # tokens by request, counts, lengths


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(1)
    yield made
    made.close()


class Case:
    """Inputs of one acceptance."""

    def __init__(self, logits: np.ndarray, drafts: np.ndarray, probs: np.ndarray | None, wanted: list[Parameters]):
        self.logits, self.drafts, self.probs, self.wanted = logits, drafts, probs, wanted
        self.window, self.requests = len(drafts) + 1, len(wanted)
        self.position = np.arange(3, 3 + self.requests, dtype=np.int32)
        self.lengths = self.position.copy()
        self.lengths[-1] = 0  # padding

    def inputs(self) -> list[Any]:
        names = ("temperature", "top_p", "min_p")
        reals = [np.array([getattr(w, name) for w in self.wanted], np.float32) for name in names]
        top_k = np.array([w.top_k for w in self.wanted], np.int32)
        seed = np.array([w.seed for w in self.wanted], np.uint64)
        rows = self.logits.reshape(self.requests * self.window, -1)
        return [rows, self.drafts, self.probs, *reals, top_k, seed, self.position, self.lengths]

    def outputs(self) -> list[np.ndarray]:
        shapes = ((self.window, self.requests), (self.requests,), (self.requests,))
        return [np.full(shape, -9, np.int32) for shape in shapes]


def tensor(array: np.ndarray | None) -> Any:
    if array is None:
        return None
    return torch.from_numpy(np.ascontiguousarray(array.view(np.int64) if array.dtype == np.uint64 else array))


def listed(outputs: list[np.ndarray]) -> Result:
    tokens, counts, lengths = outputs
    assert all((tokens[n:, s] == -1).all() for s, n in enumerate(counts))
    return [tokens[:n, s].tolist() for s, n in enumerate(counts)], counts.tolist(), lengths.tolist()


def by_triton(case: Case, chunk: int = CHUNK) -> Result:
    outputs = case.outputs()
    rows, vocab = case.inputs()[0].shape
    choice = torch.full((rows,), -9, dtype=torch.int32)
    scratch = torch.full((scratch_words(rows, vocab, chunk),), -(1 << 40) - 3)  # nothing may rest on what is there
    triton_window.accept(*map(tensor, case.inputs()), *map(tensor, outputs), choice, scratch, chunk)
    return listed(outputs)


def by_host(case: Case, team: Team) -> Result:
    outputs = case.outputs()
    try:
        window.accept(*case.inputs(), *outputs, team)
    except FloatingPointError:
        assert outputs[0].min() < 0
    return listed(outputs)


def by_reference(case: Case) -> Result:
    tokens = []
    for s, wanted in enumerate(case.wanted):
        probs = None if case.probs is None else case.probs[:, s]
        tokens.append(plain_sampling.accept(case.logits[s], case.drafts[:, s], probs, int(case.position[s]), wanted)[0])
    counts = [len(gained) for gained in tokens]
    lengths = [int(n) + c - 1 if n else 0 for n, c in zip(case.lengths, counts, strict=True)]
    return tokens, counts, lengths


def make_case(seed: int, vocab: int, width: int, wanted: list[Parameters], *, full: bool) -> Case:
    """Drafts of which half are the drafter's likeliest. No border lies so near that a bit would change a token."""
    random = np.random.default_rng(seed)
    requests = len(wanted)
    logits = (random.standard_normal((requests, width, vocab)) * 2).astype(np.float32)
    likely, probs = logits[:, :-1].transpose(1, 0, 2), None
    if full:
        weights = np.exp(likely + 2 * random.standard_normal(likely.shape))
        likely = probs = (weights / weights.sum(2, keepdims=True)).astype(np.float32)
    drafts = random.integers(0, vocab, likely.shape[:2])
    drafts = np.where(random.random(drafts.shape) < 0.6, likely.argmax(2), drafts).astype(np.int32)
    return Case(logits, drafts, probs, [w._replace(seed=seed * 1000 + s) for s, w in enumerate(wanted)])


MIXED = [Parameters(0.0), Parameters(0.9), Parameters(1.2, top_p=0.7), Parameters(1.0, min_p=0.05, top_k=6)]


@pytest.mark.parametrize("full", [False, True], ids=["sure", "full"])
def test_all_three_agree(team: Team, full: bool) -> None:
    case = make_case(1, 20, 3, MIXED, full=full)
    assert by_triton(case) == by_host(case, team) == by_reference(case)
    assert len(set(by_reference(case)[1])) > 1


@pytest.mark.parametrize("full", [False, True], ids=["sure", "full"])
def test_many_draws_agree(team: Team, full: bool) -> None:
    """One distribution, many seeds, no filter: the kernels that judge and draw."""
    case = make_case(2, 20, 2, [Parameters(1.0)] * 16, full=full)
    found = by_triton(case, 32)
    assert found == by_host(case, team) == by_reference(case)
    assert 2 < found[1].count(1) < 14


def test_a_window_of_one_is_sampling(team: Team) -> None:
    case = make_case(3, 20, 1, MIXED, full=False)
    rows, _, _, *columns = case.inputs()[:9]
    out = torch.full((4,), -9, dtype=torch.int32)
    scratch = torch.zeros(scratch_words(4, 20, CHUNK), dtype=torch.int64)
    triton_sampling.sample(tensor(rows), *map(tensor, columns), out, scratch, CHUNK)
    found = by_triton(case)
    assert found == ([[token] for token in out.tolist()], [1] * 4, [3, 4, 5, 0])
    assert found == by_host(case, team) == by_reference(case)


def test_greedy_ties_faults_and_drafts_that_are_no_tokens(team: Team) -> None:
    logits = np.zeros((6, 3, 20), np.float32)  # greedy takes token 0
    drafts = np.array([[0, 0, -1, 20, 0, 0], [0, 5, 0, 0, 0, 0]], np.int32)
    logits[4, 1] = np.nan
    logits[5, 0, 3] = np.inf
    for temperature in (0.0, 1.0):
        wanted = [Parameters(temperature, top_k=3, top_p=0.01, seed=s) for s in range(6)]  # token 0 alone stays
        case = Case(logits, drafts, None, wanted)
        found = by_triton(case, 32)
        assert found == by_host(case, team) == by_reference(case)
        assert found[0] == [[0, 0, 0], [0, 0], [0], [0], [0, -1], [-1]]


def test_nothing_left_after_a_rejection(team: Team) -> None:
    """A drafter that is nearly the target, so that max(p - q, 0) is empty: the token then comes from the target."""
    logits = np.zeros((3, 2, 8), np.float32)
    probs = np.full((1, 3, 8), 2.0, np.float32)  # no distribution: what rounding does in the extreme
    drafts = np.full((1, 3), 4, np.int32)
    case = Case(logits, drafts, probs, [Parameters(1.0, seed=s) for s in range(3)])
    found = by_triton(case)
    assert found == by_host(case, team) == by_reference(case)
    assert min(found[1]) == 1
