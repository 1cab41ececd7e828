"""What takes minutes to check for CUDA without a GPU, in one command: `python -m tools.check_cuda`.

Every variant of every Triton kernel is compiled for every supported GPU. Then FlashInfer:

FlashInfer and a CUDA compiler are installed from the package index into a folder of their own, beside the environment
and without their heavy dependencies. The compiler makes FlashInfer's decode module for Hopper; a stand-in for the CUDA
runtime, compiled here, lets its planner run on the CPU. The checks themselves are tests of `tests/compile`.

Owns that folder and the environment of the tests. It needs a C and a C++ compiler, and touches nothing outside of it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "compile"
RUNTIME = TESTS / "fake_cudart.c"
PACKAGES = (
    # The compiler, its headers and its runtime's. All of one version of CUDA.
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    # FlashInfer, and what of its dependencies it needs to compile and to plan.
    "flashinfer-python==0.6.13",
    "apache-tvm-ffi==0.1.15.post2",
    "ninja==1.13.*",
    "click",
    "einops",
    "filelock",
    "nvidia-ml-py",
    "packaging",
    "requests",
    "tabulate",
    "tqdm",
)
CUDA = Path("nvidia", "cu13")  # inside of the folder of packages
HOPPER = "9.0a"


def install(folder: Path) -> None:
    """Install the packages into `folder`, unless exactly these are there."""
    stamp, wanted = folder / ".installed", "\n".join(PACKAGES)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    subprocess.run([*command, "--upgrade", "--target", folder, *PACKAGES], check=True)
    stamp.write_text(wanted)


def build_runtime(folder: Path, cuda: Path) -> Path:
    """Compile the stand-in for the CUDA runtime, and an empty one for the driver to link with. Returns the first."""
    folder.mkdir(exist_ok=True)
    runtime = folder / "libcudart.so"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1"]
    named = "-Wl,-soname,libcudart.so.13"
    subprocess.run([*compiler, "-Wall", f"-I{cuda / 'include'}", named, RUNTIME, "-o", runtime], check=True)
    subprocess.run([*compiler, "-x", "c", os.devnull, "-o", folder / "libcuda.so"], check=True)
    return runtime


def environment(folder: Path) -> dict[str, str]:
    """Variables under which FlashInfer compiles with what is in `folder`, and is loaded with the stand-in."""
    cuda, link = folder / CUDA, folder / "link"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "CUDA_HOME": str(cuda),
        "LIBRARY_PATH": str(link),
        "FLASHINFER_CUDA_ARCH_LIST": HOPPER,
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "MAX_JOBS": str(os.cpu_count()),
        "STEPAHEAD_ALL_VARIANTS": "1",
        "STEPAHEAD_FAKE_CUDART": str(build_runtime(link, cuda)),
    }


def main() -> int:
    """Install, compile, and run the tests; the exit status is theirs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix) / "check-cuda", help="for packages and builds")
    folder = parser.parse_args().folder.absolute()
    began = time.monotonic()
    install(folder)
    print(f"FlashInfer and nvcc are in {folder} ({time.monotonic() - began:.0f} s)", flush=True)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider"]
    files = [TESTS / "test_ahead_of_time.py", *sorted(TESTS.glob("test_flashinfer_*.py"))]
    return subprocess.run([*command, *files], env=environment(folder), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
