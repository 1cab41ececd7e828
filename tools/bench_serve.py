"""Measures OpenAI-compatible servers: throughput, time to first token, inter-token latency, steps, idle device time.

Closed loop: N lanes each send the next prompt as soon as their last answer is complete. Open loop: requests leave at
random times, so many a second. Servers are measured in turn within every repeat, so that a change of the machine's mood
meets all of them; medians over the repeats are printed.
It reaches a server by its URL, or starts `stepahead serve` as a subprocess (`--start`); it never imports the server.
"""

import argparse
import contextlib
import functools
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import uvloop
from rich.progress import Progress

from tools.bench_datasets import (
    FEW_SHOT_STOP,
    SHAREGPT,
    DatasetError,
    Prompt,
    arrivals_s,
    gsm8k,
    ordered,
    random_ids,
    shared_prefix,
    sharegpt,
)
from tools.bench_figures import Counters, Figures, figures, medians, paired, read_counters, table_text
from tools.bench_outputs import about_of, put_out, shown_progress
from tools.chaos_processes import is_complete, samples
from tools.serve_load import Target, closed_loop, open_loop
from tools.serve_options import PATHS, Level, levels_of, parse, requests_of
from tools.serve_picture import picture

PROMPTS = SHAREGPT
WARM_LANES, WARM_PROMPTS = 8, 64  # of an open loop's warm-up; the prompts that any is made of, at least
START_SECONDS_MAX = 900
STANDBY_SECONDS_MAX = 20  # for all standbys to be prepared
Results = dict[str, list[Figures]]  # by server name


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


def connect(
    name: str,
    url: str,
    api_key: str | None,
    process: subprocess.Popen[bytes] | None = None,
    model: str | None = None,
) -> Server:
    """Asks the server for its model's name, unless it is given. Raises BenchError when it does not answer."""
    if model:
        return Server(name, url, model, process)
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


def request_body(options: argparse.Namespace, model: str, prompt: Prompt) -> dict[str, Any]:
    """Builds the request for one prompt: greedy, of exactly --output-tokens tokens (or of as many as the model has to
    say, but no more), streamed with the token count.
    """
    chat = options.endpoint == "chat"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {
        "model": model,
        "max_tokens": options.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not options.natural_ends:
        body["ignore_eos"] = True  # only sent where it matters: OpenAI's own servers refuse it
    elif options.dataset == "gsm8k":
        body["stop"] = [FEW_SHOT_STOP]
    return body


async def one_run(
    options: argparse.Namespace,
    server: Server,
    level: Level,
    prompts: Sequence[Prompt],
    seed: str,
    advance: Callable[[], None],
) -> Figures:
    """Sends all `prompts` and sums up. seed: of the times in an open loop. `advance()` is called after each answer."""
    bodies = [request_body(options, server.model, prompt) for prompt in prompts]
    target = Target(server.url, PATHS[options.endpoint], options.api_key, options.timeout)
    before = counters(server, options.api_key)
    began, cpu_began = time.perf_counter(), time.process_time()
    if level.rate is None:
        sent = await closed_loop(target, bodies, level.at_once, advance)
    else:
        sent = await open_loop(target, bodies, arrivals_s(len(bodies), level.rate, seed), advance)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    after = counters(server, options.api_key)
    timings = [answer.parsed() for answer in sent.answers]
    for error in {timing.error for timing in timings if timing.error}:
        print(f"{server.name}: {error}", file=sys.stderr)
    return figures(sent.at_once, timings, seconds, cpu_seconds, before, after, level.rate, sent.late_s)


async def measure(
    options: argparse.Namespace, servers: list[Server], prompts: list[Prompt], progress: Progress
) -> tuple[Results, Results]:
    """Runs every level, repeat and server. Returns {server name: [median Figures per level]} and all single runs."""
    results: Results = {server.name: [] for server in servers}
    singles: Results = {server.name: [] for server in servers}
    levels = levels_of(options)

    async def shown(server: Server, level: Level, batch: list[Prompt], told: str, seed: str = "") -> Figures:
        bar = progress.add_task(f"{server.name}: {told}", total=len(batch))
        run = await one_run(options, server, level, batch, seed, functools.partial(progress.advance, bar))
        progress.remove_task(bar)
        return run

    warm = Level(max(level.at_once for level in levels) or WARM_LANES)
    last = prompts[-_warm_prompts(options) :]  # every shared prefix is among them
    for server in servers:
        count = max(warm.at_once, options.prefixes if options.dataset == "prefix" else 0)
        await shown(server, warm, list(itertools.islice(itertools.cycle(last), count)), "warm-up")
    source = itertools.cycle(prompts)
    for level in levels:
        runs: Results = {server.name: [] for server in servers}
        for repeat in range(options.repeat):
            # The same prompts for every server, new ones for every repeat: a prefix cache gains nothing from repeats.
            batch = list(itertools.islice(source, requests_of(options, level)))
            turn = repeat % len(servers)  # nobody is always the first, or behind the same one
            for server in servers[turn:] + servers[:turn]:
                told, seed = f"{level}, {repeat + 1}/{options.repeat}", f"{options.seed or 0} {level} {repeat}"
                runs[server.name].append(await shown(server, level, batch, told, seed))
        for name, of_server in paired(runs).items():
            singles[name] += of_server
            results[name].append(medians(of_server))
    return results, singles


def _warm_prompts(options: argparse.Namespace) -> int:
    return max(WARM_PROMPTS, int(options.prefixes))


def load_prompts(path: Path, chars_max: int) -> list[str]:
    """Reads a file of prompts, leaving out those of more than `chars_max` characters. Raises BenchError."""
    try:
        return sharegpt(path, chars_max)
    except DatasetError as error:
        raise BenchError(str(error)) from error


def prompts_of(options: argparse.Namespace) -> list[Prompt]:
    """All prompts of a run. Raises BenchError or DatasetError."""
    if options.dataset in ("random", "prefix"):
        if options.endpoint == "chat":
            raise BenchError(f"--dataset {options.dataset} is token ids, which only --endpoint completions takes")
        count = _warm_prompts(options) + options.repeat * sum(
            requests_of(options, level) for level in levels_of(options)
        )
        seed = options.seed or "0"
        if options.dataset == "random":
            return [*random_ids(count, options.input_tokens, options.id_range, seed)]
        tokens = (options.prefix_tokens, options.input_tokens)
        return [*shared_prefix(count, options.prefixes, tokens, options.id_range, seed)]
    if options.dataset == "gsm8k":
        if options.prompts is None:
            raise BenchError("--dataset gsm8k needs --prompts FILE, a jsonl file with `question` and `answer`")
        return ordered(gsm8k(options.prompts, options.shots), options.seed)
    return ordered(sharegpt(options.prompts or PROMPTS, options.prompt_chars_max), options.seed)


@contextlib.contextmanager
def all_servers(options: argparse.Namespace) -> Iterator[list[Server]]:
    """Connects to the given servers and starts the others; ends those that it started."""
    servers: list[Server] = []
    try:
        for entry in options.server:
            name, _, url = entry.rpartition("=")
            servers.append(
                connect(name or url, url.rstrip("/").removesuffix("/v1"), options.api_key, model=options.model)
            )
        for arguments in options.start or ([] if servers else [""]):
            servers.append(start(arguments, options.api_key))
        yield servers
    finally:
        for server in servers:
            if server.process is not None:
                stop(server.process)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 0, or 1 with one line on stderr when a server or a request failed."""
    options = parse(argv)
    interrupt_on_sigterm()
    try:
        prompts = prompts_of(options)
        with all_servers(options) as servers, shown_progress() as progress:
            results, singles = uvloop.run(measure(options, servers, prompts, progress))
    except (BenchError, DatasetError) as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # of the terminal, or SIGTERM: the servers that were started have ended by now
        return 130
    document: dict[str, object] = {
        kind: {name: [asdict(one) for one in runs] for name, runs in table.items()}
        for kind, table in (("medians", results), ("runs", singles))
    }
    asked = f"{options.endpoint}, {options.dataset}, {options.output_tokens} tokens out"
    table = f"{asked}, medians of {options.repeat} runs\n{table_text(results)}"
    put_out(options, {"about": about_of(options)} | document, table, lambda: picture(results))
    return 1 if any(one.failed for runs in singles.values() for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
