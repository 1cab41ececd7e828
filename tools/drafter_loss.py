"""What a drafter in training is asked for, and how good it is.

Owns the batches, the loss, and the count of drafts that would be accepted.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tools.drafter_data import Example
from tools.drafter_model import Answers, Drafting, side_by_side

UNKNOWN = -1  # of ids that have no place in the draft vocabulary
DISCOUNT = 0.8  # of each later draft: it counts only where those before it are right


def batches(examples: Sequence[Example], tokens: int, order: random.Random | None) -> Iterator[list[Example]]:
    """Examples of about one length together, up to so many tokens of answers, in an order of their own."""
    made: list[list[Example]] = []
    room = 0
    for example in sorted(examples, key=lambda e: len(e.tokens)):
        answer = len(example.tokens) - example.prompt
        if not made or answer > room:
            made.append([])
            room = tokens
        made[-1].append(example)
        room -= answer
    if order is not None:
        order.shuffle(made)
    return iter(made)


def places_of(vocabulary: Tensor, size: int) -> Tensor:
    """i64[size]: the place of each of the target's ids in the draft vocabulary, or UNKNOWN."""
    known = torch.full((size,), UNKNOWN, dtype=torch.int64)
    known[vocabulary] = torch.arange(len(vocabulary))
    return known


def wanted_of(model: Drafting, answers: Answers, known: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """What the first draft of each window should be: probabilities f32[N, D] for the N windows that have a first
    draft, and i64[B, A], which of them belongs to a window, UNKNOWN where none does.

    A share `hard` of it is the token that the target chose, the rest is how probable the target finds each. What a
    later draft should be is what the first one of a later window should be.
    """
    tokens, there = answers.wanted(0)
    behind = (answers.places + 1).clamp(max=answers.states.shape[1] - 1)
    states = answers.states.gather(1, behind[..., None, None].expand(-1, -1, *answers.states.shape[2:]))
    with torch.no_grad():
        made = model.target.teacher(states[there]).softmax(-1)
        place = known[tokens[there]]
        chosen = place != UNKNOWN
        made[chosen] *= 1 - hard
        made[chosen, place[chosen]] += hard
    rows = torch.full(there.shape, UNKNOWN)
    rows[there] = torch.arange(len(made))
    return made, rows


def loss_of(model: Drafting, answers: Answers, known: Tensor, drafts: int, hard: float) -> Tensor:
    """Cross entropy of all drafts, the later ones discounted. See `wanted_of`."""
    wanted, rows = wanted_of(model, answers, known, hard)
    total, weight = torch.zeros(()), 0.0
    for number, state in enumerate(model.states(answers, drafts)):
        _, there = answers.wanted(number)
        if there.any():
            which = functional.pad(rows, (0, number), value=UNKNOWN)[:, number:][there]
            total = total + DISCOUNT**number * functional.cross_entropy(model.logits(state[there]), wanted[which])
            weight += DISCOUNT**number
    return total / max(weight, 1e-9)


@torch.no_grad()  # type: ignore[untyped-decorator]
def runs_of(model: Drafting, examples: Sequence[Example], drafts: int, tokens: int) -> Counter[int]:
    """How many drafts are accepted in a row, in the windows that serving the answers would have: each begins where the
    one before has ended.
    """
    found: Counter[int] = Counter()
    for batch in batches(examples, tokens, None):
        answers = side_by_side(batch)
        right = answers.there
        run = torch.zeros(right.shape, dtype=torch.int64)
        for number, state in enumerate(model.states(answers, drafts)):
            wanted, there = answers.wanted(number)
            best = torch.full(there.shape, UNKNOWN)
            best[there] = model.target.vocabulary[model.logits(state[there]).argmax(-1)]
            right = right & there & (best == wanted)
            run += right
        for accepted, windows in zip(run.tolist(), answers.wanted(0)[1].tolist(), strict=True):
            place = 0
            while place < len(windows) and windows[place]:
                found[accepted[place]] += 1
                place += accepted[place] + 1
    return found


def accept_length(runs: Counter[int]) -> float:
    """Tokens that a window brings: the accepted drafts and one more."""
    return 1 + sum(run * times for run, times in runs.items()) / max(1, sum(runs.values()))
