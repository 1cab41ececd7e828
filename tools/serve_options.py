"""The options of `stepahead bench serve`, and how much load they ask for.

Owns the command line; it reaches no server and reads no file.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench_datasets import DATASETS
from tools.bench_outputs import add_files

ABOUT = "Measures OpenAI-compatible servers: throughput, and the time to the first token, between tokens and in all."
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REQUESTS_MIN = 8  # of a run


@dataclass(frozen=True)
class Level:
    """How much is asked of a server: requests at once, or (`rate`) requests a second."""

    at_once: int = 0
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.at_once} at once" if self.rate is None else f"{self.rate:g} a second"


def levels_of(options: argparse.Namespace) -> list[Level]:
    """All levels of a run, in turn."""
    return [Level(rate=rate) for rate in options.rate or ()] or [Level(at_once) for at_once in options.concurrency]


def rounds_of(options: argparse.Namespace, concurrency: int) -> int:
    """Returns the number of requests of one run: full rounds of the lanes, and at least 8."""
    return int(options.requests or max(REQUESTS_MIN, options.rounds * concurrency))


def requests_of(options: argparse.Namespace, level: Level) -> int:
    """The same for an open loop too, which goes on for --seconds."""
    if level.rate is None:
        return rounds_of(options, level.at_once)
    return int(options.requests or max(REQUESTS_MIN, round(options.seconds * level.rate)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    more = "whether the device waits: stepahead bench overlap, floor or engine; two processes: ring; each with --help"
    parser = argparse.ArgumentParser("bench serve", description=ABOUT, epilog=more)
    parser.add_argument(
        "--server", action="append", default=[], metavar="[NAME=]URL", help="a running server; repeatable"
    )
    parser.add_argument(
        "--start", action="append", nargs="?", const="", metavar="ARGS", help="start `stepahead serve ARGS`; repeatable"
    )
    parser.add_argument("--model", metavar="NAME", help="of the running servers; the first that each one lists")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_numbers(int), default=[1, 8, 32], metavar="N,N,...", help="closed loop")
    told = "open loop: requests a second, at random times (Poisson)"
    load.add_argument("--rate", type=_numbers(float), metavar="R,R,...", help=told)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run with --rate (at least 8 requests)")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--natural-ends", action="store_true", help="answers may end before --output-tokens")
    parser.add_argument("--rounds", type=int, default=3, help="requests per lane and run (at least 8 in all)")
    parser.add_argument("--requests", type=int, help="requests per run, whatever the number of lanes")
    parser.add_argument("--repeat", type=int, default=3, help="runs per setting; the medians are printed")
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--api-key", default=os.environ.get("STEPAHEAD_API_KEY"))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one request may take")
    _add_dataset(parser)
    add_files(parser)
    return parser.parse_args(argv)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    told = "sharegpt: first questions of conversations; random: token ids; prefix: ids behind shared prefixes; gsm8k"
    parser.add_argument("--dataset", choices=DATASETS, default="sharegpt", help=told)
    told = "ShareGPT's JSON, or jsonl with a `prompt` a line (some come with the program); GSM8K's jsonl"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=told)
    parser.add_argument("--prompt-chars-max", type=int, default=4000, metavar="N", help="sharegpt")
    parser.add_argument("--seed", help="of ids (0), arrivals (0), and the order of a file's prompts (as they are)")
    parser.add_argument("--input-tokens", type=int, default=256, metavar="N", help="random, prefix: of a request alone")
    parser.add_argument("--prefixes", type=int, default=8, metavar="N", help="prefix: how many there are")
    parser.add_argument("--prefix-tokens", type=int, default=512, metavar="N", help="prefix: of each")
    told = "random, prefix: every id is one of these"
    parser.add_argument("--id-range", type=_id_range, default=(1000, 20_000), metavar="LOW,END", help=told)
    parser.add_argument("--shots", type=int, default=5, metavar="N", help="gsm8k: answered questions before each")


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def numbers(text: str) -> list[Any]:
        found = [kind(number) for number in text.split(",")]
        if not all(0 < number < float("inf") for number in found):
            raise argparse.ArgumentTypeError("must be positive numbers")
        return found

    return numbers


def _id_range(text: str) -> tuple[int, int]:
    low, end = (int(number) for number in text.split(","))
    if not 0 <= low < end:
        raise argparse.ArgumentTypeError("must be two ids, the second one larger")
    return low, end
