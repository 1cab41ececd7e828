"""From the options of the command line to a ServerConfig: finds the model, works out what was not given.

Owns the defaults that depend on model, device and machine. Every fault of a value ends up as a CliError, one line that
names the option. It starts nothing and keeps nothing open.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from procs.drafter_files import TRAINED, WITHOUT_MODEL, find_drafter
from procs.model_download import Progress
from procs.model_files import PACKAGED_MODELS, read_model_info, resolve_model
from procs.model_memory import kv_bytes_per_token, memory_available, memory_needed, require_memory
from procs.tokenizer_files import load_tokenizer
from shm.config import DTYPES, ConfigError, ModelInfo, ServerConfig
from shm.drafter_file import DrafterFile
from shm.limits import WINDOW_MAX
from shm.tensor_map import ModelError

HOST_PAGE_MULTIPLE = 16  # keys that the host device's attention works on at once
STANDALONE = "standalone"  # what a model that drafts is called in the configuration
CUDA_DRIVER = "libcuda.so.1"
KV_TOKENS_DEFAULT = 65536
KV_TOKENS_LEAST = 2048  # below this a default is of no use: too little memory is told instead
KV_MEMORY_SHARE = 0.5  # of what weights and processes leave free


class CliError(Exception):
    """One line for the user; the program ends with a status other than 0."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options as given; None = to be worked out."""

    model: str
    host: str
    port: int
    device: str
    dtype: str | None
    overlap: bool
    standby: bool = True
    max_running: int
    max_queued: int
    kv_tokens: int | None
    page_size: int
    max_len: int | None
    prefill_chunk: int
    drain_seconds: float
    api_key: str | None = None
    served_model_name: str | None = None
    threads: int | None = None
    speculate: str = "off"
    draft_tokens: int = 3
    draft_when: str = "auto"
    ngram_shared: bool = False
    log_seconds: float = 10.0
    poison: bool = False
    check_order: bool = False


def make_config(wanted: Wanted, progress: Progress) -> ServerConfig:
    """Find the model (downloading it, told to `progress`) and fill in what was not given.

    Raises CliError for an option that cannot be, ModelError for a model that cannot be served or does not fit.
    """
    _require_usable_key(wanted.api_key)
    _require_drafts(wanted.draft_tokens)
    if wanted.device == "cuda":
        _require_driver()
    path = resolve_model(wanted.model, progress)
    is_path = wanted.model not in PACKAGED_MODELS and Path(wanted.model).expanduser().exists()
    info = read_model_info(path, None if is_path else wanted.model)
    name = info.name if wanted.served_model_name is None else wanted.served_model_name
    trained = find_drafter(wanted.speculate, info, path)
    drafter = None if trained else _read_drafter(wanted.speculate, path, progress)
    try:
        config = _sized(wanted, info, name, drafter, trained)
    except ConfigError as error:
        raise CliError(f"{flag(error.option)}: {error.message}") from None
    if config.device == "host" and config.page_size % HOST_PAGE_MULTIPLE:
        raise CliError(
            f"--page-size: {config.page_size} is not a multiple of {HOST_PAGE_MULTIPLE}, which the host device needs"
        )
    require_memory(config)
    return config


def _require_usable_key(key: str | None) -> None:
    """A key that a header cannot carry as it is would lock everybody out. Raises CliError."""
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise CliError("--api-key: it may hold printable ASCII characters only, and no blank at either end")


def _read_drafter(speculate: str, target: Path, progress: Progress) -> ModelInfo | None:
    """The model that shall draft for the one at `target`, if a model shall. Raises CliError for other tokens."""
    if speculate in WITHOUT_MODEL:
        return None
    try:
        path = resolve_model(speculate, progress)
    except ModelError as error:
        raise CliError(
            f"--speculate: {speculate[:80]} is none of {', '.join((*WITHOUT_MODEL, *TRAINED))}, no folder of a "
            f"trained drafter, and no model ({error})"
        ) from None
    info = read_model_info(path)
    if load_tokenizer(path).get_vocab() != load_tokenizer(target).get_vocab():
        raise CliError(f"--speculate: {speculate} has other tokens than the model that it shall draft for")
    return info


def _require_drafts(draft_tokens: int) -> None:
    if not 1 <= draft_tokens < WINDOW_MAX:
        raise CliError(f"--draft-tokens: must be 1 to {WINDOW_MAX - 1}, got {draft_tokens}")


def _require_driver() -> None:
    """What the GPU itself lacks is told by the process that opens it; without its driver nobody needs to get so far."""
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        raise CliError(f"--device: cuda needs an NVIDIA GPU with its driver, and there is no {CUDA_DRIVER}") from None


def flag(option: str) -> str:
    """Return how the user calls a field of the configuration."""
    return "--" + option.replace("_", "-")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def _sized(
    wanted: Wanted, info: ModelInfo, name: str, drafter: ModelInfo | None, trained: DrafterFile | None
) -> ServerConfig:
    def build(kv_tokens: int, max_len: int) -> ServerConfig:
        return ServerConfig(
            model=info,
            served_model_name=name,
            host=wanted.host,
            port=wanted.port,
            device=wanted.device,  # type: ignore[arg-type]  # checked there
            dtype=dtype,  # type: ignore[arg-type]
            overlap=wanted.overlap,
            standby=wanted.standby,
            max_running=wanted.max_running,
            max_queued=wanted.max_queued,
            kv_tokens=kv_tokens,
            page_size=wanted.page_size,
            max_len=max_len,
            prefill_chunk=wanted.prefill_chunk,
            api_key=wanted.api_key,
            drain_seconds=wanted.drain_seconds,
            threads=usable_cpus() if wanted.threads is None else wanted.threads,
            speculate=STANDALONE if drafter else trained.kind if trained else wanted.speculate,
            drafter=drafter,
            drafter_file=str(trained.path) if trained else None,
            window=window,
            draft_when=wanted.draft_when,  # type: ignore[arg-type]
            ngram_shared=wanted.ngram_shared,
            log_seconds=wanted.log_seconds,
            poison=wanted.poison,
            check_order=wanted.check_order,
        )

    dtype = wanted.dtype or DTYPES.get(wanted.device, DTYPES["host"])[0]  # a device that is none is refused by its name
    page = max(1, wanted.page_size)  # a page of 0 is refused below, by its name
    window = 1 if wanted.speculate == "off" else 1 + wanted.draft_tokens
    kv_tokens, max_len = wanted.kv_tokens, wanted.max_len
    if kv_tokens is None:
        least_len = 2 if max_len is None else max_len
        least = -(-(least_len + 2 * window) // page) * page  # what one such request and two windows need
        kv_tokens = max(least, _kv_tokens_default(build(least, least_len)))
    if max_len is None:
        context_len = info.context_len if drafter is None else min(info.context_len, drafter.context_len)
        max_len = max(2, min(context_len, kv_tokens // page * page - 2 * window))
    return build(kv_tokens, max_len)


def _kv_tokens_default(smallest: ServerConfig) -> int:
    """Return KV_TOKENS_DEFAULT, or less where KV_MEMORY_SHARE of the memory that is left holds less, in whole pages.

    What a GPU has left is not known here.
    """
    if smallest.device != "host":
        return KV_TOKENS_DEFAULT // smallest.page_size * smallest.page_size
    need = memory_needed(smallest)
    left = memory_available() - need.weights - need.processes
    models = [smallest.model] if smallest.drafter is None else [smallest.model, smallest.drafter]
    room = int(left * KV_MEMORY_SHARE) // sum(kv_bytes_per_token(model, smallest.dtype) for model in models)
    tokens = min(KV_TOKENS_DEFAULT, max(KV_TOKENS_LEAST, room))
    return tokens // smallest.page_size * smallest.page_size
