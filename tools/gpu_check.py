"""Everything that only a GPU can answer, in one command: `python -m tools.gpu_check --out report.json`.

Runs from the source tree on a bare machine with Python, torch, triton and numpy; nothing is installed or fetched.
Every part is a process of its own with a time limit, so a part that fails, hangs or breaks the device hides no other.
With `--device host` the same parts run on the host device, as far as each has a meaning there; so this is tested code.
Exits with 1 if a part failed.

Owns the list of parts, their processes and the report. It measures nothing itself.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STANDINS = Path(__file__).with_name("standins")
GREEDY = ROOT / "tests" / "data" / "smollm2_greedy.jsonl"
TAIL_CHARS = 12000
SKIPPED = 77  # exit status of a part that has nothing to check here; its last line says why


@dataclass(frozen=True)
class Part:
    """One process of the check."""

    name: str
    module: str
    what: str
    seconds: int  # after which it has failed
    needs_model: bool = False
    least: int = 20  # seconds that the parts before leave it, whatever they do
    interpreted: bool = False  # on the host, Triton's kernels run in its interpreter


_DEVICE, _SERVING = "tools.gpu_check_device", "tools.gpu_check_serving"
PARTS = (
    Part("environment", _DEVICE, "versions, device, limits", 45),
    Part("rings", _DEVICE, "shared memory registered, results written into it by the device", 45),
    Part("graphs", _DEVICE, "capture and replay with events inside, streams that overlap", 45),
    Part("guard", _DEVICE, "calls that would wait are refused in the launch loop", 45),
    Part("compile", "tools.gpu_check_compile", "every specified variant of every Triton kernel compiles", 90),
    Part(
        *("kernels", "tools.gpu_check_kernels", "every Triton kernel against its plain reference", 150),
        least=30,
        interpreted=True,
    ),
    Part(
        *("flashinfer", "tools.gpu_check_flashinfer", "FlashInfer's decode against our own and the plain one", 120),
        least=10,
        interpreted=True,
    ),
    Part(
        "step",
        "tools.gpu_check_mutants",
        "the step program: right tokens, every edge lost or early in turn",
        180,
        least=40,
    ),
    Part("greedy", _SERVING, "the greedy file in float32, token by token", 150, needs_model=True, least=60),
    Part("speed", _SERVING, "tokens/s and gaps, 1 to 64 at once, overlap on and off", 200, needs_model=True, least=70),
    Part("speed-qwen3", _SERVING, "the same on random weights of Qwen3-0.6B's shape", 200, least=90),
)


@dataclass(frozen=True)
class Options:
    """What every part is told."""

    device: str  # "cuda" or "host"
    model: str | None  # GGUF file or folder of SmolLM2-135M-Instruct
    greedy: str  # the greedy file
    quick: bool  # as little as shows that everything runs
    lines: int  # of the greedy file


@dataclass(frozen=True)
class Outcome:
    """What came of one part."""

    part: str
    status: str  # "passed", "failed", "skipped"
    seconds: float
    figures: dict[str, Any]
    reason: str = ""


def run_part(part: Part, options: Options, seconds: float) -> Outcome:
    """Run one part in a process of its own, for at most `seconds`."""
    if part.needs_model and options.model is None:
        return Outcome(part.name, "skipped", 0.0, {}, "no model was given (--model)")
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, standins() as path:
        written = Path(folder, "figures.json")
        command = [sys.executable, "-m", part.module, part.name, json.dumps(asdict(options)), str(written)]
        env = os.environ | {"PYTHONPATH": path}
        env.pop("TRITON_INTERPRET", None)
        if part.interpreted and options.device == "host":
            env["TRITON_INTERPRET"] = "1"
        status, reason = _run(command, env, min(seconds, part.seconds))
        figures = json.loads(written.read_text()) if written.exists() else {}
    return Outcome(part.name, status, round(time.monotonic() - begin_s, 1), figures, reason)


def _run(command: Sequence[str], env: dict[str, str], seconds: float) -> tuple[str, str]:
    """What came of the process, and why. What it prints is shown only if it fails."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        status = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:  # whatever it has started goes with it, or it would disturb the parts behind it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")[-TAIL_CHARS:].strip()
    if status == 0:
        return "passed", ""
    if status == SKIPPED:
        return "skipped", said.rpartition("\n")[2]
    return "failed", f"{f'not done after {seconds:.0f} s' if status is None else f'exit status {status}'}: {said}"


@contextlib.contextmanager
def standins() -> Iterator[str]:
    """A module path that has our packages, and stand-ins for the packages that are missing here and only for those."""
    with tempfile.TemporaryDirectory() as folder:
        for file in STANDINS.glob("*.py"):
            if file.stem != "__init__" and find_spec(file.stem) is None:
                Path(folder, file.name).write_bytes(file.read_bytes())
        yield os.pathsep.join(filter(None, (str(ROOT), folder, os.environ.get("PYTHONPATH"))))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print what came of them, write the report; return the exit status."""
    options, names, out, seconds = _arguments(argv)
    begin_s = time.monotonic()
    outcomes = []
    chosen = [part for part in PARTS if not names or part.name in names]
    for number, part in enumerate(chosen):
        kept = sum(later.least for later in chosen[number + 1 :])
        left = seconds - (time.monotonic() - begin_s) - kept
        print(f"{part.name:12s} {part.what} ...", flush=True)
        if left <= 0:
            outcome = Outcome(part.name, "failed", 0.0, {}, f"the {seconds} s for all parts are over")
        else:
            outcome = run_part(part, options, left)
        outcomes.append(outcome)
        print(f"{part.name:12s} {outcome.status} in {outcome.seconds:.1f} s {outcome.reason}", flush=True)
        for name, value in outcome.figures.items():
            print(f"    {name}: {value}", flush=True)
        out.write_text(json.dumps({"options": asdict(options), "parts": [asdict(o) for o in outcomes]}, indent=1))
    failed = [outcome.part for outcome in outcomes if outcome.status == "failed"]
    took = time.monotonic() - begin_s
    print(f"{len(outcomes)} parts in {took:.0f} s, failed: {', '.join(failed) or 'none'}; report: {out}")
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> tuple[Options, set[str], Path, int]:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("report.json"), help="where the report goes")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--model", help="SmolLM2-135M-Instruct: a GGUF file, or a folder with safetensors")
    parser.add_argument("--greedy", default=str(GREEDY), help="the greedy file")
    parser.add_argument("--lines", type=int, default=1000, help="of the greedy file")
    parser.add_argument("--quick", action="store_true", help="as little as shows that everything runs")
    parser.add_argument("--seconds", type=int, default=470, help="for all parts together")
    parser.add_argument("--part", action="append", default=[], choices=[part.name for part in PARTS])
    given = parser.parse_args(argv)
    model = None if given.model is None else str(Path(given.model).absolute())
    if model is not None and not Path(model).exists():
        parser.error(f"--model: {model} does not exist")
    if not Path(given.greedy).is_file():
        parser.error(f"--greedy: {given.greedy} does not exist")
    if not given.out.absolute().parent.is_dir():
        parser.error(f"--out: {given.out.absolute().parent} is no folder")
    if given.seconds < 1:
        parser.error(f"--seconds: {given.seconds} is less than 1")
    options = Options(given.device, model, str(Path(given.greedy).absolute()), given.quick, given.lines)
    return options, set(given.part), given.out.absolute(), given.seconds


if __name__ == "__main__":
    sys.exit(main())
