"""How much memory a server needs, and how much there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from procs.model_files import ModelError, read_model_info
from procs.model_memory import (
    PROCESS_BYTES,
    STANDBY_BYTES,
    kv_bytes_per_token,
    memory_available,
    memory_needed,
    require_memory,
)
from shm.config import ServerConfig
from shm.drafter_file import DrafterFile
from shm.ledger import Ledger
from tests.gpu.models.small_drafters import trained
from tests.model_factory import TinyLlama

MIB = 1 << 20


def config(folder: Path, **values: object) -> ServerConfig:
    info = read_model_info(TinyLlama().write_hf(folder / "tiny"))
    options = {
        "served_model_name": "t",
        "host": "127.0.0.1",
        "port": 0,
        "kv_tokens": 1600,
        "max_len": 512,
        "threads": 1,
    }
    return ServerConfig(model=info, **{**options, **values})  # type: ignore[arg-type]


def machine(
    root: Path, *, available_mib: int, cgroup: str = "", groups: dict[str, dict[str, str]] | None = None
) -> Path:
    """A root folder with proc and sys of a machine. groups: folder under sys/fs/cgroup -> file -> content."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"
    )
    if cgroup:
        (root / "proc/self/cgroup").write_text(cgroup)
    for group, files in (groups or {}).items():
        folder = root / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(content + "\n")
    return root


def v2(limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    return {"memory.max": limit, "memory.current": str(current), "memory.stat": f"anon 1\ninactive_file {inactive}"}


def test_kv_bytes(tmp_path: Path) -> None:
    info = config(tmp_path).model
    # keys and values, 2 layers, 2 KV heads of 16
    assert kv_bytes_per_token(info, "float32") == 2 * 2 * 2 * 16 * 4
    assert kv_bytes_per_token(info, "int8") == kv_bytes_per_token(info, "bfloat16") == 2 * 2 * 2 * 16 * 2


def test_the_parts_of_the_estimate(tmp_path: Path) -> None:
    small, large = memory_needed(config(tmp_path)), memory_needed(config(tmp_path, kv_tokens=3200, dtype="float32"))
    # One page of 16 belongs to padding.
    assert small.kv_cache == (1600 + 16) * 256
    assert large.kv_cache == (3200 + 16) * 512
    assert small.total == small.weights + small.kv_cache + small.processes
    parameters = sum(array.size for array in TinyLlama().weights().values())
    assert parameters < small.weights < 4 * parameters < large.weights
    assert small.processes == PROCESS_BYTES + STANDBY_BYTES["host"] + Ledger.size(64 + 1024, 512)
    assert memory_needed(config(tmp_path, standby=False)).total == small.total - STANDBY_BYTES["host"]
    more_rows = memory_needed(config(tmp_path, max_queued=4096))
    assert more_rows.processes > small.processes


def test_a_trained_drafter_takes_memory_for_its_weights_its_part_of_the_head_and_its_cache(tmp_path: Path) -> None:
    plain = config(tmp_path)
    drafter = trained(tmp_path / "tiny", "dflash", (0, 1), layers=2)
    drafts = {"speculate": "dflash", "window": 4, "drafter_file": str(drafter.file), "dtype": "float32"}
    with_it, without = memory_needed(config(tmp_path, **drafts)), memory_needed(config(tmp_path, dtype="float32"))
    assert with_it.kv_cache == without.kv_cache + (1600 + 16) * kv_bytes_per_token(
        plain.model, "float32"
    )  # it has two layers as well
    file = DrafterFile(drafter.file)
    own = sum(file.entry(name).data.size for name in file.names() if name.endswith(".weight"))
    head = len(file.vocabulary) * plain.model.hidden_size
    assert own <= with_it.weights - without.weights - 4 * head < 4.2 * own


def test_what_lives_on_a_gpu_takes_no_memory_of_the_machine(tmp_path: Path) -> None:
    here = memory_needed(config(tmp_path, standby=False))
    there = memory_needed(config(tmp_path, device="cuda", dtype="bfloat16", kv_tokens=1 << 20, standby=False))
    largest = max(array.size for array in TinyLlama().weights().values())
    assert (there.weights, there.kv_cache, there.processes) == (2 * 4 * largest, 0, here.processes)


@pytest.mark.parametrize(
    ("cgroup", "groups", "mib"),
    [
        ("", {}, 8000),
        ("0::/\n", {".": v2("max", 10 * MIB)}, 8000),
        ("0::/\n", {".": v2(str(500 * MIB), 100 * MIB)}, 400),
        ("0::/\n", {".": v2(str(500 * MIB), 100 * MIB, 50 * MIB)}, 450),
        ("0::/\n", {".": v2(str(500 * MIB), 600 * MIB)}, 0),
        ("0::/a/b\n", {"a": v2(str(300 * MIB), 0), "a/b": v2(str(400 * MIB), 0)}, 300),
        ("0::/a/b\n", {"a": v2("max", 0), "a/b": v2(str(200 * MIB), 0)}, 200),
        # The container sees the host's path, but only its own files.
        ("0::/docker/0123\n", {".": v2(str(300 * MIB), 0)}, 300),
        (
            "12:cpu,memory:/x\n0::/\n",
            {
                "memory/x": {
                    "memory.limit_in_bytes": str(700 * MIB),
                    "memory.usage_in_bytes": str(200 * MIB),
                    "memory.stat": f"total_inactive_file {100 * MIB}",
                }
            },
            600,
        ),
    ],
)
def test_what_is_available(tmp_path: Path, cgroup: str, groups: dict[str, dict[str, str]], mib: int) -> None:
    root = machine(tmp_path, available_mib=8000, cgroup=cgroup, groups=groups)
    assert memory_available(root) == mib * MIB


def test_this_machine_has_memory() -> None:
    assert memory_available() > 100 * MIB


def test_too_little_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", available_mib=100)
    with pytest.raises(ModelError, match="too little memory") as caught:
        require_memory(config(tmp_path), root)
    message = str(caught.value)
    assert "--kv-tokens 1600" in message
    assert "only 0.10 GiB are available" in message
    assert "\n" not in message
    require_memory(config(tmp_path), machine(tmp_path / "large", available_mib=8000))


def test_too_little_for_a_gpu_process_says_nothing_of_its_cache(tmp_path: Path) -> None:
    on_gpu = config(tmp_path, device="cuda", dtype="float32", kv_tokens=1 << 24)
    with pytest.raises(ModelError, match=r"for loading weights and .* for processes") as caught:
        require_memory(on_gpu, machine(tmp_path / "root", available_mib=100))
    assert "kv-tokens" not in str(caught.value)
    require_memory(on_gpu, machine(tmp_path / "large", available_mib=8000))
