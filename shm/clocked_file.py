"""Folders of clocked models: a model that computes next to nothing and whose passes take the time that its file says.

Owns the format: config.json with `model_type` "clocked" and the fields of `ClockedFile`, beside a tokenizer. The gpu
process reads the times from it, everybody else what is needed of any model. A folder may have a clock beside it, a file
of one int64 that is mapped: while it is above 0, a pass takes so many nanoseconds whatever its rows. Who measures
writes it, the gpu process reads it before each pass, so that one server can be asked for many times. What such a model
answers is in `tools.clocked_model` (plain) and in `gpu.models.clocked` (native); nothing of that is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shm.config import ModelInfo
from shm.safetensors_file import read_json
from shm.tensor_map import ModelError

MODEL_TYPE = "clocked"
CLOCK_FILE = "pass_ns"
VOCAB = 256  # a token is a byte
PASS_US_MAX = 60e6
_STATE_BYTES = 8  # what the cache holds of a token; ModelInfo says it in the terms of a Llama

Times = Mapping[int, float]  # rows of a pass -> microseconds, ascending


@dataclass(frozen=True)
class ClockedFile:
    """What one folder says. Times lie on straight lines between the rows that are given, and beyond them.

    accept: probability that a draft is right if those before it were. seed: of the answers and of the drafts.
    """

    pass_us: Times
    draft_us: Times = field(default_factory=dict)  # one pass of the drafter; {}: it takes no time
    extend_us: Times = field(default_factory=dict)  # the drafter's pass behind the model's
    prompt_token_us: float = 0.0  # of a pass, for each token of a prompt in it
    accept: float = 0.0
    seed: int = 0
    context_len: int = 65536

    @classmethod
    def read(cls, folder: Path) -> ClockedFile:
        """Raises ModelError, with the key, for whatever is no such folder."""
        path = folder / "config.json"
        config = read_json(path)
        if not is_clocked(config):
            raise ModelError(f"{path}: model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}")
        values: dict[str, Any] = {key: value for key, value in config.items() if key != "model_type"}
        if unknown := set(values) - {one.name for one in fields(cls)}:
            raise ModelError(f"{path}: {min(unknown)} is no key of a clocked model")
        for key in ("pass_us", "draft_us", "extend_us"):
            if key in values:
                values[key] = _times(path, key, values[key])
        if not values.get("pass_us"):
            raise ModelError(f"{path}: it has no pass_us")
        for key, most in (("prompt_token_us", PASS_US_MAX), ("accept", 1.0)):
            if not _within(values.get(key, 0.0), 0.0, most):
                raise ModelError(f"{path}: {key} is {values[key]!r}, not a number from 0 to {most:g}")
        for key, most in (("seed", 2**63 - 1), ("context_len", 2**24)):
            value = values.get(key, 2)
            if type(value) is not int or not 0 <= value <= most:
                raise ModelError(f"{path}: {key} is {value!r}, not an integer from 0 to {most}")
        return cls(**values)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for key in ("pass_us", "draft_us", "extend_us"):
            values[key] = {str(rows): us for rows, us in values[key].items()}
        return {"model_type": MODEL_TYPE, **values}

    def info(self, folder: Path, name: str) -> ModelInfo:
        """The model in the terms of a Llama: its cache takes eight bytes for a token, and no token ends an answer."""
        return ModelInfo(
            name=name,
            path=str(folder),
            format="clocked",
            vocab_size=VOCAB,
            context_len=self.context_len,
            hidden_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=_STATE_BYTES // 4,  # keys and values of two bytes each
            intermediate_size=1,
            rope_theta=1.0,
            rope_scaling=None,
            rms_eps=1e-5,
            tie_word_embeddings=True,
            qk_norm=False,
            eos_token_ids=(),
            bos_token_id=None,
        )


def open_clock(folder: Path, mode: Literal["r", "w+"] = "r") -> NDArray[np.int64] | None:
    """i64[1], mapped, of the folder's clock; None if it has none. w+ makes it, with 0 in it."""
    path = folder / CLOCK_FILE
    if mode == "r" and (not path.is_file() or path.stat().st_size != 8):
        return None
    return np.memmap(path, np.int64, mode, shape=(1,))


def is_clocked(config: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a clocked model."""
    return config.get("model_type") == MODEL_TYPE


def times_ns(times: Times, rows_max: int) -> NDArray[np.int64]:
    """i64[rows_max + 1]: nanoseconds of a pass over so many rows; all 0 where no time is given."""
    rows = np.arange(rows_max + 1, dtype=np.float64)
    if not times:
        return np.zeros(rows_max + 1, np.int64)
    known, us = np.array(list(times), np.float64), np.array(list(times.values()), np.float64)
    line = np.interp(rows, known, us)
    if len(known) > 1:
        slope = (us[-1] - us[-2]) / (known[-1] - known[-2])
        line = np.where(rows > known[-1], us[-1] + slope * (rows - known[-1]), line)
    made: NDArray[np.int64] = np.maximum(np.rint(line * 1000), 0).astype(np.int64)
    return made


def _times(path: Path, key: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(str(rows).isdecimal() for rows in value):
        raise ModelError(f"{path}: {key} is no object from rows to microseconds")
    found = {int(rows): us for rows, us in value.items()}
    if not all(rows >= 1 and _within(us, 0.0, PASS_US_MAX) for rows, us in found.items()):
        raise ModelError(f"{path}: {key} has rows below 1, or a time that is not 0 to {PASS_US_MAX:g} us")
    return {rows: float(found[rows]) for rows in sorted(found)}


def _within(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and least <= value <= most
