"""What this process observes of requests, and the text of /metrics for all processes.

Owns the frontend's block of the stats segment and the public names of all metrics: they carry their unit, and they
stay. May never do work per token beyond one observation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shm.control import READY, STAGES, Control
from shm.limits import WINDOW_MAX
from shm.stats import BUCKETS_S, Histogram, Stats, StatsWriter, accepted_runs

Outcome = Literal["finished", "aborted", "rejected", "refused", "errors"]
OUTCOMES: tuple[Outcome, ...] = ("finished", "aborted", "rejected", "refused", "errors")

# (stage, name in the segment) -> (public name, help). Whatever is not here is public as stepahead_<stage>_<name>.
NAMES: dict[tuple[str, str], tuple[str, str]] = {
    ("supervisor", "standbys"): ("standbys", "Processes that are prepared to take a stage's place"),
    ("supervisor", "standbys_wanted"): ("standbys_wanted", "As many as there will be once all have been started"),
    ("frontend", "requests_total"): ("received_requests", "Requests for text whose body was in order"),
    ("frontend", "completion_tokens_total"): ("generation_tokens", "Output tokens of ended requests"),
    ("frontend", "open_rows"): ("open_rows", "Rows of the ledger that are taken"),
    ("frontend", "open_streams"): ("open_requests", "Requests that are being answered"),
    ("frontend", "ttft_s"): ("time_to_first_token_seconds", "From the complete request to its first token"),
    ("frontend", "inter_token_s"): ("inter_token_latency_seconds", "Between tokens of one request"),
    ("frontend", "request_s"): ("request_duration_seconds", "From the complete request to the end of its answer"),
    ("scheduler", "running"): ("running_requests", "Requests that hold an entry of the device"),
    ("scheduler", "queued"): ("queued_requests", "Requests that wait for an entry"),
    ("scheduler", "admitted_total"): ("admitted_requests", "Requests that began to run, retracted ones again"),
    ("scheduler", "finished_total"): (
        "finished_requests",
        "Requests that ended by themselves, aborted ones not among them",
    ),
    ("scheduler", "aborted_total"): (
        "aborted_requests",
        "Requests that were ended early because nobody waited for them",
    ),
    ("scheduler", "retractions_total"): ("retractions", "Times a running request gave up its pages and queued again"),
    ("scheduler", "prompt_tokens_total"): ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("scheduler", "prefix_hit_tokens_total"): ("prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("scheduler", "drafted_tokens_total"): (
        "drafted_tokens",
        "Tokens drafted for the model to take or refuse",
    ),
    ("scheduler", "pages_total"): ("pages", "Pages of the KV cache"),
    ("scheduler", "pages_free"): ("pages_free", "Pages that hold nothing"),
    ("scheduler", "pages_cached"): ("pages_cached", "Pages that the prefix cache alone holds"),
    ("scheduler", "pages_rows"): ("pages_in_rows", "Pages that running requests hold"),
}
# Told as stepahead_requests_total with a label.
_HIDDEN = {("frontend", f"{outcome}_total") for outcome in OUTCOMES}
_HIDDEN |= {("scheduler", accepted_runs(drafts)) for drafts in range(WINDOW_MAX)}


class Meter:
    """The frontend's own counters. One call for each event of a request."""

    def __init__(self, stats: StatsWriter) -> None:
        self._stats = stats
        self._answering = 0
        stats.set("open_rows", 0)
        stats.set("open_streams", 0)

    def began(self) -> None:
        self._answering += 1
        self._stats.add("requests_total")
        self._stats.set("open_streams", self._answering)

    def ended(self, outcome: Outcome, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """A request that began is over, after `seconds`."""
        self._answering -= 1
        self._stats.set("open_streams", self._answering)
        self._stats.add("prompt_tokens_total", prompt_tokens)
        self._stats.add("completion_tokens_total", completion_tokens)
        if outcome == "finished":
            self._stats.observe("request_s", seconds)
        self.outcome(outcome)

    def outcome(self, outcome: Outcome) -> None:
        self._stats.add(f"{outcome}_total")

    def open_rows(self, rows: int) -> None:
        self._stats.set("open_rows", rows)

    def took_over(self, rows: int) -> None:
        """So many rows of a frontend that died were taken over."""
        self._stats.add("adopted_total", rows)
        self._stats.set("open_rows", rows)

    def resent(self, messages: int) -> None:
        """So many messages to the tokenizer were told once more."""
        self._stats.add("resent_total", messages)

    def gave_up(self) -> None:
        """A message that tokenizers die of."""
        self._stats.add("poison_total")

    def first_token(self, seconds: float) -> None:
        self._stats.observe("ttft_s", seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` came at once, `seconds` after those before: one observation, of the mean."""
        self._stats.observe("inter_token_s", seconds / tokens)


class _Segments(Collector):
    """Reads the segments whenever somebody asks."""

    def __init__(self, stats: Stats, control: Control) -> None:
        self._stats = stats
        self._control = control

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("stepahead_ready", "1 while requests are taken")
        ready.add_metric([], float(self._control.state == READY))
        yield ready
        yield from self._processes()
        values = self._stats.read()
        requests = CounterMetricFamily("stepahead_requests", "Requests by how they ended", labels=["outcome"])
        for outcome in OUTCOMES:
            count = values["frontend"][f"{outcome}_total"]
            assert isinstance(count, int)
            requests.add_metric([outcome], count)
        yield requests
        windows = CounterMetricFamily(
            "stepahead_windows", "Rows of steps with drafts by how many drafts were accepted", labels=["accepted"]
        )
        for drafts in range(WINDOW_MAX):
            count = values["scheduler"][accepted_runs(drafts)]
            assert isinstance(count, int)
            windows.add_metric([str(drafts)], count)
        yield windows
        for stage, block in values.items():
            for name, value in block.items():
                if (stage, name) not in _HIDDEN:
                    yield _family(stage, name, value)

    def _processes(self) -> Iterator[Metric]:
        control, labels = self._control, ["stage"]
        up = GaugeMetricFamily("stepahead_stage_up", "1 while a process serves", labels=labels)
        epoch = GaugeMetricFamily("stepahead_stage_epoch", "How often a process was started", labels=labels)
        restarts = CounterMetricFamily("stepahead_stage_restarts", "Restarts of a process", labels=labels)
        deaths = CounterMetricFamily("stepahead_stage_deaths", "Deaths of a process, hangs among them", labels=labels)
        last = GaugeMetricFamily("stepahead_stage_last_death", "1; why a process died last", labels=["stage", "reason"])
        for stage in STAGES:
            up.add_metric([stage], float(control.stage_state(stage) == "serving"))
            epoch.add_metric([stage], control.epoch(stage))
            restarts.add_metric([stage], control.restarts(stage))
            deaths.add_metric([stage], control.deaths(stage))
            if reason := control.last_reason(stage):
                last.add_metric([stage, reason], 1.0)
        yield from (up, epoch, restarts, deaths, last)


def _family(stage: str, name: str, value: int | float | Histogram) -> Metric:
    public, text = public_name(stage, name)
    if isinstance(value, Histogram):
        bounds = [*map(floatToGoString, BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
        histogram = HistogramMetricFamily(public, text)
        histogram.add_metric([], buckets, value.sum)
        return histogram
    # Nanoseconds are what the processes count; seconds are what the format's users expect.
    number = value * 1e-9 if name.endswith("_ns_total") else value
    if name.endswith("_total") and isinstance(value, int):
        return CounterMetricFamily(public, text, number)
    return GaugeMetricFamily(public, text, number)


def public_name(stage: str, name: str) -> tuple[str, str]:
    """Public name and help of a value; the format itself adds the suffixes of counters and histograms."""
    known = NAMES.get((stage, name))
    if known is not None:
        return f"stepahead_{known[0]}", known[1]
    base = name.removesuffix("_total") if name != "pages_total" else name
    if base.endswith("_ns"):
        base = base.removesuffix("_ns") + "_seconds"
    elif base.endswith("_s"):
        # A histogram; the total time of the same thing may be a counter beside it.
        base = base.removesuffix("_s") + "_duration_seconds"
    return f"stepahead_{stage}_{base}", f"{name} of the {stage}"


class Exposition:
    """The text of /metrics."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, stats: Stats, control: Control) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Segments(stats, control))

    def text(self) -> bytes:
        return generate_latest(self._registry)
