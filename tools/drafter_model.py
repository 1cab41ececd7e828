"""The mtp drafter in torch, as it is trained: one decoder layer between the target's state and the target's head.

Owns its arithmetic and its tensors' names. At place i it takes the target's state there and the token behind it, and
says which token stands at i + 2; its own state takes the target's place when it goes on by itself. Embedding and head
are the target's, frozen, the head with the rows of the draft vocabulary alone.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.models.rope import rope_tables
from gpu.models.weights import WeightSource
from shm.config import ModelInfo
from shm.tensor_map import EMBEDDING, FINAL_NORM, HEAD


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / rms(x) * weight over the last axis."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., size]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@dataclass
class Keys:
    """Keys and values of one pass over all places: [B, heads, T, dim]."""

    k: Tensor
    v: Tensor


class Mtp(nn.Module):  # type: ignore[misc]
    """The drafter of one target. Parameters begin as the target's last layer, and a sum of its two inputs."""

    def __init__(self, info: ModelInfo, weights: WeightSource, vocabulary: Tensor) -> None:
        """vocabulary: i64[D], the target's ids that can be drafted."""
        super().__init__()
        self.info = info
        base = f"model.layers.{info.num_layers - 1}."

        def tensor(name: str) -> Tensor:
            return torch.from_numpy(weights.tensor(name).copy())

        def linear(name: str) -> nn.Linear:
            matrix = tensor(base + name + ".weight")
            made = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            made.weight = nn.Parameter(matrix)
            return made

        hidden = info.hidden_size
        self.token_norm = RmsNorm(torch.ones(hidden), info.rms_eps)
        self.state_norm = RmsNorm(torch.ones(hidden), info.rms_eps)
        self.token_in = nn.Linear(hidden, hidden, bias=False)
        self.state_in = nn.Linear(hidden, hidden, bias=False)
        with torch.no_grad():
            self.token_in.weight.copy_(torch.eye(hidden))
            self.state_in.weight.copy_(torch.eye(hidden))
        self.input_norm = RmsNorm(tensor(base + "input_layernorm.weight"), info.rms_eps)
        self.q, self.k, self.v, self.o = (linear(f"self_attn.{name}_proj") for name in "qkvo")
        self.post_norm = RmsNorm(tensor(base + "post_attention_layernorm.weight"), info.rms_eps)
        self.gate, self.up, self.down = (linear(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        self.norm = RmsNorm(tensor(FINAL_NORM), info.rms_eps)
        self.register_buffer("embedding", tensor(EMBEDDING), persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        head = tensor(EMBEDDING if info.tie_word_embeddings else HEAD)
        self.register_buffer("head", head[vocabulary], persistent=False)
        cosines, sines = rope_tables(info.head_dim, info.context_len, info.rope_theta, info.rope_scaling)
        self.register_buffer("cosines", torch.from_numpy(cosines), persistent=False)
        self.register_buffer("sines", torch.from_numpy(sines), persistent=False)

    def forward(self, tokens: Tensor, state: Tensor, earlier: list[Keys]) -> tuple[Tensor, Keys]:
        """One pass over places 0..T-1. Returns its state f32[B, T, hidden], and its keys.

        tokens i64[B, T]: those behind each place. state f32[B, T, hidden]: the target's at each place, or what the
        pass before has made of it. earlier: the keys of the passes before. In pass n a place sees the first pass up to
        n places before itself, and of every later pass the one place that leads to it: so it is when drafts follow on
        each other.
        """
        x = self.token_in(self.token_norm(functional.embedding(tokens, self.embedding)))
        x = x + self.state_in(self.state_norm(state))
        normed = self.input_norm(x)
        q, keys = self._heads(self.q(normed)), Keys(self._heads(self.k(normed)), self._values(self.v(normed)))
        x = x + self.o(self._attend(q, [*earlier, keys]))
        normed = self.post_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed)), keys

    def logits(self, state: Tensor) -> Tensor:
        """f32[..., D] of the draft vocabulary."""
        return functional.linear(self.norm(state), self.head)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * dim] rotated, as [B, heads, T, dim]."""
        rows = self._values(x)
        half = self.info.head_dim // 2
        cosines, sines = self.cosines[: x.shape[1]], self.sines[: x.shape[1]]
        a, b = rows[..., :half], rows[..., half:]
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)

    def _values(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.info.head_dim)).transpose(1, 2)

    def _attend(self, q: Tensor, passes: list[Keys]) -> Tensor:
        """[B, T, heads * dim]: see `forward`."""
        group, depth = self.info.num_heads // self.info.num_kv_heads, len(passes) - 1
        scale, places = 1 / math.sqrt(self.info.head_dim), torch.arange(q.shape[2])
        k, v = (part.repeat_interleave(group, dim=1) for part in (passes[0].k, passes[0].v))
        seen = places[:, None] - depth >= places[None, :]
        scores = [(q @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))]
        values = [v]
        for number, keys in enumerate(passes[1:], start=1):
            back = depth - number  # the place of pass `number` that leads here
            k, v = (_shift(part.repeat_interleave(group, dim=1), back) for part in (keys.k, keys.v))
            there = (places >= back)[None, None, :]
            scores.append((q * k).sum(-1).mul(scale).masked_fill(~there, float("-inf"))[..., None])
            values.append(v)
        weights = torch.cat(scores, dim=-1).softmax(-1).nan_to_num()  # the first places of a later pass see nothing
        mixed = weights[..., : q.shape[2]] @ values[0]
        for number, v in enumerate(values[1:]):
            mixed = mixed + weights[..., q.shape[2] + number, None] * v
        return mixed.transpose(1, 2).flatten(2)


def _shift(x: Tensor, places: int) -> Tensor:
    """x[..., T, dim] moved back: place t holds what stood at t - places."""
    return x if not places else functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


def unroll(model: Mtp, tokens: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
    """States of `depth` drafts that follow on each other, f32[B, T, hidden] each, T = tokens - 1.

    tokens i64[B, T + 1]; hidden f32[B, T, hidden], the target's. In pass n, place i stands for the draft of the token
    at i + 2, made from the target's state at i - n and the tokens behind it: as right as those drafts were.
    """
    states: list[Tensor] = []
    earlier: list[Keys] = []
    state = hidden
    for number in range(depth):
        if number:
            state = functional.pad(states[-1], (0, 0, 1, 0))[:, :-1]  # of the place before
        made, keys = model(tokens[:, 1:], state, earlier)
        states.append(made)
        earlier.append(keys)
    return states
