"""The dflash drafter in torch, as it is trained: one pass over a block of unknown tokens fills the whole window.

Owns its arithmetic and its tensors' names. Places that count are known by the target's states: joined, they give each
layer the keys and values of a place, without a pass over it. A block is the newest token, whose state nobody knows yet,
and a mask for each draft; its places see all that counts before it and, both ways, each other. Each of them begins with
the joined states of the place before the block as well, which say more of what comes than all other places together.
"""

import torch
from torch import Tensor, nn

from gpu.models.weights import WeightSource
from shm.config import ModelInfo
from tools.drafter_model import TOKEN_SHARE, Answers, Heads, Layer, RmsNorm, StateIn, TargetParts


class Dflash(nn.Module):  # type: ignore[misc]
    """The drafter of one target. Its layers begin as the target's last ones."""

    def __init__(
        self,
        info: ModelInfo,
        weights: WeightSource,
        vocabulary: Tensor,
        taps: int,
        size: float,
        layers: int,
        mask: int,
    ) -> None:
        """vocabulary: i64[D], the target's ids that can be drafted. size: of the target's last state, usually. mask:
        the id that stands for the first unknown token; the ids behind it stand for the next ones.
        """
        super().__init__()
        self.info, self.mask = info, mask
        self.target = TargetParts(info, weights, vocabulary)
        self.heads = Heads(info)
        hidden = info.hidden_size
        self.token_norm = RmsNorm(torch.ones(hidden), info.rms_eps)
        self.token_in = nn.Linear(hidden, hidden, bias=False)
        self.state_norm = RmsNorm(torch.ones(hidden), info.rms_eps)
        self.state_in = nn.Linear(hidden, hidden, bias=False)
        self.target_in = StateIn(hidden, taps)
        with torch.no_grad():
            self.token_in.weight.copy_(TOKEN_SHARE * torch.eye(hidden))
            self.state_in.weight.copy_(torch.eye(hidden))
        first = info.num_layers - layers
        self.layers = nn.ModuleList(Layer(info, weights, first + number, size) for number in range(layers))
        self.norm = RmsNorm(self.target.norm, info.rms_eps)

    def logits(self, state: Tensor) -> Tensor:
        """f32[..., D] of the draft vocabulary."""
        return self.target.logits(self.norm(state))

    def states(self, answers: Answers, drafts: int) -> list[Tensor]:
        """See `Drafting`: one block for each place at which a window may begin."""
        batch, windows = answers.places.shape
        known = self.target_in(answers.states)
        everywhere = torch.arange(known.shape[1])
        newest = answers.tokens.gather(1, answers.places + 1)
        blocks = (self.mask - 1 + torch.arange(1 + drafts)).repeat(batch, windows, 1)
        blocks[:, :, 0] = newest
        x = self.token_in(self.token_norm(self.target.embed(blocks))).float()  # [B, A, W, hidden]
        before = known.gather(1, answers.places[..., None].expand(-1, -1, known.shape[2]))
        x = x + self.state_in(self.state_norm(before)).float()[:, :, None]
        x = x.flatten(1, 2)
        places = (answers.places[..., None] + 1 + torch.arange(1 + drafts)).flatten(1)
        seen = everywhere <= answers.places.repeat_interleave(1 + drafts, dim=1)[:, None, :, None]
        for layer in self.layers:
            x = self._layer(layer, x, known, places, seen, 1 + drafts)
        made = x.unflatten(1, (windows, 1 + drafts))
        return [made[:, :, 1 + number] for number in range(drafts)]

    def _layer(self, layer: Layer, x: Tensor, known: Tensor, places: Tensor, seen: Tensor, window: int) -> Tensor:
        """x f32[B, A * W, hidden] at places i64[B, A * W]; known f32[B, T, hidden]."""
        heads = self.heads
        normed, told = layer.input_norm(x), layer.input_norm(known)
        q, k = (heads.rotate(part(normed), places) for part in (layer.q, layer.k))
        k, v = (p.repeat_interleave(heads.group, dim=1) for p in (k, heads.split(layer.v(normed))))
        q_block, k, v = (part.unflatten(2, (-1, window)) for part in (q, k, v))  # [B, heads, A, W, dim]
        earlier = heads.scores(q, heads.rotate(layer.k(told), torch.arange(known.shape[1])), seen)
        within = (q_block @ k.transpose(-1, -2)).float().flatten(2, 3) / heads.dim**0.5
        weights = torch.cat((earlier, within), dim=-1).softmax(-1)
        mixed = heads.mix(weights[..., : known.shape[1]], heads.split(layer.v(told)))
        own = weights[..., known.shape[1] :].unflatten(2, (-1, window)) @ v
        mixed = mixed + own.float().flatten(2, 3)
        return layer.mlp(x + layer.o(mixed.transpose(1, 2).flatten(2)).float())
