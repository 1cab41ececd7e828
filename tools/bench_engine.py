"""What the engine itself costs: `stepahead bench engine`.

Serves a model that computes next to nothing, two random layers with a vocabulary of 49,152, so that what is left is the
server: processes, rings, sampling, text, HTTP. Says tokens/s and the processor time of every stage for a token, with
answers streamed and not, at each number of requests at once. A prompt's answer has to be the same tokens in every
setting.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.bench_figures import aligned
from tools.bench_outputs import about_of, add_outputs, levels_of, put_out, shown_progress
from tools.bench_run import Ask, Bench, Load, prompts, serving
from tools.bench_serve import BenchError, interrupt_on_sigterm
from tools.bench_watch import Seen
from tools.random_llama import VOCAB, write_random_llama
from tools.step_figures import StepFigures, figures
from tools.svg_document import document

PROMPT_TOKENS = 12  # less than a page, so that the cache of prefixes gains nothing when a prompt comes again
REQUESTS_MIN = 8
STAGES = ("frontend", "tokenizer", "scheduler", "gpu", "detokenizer")
Answers = dict[tuple[int, ...], list[int]]  # of prompts that have been asked already


@dataclass(frozen=True)
class Row:
    """One setting. cpu_us: processor time of each stage, and of the client, for a token."""

    at_once: int
    streamed: bool
    tokens_per_s: float
    ttft_ms: float | None
    steps: StepFigures
    cpu_us: dict[str, float]
    requests: int
    wrong: int
    failed: int


def row_of(at_once: int, streamed: bool, load: Load, seen: Seen) -> Row:
    """Sums up one run. Raises BenchError, with the first failure, for one that saw no steps."""
    steps = figures(seen.spans)
    if steps is None or not load.tokens:
        raise BenchError(f"{at_once} at once: no steps were seen ({load.error})")
    ttft_s = seen.mean_s("frontend", "ttft_s")
    cpu_us = {stage: seen.cpu_ns.get(stage, 0) / load.tokens / 1e3 for stage in STAGES}
    return Row(
        at_once=at_once,
        streamed=streamed,
        tokens_per_s=load.tokens_per_s,
        ttft_ms=None if ttft_s is None else 1e3 * ttft_s,
        steps=steps,
        cpu_us=cpu_us | {"client": load.client_cpu_s * 1e6 / load.tokens},
        requests=load.requests,
        wrong=load.wrong,
        failed=load.failed,
    )


def asks_of(drawn: Sequence[list[int]], number: int, tokens: int, known: Answers) -> list[Ask]:
    """`number` requests over the prompts in turn, with the answers that are known by now."""
    asked = [drawn[i % len(drawn)] for i in range(number)]
    return [Ask(prompt, tokens, known.get(tuple(prompt))) for prompt in asked]


def learn(asks: Sequence[Ask], load: Load, known: Answers) -> None:
    """Take note of the answers of prompts that were asked for the first time."""
    for ask, ids in zip(asks, load.ids, strict=True):
        if len(ids) == ask.count:
            known.setdefault(tuple(ask.prompt), list(ids))


def measure(bench: Bench, options: argparse.Namespace, said: Callable[[str], None]) -> list[Row]:
    """All settings, those of few requests first: their answers are what the others' are compared with."""
    drawn = prompts(options.seed, max(REQUESTS_MIN, *options.concurrency), PROMPT_TOKENS, VOCAB)
    known: Answers = {}
    warm = prompts(f"{options.seed} warm", REQUESTS_MIN, PROMPT_TOKENS, VOCAB)
    bench.run(asks_of(warm, REQUESTS_MIN, 8, {}), REQUESTS_MIN)  # discarded
    rows: list[Row] = []
    for at_once in options.concurrency:
        for streamed in (False, True):
            said(f"{at_once} at once, {'streamed' if streamed else 'whole'}")
            number = max(REQUESTS_MIN, options.rounds * at_once)
            asks = asks_of(drawn, number, options.output_tokens, known)
            load, seen = bench.run(asks, at_once, stream=streamed)
            learn(asks, load, known)
            again = [replace(ask, wanted=known.get(tuple(ask.prompt))) for ask in asks]
            wrong = sum(list(ids) != ask.wanted for ask, ids in zip(again, load.ids, strict=True)) - load.failed
            rows.append(row_of(at_once, streamed, replace(load, wrong=wrong), seen))
    return rows


def table_text(rows: Sequence[Row]) -> str:
    """A line for each setting."""
    headings = ("at once", "answers", "tokens/s", "TTFT", "step", "gap p50", "p99", "prepare", "launch", "process")
    lines: list[Sequence[str]] = [(*headings, *STAGES, "client", "bad")]
    for row in rows:
        steps = row.steps
        us = (steps.step_us, steps.gap_us_p50, steps.gap_us_p99, steps.prepare_us, steps.launch_us, steps.process_us)
        lines.append(
            (
                *(str(row.at_once), "streamed" if row.streamed else "whole", f"{row.tokens_per_s:.0f}"),
                "-" if row.ttft_ms is None else f"{row.ttft_ms:.1f}",
                *(f"{one:.0f}" for one in us),
                *(f"{row.cpu_us[stage]:.1f}" for stage in (*STAGES, "client")),
                str(row.wrong + row.failed),
            )
        )
    legend = (
        "TTFT: mean in ms; step to process: medians in us, wall time; stages, client: processor time for a token, us\n"
        "bad: answers that failed, or were not the tokens that the same prompt had before"
    )
    return "\n".join([*aligned(lines, 2), legend])


STYLE = """
text { font: 12px sans-serif; fill: #202124; } .small { font-size: 10px; fill: #5f6368; } .end { text-anchor: end; }
.frontend { fill: #1a73e8; } .tokenizer { fill: #9aa0a6; } .scheduler { fill: #f9ab00; } .gpu { fill: #9334e6; }
.detokenizer { fill: #1e8e3e; } .client { fill: #dadce0; }
@media (prefers-color-scheme: dark) { text { fill: #e8eaed; } .small { fill: #9aa0a6; } .client { fill: #5f6368; } }
"""
WIDTH, LEFT, BARS, ROW, BAR = 860, 130, 560, 30, 18


def picture(rows: Sequence[Row]) -> str:
    """SVG: a bar for each setting, the processor time of a token by stage; beside it the tokens a second."""
    scale = BARS / max(1e-9, *(sum(row.cpu_us.values()) for row in rows))
    parts = [f'<text class="small" x="{LEFT}" y="16">processor time for a token, us</text>']
    x = LEFT + 170.0
    for stage in (*STAGES, "client"):
        parts.append(f'<rect class="{stage}" x="{x:.0f}" y="8" width="10" height="10"/>')
        parts.append(f'<text class="small" x="{x + 14:.0f}" y="17">{stage}</text>')
        x += 26 + 6.2 * len(stage)
    for number, row in enumerate(rows):
        y = 30 + number * ROW
        name = f"{row.at_once}, {'streamed' if row.streamed else 'whole'}"
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{y + 13}">{name}</text>')
        x = float(LEFT)
        for stage in (*STAGES, "client"):
            us = row.cpu_us[stage]
            box = f'x="{x:.1f}" y="{y}" width="{us * scale:.1f}" height="{BAR}"'
            parts.append(f'<rect class="{stage}" {box}><title>{stage} {us:.1f} us</title></rect>')
            x += us * scale
        parts.append(f'<text class="end" x="{WIDTH - 8}" y="{y + 13}">{row.tokens_per_s:.0f} tokens/s</text>')
    return document(WIDTH, 36 + ROW * len(rows), STYLE, parts)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    parser = argparse.ArgumentParser("bench engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--concurrency", type=levels_of, default=[1, 64, 256], metavar="N,N,...")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--rounds", type=int, default=2, help="requests of each connection (at least 8 in all)")
    parser.add_argument("--seed", default="0", help="of the prompts")
    add_outputs(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes. Returns 0; 1 if a server failed or an answer was wrong; 130 if it was interrupted."""
    options = parse(argv)
    interrupt_on_sigterm()
    most, length = max(options.concurrency), PROMPT_TOKENS + options.output_tokens + 32
    arguments = f"--max-running {most} --max-len {length} --kv-tokens {most * (length + 32)} {options.start}"
    try:
        with tempfile.TemporaryDirectory(prefix="stepahead-bench-") as folder, shown_progress() as progress:
            bar = progress.add_task("starting", total=None)
            model = write_random_llama(Path(folder) / "random")
            with serving(model, arguments.strip()) as bench:
                rows = measure(bench, options, lambda text: progress.update(bar, description=text))
    except BenchError as error:
        print(f"bench engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of the terminal, or SIGTERM: the server that was started has ended by now
        return 130
    document: dict[str, object] = {"about": about_of(options), "rows": [asdict(row) for row in rows]}
    put_out(options, document, table_text(rows), lambda: picture(rows))
    return 1 if any(row.wrong or row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
