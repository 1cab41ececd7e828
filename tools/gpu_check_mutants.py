"""The part of the check that judges the step program: right tokens whatever is slow, every edge lost or early in turn.

Owns the list of runs, the process in which `tools.gpu_check_step` does them, and the judgement. With all edges every
run must be right and unflagged. Without one, or with one too early, the checker must flag the program; how often tokens
went wrong is reported: luck decides that. A mutant that breaks the device or ends its process spoils no other: the next
one begins in a fresh process.
"""

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from gpu.device.mutations import RECORD, Edge
from tools.gpu_check import Options
from tools.gpu_check_part import Figures, run

SLOW = ("", "forward", "copy", "schedule", "lengths")  # streams; "": none
QUICK = ("", "forward")
START_S, RUN_S = 90, 30
WINDOW = 3  # tokens of a decode row in steps with drafts


@dataclass(frozen=True)
class Run:
    """One run of the step program, as it is asked for."""

    edge: Edge | None = None  # that is mutated
    how: str = "drop"  # or "early"
    slow: str = ""  # stream
    early_lengths: bool = True
    window: int = WINDOW  # most tokens of a decode row

    @property
    def name(self) -> str:
        """What is mutated."""
        return f"{self.edge}, {'too early' if self.how == 'early' else 'dropped'}"


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    flagged: str | None  # what the checker says of it, empty for nothing; None if that is not known
    wrong: str  # what is wrong with tokens or lengths, or what was raised instead; empty for nothing
    mutated: int = 0  # records and waits that were not what the program asked for
    edges: Sequence[Sequence[str]] = ()  # fields of each Edge that was issued
    usable: bool = True  # whether other runs may follow in this process


class Runner:
    """A process that does runs one by one, and a fresh one where it has ended or should end. For use in `with`."""

    def __init__(self, command: Sequence[str], run_seconds: float = RUN_S) -> None:
        """command: of a program that says a line when it is ready, then reads a Run a line and answers an Outcome."""
        self._command = command
        self._seconds = run_seconds
        self._process: subprocess.Popen[str] | None = None
        self.processes = 0

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, wanted: Run) -> Outcome:
        """Do a run. Raises RuntimeError if no process starts."""
        if self._process is None:
            self._start()
        said = self._ask(json.dumps(asdict(wanted)))
        if said is None:
            return Outcome(None, self.end())
        outcome = Outcome(**json.loads(said))
        if not outcome.usable:
            self.end()
        return outcome

    def end(self) -> str:
        """End the process, if there is one; how it ended."""
        if self._process is None:
            return ""
        status = self._process.poll()
        self._process.kill()
        self._process.communicate()
        self._process = None
        return "no answer in time" if status is None else f"the process ended with {status}"

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes += 1
        if self._read(START_S) is None:
            raise RuntimeError(f"runs of the step program do not start: {self.end()}")

    def _ask(self, line: str) -> str | None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(self._seconds)

    def _read(self, seconds: float) -> str | None:
        """The next line; None if none comes, and then the process is over or to be ended."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            return line
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # so that it can be said how it ended
        return None


def mutations(edges: Iterable[Edge]) -> list[Run]:
    """All that can be dropped, and all records, each of which may be early unless a host function is in front of it."""
    ordered = sorted(edges)
    return [*map(Run, ordered), *(Run(edge, "early") for edge in ordered if edge.kind == RECORD)]


def judge(outcomes: Sequence[Outcome]) -> tuple[bool, str]:
    """Whether a mutant is as it should be, and what to report of it."""
    known = [outcome for outcome in outcomes if outcome.flagged is not None]
    is_flagged = bool(known) and all(outcome.flagged for outcome in known)
    wrong = [outcome.wrong for outcome in outcomes if outcome.wrong]
    often = f"wrong in {len(wrong)} of {len(outcomes)}"
    return is_flagged, f"{'flagged' if is_flagged else 'NOT flagged'}, {often}"


def sound(runner: Runner, slow: Sequence[str]) -> set[Edge]:
    """Runs with all edges, plain ones, and with early lengths and drafts: right and unflagged. Returns the edges."""
    edges: set[Edge] = set()
    plain = [Run(slow=stream, early_lengths=False, window=1) for stream in slow]
    for wanted in (*plain, *(Run(slow=stream) for stream in slow)):
        outcome = runner.run(wanted)
        assert not outcome.wrong, f"with a slow {wanted.slow or 'nothing'}: {outcome.wrong}"
        assert outcome.flagged == "", outcome.flagged
        edges |= {Edge(*fields) for fields in outcome.edges}
    return edges


def check_steps(runner: Runner, slow: Sequence[str], figures: Figures) -> None:
    """The sound program, then all mutants; each with one stream slow after the other."""
    edges = sound(runner, slow)
    figures.add("all edges", f"right and unflagged in {2 * len(slow)} runs")
    failed = []
    for mutation in mutations(edges):
        outcomes: list[Outcome] = []
        for stream in slow:
            outcomes.append(runner.run(Run(mutation.edge, mutation.how, stream)))
            if outcomes[-1].flagged is not None and not outcomes[-1].mutated:
                break  # nothing that could be early
        if not any(outcome.mutated or outcome.flagged is None for outcome in outcomes):
            continue
        is_fine, text = judge(outcomes)
        figures.add(mutation.name, text)
        if not is_fine:
            failed.append(f"{mutation.name}: {text}")
    figures.add("processes", runner.processes)
    assert not failed, "; ".join(failed)


def step(options: Options, figures: Figures) -> None:
    """Everything, in a process that the parts of the device live in."""
    with Runner([sys.executable, "-m", "tools.gpu_check_step", options.device]) as runner:
        check_steps(runner, QUICK if options.quick else SLOW, figures)


if __name__ == "__main__":
    run({"step": step})
