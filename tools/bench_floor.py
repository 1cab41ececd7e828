"""How short a step may be before the device waits for the CPU: `stepahead bench floor`.

A clocked model's passes are made shorter and shorter, at each number of requests at once, until the device is starved
more than 1% of the time: the next step is not yet queued when the last one has ended. Printed is the shortest step for
which it is not: below it the CPU's own work for a step is what limits the server. Real processes over real HTTP, with
overlap; every answer is checked. Only the time counts in which all of the requests run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shm.clocked_file import VOCAB, open_clock
from tools.bench_outputs import about_of, add_outputs, levels_of, put_out, shown_progress
from tools.bench_overlap import add_client, clocked_serving
from tools.bench_run import Ask, Bench, prompts
from tools.bench_serve import BenchError, interrupt_on_sigterm
from tools.clocked_model import answers, constant, write
from tools.floor_figures import Floor, Probe, probe_of, search, table_text
from tools.floor_picture import picture

PROMPT_TOKENS = 16
TOKENS_MIN, TOKENS_MAX = 64, 6000  # of one answer
LENGTH_MAX = PROMPT_TOKENS + TOKENS_MAX + 32
LEVELS = [1, 32, 64, 256]
FIRST_US, LEAST_US = 1600.0, 20.0
START_S = 0.4  # in which requests only begin, beside the time that is measured


class Search:
    """The runs of one server. clock: its model's."""

    def __init__(self, bench: Bench, clock: NDArray[np.int64], options: argparse.Namespace) -> None:
        self._bench = bench
        self._clock = clock
        self._options = options
        self._runs = 0

    def probe(self, at_once: int, pass_us: float) -> Probe:
        """One run with passes of that time. Raises BenchError if an answer is wrong or missing."""
        self._clock[0] = round(pass_us * 1000)
        self._runs += 1
        steps = (START_S + self._options.seconds) * 1e6 / (pass_us + 30)
        tokens = int(min(TOKENS_MAX, max(TOKENS_MIN, steps)))
        drawn = prompts(f"{self._options.seed} {self._runs}", at_once, PROMPT_TOKENS, VOCAB)
        wanted = answers(drawn, tokens)
        asks = [Ask(prompt, tokens, ids) for prompt, ids in zip(drawn, wanted, strict=True)]
        load, seen = self._bench.run(asks, at_once)
        if load.wrong or load.failed:
            raise BenchError(f"{at_once} at once: {load.wrong} answers were wrong, {load.failed} failed ({load.error})")
        return probe_of(at_once, pass_us, seen)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    parser = argparse.ArgumentParser("bench floor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--concurrency", type=levels_of, default=LEVELS, metavar="N,N,...")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run that are measured, about")
    parser.add_argument("--starved", type=float, default=0.01, metavar="SHARE", help="of the time, at most")
    parser.add_argument("--first-us", type=float, default=FIRST_US, metavar="US", help="of the longest step to try")
    parser.add_argument("--least-us", type=float, default=LEAST_US, metavar="US", help="of the shortest step to try")
    parser.add_argument("--tries", type=int, default=3, help="runs that a step may take to prove itself")
    parser.add_argument("--seed", default="0", help="of the prompts")
    add_client(parser)
    add_outputs(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes. Returns 0; 1 if a server failed or an answer was wrong; 130 if it was interrupted."""
    options = parse(argv)
    interrupt_on_sigterm()
    floors: list[Floor] = []
    try:
        with tempfile.TemporaryDirectory(prefix="stepahead-bench-") as folder, shown_progress() as progress:
            model = write(Path(folder) / "clocked", constant(options.first_us))
            clock = open_clock(model, "w+")
            assert clock is not None
            bar = progress.add_task("starting", total=None)
            with clocked_serving(options, model, max(options.concurrency), LENGTH_MAX) as bench:
                runs = Search(bench, clock, options)
                for at_once in options.concurrency:

                    def measure(pass_us: float, at_once: int = at_once) -> Probe:
                        progress.update(bar, description=f"{at_once} at once, {pass_us:.0f} us")
                        return runs.probe(at_once, pass_us)

                    span = (options.first_us, options.least_us)
                    floors.append(search(measure, span, options.starved, options.tries))
    except BenchError as error:
        print(f"bench floor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of the terminal, or SIGTERM: the server that was started has ended by now
        return 130
    document: dict[str, object] = {"about": about_of(options), "floors": [asdict(floor) for floor in floors]}
    put_out(options, document, table_text(floors, options.starved), lambda: picture(floors, options.starved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
