"""The server's log line: differences of counters, said once per interval, and not at all while nothing happens."""

from procs.log_line import LogLine
from shm.segment import Segment
from shm.stats import Stats


def test_a_line_says_what_happened_since_the_last_one() -> None:
    stats = Stats(Segment.create("stats", Stats.size()))
    scheduler, gpu = stats.writer("scheduler"), stats.writer("gpu")
    line = LogLine(stats, 10.0)
    assert line.next(100.0) == (None, 10.0)
    assert line.next(104.0) == (None, 6.0)
    assert line.next(110.0) == (None, 10.0), "nothing has happened"
    for name, value in (("running", 3), ("queued", 1), ("pages_free", 75), ("pages_total", 100)):
        scheduler.set(name, value)
    scheduler.add("steps_total", 40)
    scheduler.add("decode_tokens_total", 200)
    gpu.add("gaps_total", 40)
    gpu.add("device_idle_ns_total", 4_000_000)
    assert line.next(120.0) == ("running 3, queued 1, 20.0 tokens/s, cache 25%, gap 0.10 ms", 10.0)
    scheduler.add("steps_total", 10)
    scheduler.add("decode_tokens_total", 30)
    scheduler.add("prefill_tokens_total", 500)
    scheduler.add("retractions_total", 2)
    scheduler.add("accepted_0_total", 5)
    scheduler.add("accepted_3_total", 5)
    said, _ = line.next(125.0)
    assert said is None, "it is not due"
    said, _ = line.next(130.0)
    assert said == (
        "running 3, queued 1, 3.0 tokens/s, prefill 50 tokens/s, accept length 2.50, cache 25%, retracted 2"
    )
    assert line.next(140.0) == (None, 10.0)
