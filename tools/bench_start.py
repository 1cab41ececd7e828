"""How long the gpu process takes to start, the first time and after it was killed: `python -m tools.bench_start`.

Starts it alone, without the rest of a server, over memory that outlives it; kills it, starts it again, and says how
long each part took until it was ready. The parts are what the process itself says that it is busy with. The first
start packs the weights (and compiles the kernels, if nobody has before); the others find them packed.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from procs.child_specs import CHILD_SPECS, child_environment
from procs.drafter_files import find_drafter
from procs.model_files import read_model_info, resolve_model
from procs.model_memory import memory_needed
from procs.server_memory import ServerMemory
from procs.stage_process import StageProcess
from shm.config import ServerConfig

(SPEC,) = (spec for spec in CHILD_SPECS if spec.stage == "gpu")
# What the process is busy with from when it says this on; at first it is the interpreter.
PARTS = {
    "loading ": "libraries",
    "compiling ": "kernels",
    "packing ": "weights",
    "taking ": "weights",
    "warming ": "warm-up",
}
NAMES = ("interpreter", *dict.fromkeys(PARTS.values()))


class Start(NamedTuple):
    """One start: seconds of each part, by its name, and in all; seconds of processor time that it took."""

    parts: dict[str, float]
    ready_s: float
    cpu_s: float


def start_once(memory: ServerMemory, config: ServerConfig) -> Start:
    """Start the process, wait until it is ready, and kill it. Raises SystemExit with its reason if it fails."""
    memory.control.set_epoch("gpu", memory.control.epoch("gpu") + 1)
    begin_s = last_s = time.monotonic()
    process = StageProcess(SPEC, memory, child_environment(SPEC, config, os.environ), None)
    parts, part = dict.fromkeys(NAMES, 0.0), NAMES[0]
    try:
        while not process.is_ready:
            select.select([process.ready_fd], [], [], 1)
            for event, text in process.listen():
                if event == "error":
                    raise SystemExit(text)
                now_s = time.monotonic()
                parts[part] += now_s - last_s
                last_s = now_s
                part = next((name for begin, name in PARTS.items() if text.startswith(begin)), part)
            if process.silent and not process.is_ready:
                process.wait_exit(1)
                raise SystemExit(process.how_it_ended())
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    finally:
        process.reap()
    return Start(parts, last_s - begin_s, cpu_s)


def make_config(options: Any) -> ServerConfig:
    """As `stepahead serve` would, with the options that matter here."""
    path = resolve_model(options.model)
    info = read_model_info(path)
    trained = find_drafter(options.speculate, info, path)
    return ServerConfig(
        model=info, served_model_name=info.name, host="127.0.0.1", port=0, dtype=options.dtype,
        kv_tokens=options.kv_tokens, max_len=min(info.context_len, options.kv_tokens - 16), threads=options.threads,
        speculate=trained.kind if trained else options.speculate, window=1 if options.speculate == "off" else 4,
        drafter_file=str(trained.path) if trained else None,
    )  # fmt: skip


def line(name: str, start: Start) -> str:
    """One row of the table."""
    parts = "".join(f"{start.parts[part]:13.2f}" for part in NAMES)
    return f"{name:<8}{parts}{start.ready_s:9.2f}{start.cpu_s:9.2f}"


def main() -> None:
    """Parse the options and print the table, seconds of wall clock, and the processor's in the last column."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="int8", choices=["int8", "bfloat16", "float32"])
    parser.add_argument("--speculate", default="off", help="off, ngram, mtp, dflash, or the folder of a drafter")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--again", type=int, default=5, help="how often it is killed and started again")
    options = parser.parse_args()
    config = make_config(options)
    memory = ServerMemory(config)
    print(f"{'start':<8}{''.join(f'{name:>13}' for name in NAMES)}{'ready':>9}{'cpu':>9}", flush=True)
    again: list[Start] = []
    try:
        print(line("first", start_once(memory, config)), flush=True)
        for _ in range(options.again):
            again.append(start_once(memory, config))
            print(line("again", again[-1]), flush=True)
    finally:
        memory.close()
    if again:
        seconds = [start.ready_s for start in again]
        need = memory_needed(config)
        print(f"again: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s;", end=" ")
        print(f"weights and their loading are estimated at {need.weights / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
