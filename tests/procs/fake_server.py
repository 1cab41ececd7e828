"""Runs a supervisor over fake stages as a program of its own: argv[1] is JSON {stages, drain_seconds, standby}."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import warnings
from typing import Any

from procs.child_specs import ChildSpec
from procs.listener import open_listener
from procs.supervisor import Supervisor
from shm.config import ModelInfo, ServerConfig

MODEL = ModelInfo(
    name="fake",
    path="/nowhere",
    format="gguf",
    vocab_size=100,
    context_len=256,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    rope_theta=1e4,
    rope_scaling=None,
    rms_eps=1e-5,
    tie_word_embeddings=True,
    qk_norm=False,
    eos_token_ids=(0,),
    bos_token_id=None,
)


CALM_SECONDS = 0.5


def config(port: int = 0, **more: Any) -> ServerConfig:
    values: dict[str, Any] = {"max_running": 2, "max_queued": 2, "kv_tokens": 512, "max_len": 128, "threads": 1}
    values |= {"standby": False, **more}
    return ServerConfig(model=MODEL, served_model_name="fake", host="127.0.0.1", port=port, **values)


def spec(
    stage: str,
    fake: str,
    ready_seconds: float = 30,
    stop_seconds: float = 5,
    deaths: int = 7,
    asleep_seconds: float = 15,
) -> ChildSpec:
    return ChildSpec(
        stage=stage,
        module="tests.procs.fake_stage",
        ready_seconds=ready_seconds,
        asleep_seconds=asleep_seconds,
        stop_seconds=stop_seconds,
        listens=stage == "frontend",
        env={"FAKE": fake},
        deaths_in_a_row_max=deaths,
        standby_backoff_seconds=(0.05,),
        standby_deaths_in_a_row_max=2,
        standby_after_seconds=CALM_SECONDS if stage == "gpu" else CALM_SECONDS / 2,
    )


class Lines:
    """A report as lines on stdout."""

    def progress(self, stage: str, text: str) -> None:
        print(f"progress {stage}: {text}", flush=True)

    def ready(self) -> None:
        print("ready", flush=True)

    def note(self, text: str) -> None:
        print(f"note {text}", flush=True)

    def failed(self, text: str) -> None:
        print(f"failed {text}", flush=True)


class Spawn:
    """Starts processes; those of `no_room`, counted from 1, as on a machine that has no room for another one."""

    def __init__(self, spawn: Any, no_room: list[int]) -> None:
        self._spawn = spawn
        self._no_room = no_room
        self._calls = 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self._calls += 1
        if self._calls in self._no_room:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._spawn(*args, **more)


def open_fds() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {fd: target for fd, target in found.items() if not target.startswith("/proc/")}


def main() -> int:
    warnings.simplefilter("error", ResourceWarning)
    order = json.loads(sys.argv[1])
    before = open_fds()
    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    print(f"port {port}", flush=True)
    specs = [spec(**stage) for stage in order["stages"]]
    made = config(port, drain_seconds=order["drain_seconds"], standby=order["standby"])
    supervisor = Supervisor(made, listener, specs)
    supervisor._spawn = Spawn(supervisor._spawn, order["no_room"])  # type: ignore[method-assign]
    try:
        status = supervisor.run(Lines())
    finally:
        listener.close()
    del supervisor._spawn, supervisor
    gc.collect()
    print(f"left fds {sorted(set(open_fds().items()) - set(before.items()))}", flush=True)
    with open("/proc/self/maps") as maps:
        print(f"left maps {[line.split()[-2] for line in maps if 'stepahead' in line]}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
