"""/metrics: a parser of the format reads it, names carry their unit, and the figures are those of the segment."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics import NAMES, Exposition, public_name
from shm.control import READY, Control
from shm.segment import Segment
from shm.stats import TABLE, Stats
from tests import plain_http
from tests.frontend.live_frontend import live_frontend, text

# Names that dashboards and the project's own tests rely on.
PROMISED = {
    "stepahead_ready",
    "stepahead_running_requests",
    "stepahead_queued_requests",
    "stepahead_pages",
    "stepahead_pages_free",
    "stepahead_pages_cached",
    "stepahead_pages_in_rows",
    "stepahead_aborted_requests_total",
    "stepahead_prefix_hit_tokens_total",
    "stepahead_retractions_total",
    "stepahead_generation_tokens_total",
    "stepahead_gpu_steps_total",
    "stepahead_gpu_device_busy_seconds_total",
    "stepahead_gpu_device_idle_seconds_total",
    "stepahead_time_to_first_token_seconds_bucket",
    "stepahead_inter_token_latency_seconds_count",
    "stepahead_request_duration_seconds_sum",
}


def segments() -> tuple[Stats, Control]:
    stats = Stats(Segment.create("stats", Stats.size()))
    control = Control(Segment.create("control", Control.size()))
    return stats, control


def samples(exposition: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(exposition.decode())
    found = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def test_names_are_unique_and_carry_their_unit() -> None:
    names = [public_name(stage, n) for stage, t in TABLE.items() for n in (*t.counters, *t.gauges, *t.histograms)]
    assert len({name for name, _ in names}) == len(names)
    for name, text_ in names:
        assert text_ and not name.endswith(("_ns", "_s", "_ms", "_total")), name
    assert {stage for stage, _ in NAMES} <= set(TABLE)
    assert all(n in (*TABLE[s].counters, *TABLE[s].gauges, *TABLE[s].histograms) for s, n in NAMES)


def test_the_figures_are_those_of_the_segment() -> None:
    stats, control = segments()
    control.state = READY
    control.set_restarts("gpu", 2)
    scheduler, gpu = stats.writer("scheduler"), stats.writer("gpu")
    scheduler.set("running", 5)
    scheduler.set("pages_total", 100)
    scheduler.add("aborted_total", 3)
    gpu.add("device_busy_ns_total", 1_500_000_000)
    frontend = stats.writer("frontend")
    frontend.add("refused_total", 4)
    for seconds in (0.003, 0.04, 1000.0):
        frontend.observe("ttft_s", seconds)
    found = samples(Exposition(stats, control).text())
    assert {name.split("{")[0] for name in found} >= PROMISED
    assert found["stepahead_ready"] == 1
    assert found["stepahead_stage_restarts_total{stage=gpu}"] == 2
    assert found["stepahead_running_requests"] == 5 and found["stepahead_pages"] == 100
    assert found["stepahead_aborted_requests_total"] == 3
    assert found["stepahead_gpu_device_busy_seconds_total"] == 1.5
    assert found["stepahead_requests_total{outcome=refused}"] == 4
    name = "stepahead_time_to_first_token_seconds"
    buckets = [found[f"{name}_bucket{{le={le}}}"] for le in ("0.002", "0.005", "0.05", "50.0", "+Inf")]
    assert buckets == [0, 1, 2, 2, 3]
    assert found[f"{name}_count"] == 3 and found[f"{name}_sum"] == 1000.043


def test_a_request_is_counted_where_it_ends() -> None:
    with live_frontend(max_running=1, max_queued=0) as live:
        assert live.post("/v1/completions", text("abc", max_tokens=5)).status_code == 200
        assert live.post("/v1/completions", text("abc", what=1)).status_code == 400
        assert live.post("/v1/completions", text(["a", "b"])).status_code == 429
        answer = live.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = samples(answer.content)
        outcomes = {o: found[f"stepahead_requests_total{{outcome={o}}}"] for o in ("finished", "rejected", "refused")}
        assert outcomes == {"finished": 1, "rejected": 1, "refused": 1}
        assert found["stepahead_received_requests_total"] == 1
        assert found["stepahead_generation_tokens_total"] == 5
        assert found["stepahead_time_to_first_token_seconds_count"] == 1
        assert found["stepahead_inter_token_latency_seconds_count"] == 4
        assert found["stepahead_request_duration_seconds_count"] == 1
        assert plain_http.get(live.url + "/metrics").status_code == 200
