"""Clocked models: their presets, the folder that `stepahead serve` takes, and what they answer, as plain functions.

Owns the step times that stand for real models on real GPUs, each with its source, and the plain form of the answers: a
word for each token, made of the word before it, the token and its position, and a next token that is made of the word.
`gpu.models.clocked` computes the same in native code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from shm.clocked_file import VOCAB, ClockedFile, Times

MASK = 2**64 - 1
MIX_1, MIX_2, STEP = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
FIRST_TOKEN, TOKENS = 32, 95
# Of a pass, for each token of a prompt in it. The article does not say; a guess that makes a prompt of 200 tokens
# take as long as a step of the smaller model.
PROMPT_TOKEN_US = 17.0


@dataclass(frozen=True)
class Preset:
    """A model of the article. A step of `drafts` drafts has that many passes of the drafter less one, the model's, and
    the one behind it.
    """

    title: str
    file: ClockedFile
    drafts: int = 0

    def step_us(self, rows: int) -> float:
        """Time of all passes of a decode step."""
        parts = [between(self.file.pass_us, rows)]
        if self.drafts:
            parts += [max(0, self.drafts - 1) * between(self.file.draft_us, rows), between(self.file.extend_us, rows)]
        return sum(parts)


def between(times: Times, rows: int) -> float:
    """Microseconds of a pass over `rows` rows, on the straight lines that `shm.clocked_file` describes."""
    known = sorted(times.items())
    if not known:
        return 0.0
    if rows <= known[0][0] or len(known) == 1:
        return known[0][1]
    later = next((i for i, (at, _) in enumerate(known) if at >= rows), len(known) - 1)
    (low, low_us), (high, high_us) = known[later - 1], known[later]
    return low_us + (high_us - low_us) * (rows - low) / (high - low)


# Steps at 1 request are the article's (its sections 1, 2 and 3), and so is that of GLM-5.3 at 64. The others follow
# from its throughput: 6,949 tokens/s at 32 are a token for each request every 4.6 ms, prompts included, and 4,437 at
# 64, of 2.8 tokens a step, a step every 40 ms. Beyond the last one the line goes on.
PRESETS = {
    "qwen3-8b": Preset("Qwen3-8B", ClockedFile({1: 3400.0, 32: 4400.0}, prompt_token_us=PROMPT_TOKEN_US)),
    "glm-5.3": Preset("GLM-5.3", ClockedFile({1: 6100.0, 64: 21000.0}, prompt_token_us=PROMPT_TOKEN_US)),
    # 8.2 ms a step, 7.4 ms of it in the verify pass; 2.8 tokens = 1 + p + p^2 + p^3.
    "glm-5.3-mtp": Preset(
        "GLM-5.3 with MTP",
        ClockedFile(
            {1: 7400.0, 64: 36000.0},
            draft_us={1: 250.0, 64: 900.0},
            extend_us={1: 300.0, 64: 1200.0},
            prompt_token_us=PROMPT_TOKEN_US,
            accept=0.766,
        ),
        drafts=3,
    ),
}


def constant(step_us: float) -> ClockedFile:
    """A model whose steps take so long whatever their rows and prompts."""
    return ClockedFile({1: step_us})


def write(folder: Path, file: ClockedFile) -> Path:
    """Write the folder, made if it is missing; an absolute path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(orjson.dumps(file.config(), option=orjson.OPT_INDENT_2))
    (folder / "tokenizer.json").write_bytes(orjson.dumps(byte_tokenizer()))
    return folder.absolute()


def byte_tokenizer(more: Sequence[str] = ()) -> dict[str, object]:
    """The content of a tokenizer.json in which each byte is a token, and behind these each of `more`."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokens = [*byte_alphabet(), *more]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def byte_alphabet() -> list[str]:
    """The characters of byte-level BPE for the bytes 0..255: printable ones stand for themselves."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in kept else next(spare)) for byte in range(VOCAB)]


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * MIX_1 & MASK
    z = (z ^ z >> 27) * MIX_2 & MASK
    return z ^ z >> 31


def next_word(before: int, token: int, position: int) -> int:
    """The word of a token behind the word before it."""
    return _mix(before + token * STEP + position + 1 & MASK)


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The `count` tokens that a clocked model of that seed answers to `prompt`."""
    word, made = seed, []
    for position, token in enumerate(prompt):
        word = next_word(word, token, position)
    for position in range(len(prompt), len(prompt) + count):
        made.append(FIRST_TOKEN + (word >> 20) % TOKENS)
        word = next_word(word, made[-1], position)
    return made


def answers(prompts: Sequence[Sequence[int]], count: int, seed: int = 0) -> list[list[int]]:
    """As `answer`, for prompts of one length all at once."""
    tokens = np.array(prompts, np.uint64).T
    words, made = np.full(tokens.shape[1], seed, np.uint64), np.empty((count, tokens.shape[1]), np.uint64)
    for position in range(len(tokens) + count - 1):
        behind = position - len(tokens)
        token = tokens[position] if behind < 0 else made[behind]
        z = words + token * np.uint64(STEP) + np.uint64(position + 1)
        z = (z ^ z >> np.uint64(30)) * np.uint64(MIX_1)
        z = (z ^ z >> np.uint64(27)) * np.uint64(MIX_2)
        words = z ^ z >> np.uint64(31)
        if behind >= -1:
            made[behind + 1] = np.uint64(FIRST_TOKEN) + (words >> np.uint64(20)) % np.uint64(TOKENS)
    found: list[list[int]] = made.T.tolist()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Write a folder: `python -m tools.clocked_model qwen3-8b FOLDER`."""
    parser = argparse.ArgumentParser("clocked_model", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    print(write(options.folder, PRESETS[options.preset].file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
