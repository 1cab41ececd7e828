"""How much memory a configured server needs, and how much there is.

Owns the estimate that is made before anything starts, so that too little memory is one line and not a killed process.
The estimate is what the parts allocate for certain plus what processes take; it never allocates anything itself. It is
of the machine's memory alone: what lives on a GPU is left to the process that opens it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from shm.config import ModelInfo, ServerConfig
from shm.drafter_file import DrafterFile
from shm.ledger import Ledger
from shm.limits import CACHE_LINE_BYTES
from shm.tensor_map import ModelError, llama_tensors

# Bytes of one weight and of one number in the KV cache, by --dtype.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2}
CLOCKED_BYTES = 8  # that a clocked model keeps of a token
PANEL_ROWS = 16  # in which the host device packs weights
# Measured: interpreters and libraries of the six processes, torch and the compiled kernels among them.
PROCESS_BYTES = 900 << 20
# What the standbys have for themselves, measured on the host. On CUDA that of the gpu process imports torch.
STANDBY_BYTES = {"host": 256 << 20, "cuda": 512 << 20}
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of the machine's memory by what they are for."""

    weights: int
    kv_cache: int
    processes: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.processes


def kv_bytes_per_token(info: ModelInfo, dtype: str) -> int:
    """Bytes that one token takes in the KV cache of all layers."""
    return 2 * info.num_layers * info.num_kv_heads * info.head_dim * KV_BYTES[dtype]


def cache_bytes(config: ServerConfig) -> int:
    """Bytes that the KV caches of all models of a server take, those of drafters among them.

    Raises ModelError for a trained drafter whose file is not one any more.
    """
    is_clocked = config.model.format == "clocked"
    per_token = CLOCKED_BYTES if is_clocked else kv_bytes_per_token(config.model, config.dtype)
    if config.drafter is not None:
        per_token += kv_bytes_per_token(config.drafter, config.dtype)
    if config.drafter_file is not None:
        layers = replace(config.model, num_layers=DrafterFile(Path(config.drafter_file)).layers)
        per_token += kv_bytes_per_token(layers, config.dtype)
    return config.pages * config.page_size * per_token


def packed_bytes(config: ServerConfig) -> int:
    """Bytes that the weights of all models of a server on the host device take once they are packed, and a little more.

    Raises ModelError for a trained drafter whose file is not one any more.
    """
    if config.model.format == "clocked":
        return 0
    shapes = list(llama_tensors(config.model).values())
    if config.drafter is not None:
        shapes += llama_tensors(config.drafter).values()
    if config.drafter_file is not None:
        trained = DrafterFile(Path(config.drafter_file))
        shapes += [trained.entry(name).shape for name in trained.names()]
        shapes.append((len(trained.vocabulary), config.model.hidden_size))  # a copy of these rows of the target's head
    return sum(_packed(shape, WEIGHT_BYTES[config.dtype]) for shape in shapes)


def _packed(shape: tuple[int, ...], weight_bytes: int) -> int:
    """Of one tensor, at most: rows of a matrix in whole panels, with a scale each; all else as float32."""
    if len(shape) < 2 or shape[0] < PANEL_ROWS:
        return 4 * math.prod(shape) + CACHE_LINE_BYTES
    rows = -(-shape[0] // PANEL_ROWS) * PANEL_ROWS
    return rows * (math.prod(shape[1:]) * weight_bytes + 4) + 2 * CACHE_LINE_BYTES


def memory_needed(config: ServerConfig) -> MemoryNeed:
    """Estimate for a whole server. Raises ModelError for a trained drafter whose file is not one any more."""
    info = config.model
    sizes = [] if info.format == "clocked" else [math.prod(shape) for shape in llama_tensors(info).values()]
    # While loading, one tensor lives twice more: as float32, and half converted.
    weights, kv_cache = 2 * 4 * max(sizes, default=0), 0
    if config.device == "host":
        weights += packed_bytes(config)
        kv_cache = cache_bytes(config)
    ledger = Ledger.size(config.rows, config.max_len)
    processes = PROCESS_BYTES + ledger + (STANDBY_BYTES[config.device] if config.standby else 0)
    return MemoryNeed(weights=weights, kv_cache=kv_cache, processes=processes)


def memory_available(root: Path = Path("/")) -> int:
    """Bytes that this process and its children may still take: the machine's, or less where a control group says so.

    root: where proc and sys are looked for (tests).
    """
    fields = (root / "proc/meminfo").read_text().split()
    available = int(fields[fields.index("MemAvailable:") + 1]) * 1024
    return min([available, *_group_limits(root)])


def require_memory(config: ServerConfig, root: Path = Path("/")) -> None:
    """Raise ModelError, saying what needs how much and what to change, if memory_needed is more than
    memory_available.
    """
    need, available = memory_needed(config), memory_available(root)
    if need.total <= available:
        return
    weights, advice = f"{_gib(need.weights)} for loading weights", "--max-len"
    if config.device == "host":
        weights = f"{_gib(need.weights)} for weights in {config.dtype}, "
        weights += f"{_gib(need.kv_cache)} for --kv-tokens {config.kv_tokens}"
        advice = "--kv-tokens or --max-len"
    raise ModelError(
        f"too little memory: {weights} and {_gib(need.processes)} for processes make {_gib(need.total)}, but only "
        f"{_gib(available)} are available; lower {advice}, {'say --no-standby, ' if config.standby else ''}or choose a "
        "smaller model"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _group_limits(root: Path) -> list[int]:
    """What is left below each limit of the control groups (v2 or v1) that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        # A limit on any group above holds as well. In a container the path may be the host's: only the base exists.
        folder = base / group.strip("/")
        for candidate in [folder, *folder.parents]:
            left += _left_in_group(candidate, *names)
            if candidate == base:
                break
    return left


def _left_in_group(folder: Path, limit_file: str, usage_file: str, cache_key: str) -> list[int]:
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    if limit == "max":
        return []
    # Page cache counts as usage, but gives way.
    return [max(0, int(limit) - usage + int(stat.get(cache_key, 0)))]
