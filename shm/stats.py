"""Counters, gauges and histograms of every stage, in one segment that anyone may read at any time.

Owns the table of names. Each stage's block has one writer, the stage; within a stage each name has one writing thread.
Counters go on counting over a restart. Nothing in here may be needed to serve a request.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from shm.control import STAGES
from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES, WINDOW_MAX
from shm.segment import Segment, schema_hash

# Upper bounds of the buckets of every histogram, in seconds; one more bucket holds what is longer.
BUCKETS_S = tuple(float(f"{digit}e{exponent}") for exponent in range(-6, 2) for digit in (1, 2, 5))


def accepted_runs(drafts: int) -> str:
    """Name of the counter of windows of which exactly so many drafts were accepted."""
    return f"accepted_{drafts}_total"


@dataclass(frozen=True)
class Names:
    """What one stage counts: u64 counters that only grow, f64 gauges, histograms of seconds."""

    counters: tuple[str, ...] = ()
    gauges: tuple[str, ...] = ()
    histograms: tuple[str, ...] = ()


TABLE: dict[str, Names] = {
    "supervisor": Names(
        counters=("deaths_total", "restarts_total", "hangs_total"), gauges=("standbys", "standbys_wanted")
    ),
    "frontend": Names(
        counters=(
            "requests_total",
            "finished_total",
            "aborted_total",
            "rejected_total",
            "refused_total",
            "errors_total",
            "adopted_total",
            "resent_total",
            "poison_total",
            "prompt_tokens_total",
            "completion_tokens_total",
        ),
        gauges=("open_rows", "open_streams"),
        histograms=("ttft_s", "inter_token_s", "request_s"),
    ),
    "tokenizer": Names(
        counters=("accepted_total", "rejected_total", "prompt_tokens_total", "encode_ns_total", "requests_total"),
        gauges=("waiting",),
        histograms=("encode_s",),
    ),
    "scheduler": Names(
        counters=(
            "admitted_total",
            "finished_total",
            "aborted_total",
            "retractions_total",
            "steps_total",
            "decode_steps_total",
            "mixed_steps_total",
            "decode_tokens_total",
            "prefill_tokens_total",
            "prompt_tokens_total",
            "prefix_hit_tokens_total",
            "surplus_tokens_total",
            "drafted_tokens_total",
            *map(accepted_runs, range(WINDOW_MAX)),
            "evicted_pages_total",
            "conservation_checks_total",
            "prepare_ns_total",
            "process_ns_total",
            "wait_ns_total",
            "stale_results_total",
            "requeued_total",
            "adopted_pages_total",
            "rerun_total",
            "poison_total",
        ),
        gauges=("running", "queued", "pages_free", "pages_cached", "pages_rows", "pages_total"),
        histograms=("queue_s", "prepare_s", "process_s"),
    ),
    "gpu": Names(
        counters=(
            "steps_total",
            "decode_steps_total",
            "mixed_steps_total",
            "device_busy_ns_total",
            "device_idle_ns_total",
            "gaps_total",
            "starved_total",
            "starved_ns_total",
            "graph_replays_total",
            "captures_total",
            "dropped_steps_total",
            "launch_ns_total",
        ),
        gauges=("graphs", "weights_bytes", "kv_bytes"),
        histograms=("step_gap_s", "step_s"),
    ),
    "detokenizer": Names(
        counters=(
            "tokens_total",
            "pieces_total",
            "stops_total",
            "finished_total",
            "decode_ns_total",
            "rebuilt_total",
            "poison_total",
        ),
        gauges=("open_rows",),
        histograms=("decode_s",),
    ),
}

_HISTOGRAM_WORDS = len(BUCKETS_S) + 2  # buckets, the one above them all, the sum
_LINE_WORDS = CACHE_LINE_BYTES // 8
_SCHEMA = schema_hash(f"{TABLE} {BUCKETS_S}")

assert tuple(TABLE) == STAGES
for _stage, _names in TABLE.items():
    _all = _names.counters + _names.gauges + _names.histograms
    assert len(set(_all)) == len(_all), _stage


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` observations were <= BUCKETS_S[i] and above the bound before; the last were above all bounds."""

    counts: tuple[int, ...]
    sum: float
    bounds: tuple[float, ...] = field(default=BUCKETS_S, repr=False)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Return the upper bound, in seconds, of the bucket that holds the q-quantile; 0 if empty, inf if above all."""
        rank, seen = q * self.count, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= rank:
                return bound
        return 0.0


class StatsWriter:
    """The block of one stage, for that stage to write. Unknown names are KeyErrors."""

    def __init__(self, segment: Segment, stage: str) -> None:
        self._words = segment.words
        self._floats = segment.floats
        self._counters, self._gauges, self._histograms = _LAYOUT[stage]

    def add(self, name: str, n: int = 1) -> None:
        """Add n >= 0 to a counter."""
        self._words[self._counters[name]] += n

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._floats[self._gauges[name]] = value

    def observe(self, name: str, seconds: float) -> None:
        """Add one observation to a histogram."""
        base = self._histograms[name]
        self._words[base + bisect_left(BUCKETS_S, seconds)] += 1
        self._floats[base + _HISTOGRAM_WORDS - 1] += seconds


class Stats:
    """A view of the stats segment, the same in every process."""

    def __init__(self, segment: Segment) -> None:
        """Attach to the segment, or format it if it is new (the supervisor does, before any child exists)."""
        if not segment.formatted:
            segment.format("stats", _SCHEMA)
        segment.check("stats", _SCHEMA)
        self.segment = segment

    @staticmethod
    def size() -> int:
        return _END_WORD * 8

    def writer(self, stage: str) -> StatsWriter:
        return StatsWriter(self.segment, stage)

    def read(self) -> dict[str, dict[str, int | float | Histogram]]:
        """Return {stage: {name: int (counter) | float (gauge) | Histogram}}. Each value is whole; together they are not
        of one instant."""
        return {stage: self.read_stage(stage) for stage in STAGES}

    def read_stage(self, stage: str) -> dict[str, int | float | Histogram]:
        words, floats = self.segment.words, self.segment.floats
        counters, gauges, histograms = _LAYOUT[stage]
        values: dict[str, int | float | Histogram] = {name: words[word] for name, word in counters.items()}
        values.update({name: floats[word] for name, word in gauges.items()})
        for name, base in histograms.items():
            end = base + _HISTOGRAM_WORDS - 1
            values[name] = Histogram(tuple(words[base:end]), floats[end])
        return values


_Words = dict[str, int]


def _lay_out() -> tuple[dict[str, tuple[_Words, _Words, _Words]], int]:
    layout: dict[str, tuple[_Words, _Words, _Words]] = {}
    word = HEADER_BYTES // 8
    for stage, names in TABLE.items():
        counters = {name: word + i for i, name in enumerate(names.counters)}
        word += len(counters)
        gauges = {name: word + i for i, name in enumerate(names.gauges)}
        word += len(gauges)
        histograms = {name: word + i * _HISTOGRAM_WORDS for i, name in enumerate(names.histograms)}
        word += len(histograms) * _HISTOGRAM_WORDS
        layout[stage] = (counters, gauges, histograms)
        word = -(-word // _LINE_WORDS) * _LINE_WORDS  # two stages never write the same cache line
    return layout, word


_LAYOUT, _END_WORD = _lay_out()
