"""The mtp drafter in torch, as it is trained: one decoder layer between the target's states and the target's head.

Owns its arithmetic and its tensors' names. At place i it takes the target's states there and the token behind it, and
says which token stands at i + 2; its own state takes the place of the target's when it goes on by itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.models.weights import WeightSource
from shm.config import ModelInfo
from tools.drafter_model import TOKEN_SHARE, Answers, Heads, Layer, RmsNorm, StateIn, TargetParts


@dataclass
class Keys:
    """Keys and values: [B, kv_heads, places, dim]."""

    k: Tensor
    v: Tensor


class Mtp(nn.Module):  # type: ignore[misc]
    """The drafter of one target. Its layer begins as the target's last."""

    def __init__(self, info: ModelInfo, weights: WeightSource, vocabulary: Tensor, taps: int, size: float) -> None:
        """vocabulary: i64[D], the target's ids that can be drafted. size: of the target's last state, usually."""
        super().__init__()
        self.info = info
        self.target = TargetParts(info, weights, vocabulary)
        self.heads = Heads(info)
        hidden = info.hidden_size
        self.token_norm = RmsNorm(torch.ones(hidden), info.rms_eps)
        self.state_norm = RmsNorm(torch.ones(hidden), info.rms_eps)
        self.token_in = nn.Linear(hidden, hidden, bias=False)
        self.state_in = nn.Linear(hidden, hidden, bias=False)
        self.target_in = StateIn(hidden, taps)
        with torch.no_grad():
            self.token_in.weight.copy_(TOKEN_SHARE * torch.eye(hidden))
            self.state_in.weight.copy_(torch.eye(hidden))
        self.layers = nn.ModuleList([Layer(info, weights, info.num_layers - 1, size)])
        self.norm = RmsNorm(self.target.norm, info.rms_eps)

    @property
    def layer(self) -> Layer:
        """Its only one."""
        only: Layer = self.layers[0]
        return only

    def logits(self, state: Tensor) -> Tensor:
        """f32[..., D] of the draft vocabulary."""
        return self.target.logits(self.norm(state))

    def tokens(self, tokens: Tensor) -> Tensor:
        """What tokens bring to the layer's input: f32[..., hidden]."""
        return self.token_in(self.token_norm(self.target.embed(tokens))).float()

    def keys(self, normed: Tensor, places: Tensor) -> Keys:
        """Of the layer's input behind its norm, [B, P, hidden] at places i64[P] or [B, P]."""
        return Keys(self.heads.rotate(self.layer.k(normed), places), self.heads.split(self.layer.v(normed)))

    def states(self, answers: Answers, drafts: int) -> list[Tensor]:
        """See `Drafting`. Pass 0 goes over all places, of which only keys are needed where no window begins."""
        token_parts = self.tokens(answers.tokens[:, 1:])
        x = token_parts + self.target_in(answers.states)
        normed = self.layer.input_norm(x)
        everywhere = torch.arange(x.shape[1])
        first = self.keys(normed, everywhere)
        seen = answers.places[:, None, :, None] >= everywhere
        state = self.own(answers.at(x), answers.at(normed), answers.places, first, seen, [])
        made, earlier, tokens = [state], [], answers.at(token_parts)
        for number in range(1, drafts):
            before = functional.pad(state, (0, 0, 1, 0))[:, :-1]  # of the place before
            x = tokens + self.state_in(self.state_norm(before)).float()
            normed = self.layer.input_norm(x)
            earlier.append(self.keys(normed, answers.places))
            seen = answers.places[:, None, :, None] - number >= everywhere
            state = self.own(x, normed, answers.places, first, seen, earlier)
            made.append(functional.pad(state, (0, 0, 0, number))[:, number:])  # of the window that begins here
        return made

    def own(self, x: Tensor, normed: Tensor, places: Tensor, first: Keys, seen: Tensor, later: list[Keys]) -> Tensor:
        """The layer over [B, A, hidden]: keys of the first pass as far as seen, of later ones the one on the way."""
        heads, depth = self.heads, len(later)
        q = heads.rotate(self.layer.q(normed), places)
        scores = [heads.scores(q, first.k, seen)]
        values = []
        for number, keys in enumerate(later, start=1):
            back = depth - number  # places: so far behind lies the pass that led here
            k, v = (_shift(part.repeat_interleave(heads.group, dim=1), back) for part in (keys.k, keys.v))
            there = torch.arange(q.shape[2]) >= depth
            score = (q * k).sum(-1) / heads.dim**0.5
            scores.append(score.masked_fill(~there, float("-inf"))[..., None])
            values.append(v)
        weights = torch.cat(scores, dim=-1).softmax(-1)
        if depth:
            weights = weights.nan_to_num()  # the first places of a later pass may see nothing
        mixed = heads.mix(weights[..., : first.k.shape[2]], first.v)
        for number, v in enumerate(values):
            mixed = mixed + weights[..., first.k.shape[2] + number, None] * v
        return self.layer.mlp(x + self.layer.o(mixed.transpose(1, 2).flatten(2)).float())


def _shift(x: Tensor, places: int) -> Tensor:
    """x[..., A, dim] moved back: place a holds what stood at a - places."""
    return x if not places else functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]
