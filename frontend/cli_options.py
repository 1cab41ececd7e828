"""The options of the command line as types: names, defaults' meaning, help and what each one costs.

Declares only. Values are checked where the configuration is made, not here, so that no rule stands in two places.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

LISTENING = "Where it listens"
SERVING = "What it serves"
HOLDING = "How much it holds at once (memory)"
RUNNING = "How it runs"
ANSWERING = "What it answers"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A known name, a folder in Hugging Face layout (safetensors), a .gguf file, or a hub id (org/name). "
        "The default is downloaded once (93 MB) and kept in the cache.",
    ),
]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="What `serve` takes as MODEL.", rich_help_panel=SERVING)
]

Host = Annotated[
    str,
    typer.Option(
        help="Address to bind. Beyond the loopback, anyone on the network can use the model: set --api-key then.",
        rich_help_panel=LISTENING,
    ),
]
Port = Annotated[int, typer.Option(help="TCP port; 0 takes a free one.", rich_help_panel=LISTENING)]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="STEPAHEAD_API_KEY",
        help="Key that every route but /health demands. Given as an option it shows in the shell's history.",
        rich_help_panel=LISTENING,
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="Name that requests use for the model; by default its own.", rich_help_panel=SERVING),
]
Device = Annotated[
    Literal["host", "cuda"],
    typer.Option(
        help="What computes. host: the CPU, with a GPU's ordering rules. cuda: the first NVIDIA GPU, which holds the "
        "weights and the KV cache.",
        rich_help_panel=RUNNING,
    ),
]
Dtype = Annotated[
    Literal["int8", "float32", "bfloat16"] | None,
    typer.Option(
        help="On the host, int8 by default: exact integer sums, fastest, 1 byte a weight. bfloat16: 2 bytes a weight, "
        "slower there, and the default on cuda. float32: the reference, 4 bytes a weight, slowest. On the host, an "
        "answer has the same bits whatever runs beside it.",
        rich_help_panel=RUNNING,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        help="Prepare the next step while this one runs. Without it the device waits between steps; the answers "
        "are the same.",
        rich_help_panel=RUNNING,
    ),
]
Standby = Annotated[
    bool,
    typer.Option(
        help="For every stage, keep a process that has been started already and takes its place when it dies: requests "
        "then wait some hundredths of a second for it, and not one to two. Costs 0.2 GB of memory, more with large "
        "vocabularies; and half a second of a CPU for each, once and after each death.",
        rich_help_panel=RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads that compute; by default as many as there are CPUs to use.", rich_help_panel=RUNNING),
]
PrefillChunk = Annotated[
    int,
    typer.Option(
        help="Prompt tokens that one step computes at most. More: prompts are read faster, but running answers stall "
        "for longer, and so do all behind a death. A GPU can do with some thousands.",
        rich_help_panel=RUNNING,
    ),
]
MaxRunning = Annotated[
    int,
    typer.Option(
        help="Requests that run at once. More: more tokens/s in all, fewer for each.", rich_help_panel=HOLDING
    ),
]
MaxQueued = Annotated[
    int,
    typer.Option(
        help="Requests that may wait; the next one gets 429 at once. Each costs 4 bytes per token of --max-len, used "
        "or not.",
        rich_help_panel=HOLDING,
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens that the KV cache holds, of all requests and the prefix cache together; all of it is taken at the "
        "start. Too few: requests are retracted and computed again. By default 65536, or what half of the free memory "
        "holds.",
        rich_help_panel=HOLDING,
    ),
]
PageSize = Annotated[
    int,
    typer.Option(
        help="Tokens per page; the host device takes multiples of 16. Larger: less book-keeping, more of the last page "
        "unused, coarser prefix cache.",
        rich_help_panel=HOLDING,
    ),
]
MaxLen = Annotated[
    int | None,
    typer.Option(
        help="Tokens of one request, prompt and answer together; by default what the model and the KV cache allow. "
        "Longer: 4 bytes a token for each of --max-running + --max-queued.",
        rich_help_panel=HOLDING,
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        help="On SIGTERM or Ctrl-C, how long running requests may take to finish. A second signal ends at once.",
        rich_help_panel=RUNNING,
    ),
]
Speculate = Annotated[
    str,
    typer.Option(
        help="What drafts tokens for the model to take or refuse, several in one step. The answers are the same. "
        "off: nothing. ngram: what once followed on the last tokens in the request's own text. mtp, dflash: drafters "
        "that were trained for the default model and come with the server. Or the folder of one that "
        "tools.train_drafter has made. Or a smaller model with the same tokens, given as MODEL is.",
        rich_help_panel=RUNNING,
    ),
]
DraftTokens = Annotated[
    int,
    typer.Option(
        help="Tokens that are drafted in a step. More: longer leaps where drafts are good, more lost work where not.",
        rich_help_panel=RUNNING,
    ),
]
DraftWhen = Annotated[
    Literal["auto", "always"],
    typer.Option(help="auto: as long as it is measured to pay.", rich_help_panel=RUNNING),
]
NgramShared = Annotated[
    bool,
    typer.Option(
        "--ngram-shared",
        help="With --speculate ngram, look in what other requests have read and written as well. Answers do "
        "not change, but how many drafts were right tells a client something of what others wrote.",
        rich_help_panel=RUNNING,
    ),
]
LogSeconds = Annotated[
    float,
    typer.Option(
        help="Seconds between two lines about what the server does (requests, tokens/s, accept length, cache, gap); 0: "
        "none.",
        rich_help_panel=RUNNING,
    ),
]
Poison = Annotated[
    bool, typer.Option(help="Debugging: overwrite memory that is given back. Slower.", rich_help_panel=RUNNING)
]
CheckOrder = Annotated[
    bool,
    typer.Option(
        "--check-order",
        help="Debugging: check that whatever touches the device's memory waits for what it needs, and that nothing in "
        "the launch loop waits for the device. The first violation ends the gpu process. Slower.",
        rich_help_panel=RUNNING,
    ),
]

Text = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)]
MaxTokens = Annotated[int, typer.Option(help="Tokens of the answer at most.", rich_help_panel=ANSWERING)]
Temperature = Annotated[
    float, typer.Option(help="0 always takes the likeliest token; higher is more random.", rich_help_panel=ANSWERING)
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same answer at any temperature.", rich_help_panel=ANSWERING)
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Continue the text as it stands, without chat template.", rich_help_panel=ANSWERING),
]
SystemText = Annotated[
    str | None, typer.Option("--system", help="A system message in front of the prompt.", rich_help_panel=ANSWERING)
]
