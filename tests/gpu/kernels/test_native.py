"""Where compiled kernels are kept: nothing of the user's is ever deleted, and no folder at all is no reason to fail."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from gpu.kernels import native
from gpu.kernels.native import FOLDER, MARKER, Entry, HostKernel, KernelCache, cache_root, purge
from gpu.kernels.vectors import store_i64

ROOT = Path(__file__).resolve().parents[3]
OLD_S = time.time() - (native.UNUSED_DAYS_MAX + 1) * 86400
NEEDS_A_USER = pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")


def made(folder: Path, *, marked: bool, used_s: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "precious").write_text("data")
    paths = [folder / "precious", folder]
    if marked:
        (folder / MARKER).touch()
        paths.insert(0, folder / MARKER)
    for path in paths:
        os.utime(path, (used_s, used_s))
    return folder


def test_only_old_folders_of_ours_are_purged(tmp_path: Path) -> None:
    now = time.time()
    kept = [
        made(tmp_path / "00112233445566aa", marked=False, used_s=OLD_S),
        made(tmp_path / "sixteen-letters!", marked=True, used_s=OLD_S),
        made(tmp_path / "00112233445566AA", marked=True, used_s=OLD_S),
        made(tmp_path / "00112233445566aabb", marked=True, used_s=OLD_S),
        made(tmp_path / "00112233445566bb", marked=True, used_s=now),
        made(tmp_path / "elsewhere", marked=True, used_s=OLD_S),
    ]
    (tmp_path / "00112233445566cc").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "00112233445566dd").write_text("a file")
    gone = made(tmp_path / "00112233445566ee", marked=True, used_s=OLD_S)
    purge(tmp_path)
    assert not gone.exists()
    assert all((folder / "precious").read_text() == "data" for folder in kept)
    assert (tmp_path / "00112233445566cc").is_symlink()
    assert (tmp_path / "00112233445566dd").exists()


def test_two_processes_may_purge_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has listed the other has deleted, wholly or down to the marker."""
    there = made(tmp_path / "00112233445566ee", marked=True, used_s=OLD_S)
    half = made(tmp_path / "00112233445566ff", marked=False, used_s=OLD_S)
    listed = [tmp_path / "00112233445566aa", half, there]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    purge(tmp_path)
    assert not there.exists()
    assert half.exists()


def test_the_folder_is_our_own_below_the_one_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = made(tmp_path / "my-sixteen-chars", marked=False, used_s=OLD_S)
    hexed = made(tmp_path / "00112233445566ee", marked=True, used_s=OLD_S)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    cache = KernelCache()
    assert cache.folder is not None
    assert cache.folder.parent == tmp_path / FOLDER
    assert (cache.folder / MARKER).exists()
    assert (mine / "precious").exists()
    assert (hexed / "precious").exists()


def test_without_a_choice_it_lies_below_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "stepahead" / FOLDER
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "stepahead" / FOLDER


def test_importing_kernels_looks_at_no_folder(tmp_path: Path) -> None:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)}
    modules = "import procs.executor, gpu.warm_up, gpu.models.llama, gpu.kernels.sampling"
    subprocess.run([sys.executable, "-c", modules], env=env, cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []


def answer(address: int) -> None:
    store_i64(address, 42)


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], KernelCache]]:
    folder_before = config.CACHE_DIR

    def fresh(folder: str) -> KernelCache:
        monkeypatch.setenv("NUMBA_CACHE_DIR", folder)
        monkeypatch.setattr(native, "CACHE", KernelCache())
        return native.CACHE

    yield fresh
    config.CACHE_DIR = folder_before


def check_that_kernels_work() -> None:
    word = ctypes.c_int64(0)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(Entry(answer).compile())(ctypes.addressof(word))
    assert word.value == 42
    assert HostKernel(double)(21) == 42


def test_kernels_are_kept_and_found_again(tmp_path: Path, cache: Callable[[str], KernelCache], capfd: Any) -> None:
    assert cache(str(tmp_path)).folder is not None
    check_that_kernels_work()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert len(files) == 2
    cache(str(tmp_path))
    check_that_kernels_work()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == files
    assert capfd.readouterr().err == ""


def check_one_line(err: str, *parts: str) -> None:
    assert err.count("\n") == 1, err
    assert all(part in err for part in ("compiled anew", *parts)), err


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null", "/dev/null/below"])
def test_a_folder_that_cannot_be_is_told_in_one_line(
    folder: str, cache: Callable[[str], KernelCache], capfd: Any
) -> None:
    cache(folder)
    check_that_kernels_work()
    assert native.CACHE.folder is None
    check_one_line(capfd.readouterr().err, folder)


@NEEDS_A_USER
def test_a_folder_that_is_read_only_is_told_in_one_line(
    tmp_path: Path, cache: Callable[[str], KernelCache], capfd: Any
) -> None:
    folder = cache(str(tmp_path)).folder
    assert folder is not None
    folder.chmod(0o500)
    cache(str(tmp_path))
    check_that_kernels_work()
    check_one_line(capfd.readouterr().err, str(tmp_path))


def test_no_home_is_told_in_one_line(
    cache: Callable[[str], KernelCache], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    cache("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    check_that_kernels_work()
    check_one_line(capfd.readouterr().err, "home directory")


def test_kernels_that_cannot_be_kept_are_compiled_all_the_same(
    tmp_path: Path, cache: Callable[[str], KernelCache], capfd: Any
) -> None:
    """The disk is full, or the folder has gone: found out only when a kernel is written."""
    folder = cache(str(tmp_path)).folder
    assert folder is not None
    (folder / MARKER).unlink()
    folder.rmdir()
    folder.symlink_to("/proc/nope")
    check_that_kernels_work()
    check_one_line(capfd.readouterr().err, str(folder))


@pytest.mark.parametrize("what", ["*.nbi", "*.nbc"])
def test_torn_files_in_the_cache_are_told_and_not_used(
    what: str, tmp_path: Path, cache: Callable[[str], KernelCache], capfd: Any
) -> None:
    cache(str(tmp_path))
    check_that_kernels_work()
    for path in tmp_path.rglob(what):
        path.write_bytes(path.read_bytes()[:1])
    cache(str(tmp_path))
    check_that_kernels_work()
    check_one_line(capfd.readouterr().err, str(tmp_path))


def test_a_kernel_that_does_not_compile_says_why(tmp_path: Path, cache: Callable[[str], KernelCache]) -> None:
    def wrong(address: int) -> None:
        store_i64(address, "text")

    cache(str(tmp_path))
    with pytest.raises(Exception, match="text"):
        Entry(wrong).compile()
