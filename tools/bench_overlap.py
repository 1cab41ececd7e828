"""Whether the device waits for the CPU, with and without overlap: `stepahead bench overlap`.

Two servers of one clocked model, one with overlap and one without, are measured in turn at each number of requests at
once: real processes over real HTTP, and a device whose passes take the time that a real GPU would need, and no core.
Says what the device waited and what for, what the CPU's parts of a step cost, and what overlap brings in tokens/s, for
each model of the article beside the article's own figures. Every answer is checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from rich.progress import Progress

from shm.clocked_file import VOCAB
from tools.bench_outputs import about_of, add_outputs, levels_of, put_out, shown_progress
from tools.bench_rings import rings_serving
from tools.bench_run import Ask, Bench, prompts, serving
from tools.bench_serve import BenchError, interrupt_on_sigterm
from tools.clocked_model import PRESETS, Preset, answers, write
from tools.overlap_figures import Row, document_of, median_row, row_of, table_text
from tools.overlap_picture import picture
from tools.step_figures import typical

PROMPT_TOKENS = 32
TOKENS_MIN, TOKENS_MAX = 16, 256  # of one answer
LENGTH_MAX = PROMPT_TOKENS + TOKENS_MAX + 32
MODES = (True, False)  # with overlap, without
STEPS_DRAWN = 3


def tokens_and_rounds(preset: Preset, at_once: int, seconds: float) -> tuple[int, int]:
    """Tokens of each answer, and how many answers each connection asks for, for a run of about `seconds`."""
    steps = seconds * 1e6 / preset.step_us(at_once)
    gained = sum(preset.file.accept**draft for draft in range(preset.drafts + 1))
    tokens = int(min(TOKENS_MAX, max(TOKENS_MIN, steps * gained)))
    return tokens, max(1, round(steps * gained / tokens))


def asks_of(preset: Preset, at_once: int, seconds: float, seed: str) -> list[Ask]:
    """The requests of one run, with their answers."""
    tokens, rounds = tokens_and_rounds(preset, at_once, seconds)
    drawn = prompts(f"{seed} {at_once}", at_once * rounds, PROMPT_TOKENS, VOCAB)
    wanted = answers(drawn, tokens, preset.file.seed)
    return [Ask(prompt, tokens, ids) for prompt, ids in zip(drawn, wanted, strict=True)]


def clocked_serving(
    options: argparse.Namespace, model: Path, at_once: int, length: int, drafts: int = 0, overlap: bool = True
) -> AbstractContextManager[Bench]:
    """A server of a clocked model, with room for so many requests of so many tokens, prompt and answer.

    Raises BenchError for options of a server that is not started.
    """
    if options.client == "rings":
        if options.start:
            raise BenchError("--start is for --client http: without it no `stepahead serve` is started")
        return rings_serving(model, at_once, length, drafts, overlap)
    given = f"--max-running {at_once} --max-len {length} --kv-tokens {at_once * (length + 32)} --threads 1"
    if drafts:
        given += f" --speculate clocked --draft-tokens {drafts} --draft-when always"
    return serving(model, f"{given} {'' if overlap else '--no-overlap'} {options.start}")


def measure(
    name: str, levels: Sequence[int], options: argparse.Namespace, folder: Path, progress: Progress
) -> tuple[list[Row], dict[str, object]]:
    """All rows of one preset, and the steps to draw: of the smallest level, by mode. Raises BenchError."""
    preset = PRESETS[name]
    model = write(folder / name, preset.file)
    bar = progress.add_task(f"{name}: starting two servers", total=len(levels) * options.repeat * len(MODES))
    rows: list[Row] = []
    drawn: dict[str, object] = {}
    with ExitStack() as stack:
        benches: dict[bool, Bench] = {
            overlap: stack.enter_context(
                clocked_serving(options, model, max(levels), LENGTH_MAX, preset.drafts, overlap)
            )
            for overlap in MODES
        }
        for bench in benches.values():  # discarded: the first request of each connection, kernels, caches
            bench.run(asks_of(preset, min(8, max(levels)), 0.2, f"{options.seed} warm"), 8)
        for level in levels:
            runs: dict[bool, list[Row]] = {mode: [] for mode in MODES}
            for repeat in range(options.repeat):
                asks = asks_of(preset, level, options.seconds, f"{options.seed} {repeat}")
                for mode in MODES if repeat % 2 == 0 else MODES[::-1]:
                    progress.update(bar, description=f"{name}: {level} at once, {'overlap' if mode else 'without'}")
                    load, seen = benches[mode].run(asks, level)
                    runs[mode].append(row_of(name, level, mode, preset.step_us(level), load, seen))
                    if level == min(levels) and repeat == 0:
                        drawn["overlap" if mode else "without"] = typical(seen.spans, STEPS_DRAWN)
                    progress.advance(bar)
            rows += [median_row(runs[mode]) for mode in MODES]
    progress.remove_task(bar)
    return rows, drawn


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    parser = argparse.ArgumentParser("bench overlap", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", type=_presets, default=list(PRESETS), metavar="NAME,...", help=", ".join(PRESETS))
    parser.add_argument("--concurrency", type=levels_of, default=[1, 8, 32, 64, 256], metavar="N,N,...")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one run, about")
    parser.add_argument("--repeat", type=int, default=1, help="runs per setting; the medians are printed")
    parser.add_argument("--seed", default="0", help="of the prompts")
    add_client(parser)
    add_outputs(parser)
    return parser.parse_args(argv)


def add_client(parser: argparse.ArgumentParser) -> None:
    """How a clocked model is asked."""
    told = "http: the whole server; rings: the scheduler and the gpu process alone, through shared memory"
    parser.add_argument("--client", choices=("http", "rings"), default="http", help=told)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes. Returns 0; 1 if a server failed or an answer was wrong; 130 if it was interrupted."""
    options = parse(argv)
    interrupt_on_sigterm()
    rows: list[Row] = []
    drawn: dict[str, dict[str, object]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="stepahead-bench-") as folder, shown_progress() as progress:
            for name in options.preset:
                found, drawn[name] = measure(name, options.concurrency, options, Path(folder), progress)
                rows += found
    except BenchError as error:
        print(f"bench overlap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of the terminal, or SIGTERM: the servers that were started have ended by now
        return 130
    document = document_of(rows, drawn, about_of(options))
    put_out(options, document, table_text(rows), lambda: picture(rows, drawn))
    return 1 if any(row.wrong or row.failed for row in rows) else 0


def _presets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PRESETS):
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {', '.join(PRESETS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
