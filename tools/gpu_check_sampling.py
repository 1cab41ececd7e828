"""Sampling and the acceptance of drafts by Triton, compared with the plain references: what the part "kernels" runs.

Owns inputs, and the judgement of tokens that differ: exact, row by row, but where the border between two tokens lies so
near that the floats of either side may decide; and by how often each token comes. It never looks into a kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.device.buffers import signed
from gpu.kernels import plain_sampling
from gpu.kernels.cuda_sampling_work import CHUNK, scratch_words
from gpu.kernels.plain_sampling import Parameters
from gpu.kernels.triton_filters import VOCABULARIES
from gpu.kernels.triton_sampling import sample
from gpu.kernels.triton_window import accept

SMALL, SMALL_CHUNK = 40, 64  # for the interpreter, which pays for every token and every chunk
NOISE, DRAWS = 1e-5, 6  # of logits: more than the floats of any side are wrong by
TRIES = 60  # seeds, until a filter changes the token
NEAR_MOST = 0.25  # of all rows may lie near a border, or the inputs say nothing
FILTERS = (
    Parameters(0.0),
    Parameters(0.8),
    Parameters(1.3, top_p=0.55),
    Parameters(2.0, top_p=0.9, min_p=0.03, top_k=9),
    Parameters(0.7, min_p=0.3),
    Parameters(1.0, top_k=3),
    Parameters(0.9, top_k=10**6),
    Parameters(1.0, top_p=1e-6),
)
Row = tuple[Any, ...]  # what one request gains
Reference = Callable[[int, Any], Row]  # request, and its logits f32[W, V]


class Case:
    """Requests with windows of W tokens, and drafts of which most are the drafter's likeliest."""

    def __init__(self, vocab: int, window: int, requests: int, *, full: bool = False) -> None:
        """full: drafts come with the distributions that they were drawn from, else the drafter is sure of them."""
        random = np.random.default_rng((vocab, window, full))
        spread = 3 if vocab == SMALL else 6  # about as few likely tokens in a large vocabulary
        shape = (window - 1, requests, vocab)
        self.window, self.full = window, full
        self.logits = (random.standard_normal((requests, window, vocab)) * spread).astype(np.float32)
        self.position = random.integers(0, 4000, requests).astype(np.int32)
        self.wanted = [telling(*row) for row in zip(self.logits[:, 0], self.position, cycle(FILTERS), range(requests))]
        self.lengths = self.position.copy()
        self.lengths[-1] = 0  # padding
        likely = self.logits[:, :-1].transpose(1, 0, 2) + random.standard_normal(shape)
        likely = np.exp(likely - likely.max(2, keepdims=True))
        drafts = np.where(random.random(shape[:2]) < 0.8, likely.argmax(2), random.integers(0, vocab, shape[:2]))
        self.drafts = drafts.astype(np.int32)
        self.probs = np.zeros(shape, np.float32)  # the same as none where the drafter is sure
        np.put_along_axis(self.probs, self.drafts[:, :, None].astype(np.int64), 1, 2)
        if full:
            self.probs = (likely / likely.sum(2, keepdims=True)).astype(np.float32)

    def columns(self, device: str) -> list[Tensor]:
        """temperature, top_p, min_p, top_k, seed and position, as the kernels take them."""
        reals = [np.array([getattr(w, name) for w in self.wanted], np.float32) for name in Parameters._fields[:3]]
        top_k = np.array([w.top_k for w in self.wanted], np.int32)
        seed = np.array([w.seed for w in self.wanted], np.uint64)
        return [_tensor(column, device) for column in (*reals, top_k, seed, self.position)]

    def scratch(self, device: str, chunk: int) -> Tensor:
        """Working memory, of which nothing may rest on what is there."""
        words = scratch_words(self.logits.shape[0] * self.window, self.logits.shape[2], chunk)
        return torch.full((words,), -(1 << 40) - 3, device=device)

    def sample(self, device: str, chunk: int) -> list[Row]:
        """The token of each request, without drafts."""
        out = torch.full((len(self.wanted),), -9, dtype=torch.int32, device=device)
        rows = _tensor(self.logits[:, 0], device)
        sample(*(rows, *self.columns(device), out, self.scratch(device, chunk), chunk))
        return [(token,) for token in out.tolist()]

    def sample_plainly(self, request: int, logits: Any) -> Row:
        """The same by the reference."""
        return (plain_sampling.sample(logits[0], int(self.position[request]), self.wanted[request]),)

    def accept(self, device: str, chunk: int) -> list[Row]:
        """What each request gains: tokens, -1 behind them; how many; and its new length."""
        requests, window, vocab = self.logits.shape
        shapes = ((window, requests), (requests,), (requests,), (requests * window,))
        *made, choice = (torch.full(shape, -9, dtype=torch.int32, device=device) for shape in shapes)
        rows = _tensor(self.logits.reshape(-1, vocab), device)
        guess = _tensor(self.drafts, device), _tensor(self.probs, device) if self.full else None
        lengths, scratch = _tensor(self.lengths, device), self.scratch(device, chunk)
        accept(*(rows, *guess, *self.columns(device), lengths, *made, choice, scratch, chunk))
        tokens, counts, new_lengths = (array.tolist() for array in made)
        columns = (tuple(column) for column in zip(*tokens, strict=True))
        return list(zip(columns, counts, new_lengths, strict=True))

    def accept_plainly(self, request: int, logits: Any) -> Row:
        """The same by the reference."""
        drafts, probs, place = self.drafts[:, request], self.probs[:, request], int(self.position[request])
        gained = plain_sampling.accept(logits, drafts, probs, place, self.wanted[request])[0]
        length = int(self.lengths[request])
        rest = [-1] * (self.window - len(gained))
        return (*gained, *rest), len(gained), length + len(gained) - 1 if length else 0


def telling(logits: Any, position: Any, wanted: Parameters, number: int) -> Parameters:
    """The filter with a seed for request `number`, with which the filter changes the first token if it can."""
    first = number % 16 << 60 | 7919 * number  # seeds have 64 bits
    without = Parameters(wanted.temperature)
    if wanted == without or wanted.top_k >= len(logits):
        return wanted._replace(seed=first)
    for seed in range(first, first + TRIES):
        drawn = [plain_sampling.sample(logits, int(position), w._replace(seed=seed)) for w in (wanted, without)]
        if drawn[0] != drawn[1]:
            return wanted._replace(seed=seed)
    return wanted._replace(seed=first)


def _tensor(array: Any, device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(signed(array))).to(device)


def differing(case: Case, found: list[Row], reference: Reference) -> float:
    """Requests that got something else than the reference gives, though no border is near; infinite if many are."""
    wrong = [s for s, row in enumerate(found) if row != reference(s, case.logits[s])]
    near = [s for s in wrong if is_near_a_border(partial(reference, s), case.logits[s])]
    return len(wrong) - len(near) if len(near) <= NEAR_MOST * len(found) else float("inf")


def is_near_a_border(reference: Callable[[Any], Row], logits: Any) -> bool:
    """Whether a change of the logits by less than anybody could feel changes what the reference gives."""
    random = np.random.default_rng(0)
    moved = (logits + NOISE * random.standard_normal(logits.shape).astype(np.float32) for _ in range(DRAWS))
    return len({reference(logits), *map(reference, moved)}) > 1


def compare_exactly(device: str, vocab: int, requests: int, chunk: int) -> Iterator[tuple[str, float]]:
    """Token by token, for each of the filters: (operation, requests that differ)."""
    case = Case(vocab, 1, requests)
    yield "sample, token by token", differing(case, case.sample(device, chunk), case.sample_plainly)
    for window, full in ((1, False), (4, False), (4, True)):
        case = Case(vocab, window, requests, full=full)
        found = case.accept(device, chunk)
        assert window == 1 or len({count for _, count, _ in found}) > 1, "all requests gain the same: nothing is tested"
        name = f"acceptance of {window - 1} drafts{' with distributions' if full else ''}"
        yield name, differing(case, found, case.accept_plainly)


def compare_frequencies(device: str, rows: int, chunk: int, filters: int) -> Iterator[tuple[str, float]]:
    """How often each token comes, in standard deviations over 5; and how many come that a filter forbids."""
    generator = torch.Generator(device).manual_seed(7)
    logits = torch.randn((1, SMALL), generator=generator, device=device).expand(rows, SMALL).contiguous()
    scratch = torch.zeros(scratch_words(rows, SMALL, chunk), dtype=torch.int64, device=device)
    out = torch.full((rows,), -7, dtype=torch.int32, device=device)
    seeds = torch.arange(rows, dtype=torch.int64, device=device) * 7919 + 1
    places = torch.arange(rows, dtype=torch.int32, device=device) % 50
    every = (
        ("top_p", Parameters(0.8, top_p=0.6)),
        ("top_k", Parameters(0.8, top_k=5)),
        ("min_p", Parameters(0.8, min_p=0.2)),
        ("temperature", Parameters(0.8)),
    )
    for name, wanted in every[:filters]:
        reals = [torch.full((rows,), value, device=device) for value in wanted[:3]]
        top_k = torch.full((rows,), wanted.top_k, dtype=torch.int32, device=device)
        sample(*(logits, *reals, top_k, seeds, places, out, scratch, chunk))
        kept = plain_sampling.kept_weights(logits[0].cpu().numpy(), wanted)
        share = kept / kept.sum()
        counts = np.bincount(out.cpu().numpy().clip(min=0), minlength=SMALL)
        spread = np.sqrt(rows * share * (1 - share)).clip(min=1)
        beyond = float(counts[kept == 0].sum())
        yield f"sample, how often, {name}", max(float((abs(counts - rows * share) / spread).max()) / 5, beyond)


def compare_sampling(device: str) -> Iterator[tuple[str, float, float]]:
    """Everything, and on the host little of it: (operation, what was found, what is allowed)."""
    on_gpu = device == "cuda"
    vocabularies, requests, chunk = ((SMALL, *VOCABULARIES), 32, CHUNK) if on_gpu else ((SMALL,), 4, SMALL_CHUNK)
    for vocab in vocabularies:
        for name, found in compare_exactly(device, vocab, requests, chunk):
            yield f"{name}, vocabulary of {vocab}", found, 0
    for name, found in compare_frequencies(device, *((20000, chunk, 4) if on_gpu else (4, chunk, 1))):
        yield name, found, 1
