"""The configuration of a server, as every process gets it.

Owns the frozen dataclasses, their JSON form and the one place where every field is checked. It may never read the
environment, a file or a default from elsewhere: what is not in here was not configured.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Self

import orjson

from shm import limits

# What each device computes in; its default comes first.
DTYPES = {"host": ("int8", "bfloat16", "float32"), "cuda": ("bfloat16", "float32")}

DRAFTERS = ("ngram", "standalone", "mtp", "dflash", "clocked")


class ConfigError(ValueError):
    """An option that cannot be. `option` is the name of the field, `message` says what is wrong with its value."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
        self.message = message


class _Json:
    """JSON form of a dataclass: an object of its fields, unknown or missing ones being ConfigErrors."""

    def to_json(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, raw: bytes | str) -> Self:
        """Raises ConfigError, naming the field, for whatever does not make a valid object."""
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ConfigError(cls.__name__, f"not valid JSON: {error}") from error
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        if not isinstance(value, dict):
            raise ConfigError(cls.__name__, f"expected an object, got {type(value).__name__}")
        known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in value:
            if name not in known:
                raise ConfigError(str(name), "unknown option")
        for name, field in known.items():
            if name not in value and field.default is dataclasses.MISSING:
                raise ConfigError(name, "missing")
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class ModelInfo(_Json):
    """What the other parts need to know of a model without opening it."""

    name: str
    path: str
    format: Literal["gguf", "hf", "clocked"]
    vocab_size: int
    context_len: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_eps: float
    tie_word_embeddings: bool
    qk_norm: bool  # every head of queries and keys is normed before it is rotated
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        _check_types(self)
        for option in ("name", "path"):
            _require(bool(getattr(self, option)), option, "must not be empty")
        for option in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _check_range(self, option, 1, 2**31 - 1)
        _check_range(self, "intermediate_size", 1, 2**31 - 1)
        _check_range(self, "context_len", 2, limits.CONTEXT_LEN_MAX)
        _require(
            self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"must divide num_heads, which is {self.num_heads}"
        )
        _require(self.rope_theta > 0, "rope_theta", f"must be positive, got {self.rope_theta}")
        _require(self.rms_eps > 0, "rms_eps", f"must be positive, got {self.rms_eps}")
        for token in self.eos_token_ids:
            _require(0 <= token < self.vocab_size, "eos_token_ids", f"{token} is not in the vocabulary")
        if self.bos_token_id is not None:
            _require(
                0 <= self.bos_token_id < self.vocab_size,
                "bos_token_id",
                f"{self.bos_token_id} is not in the vocabulary",
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig(_Json):
    """Everything that was configured. Counts are of requests, tokens or pages as their names say."""

    model: ModelInfo
    served_model_name: str
    host: str
    port: int
    device: Literal["host", "cuda"] = "host"
    dtype: Literal["int8", "float32", "bfloat16"] = "int8"
    overlap: bool = True
    max_running: int = 64
    max_queued: int = 1024
    kv_tokens: int
    page_size: int = 16
    max_len: int  # tokens of one request, prompt and output
    prefill_chunk: int = 256
    api_key: str | None = None
    drain_seconds: float = 30.0
    log_seconds: float = 10.0  # between two lines about what the server does; 0: none
    speculate: str = "off"  # or what drafts, one of DRAFTERS
    drafter: ModelInfo | None = None  # the model that drafts, where one does
    drafter_file: str | None = None  # the trained drafter's, where one drafts
    window: int = 1  # tokens of a decode row in one step: its newest one, and the drafts behind it
    draft_when: Literal["auto", "always"] = "auto"  # auto: while it is measured to pay
    ngram_shared: bool = False  # drafts may come from what other requests have read and written
    standby: bool = True  # for every stage a process waits that has been started already
    threads: int  # of the host device, for computing
    poison: bool = False  # debugging: relay entries with nothing to read are marked, and reading one is an error
    check_order: bool = False  # debugging: every access on the device is checked for the order that it needs

    def __post_init__(self) -> None:
        _check_types(self)
        for option in ("served_model_name", "host"):
            _require(bool(getattr(self, option)), option, "must not be empty")
        _require(self.api_key != "", "api_key", "must not be empty")
        dtypes = DTYPES[self.device]
        _require(
            self.dtype in dtypes,
            "dtype",
            f"must be one of {', '.join(dtypes)} on the device {self.device}, got {self.dtype!r}",
        )
        _check_range(self, "port", 0, 65535)
        _check_range(self, "max_running", 1, limits.MAX_RUNNING_MAX)
        _check_range(self, "max_queued", 0, limits.MAX_QUEUED_MAX)
        _check_range(self, "page_size", 1, limits.PAGE_SIZE_MAX)
        _check_range(self, "prefill_chunk", 1, limits.PREFILL_CHUNK_MAX)
        _check_range(self, "window", 1, limits.WINDOW_MAX)
        known = ", ".join(("off", *DRAFTERS))
        _require(self.speculate in ("off", *DRAFTERS), "speculate", f"must be one of {known}, got {self.speculate!r}")
        _require(self.window > 1 or self.speculate == "off", "window", "of 1 leaves nothing to draft")
        _require(self.speculate == "ngram" or not self.ngram_shared, "ngram_shared", "needs --speculate ngram")
        _require(
            (self.speculate == "standalone") == (self.drafter is not None), "drafter", "is for a model that drafts"
        )
        is_clocked = self.model.format == "clocked"
        _require(self.device == "host" or not is_clocked, "device", "must be host for a clocked model")
        drafts_for_it = self.speculate in ("off", "ngram", "clocked")
        fits = drafts_for_it if is_clocked else self.speculate != "clocked"
        _require(fits, "speculate", f"{self.speculate} cannot draft for {self.model.name}")
        is_trained = self.speculate in ("mtp", "dflash")
        _require(is_trained == (self.drafter_file is not None), "drafter_file", "is for a trained drafter")
        if self.drafter is not None:
            drafted, wanted = self.drafter.vocab_size, self.model.vocab_size
            _require(
                drafted == wanted,
                "speculate",
                f"{self.drafter.name} knows {drafted} tokens and {self.model.name} {wanted}: it cannot draft for it",
            )
            _check_range(self, "max_len", 2, self.drafter.context_len, f"the context length of {self.drafter.name}")
        _check_range(self, "threads", 1, limits.THREADS_MAX)
        _check_range(self, "drain_seconds", 0, limits.DRAIN_SECONDS_MAX)
        _check_range(self, "log_seconds", 0, limits.LOG_SECONDS_MAX)
        _check_range(self, "max_len", 2, self.model.context_len, f"the context length of {self.model.name}")
        _check_range(self, "kv_tokens", 1, limits.KV_TOKENS_MAX)
        # A lone request must always fit: retraction ends with one, and it may never wait for ever.
        _require(
            self.pages_per_row <= self.kv_tokens // self.page_size,
            "kv_tokens",
            f"{self.kv_tokens} tokens in pages of {self.page_size} cannot hold one request of max_len {self.max_len} "
            f"and twice the window of {self.window}; at least {self.pages_per_row * self.page_size} are needed",
        )

    @property
    def drafts(self) -> int:
        """Tokens that are drafted behind the newest one of a row, at most."""
        return self.window - 1

    @property
    def rows(self) -> int:
        """Rows of the ledger: every request that runs or waits."""
        return self.max_running + self.max_queued

    @property
    def entries(self) -> int:
        """Entries of the device's tables; entry 0 belongs to padding."""
        return self.max_running + 1

    @property
    def pass_tokens(self) -> int:
        """Most tokens of one pass: every running row decodes a window, and the prefill chunks are full."""
        return self.max_running * self.window + self.prefill_chunk

    @property
    def pages(self) -> int:
        """Pages of the KV pool; page 0 belongs to padding."""
        return self.kv_tokens // self.page_size + 1

    @property
    def pages_per_row(self) -> int:
        """Pages that the longest request can need, the windows reserved ahead included."""
        return -(-(self.max_len + 2 * self.window) // self.page_size)


def _require(condition: bool, option: str, message: str) -> None:
    if not condition:
        raise ConfigError(option, message)


def _check_range(config: Any, option: str, low: float, high: float, high_is: str = "") -> None:
    value = getattr(config, option)
    if not low <= value <= high:
        raise ConfigError(option, f"must be {low} to {high}{f' ({high_is})' if high_is else ''}, got {value}")


def _check_types(config: Any) -> None:
    """Check every field against its annotation; JSON's lists, objects and whole floats become what is declared."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = _convert(field.name, getattr(config, field.name), hints[field.name])
        object.__setattr__(config, field.name, value)


def _convert(option: str, value: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        present = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return None if value is None else _convert(option, value, present[0])
    if origin is Literal:
        allowed = typing.get_args(hint)
        _require(value in allowed, option, f"must be one of {', '.join(allowed)}, got {value!r}")
        return value
    if origin is tuple:
        _require(isinstance(value, list | tuple), option, f"must be a list, got {value!r}")
        return tuple(_convert(option, item, typing.get_args(hint)[0]) for item in value)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return typing.cast(Any, hint).from_dict(value)
        _require(isinstance(value, typing.cast(type, hint)), option, f"must be an object, got {value!r}")
        return value
    expected = origin or hint
    if expected is float and type(value) is int:
        value = float(value)
    _require(type(value) is expected, option, f"must be {expected.__name__}, got {value!r}")
    if expected is float:
        _require(math.isfinite(value), option, f"must be finite, got {value}")
    return value
