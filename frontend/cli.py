"""The one entry point, `stepahead serve | generate | bench | chaos`, and the root where the parts are put together.

Owns the exit status and the promise that what a user can mend is one line on stderr. It computes nothing, and it
imports what a command needs only when that command runs, so that --help stays instant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from setproctitle import setproctitle

from frontend import cli_options as opt
from frontend.log_writer import LOG, leave, open_closed_streams

if TYPE_CHECKING:
    from frontend.cli_config import Wanted
    from frontend.cli_generate import Question
    from procs.supervisor import Supervisor
    from shm.config import ServerConfig

# What `stepahead bench NAME` runs; without one of these names it is tools.bench_serve.
INSTRUMENTS = {name: f"tools.bench_{name}" for name in ("overlap", "floor", "engine", "ring", "serve")}
DEFAULT_MODEL = "smollm2-135m-instruct"

app = typer.Typer(
    help="Serves language models so that the device never waits for the CPU.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def serve(
    model: opt.Model = DEFAULT_MODEL,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    api_key: opt.ApiKey = None,
    served_model_name: opt.ServedModelName = None,
    max_running: opt.MaxRunning = 64,
    max_queued: opt.MaxQueued = 1024,
    kv_tokens: opt.KvTokens = None,
    page_size: opt.PageSize = 16,
    max_len: opt.MaxLen = None,
    device: opt.Device = "host",
    dtype: opt.Dtype = None,
    overlap: opt.Overlap = True,
    standby: opt.Standby = True,
    threads: opt.Threads = None,
    prefill_chunk: opt.PrefillChunk = 256,
    drain_seconds: opt.DrainSeconds = 30.0,
    poison: opt.Poison = False,
    speculate: opt.Speculate = "off",
    draft_tokens: opt.DraftTokens = 3,
    draft_when: opt.DraftWhen = "auto",
    ngram_shared: opt.NgramShared = False,
    log_seconds: opt.LogSeconds = 10.0,
    check_order: opt.CheckOrder = False,
) -> None:
    """Serve MODEL over HTTP, as the OpenAI API, until SIGTERM or Ctrl-C."""
    from frontend.cli_config import Wanted

    given = locals()
    wanted = Wanted(**{name: given[name] for name in Wanted.__dataclass_fields__})
    with LOG:
        raise typer.Exit(run_serve(wanted))


@app.command()
def generate(
    text: opt.Text,
    model: opt.ModelOption = DEFAULT_MODEL,
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = None,
    raw: opt.Raw = False,
    system: opt.SystemText = None,
    device: opt.Device = "host",
    dtype: opt.Dtype = None,
    overlap: opt.Overlap = True,
    threads: opt.Threads = None,
    max_len: opt.MaxLen = None,
) -> None:
    """Answer one prompt on the terminal, through the same processes that serve."""
    from frontend.cli_config import Wanted
    from frontend.cli_generate import Question

    wanted = Wanted(
        model=model,
        host="127.0.0.1",
        port=0,
        api_key=secrets.token_urlsafe(24),  # others on this machine can reach the port
        max_running=1,
        max_queued=1,
        kv_tokens=None,
        page_size=16,
        max_len=max_len,
        device=device,
        dtype=dtype,
        overlap=overlap,
        standby=False,  # it is over before there would be any
        threads=threads,
        prefill_chunk=512,
        drain_seconds=0.0,
    )
    prompt = sys.stdin.read() if text == "-" else text
    question = Question(text=prompt, system=system, raw=raw, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with LOG:
        raise typer.Exit(run_generate(wanted, question))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure a server: throughput, time to first token, inter-token latency. `stepahead bench --help` says more.

    `stepahead bench serve` is the same. Whether the device waits: `overlap`, `floor`, `engine`; what a message between
    two processes costs: `ring`; each with its own --help.
    """
    name, *rest = context.args or [""]
    instrument = INSTRUMENTS.get(name)
    module = importlib.import_module(instrument or "tools.bench_serve")
    raise typer.Exit(module.main(rest if instrument else context.args))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def chaos(context: typer.Context) -> None:
    """Kill a server's processes under load and check every answer. `stepahead chaos --help` says more."""
    from tools.chaos import main as chaos_main

    raise typer.Exit(chaos_main(context.args))


def run_serve(wanted: Wanted) -> int:
    """Serve until told to stop; return the exit status."""
    from frontend.cli_report import ServeReport, StartLine

    with server_for(wanted) as (config, supervisor):
        return supervisor.run(ServeReport(config, StartLine()))


def run_generate(wanted: Wanted, question: Question) -> int:
    """Start a server, put one question to it, print the answer, stop it; return the exit status."""
    from frontend.cli_config import CliError
    from frontend.cli_generate import Asker
    from frontend.cli_report import QuietReport, StartLine, tell, url_of

    try:
        question.check()
    except CliError as error:
        tell(str(error))
        return 1
    with server_for(wanted) as (config, supervisor):
        asker = Asker(question, url_of(config), config.served_model_name, config.api_key or "", supervisor.stop)
        status = supervisor.run(QuietReport(StartLine(), asker.start))
    asker.join()
    if status == 0 and not asker.complete:
        if supervisor.interrupted_by:
            return 128 + supervisor.interrupted_by
        tell(asker.error or "the answer broke off")
        return 1
    return status


@contextlib.contextmanager
def server_for(wanted: Wanted) -> Iterator[tuple[ServerConfig, Supervisor]]:
    """Bind the port, find the model, and give a server that can be run.

    What the user can mend, here or while it runs, is told in one line and ends the program with status 1.
    """
    from frontend.cli_config import CliError, make_config
    from frontend.cli_report import log_console, tell
    from procs.child_specs import check_package_names
    from procs.listener import open_listener
    from procs.model_files import ModelError
    from procs.model_progress import show_progress
    from procs.supervisor import Supervisor
    from shm.child import StartupError

    try:
        check_package_names()
        # First of all: nobody should wait for a download to be told that the port is taken.
        with contextlib.closing(open_listener(wanted.host, wanted.port)) as listener:
            with show_progress(log_console()) as progress:
                config = make_config(dataclasses.replace(wanted, port=listener.getsockname()[1]), progress)
            setproctitle("stepahead: supervisor")
            yield config, Supervisor(config, listener)
    except (CliError, ModelError, StartupError) as error:
        tell(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    """Run the command line. The process ends with the status of its command."""
    open_closed_streams()
    try:
        app()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
