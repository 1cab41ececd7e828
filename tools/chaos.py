"""Kills the processes of a server under load and checks every answer: `stepahead chaos --kills 50 --stage all`.

Starts a real server, asks every request once without faults, then keeps so many streams running while it kills, at
random instants from the seed, every stage with every signal so many times. Every event of every request is compared
with what came without faults. Prints a line for each stage and signal; the exit status is 0 only if nobody noticed
more than a pause and nothing is left behind. Owns the command line; it never imports the server.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shm.faults import VARIABLE, WRONGS
from tools.bench_serve import PROMPTS, BenchError, interrupt_on_sigterm, load_prompts
from tools.chaos_check import KINDS as FAULT_KINDS
from tools.chaos_check import kinds_of
from tools.chaos_kill import HOWS, KillError, cells_of, plan
from tools.chaos_picture import picture
from tools.chaos_processes import SUPERVISOR
from tools.chaos_report import Phase, document_of, faults_text, phase_text, rows_of, step_ms, table_text
from tools.chaos_requests import KINDS
from tools.chaos_session import Session

PROMPT_CHARS_MAX = 4000
SWITCH_S = 0.0005  # the threads that watch the dying read a clock: they may not wait long for the load's thread


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    parser = argparse.ArgumentParser("chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--kills", type=int, default=50, metavar="N", help="of each stage with each signal; 0: only load"
    )
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="clients at once")
    parser.add_argument(
        "--stage",
        default="all",
        metavar="NAME,...",
        help="a+b: both at once, or b while a comes back; also: supervisor",
    )
    parser.add_argument("--signal", default="KILL,STOP,ABRT,exit", metavar="HOW,...", help=", ".join(HOWS))
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the requests, the order and the instants")
    parser.add_argument("--model", default="", metavar="MODEL", help="as `stepahead serve` takes it")
    parser.add_argument("--start", default="", metavar="ARGS", help="options of `stepahead serve`")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="different ones; by default 2 a stream")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="of an answer, at most")
    parser.add_argument(
        "--apart", type=_seconds, default=(0.1, 0.5), metavar="MIN,MAX", help="seconds from recovery to the next kill"
    )
    parser.add_argument("--bound", type=float, default=30.0, metavar="SECONDS", help="that a recovery may take")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="that a request may take")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE", help="jsonl with a `prompt` per line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was seen")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the streams with the kills")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's lines, behind those that are there")
    parser.add_argument(
        "--plant",
        default="",
        metavar="FAULTS",
        help=f"start the server with {VARIABLE} set to this: rules to break ({', '.join(WRONGS)}), or faults as "
        "NAME=ACTION[@N][+SECONDS][#EPOCH][?VALUE], the names being in ARCHITECTURE.md",
    )
    parser.add_argument(
        "--expect",
        type=_kinds,
        metavar="KIND,...",
        help=f"negative control: succeed only if one of these was found ({', '.join(FAULT_KINDS)})",
    )
    parser.add_argument("--api-key", default=os.environ.get("STEPAHEAD_API_KEY"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints, writes. Returns 0 if all is as it has to be, 1 if not, 130 if it was interrupted."""
    options = parse(argv)
    interrupt_on_sigterm()
    sys.setswitchinterval(SWITCH_S)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    phases: list[Phase] = []
    try:
        progress = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
        with progress:
            step = uvloop.run(run(options, progress, phases))
    except (BenchError, KillError) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the server that was started has ended by now
        print(faults_text(phases), file=sys.stderr)
        return 130
    rows = rows_of(phases)
    print(table_text(rows, step))
    if told := faults_text(phases):
        print(told)
    if options.json:
        names = ("seed", "kills", "streams", "stage", "signal", "model", "start", "tokens", "plant")
        about = {name: getattr(options, name) for name in names}
        options.json.write_bytes(orjson.dumps(document_of(phases, step, about), option=orjson.OPT_INDENT_2) + b"\n")
    if options.picture:
        options.picture.write_text(picture(phases, step))
    if options.expect:
        found = {kind for phase in phases for story in phase.stories for kind in kinds_of(story.faults)}
        return 0 if found & options.expect else 1
    return 0 if all(row.is_clean for row in rows) else 1


async def run(options: argparse.Namespace, progress: Progress, phases: list[Phase]) -> float:
    """Carry out everything; `phases` grows meanwhile. Returns the milliseconds of a step in calm. Raises BenchError."""
    cells = cells_of(options.stage, options.signal) if options.kills else []
    prompts = load_prompts(options.prompts, PROMPT_CHARS_MAX)
    count = options.requests or max(len(KINDS), 2 * options.streams)
    with Session(
        f"{options.model} {options.start}".strip(),
        streams=options.streams,
        api_key=options.api_key,
        timeout_s=options.timeout,
        bound_s=options.bound,
        plant=options.plant,
        log=options.log,
    ) as session:
        bar = progress.add_task("without faults", total=count + 1)
        calm = await session.baseline(options.seed, prompts, count, options.tokens, lambda: progress.advance(bar))
        progress.remove_task(bar)
        again = progress.add_task("the same again", total=count)
        phases.append(await session.phase((), str(options.seed), lambda: progress.advance(again)))
        progress.remove_task(again)
        bar = progress.add_task("kills", total=len(cells) * options.kills, visible=bool(cells))
        for number, kills in enumerate(plan(options.seed, cells, options.kills, options.apart)):
            seed = f"{options.seed} {number}"
            if SUPERVISOR in kills[0].cell.stages:
                phases.append(await session.supervisor_phase(kills[0], seed))
                progress.advance(bar)
            else:
                phases.append(await session.phase(kills, seed, lambda: progress.advance(bar)))
            progress.console.print(phase_text(phases[-1]), soft_wrap=True)
    return step_ms(calm)


def _seconds(text: str) -> tuple[float, float]:
    least, _, most = text.partition(",")
    found = float(least), float(most or least)
    if not 0 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError("must be MIN,MAX in seconds")
    return found


def _kinds(text: str) -> set[str]:
    kinds = set(text.split(","))
    if kinds - set(FAULT_KINDS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(FAULT_KINDS)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
