"""Measures OpenAI-compatible servers: throughput, time to first token, inter-token latency, steps, idle device time.

Closed loop: N lanes each send the next prompt as soon as their last answer is complete. Servers are measured in turn
within every repeat, so that a change of the machine's mood meets all of them; medians over the repeats are printed.
It reaches a server by its URL, or starts `stepahead serve` as a subprocess (`--start`); it never imports the server.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.bench_figures import Counters, Figures, figures, medians, paired, read_counters, table_text
from tools.chaos_processes import is_complete, samples
from tools.openai_stream import Lane, Timing

PROMPTS = Path(__file__).with_name("data") / "sharegpt_prompts.jsonl"
START_SECONDS_MAX = 900
STANDBY_SECONDS_MAX = 20  # for all standbys to be prepared
Results = dict[str, list[Figures]]  # by server name
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class BenchError(Exception):
    """Something that the person at the terminal can mend; its text is the one line to show."""


@dataclass(frozen=True)
class Server:
    """One server to measure. `process` is set for those that this run started."""

    name: str
    url: str
    model: str
    process: subprocess.Popen[bytes] | None = None


def get(url: str, api_key: str | None) -> bytes:
    """Returns the body of a GET. Raises OSError (urllib's errors are ones) when it does not come with status 200."""
    request = urllib.request.Request(url)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
        return body


def connect(name: str, url: str, api_key: str | None, process: subprocess.Popen[bytes] | None = None) -> Server:
    """Asks the server for its model's name. Raises BenchError when it does not answer."""
    try:
        models = orjson.loads(get(f"{url}/v1/models", api_key))
        return Server(name, url, models["data"][0]["id"], process)
    except (OSError, ValueError, LookupError) as error:
        raise BenchError(f"{name}: no list of models at {url}/v1/models ({error})") from error


def start(
    arguments: str, api_key: str | None, stderr: IO[bytes] | None = None, env: Mapping[str, str] | None = None
) -> Server:
    """Starts `stepahead serve` with `arguments` on a free port and waits until it is ready. Raises BenchError.

    stderr: where its lines go; env: its environment. Both are this process's own by default.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--log-seconds", "0", *arguments.split(), "--port", str(port)]  # its lines would stand in our table
    command = [sys.executable, "-m", "frontend.cli", "serve", *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=env)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS_MAX
    try:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                get(f"{url}/ready", api_key)
                _await_standbys(url, api_key)
                return connect(f"stepahead {arguments}".strip(), url, api_key, process)
            time.sleep(0.2)
        status = "did not get ready" if process.returncode is None else f"ended with status {process.returncode}"
        raise BenchError(f"stepahead serve {arguments} {status}")
    except BaseException:
        stop(process)
        raise


def _await_standbys(url: str, api_key: str | None) -> None:
    """Wait a while for the last processes that a server starts, which would be measured as well. Raises OSError."""
    deadline = time.monotonic() + STANDBY_SECONDS_MAX
    while not is_complete(samples(get(f"{url}/metrics", api_key).decode())) and time.monotonic() < deadline:
        time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a started server; kills it when it takes longer than 40 s."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def interrupt_on_sigterm() -> None:
    """Make SIGTERM of this process what Ctrl-C is, so that it too ends the servers that were started."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def counters(server: Server, api_key: str | None) -> Counters | None:
    """Returns the server's step counters, or None when it has no such metrics."""
    try:
        return read_counters(get(f"{server.url}/metrics", api_key).decode())
    except (OSError, ValueError):
        return None


def request_body(options: argparse.Namespace, model: str, prompt: str) -> dict[str, Any]:
    """Builds the request for one prompt: greedy, of exactly --output-tokens tokens (or of as many as the model has to
    say, but no more), streamed with the token count.
    """
    text = {"messages": [{"role": "user", "content": prompt}]} if options.endpoint == "chat" else {"prompt": prompt}
    return text | {
        "model": model,
        "max_tokens": options.output_tokens,
        "ignore_eos": not options.natural_ends,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def one_run(
    options: argparse.Namespace, server: Server, concurrency: int, prompts: list[str], advance: Callable[[], None]
) -> Figures:
    """Sends all `prompts` over `concurrency` lanes and sums up. `advance()` is called after each answer."""
    bodies = iter([request_body(options, server.model, prompt) for prompt in prompts])
    answers = []
    lanes = [Lane(server.url, options.api_key) for _ in range(concurrency)]

    async def drive(lane: Lane) -> None:
        for body in bodies:
            answers.append(await lane.ask(PATHS[options.endpoint], body, options.timeout))
            advance()

    before = counters(server, options.api_key)
    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(drive(lane) for lane in lanes))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    after = counters(server, options.api_key)
    for lane in lanes:
        lane.close()
    timings: list[Timing] = [answer.parsed() for answer in answers]
    for error in {timing.error for timing in timings if timing.error}:
        print(f"{server.name}: {error}", file=sys.stderr)
    return figures(concurrency, timings, seconds, cpu_seconds, before, after)


def rounds_of(options: argparse.Namespace, concurrency: int) -> int:
    """Returns the number of requests of one run: full rounds of the lanes, and at least 8."""
    return int(options.requests or max(8, options.rounds * concurrency))


async def measure(
    options: argparse.Namespace, servers: list[Server], prompts: list[str], progress: Progress
) -> tuple[Results, Results]:
    """Runs every level, repeat and server. Returns {server name: [median Figures per level]} and all single runs."""
    results: Results = {server.name: [] for server in servers}
    singles: Results = {server.name: [] for server in servers}
    for server in servers:
        bar = progress.add_task(f"{server.name}: warm-up", total=max(options.concurrency))
        warm = list(itertools.islice(itertools.cycle(prompts[-64:]), max(options.concurrency)))
        await one_run(options, server, max(options.concurrency), warm, functools.partial(progress.advance, bar))
        progress.remove_task(bar)
    source = itertools.cycle(prompts)
    for level in options.concurrency:
        runs: Results = {server.name: [] for server in servers}
        for repeat in range(options.repeat):
            # The same prompts for every server, new ones for every repeat: a prefix cache gains nothing from repeats.
            batch = list(itertools.islice(source, rounds_of(options, level)))
            turn = repeat % len(servers)  # nobody is always the first, or behind the same one
            for server in servers[turn:] + servers[:turn]:
                label = f"{server.name}: {level} at once, {repeat + 1}/{options.repeat}"
                bar = progress.add_task(label, total=len(batch))
                run = await one_run(options, server, level, batch, functools.partial(progress.advance, bar))
                runs[server.name].append(run)
                progress.remove_task(bar)
        for name, of_server in paired(runs).items():
            singles[name] += of_server
            results[name].append(medians(of_server))
    return results, singles


def load_prompts(path: Path, chars_max: int) -> list[str]:
    """Reads a jsonl file with a `prompt` per line, leaving out those of more than `chars_max` characters."""
    try:
        lines = path.read_bytes().splitlines()
        prompts = [prompt for line in lines if len(prompt := orjson.loads(line)["prompt"]) <= chars_max]
    except (OSError, ValueError, LookupError) as error:
        raise BenchError(f"{path}: not a jsonl file of prompts ({error})") from error
    if not prompts:
        raise BenchError(f"{path}: no prompt of at most {chars_max} characters")
    return prompts


@contextlib.contextmanager
def all_servers(options: argparse.Namespace) -> Iterator[list[Server]]:
    """Connects to the given servers and starts the others; ends those that it started."""
    servers: list[Server] = []
    try:
        for entry in options.server:
            name, _, url = entry.rpartition("=")
            servers.append(connect(name or url, url.rstrip("/").removesuffix("/v1"), options.api_key))
        for arguments in options.start or ([] if servers else [""]):
            servers.append(start(arguments, options.api_key))
        yield servers
    finally:
        for server in servers:
            if server.process is not None:
                stop(server.process)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line. argparse ends the process with status 2 for what it does not understand."""
    more = "whether the device waits: stepahead bench overlap, floor or engine, each with its own --help"
    parser = argparse.ArgumentParser("bench_serve", description=(__doc__ or "").partition("\n")[0], epilog=more)
    parser.add_argument(
        "--server", action="append", default=[], metavar="[NAME=]URL", help="a running server; repeatable"
    )
    parser.add_argument(
        "--start", action="append", nargs="?", const="", metavar="ARGS", help="start `stepahead serve ARGS`; repeatable"
    )
    parser.add_argument(
        "--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32], metavar="N,N,..."
    )
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--natural-ends", action="store_true", help="answers may end before --output-tokens")
    parser.add_argument("--rounds", type=int, default=3, help="requests per lane and run (at least 8 in all)")
    parser.add_argument("--requests", type=int, help="requests per run, whatever the number of lanes")
    parser.add_argument("--repeat", type=int, default=3, help="runs per setting; the medians are printed")
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="jsonl with a `prompt` per line")
    parser.add_argument("--prompt-chars-max", type=int, default=4000)
    parser.add_argument("--api-key", default=os.environ.get("STEPAHEAD_API_KEY"))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one request may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all runs to this file (- = stdout)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints. Returns 0, or 1 with one line on stderr when a server or a request failed."""
    options = parse(argv)
    interrupt_on_sigterm()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        prompts = load_prompts(options.prompts, options.prompt_chars_max)
        progress = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
        with all_servers(options) as servers, progress:
            results, singles = uvloop.run(measure(options, servers, prompts, progress))
    except BenchError as error:
        print(f"bench_serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of the terminal, or SIGTERM: the servers that were started have ended by now
        return 130
    if options.json:
        document = {
            kind: {name: [asdict(one) for one in runs] for name, runs in table.items()}
            for kind, table in (("medians", results), ("runs", singles))
        }
        text = orjson.dumps(document, option=orjson.OPT_INDENT_2)
        if str(options.json) == "-":
            sys.stdout.buffer.write(text + b"\n")
        else:
            options.json.write_bytes(text + b"\n")
    if str(options.json) != "-":
        print(f"{options.endpoint}, {options.output_tokens} tokens out, medians of {options.repeat} runs")
        print(table_text(results))
    return 1 if any(one.failed for runs in singles.values() for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
