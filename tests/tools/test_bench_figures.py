"""The benchmark's arithmetic: events to timings, timings to figures, medians, ratios and counter differences."""

import math
from xml.etree import ElementTree

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench_figures import (
    Counters,
    Figures,
    figures,
    latency_rows,
    medians,
    paired,
    percentile,
    read_counters,
    table_rows,
    table_text,
)
from tools.openai_stream import Answer, Timing
from tools.serve_picture import picture

METRICS = """# HELP stepahead_gpu_steps_total steps
# TYPE stepahead_gpu_steps_total counter
stepahead_gpu_steps_total 40.0
stepahead_gpu_device_busy_ns_total{kind="decode"} 3e9
stepahead_gpu_device_busy_ns_total{kind="mixed"} 1e9
stepahead_gpu_device_idle_ns_total 1e8
stepahead_scheduler_steps_total 41
stepahead_windows_total{accepted="0"} 6.0
stepahead_windows_total{accepted="1"} 3.0
stepahead_windows_total{accepted="2"} 1.0
stepahead_windows_total{accepted="3"} 0.0
"""


def event(**message: object) -> bytes:
    return b"data: " + orjson.dumps(message)


def answer(*events: bytes, status: int = 200) -> Answer:
    times = [1_000_000 * (i + 1) for i in range(len(events))]
    return Answer(start_ns=0, status=status, times_ns=times, events=list(events))


def chat(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"role": "assistant", "content": text}}])


def test_role_and_usage_events_are_no_text_and_the_servers_count_is_taken() -> None:
    got = answer(
        chat(""),
        chat("a"),
        b": a comment",
        chat("b"),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]),
        event(choices=[], usage={"completion_tokens": 7}),
        b"data: [DONE]",
    ).parsed()
    assert got.error is None
    assert got.text_times_ns == [2_000_000, 4_000_000]
    assert (got.tokens, got.first_ms(), got.gaps_ms()) == (7, 2.0, [2.0])


def test_without_usage_the_pieces_are_counted() -> None:
    piece = event(choices=[{"index": 0, "text": "x", "finish_reason": None}])
    assert answer(piece, piece, b"data: [DONE]").parsed().tokens == 2


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (answer(chat("a")), "without [DONE]"),
        (answer(chat("a"), event(error={"message": "gpu is gone"}), b"data: [DONE]"), "gpu is gone"),
        (answer(status=429), "status 429"),
    ],
)
def test_a_failed_request_is_never_a_good_one(broken: Answer, told: str) -> None:
    timing = broken.parsed()
    assert told in (timing.error or "")
    assert figures(1, [timing], 1.0, 0.0).failed == 1


def test_counters_are_summed_over_labels_and_taken_from_the_gpu_stage() -> None:
    assert read_counters(METRICS) == Counters(steps=40, busy=4.0, idle=0.1, windows=(6, 3, 1, 0))
    assert read_counters("vllm_requests_total 3\n") is None


def test_figures_of_one_run() -> None:
    timings = [Timing(0, [10_000_000, 30_000_000, 60_000_000], tokens=3), Timing(0, [20_000_000], tokens=1)]
    got = figures(2, timings, 2.0, 0.1, Counters(10, 1.0, 0.5), Counters(30, 2.5, 1.0))
    assert (got.tokens_per_s, got.ttft_ms_p50, got.inter_token_ms_p50) == (2.0, 15.0, 25.0)
    assert (got.steps_per_s, got.device_idle_share, got.client_cpu_share) == (10.0, 0.25, 0.05)
    assert got.gap_us == pytest.approx(25_000)
    assert (got.requests_per_s, got.rate, got.late_ms_p99, got.load) == (1.0, None, None, "2")


def test_percentiles_of_all_three_times_and_how_late_requests_left() -> None:
    timings = [
        Timing(0, [1_000_000 * n, 3_000_000 * n], tokens=2, end_ns=5_000_000 * n if n > 1 else 0) for n in range(1, 12)
    ]
    got = figures(4, timings, 1.0, 0.0, rate=2.5, late_s=[0.001] * 99 + [1.0])
    assert (got.ttft_ms_p50, got.ttft_ms_p90, got.ttft_ms_p99) == pytest.approx((6, 10, 10.9))
    assert (got.inter_token_ms_p50, got.inter_token_ms_p90, got.inter_token_ms_p99) == pytest.approx((12, 20, 21.8))
    assert (got.whole_ms_p50, got.whole_ms_p90, got.whole_ms_p99) == pytest.approx((30, 50, 54.5))
    assert got.load == "2.5/s" and got.late_ms_p99 == pytest.approx(1e3 * (0.001 + 0.01 * 0.999), rel=0.01)
    assert "at most 4 under way" in table_text({"a": [got]}) and "11.00" in table_text({"a": [got]})
    assert medians([got, figures(7, timings, 1.0, 0.0, rate=2.5)]).concurrency == 7
    whole = answer(chat("a"), b"data: [DONE]").parsed()
    assert whole.whole_ms() == 2.0 and Timing(0, [1_000_000, 4_000_000]).whole_ms() == 4.0


def test_drafts_of_one_run_and_of_several() -> None:
    timings = [Timing(0, [10_000_000], tokens=1)]
    before, after = Counters(10, 1.0, 0.5, (6, 3, 1, 0)), Counters(30, 2.5, 1.0, (11, 6, 2, 1))
    got = figures(2, timings, 2.0, 0.1, before, after)
    assert got.windows == (5, 3, 1, 1) and got.accept_length == pytest.approx(1.8)
    assert got.accepted_shares == pytest.approx([0.5, 0.2, 0.1])
    both = medians([got, got])
    assert both.windows == (10, 6, 2, 2) and both.accept_length == got.accept_length
    assert "a, 2 at once: 1.80 tokens a window; 50% 20% 10%" in table_text({"a": [got]})
    none = figures(2, timings, 2.0, 0.1, before, before)
    assert none.accept_length is None and none.accepted_shares == []
    assert "tokens a window" not in table_text({"a": [none]})


def test_no_counters_means_not_told_rather_than_zero() -> None:
    got = figures(1, [Timing(0, [1], tokens=1)], 1.0, 0.0)
    assert got.steps_per_s is None and got.device_idle_share is None and got.gap_us is None
    assert math.isnan(got.inter_token_ms_p50)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(0, 3))
def test_medians_lie_within_the_runs_and_failures_add_up(rates: list[float], failed: int) -> None:
    runs = [Figures(8, 24, failed, 1, 1, rate, 1, 1, 1, 1, None, None, 0) for rate in rates]
    middle = medians(runs)
    assert min(rates) <= middle.tokens_per_s <= max(rates)
    assert middle.failed == failed * len(runs)
    assert middle.steps_per_s is None


def one(level: int, rate: float, ratio: float | None = None) -> Figures:
    return Figures(level, 8, 0, 1, 1, rate, 1, 1, 1, 1, 5.0, 0.001, 0.01, ratio=ratio)


def test_ratios_are_to_the_first_server_in_the_same_repeat() -> None:
    """The machine was twice as fast in the second repeat, and one run of the third was disturbed."""
    runs = paired({"other": [one(1, rate) for rate in (50, 100, 90)], "ours": [one(1, rate) for rate in (60, 120, 9)]})
    assert [run.ratio for run in runs["ours"]] == [1.2, 1.2, 0.1] and medians(runs["ours"]).ratio == 1.2
    assert medians(runs["other"]).ratio == 1.0
    (none,) = paired({"failed": [one(1, 0.0)], "ours": [one(1, 5.0)]})["ours"]
    assert none.ratio is None


def test_times_have_ratios_too() -> None:
    base = figures(1, [Timing(0, [10_000_000, 20_000_000], end_ns=20_000_000)], 1.0, 0.0)
    ours = figures(1, [Timing(0, [5_000_000, 13_000_000], end_ns=14_000_000)], 1.0, 0.0)
    lone = figures(1, [Timing(0, [5_000_000], end_ns=0)], 1.0, 0.0)
    runs = paired({"other": [base, base], "ours": [ours, lone]})
    assert [run.ttft_ratio for run in runs["ours"]] == [0.5, 0.5]
    assert [run.inter_token_ratio for run in runs["ours"]] == [0.8, None]
    assert [run.whole_ratio for run in runs["ours"]] == [0.7, 0.25]
    assert latency_rows({"ours": [medians(runs["ours"][:1])]})[0] == (
        *("ours", "1", "5", "5", "5", "0.50", "8.0", "8.0", "8.0", "0.80", "14", "14", "14", "0.70"),
    )


def test_the_picture_has_a_line_for_every_server_and_level() -> None:
    got = figures(1, [Timing(0, [10_000_000, 20_000_000], tokens=2, end_ns=20_000_000)], 1.0, 0.0)
    root = ElementTree.fromstring(picture({"a <b>": [got, one(8, 100.0)], "c": [got, one(8, 50.0)]}))
    kinds = [element.get("class") for element in root.iter()]
    assert kinds.count("rate") == 4 and kinds.count("range") == 2 * 3 + 2 * 2, "not told is not drawn"
    widths = [float(element.get("width", "0")) for element in root.iter() if element.get("class") == "rate"]
    assert widths[2] == pytest.approx(2 * widths[3], abs=0.2)


def test_the_table_goes_level_by_level() -> None:
    other, ours = [one(1, 50.0, 1.0), one(8, 100.0, 1.0)], [one(1, 60.0, 1.2), one(8, 300.0, 3.0)]
    rows = table_rows({"other": other, "ours": ours})
    text = table_text({"other": [one(1, 50.0)], "ours": [one(1, 60.0)]}).splitlines()
    assert len({len(line) for line in text[:3]}) == 1 and len(text[0]) <= 88
    assert [(row[0], row[1], row[3]) for row in rows] == [
        ("other", "1", "1.00"),
        ("ours", "1", "1.20"),
        ("other", "8", "1.00"),
        ("ours", "8", "3.00"),
    ]


def test_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))
