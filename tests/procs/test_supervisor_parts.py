"""What the supervisor is made of: child specs and environments, the listener, shared memory, signals as bytes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from procs.child_specs import CHILD_SPECS, PACKAGES, ROOT, check_package_names, child_environment, command
from procs.listener import open_listener
from procs.server_memory import ServerMemory
from procs.signal_pipe import ASKED, SignalPipe
from procs.stage_process import StageProcess
from shm.child import CORE_DUMPS, Boot, StartupError
from shm.control import STAGES
from shm.records import ring_specs
from tests.procs.fake_server import config, open_fds, spec

RINGS = {
    "frontend": set(),
    "tokenizer": {"intake"},
    "scheduler": {"intake", "step", "result", "progress"},
    "gpu": {"step", "result"},
    "detokenizer": {"progress"},
}


def test_every_stage_has_one_spec_and_its_module_exists() -> None:
    assert sorted(spec.stage for spec in CHILD_SPECS) == sorted(set(STAGES) - {"supervisor"})
    assert [one.stage for one in CHILD_SPECS if one.listens] == ["frontend"]
    assert all(find_spec(spec.module) for spec in CHILD_SPECS)


def test_the_environment_is_cleaned_and_the_threads_are_set() -> None:
    gpu = CHILD_SPECS[0]
    given = {"HOME": "/h", "PYTHONPATH": "/evil", "PYTHONOPTIMIZE": "2", "STEPAHEAD_API_KEY": "secret"}
    given[CORE_DUMPS] = "1"
    env = child_environment(gpu, config(threads=3), given)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/evil"]
    assert not {"PYTHONOPTIMIZE", "STEPAHEAD_API_KEY"} & set(env)
    assert env[CORE_DUMPS] == "1"
    assert (env["HOME"], env["OMP_NUM_THREADS"], env["NUMBA_NUM_THREADS"]) == ("/h", "3", "3")
    assert all("{" not in value for spec in CHILD_SPECS for value in child_environment(spec, config(), {}).values())


def test_bytecode_is_kept_in_the_cache_where_it_may_not_lie_beside_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    spec, unwanted = CHILD_SPECS[0], {"PYTHONDONTWRITEBYTECODE": "1"}
    env = child_environment(spec, config(), unwanted)
    assert (env.get("PYTHONDONTWRITEBYTECODE"), env["PYTHONPYCACHEPREFIX"]) == (None, "/c/stepahead/bytecode")
    assert "PYTHONPYCACHEPREFIX" not in child_environment(spec, config(), {})
    env = child_environment(spec, config(), unwanted | {"PYTHONPYCACHEPREFIX": "/own"})
    assert (env["PYTHONDONTWRITEBYTECODE"], env["PYTHONPYCACHEPREFIX"]) == ("1", "/own")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless(_path: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert child_environment(spec, config(), unwanted)["PYTHONDONTWRITEBYTECODE"] == "1"


def shadow(folder: Path) -> Path:
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return folder


def test_packages_of_our_names_elsewhere_cannot_take_their_place(tmp_path: Path) -> None:
    spec = CHILD_SPECS[0]
    program = [*command(spec, 0)[:2], "-c", "import shm, sys; print(shm.__file__)"]
    env = child_environment(spec, config(), {**os.environ, "PYTHONPATH": str(shadow(tmp_path / "path"))})
    found = subprocess.run(program, cwd=shadow(tmp_path / "cwd"), env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(ROOT / "shm" / "__init__.py")


def test_a_shadowed_package_is_named(tmp_path: Path) -> None:
    check_package_names()
    program = (
        "from procs.child_specs import check_package_names as check; import sys; sys.path.insert(0, sys.argv[1]); "
    )
    folder = shadow(tmp_path / "path")
    run = [sys.executable, "-c", program + "check()", str(folder)]
    failed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert f"the package 'gpu' is {folder}/gpu/__init__.py, not the one in {ROOT}" in failed.stderr


def test_a_port_in_use_is_one_clear_line() -> None:
    with open_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartupError, match=f"^port {port} on 127.0.0.1 is in use: .*--port$"):
            open_listener("127.0.0.1", port)
    with open_listener("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(
    ("host", "port", "told"), [("no.invalid", 0, "--host no.invalid"), ("127.0.0.1", 70000, "--port")]
)
def test_an_address_that_cannot_be_is_one_clear_line(host: str, port: int, told: str) -> None:
    with pytest.raises(StartupError) as caught:
        open_listener(host, port)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_port_whose_last_connections_linger_can_be_bound_again() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        server.close()  # the server's side closes first: it lingers in TIME_WAIT
        client.close()
    open_listener("127.0.0.1", port).close()


def test_every_stage_is_handed_its_own_rings_and_no_others() -> None:
    memory = ServerMemory(config())
    try:
        for stage, rings in RINGS.items():
            record = memory.boot_record(stage, ready_fd=0, listen_fd=None)
            own = {"batch"} if stage == "scheduler" else set()
            assert set(record.segments) - {"control", "stats", "trace", "ledger"} == rings | own
            assert set(record.doorbells) == set(STAGES)
            assert record.weights == (memory.weights if stage == "gpu" else None)
            assert record.kv == (memory.kv if stage == "gpu" else None)
            for kept in (memory.weights, memory.kv):
                assert kept is not None and (kept[0] in record.fds) == (stage == "gpu")
            fd = record.to_memfd()
            assert Boot.from_fd(fd) == record
            os.close(fd)
        assert set(memory.segments) == {"control", "stats", "trace", "ledger", "batch", *ring_specs(config())}
    finally:
        memory.close()


def test_there_is_no_memory_for_weights_and_caches_that_lie_on_the_device() -> None:
    memory = ServerMemory(replace(config(), device="cuda", dtype="bfloat16"))
    record = memory.boot_record("gpu", ready_fd=0, listen_fd=None)
    assert record.weights is None and record.kv is None
    memory.close()


def test_closed_shared_memory_leaves_no_descriptor() -> None:
    before = open_fds()
    ServerMemory(config()).close()
    assert open_fds() == before


def test_too_little_memory_is_told_with_its_size_and_leaves_nothing() -> None:
    # 66,000 rows of 2^24 tokens: more than there is address space to map here, or memory to back it.
    small = config()
    huge = replace(small.model, context_len=2**24)
    before = open_fds()
    with pytest.raises(StartupError, match=r"^cannot get \d+ MB of shared memory: ") as caught:
        ServerMemory(replace(small, model=huge, max_len=2**24, kv_tokens=2**25, max_queued=65536))
    assert "\n" not in str(caught.value)
    assert open_fds() == before


def test_signals_come_out_in_order_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    pipe = SignalPipe()
    pipe.ask()  # closed: nothing happens
    with pipe:
        assert pipe.take() == []
        os.kill(os.getpid(), signal.SIGTERM)
        thread = threading.Thread(target=pipe.ask)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        taken: list[int] = []
        while len(taken) < 3 and time.monotonic() < deadline:
            taken += pipe.take()
        assert taken == [signal.SIGTERM, ASKED, signal.SIGINT]
    pipe.ask()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_child_that_cannot_be_watched_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    memory = ServerMemory(config())
    before = open_fds()
    monkeypatch.setattr(os, "pidfd_open", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        StageProcess(spec("gpu", "serve"), memory, dict(os.environ), None, standby=True)
    assert open_fds() == before
    assert not [child for child in psutil.Process().children() if "fake_stage" in " ".join(child.cmdline())]
    memory.close()
