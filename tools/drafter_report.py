"""What training leaves behind: the drafter's file, and pictures and figures of how it came about.

Owns the rounding to int8, by the rule by which the server packs weights: so that serving in int8 rounds nothing again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 [rows, k] with a scale f32[rows] each; what has one dimension, and norms, as it is."""
    made: dict[str, Tensor] = {}
    for name, value in weights.items():
        if value.dim() != 2 or "norm" in name:
            made[name] = value.float().contiguous()
            continue
        scales = value.float().abs().amax(dim=1) / 127
        made[name] = (value.float() / scales.clamp(min=1e-30)[:, None]).round().clamp(-127, 127).to(torch.int8)
        made[name.removesuffix(".weight") + ".scale"] = scales
    return made


def as_rounded(model: nn.Module) -> None:
    """Give a model the weights that its file has."""
    whole = rounded(model.state_dict())
    scales = {name: value for name, value in whole.items() if name.endswith(".scale")}
    for name, value in scales.items():
        matrix = name.removesuffix(".scale") + ".weight"
        whole[matrix] = whole[matrix].float() * value[:, None]
        del whole[name]
    model.load_state_dict(whole)


def write_drafter(
    model: nn.Module, vocabulary: Tensor, taps: Sequence[int], mask: int | None, tokens: bytes, file: Path
) -> None:
    """Write the file that `shm.drafter_file` describes. tokens: the digest of the target's, 32 bytes."""
    weights = rounded(model.state_dict())
    weights["vocabulary"] = vocabulary.to(torch.int32)
    weights["tokens"] = torch.frombuffer(bytearray(tokens), dtype=torch.int32)
    weights["taps"] = torch.tensor(taps, dtype=torch.int32)
    if mask is not None:
        weights["mask"] = torch.tensor([mask], dtype=torch.int32)
    save_file(weights, file)


def read_metadata(file: Path) -> dict[str, str]:
    """The strings in the header of a safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        metadata: dict[str, str] = json.loads(opened.read(size)).get("__metadata__", {})
    return metadata


def picture(losses: Sequence[float], width: int = 640, height: int = 320) -> str:
    """The loss, step by step, as a mean over a hundredth of the steps each."""
    size = max(1, len(losses) // 100)
    means = [sum(losses[i : i + size]) / len(losses[i : i + size]) for i in range(0, len(losses), size)]
    top = max(means, default=1.0) * 1.05
    points = " ".join(
        f"{50 + i * (width - 70) / max(1, len(means) - 1):.1f},{height - 40 - mean / top * (height - 60):.1f}"
        for i, mean in enumerate(means)
    )
    ticks = "".join(
        f'<text x="44" y="{height - 36 - share * (height - 60):.0f}" text-anchor="end">{share * top:.2f}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return (
        f'{head} font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        f'<polyline points="{points}" fill="none" stroke="#1f6feb"/>'
        f'{ticks}<text x="{width // 2}" y="{height - 10}" text-anchor="middle">loss, {len(losses)} steps</text></svg>\n'
    )
