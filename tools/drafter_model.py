"""What drafters have in common in training: layers of the target's shape, and the answers that they learn from.

Owns the parts that are the target's (embedding, head, rotation: frozen, the head with the rows of the draft vocabulary
alone) and the arithmetic of one layer. All drafters answer one question: `Drafting.states` gives, for every place of
the answers at which a window may begin, a state for each draft of that window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.models.rope import rope_tables
from gpu.models.weights import WeightSource
from shm.config import ModelInfo
from shm.tensor_map import EMBEDDING, FINAL_NORM, HEAD
from tools.drafter_data import Example

TOKEN_SHARE = 0.1  # of a token in a layer's input at the beginning, beside a state's 1


@dataclass(frozen=True)
class Answers:
    """Examples side by side. A window may begin at A places of each: at place a stands the target's state of token
    begins + a, and behind it the window's first token. Where an answer has fewer, `there` is False.
    """

    tokens: Tensor  # i64[B, T + 1], with padding behind
    states: Tensor  # f32[B, T, taps, hidden], of mean square 1
    places: Tensor  # i64[B, A]: token whose state a window goes on from, 0..T - 1
    there: Tensor  # bool[B, A]: both this token and the one behind it exist
    count: Tensor  # i64[B]: tokens of each example

    def at(self, x: Tensor) -> Tensor:
        """[B, A, ...] out of [B, T, ...]: what belongs to each place."""
        return x.gather(1, self.places.view(*self.places.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    def wanted(self, number: int) -> tuple[Tensor, Tensor]:
        """Draft `number`, from 0, of every window: the target's token i64[B, A], and whether there is one."""
        place = self.places + 2 + number
        there = self.there & (place < self.count[:, None])
        return self.tokens.gather(1, place.clamp(max=self.tokens.shape[1] - 1)), there


def side_by_side(examples: Sequence[Example]) -> Answers:
    """Pad examples to one length."""
    counts = [len(example.tokens) for example in examples]
    longest, hidden = max(counts), examples[0].states.shape[1:]
    answers = max(count - example.prompt for count, example in zip(counts, examples, strict=True))
    tokens = np.zeros((len(examples), longest), np.int64)
    states = np.zeros((len(examples), longest - 1, *hidden), np.float32)
    for i, example in enumerate(examples):
        tokens[i, : counts[i]] = example.tokens
        states[i, : counts[i] - 1] = example.states
    begins = torch.tensor([example.prompt - 1 for example in examples])
    count = torch.tensor(counts)
    places = begins[:, None] + torch.arange(answers)
    there = places + 1 < count[:, None]
    return Answers(torch.from_numpy(tokens), torch.from_numpy(states), places.clamp(max=longest - 2), there, count)


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.clone()), eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., size]."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):  # type: ignore[misc]
    """A decoder layer, which begins as one of the target's. What it adds is divided by `size`."""

    def __init__(self, info: ModelInfo, weights: WeightSource, number: int, size: float) -> None:
        super().__init__()
        base = f"model.layers.{number}."

        def tensor(name: str) -> Tensor:
            return torch.from_numpy(weights.tensor(base + name).copy())

        def linear(name: str, divisor: float = 1.0) -> nn.Linear:
            matrix = tensor(name + ".weight") / divisor
            made = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            made.weight = nn.Parameter(matrix)
            return made

        self.input_norm = RmsNorm(tensor("input_layernorm.weight"), info.rms_eps)
        self.q, self.k, self.v = (linear(f"self_attn.{name}_proj") for name in "qkv")
        self.o = linear("self_attn.o_proj", size)
        self.post_norm = RmsNorm(tensor("post_attention_layernorm.weight"), info.rms_eps)
        self.gate, self.up = (linear(f"mlp.{name}_proj") for name in ("gate", "up"))
        self.down = linear("mlp.down_proj", size)

    def mlp(self, x: Tensor) -> Tensor:
        """x and what the gated product adds to it."""
        normed = self.post_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed)).float()


class Heads(nn.Module):  # type: ignore[misc]
    """Rotation, and attention over pieces of keys."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        self.dim, self.group = info.head_dim, info.num_heads // info.num_kv_heads
        cosines, sines = rope_tables(info.head_dim, info.context_len, info.rope_theta, info.rope_scaling)
        self.register_buffer("cosines", torch.from_numpy(cosines), persistent=False)
        self.register_buffer("sines", torch.from_numpy(sines), persistent=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads * dim] as [B, heads, T, dim], in float32."""
        return x.float().unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """[B, T, heads * dim] at places i64[T] or [B, T], as [B, heads, T, dim]."""
        rows, half = self.split(x), self.dim // 2
        cosines, sines = (table[places].unsqueeze(-3) for table in (self.cosines, self.sines))
        a, b = rows[..., :half], rows[..., half:]
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """f32[B, heads, A, T] of q [B, heads, A, dim] and k [B, kv_heads, T, dim]; seen: bool, [B, 1, A, T]."""
        grouped = q.unflatten(1, (-1, self.group)).flatten(2, 3)  # [B, kv_heads, group * A, dim]
        made = (grouped @ k.transpose(-1, -2)).float() / math.sqrt(self.dim)
        return made.unflatten(2, (self.group, -1)).flatten(1, 2).masked_fill(~seen, float("-inf"))

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """[B, heads, A, dim] of weights [B, heads, A, T] and v [B, kv_heads, T, dim]."""
        grouped = weights.unflatten(1, (-1, self.group)).flatten(2, 3)
        return (grouped @ v).float().unflatten(2, (self.group, -1)).flatten(1, 2)


class TargetParts(nn.Module):  # type: ignore[misc]
    """What of the target a drafter uses as it is. vocabulary: i64[D], the target's ids that can be drafted."""

    def __init__(self, info: ModelInfo, weights: WeightSource, vocabulary: Tensor) -> None:
        super().__init__()
        embedding = torch.from_numpy(weights.tensor(EMBEDDING).copy())
        head = embedding if info.tie_word_embeddings else torch.from_numpy(weights.tensor(HEAD).copy())
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer("head", head[vocabulary], persistent=False)
        self.register_buffer("norm", torch.from_numpy(weights.tensor(FINAL_NORM).copy()), persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """f32[..., hidden]."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, normed: Tensor) -> Tensor:
        """f32[..., D] of states that went through the final norm."""
        return functional.linear(normed, self.head).float()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def teacher(self, states: Tensor) -> Tensor:
        """f32[..., D]: the target's own logits, out of states [..., taps, hidden] of mean square 1."""
        return self.logits(states[..., -1, :] * self.norm)


class Drafting(Protocol):
    """A drafter in training."""

    target: TargetParts

    def states(self, answers: Answers, drafts: int) -> list[Tensor]:
        """For each draft f32[B, A, hidden], or a wider one: what `logits` makes its logits of."""

    def logits(self, state: Tensor) -> Tensor:
        """f32[..., D]."""


class StateIn(nn.Module):  # type: ignore[misc]
    """The target's states of one place, joined: each through a norm of its own, all through one matrix."""

    def __init__(self, hidden: int, taps: int) -> None:
        super().__init__()
        self.norms = nn.Parameter(torch.ones(taps, hidden))
        self.matrix = nn.Linear(taps * hidden, hidden, bias=False)
        with torch.no_grad():  # it begins as the last of them
            self.matrix.weight.zero_()
            self.matrix.weight[:, -hidden:] = torch.eye(hidden)

    def forward(self, states: Tensor) -> Tensor:
        """f32[..., hidden] of [..., taps, hidden] whose mean squares are 1."""
        return self.matrix((states * self.norms).flatten(-2)).float()
