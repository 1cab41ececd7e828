"""The figures of `stepahead bench ring`: medians over repeats, ratios to the ring within a repeat, and the gates.

Pure functions over values: no clock, no process.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tools.bench_figures import aligned
from tools.ring_wires import NAMES

PLACES = {"split": "a core each", "one": "one core", "any": "any core"}


@dataclass(frozen=True)
class Run:
    """One wire in one repeat, or the medians of several. Times in us; cpu: of both processes together, a message."""

    round_trip_us_p50: float
    round_trip_us_p99: float
    round_trip_cpu_us: float
    messages_per_s: float
    message_cpu_us: float
    core_wait: float  # share of the time for which threads of the two had no core, though they could have run


@dataclass(frozen=True)
class Row:
    """One wire with the two processes at one place. The ratios say how many times better the ring is; above 1 it is."""

    wire: str
    cores: str
    medians: Run
    round_trip_ratio: float
    messages_ratio: float


@dataclass(frozen=True)
class Gate:
    """What the ring was designed to reach, in its prototype's figures: the ratio is theirs."""

    what: str
    unit: str
    ring: float
    other: float

    @property
    def least(self) -> float:
        """How many times better than raw ZeroMQ the ring has to be."""
        return max(self.ring, self.other) / min(self.ring, self.other)


GATES_CORES, GATES_WIRE, GATES_BYTES = "split", "zmq", 1024
GATES = {
    "round_trip_ratio": Gate("round trip", "us", 67, 148),
    "messages_ratio": Gate("messages a second", "/s", 715_000, 171_000),
}


def median_run(runs: Sequence[Run]) -> Run:
    """The median of every figure."""
    return Run(*(statistics.median(getattr(run, one.name) for run in runs) for one in fields(Run)))


def rows_of(runs: Mapping[tuple[str, str], Sequence[Run]]) -> list[Row]:
    """A row for each place and wire. runs: by (cores, wire), repeat by repeat; of each place there is the ring."""
    rows = []
    for (cores, wire), own in runs.items():
        pairs = list(zip(runs[cores, "ring"], own, strict=True))
        times = statistics.median(one.round_trip_us_p50 / ring.round_trip_us_p50 for ring, one in pairs)
        rates = statistics.median(ring.messages_per_s / one.messages_per_s for ring, one in pairs)
        rows.append(Row(wire, cores, median_run(own), times, rates))
    return rows


def verdicts(rows: Sequence[Row], size: int) -> list[tuple[Gate, float, bool]]:
    """Each gate with the ratio that was measured, and whether that is enough. None for other sizes or places."""
    found = [row for row in rows if (row.cores, row.wire) == (GATES_CORES, GATES_WIRE) and size == GATES_BYTES]
    told = [(gate, float(getattr(row, name))) for row in found for name, gate in GATES.items()]
    return [(gate, ratio, ratio >= gate.least) for gate, ratio in told]


HEADINGS = ("wire", "cores", "round trip p50", "p99", "CPU", "x ring", "messages/s", "CPU", "ring x", "core wait")


def table_text(rows: Sequence[Row], size: int, slots: int, repeats: int) -> str:
    """A line for each row, then the gates."""
    lines: list[Sequence[str]] = [HEADINGS]
    for row in rows:
        one = row.medians
        times = (one.round_trip_us_p50, one.round_trip_us_p99, one.round_trip_cpu_us)
        lines.append(
            (
                *(NAMES[row.wire], PLACES[row.cores]),
                *(f"{us:.1f}" for us in times),
                f"{row.round_trip_ratio:.2f}",
                *(f"{one.messages_per_s:,.0f}", f"{one.message_cpu_us:.1f}"),
                f"{row.messages_ratio:.2f}",
                f"{one.core_wait:.0%}",
            )
        )
    legend = (
        f"messages of {size} bytes, {slots} under way; us; medians of {repeats} repeats, ratios within each\n"
        "CPU: processor time of both processes, for a message\n"
        "x ring: how much longer than the ring's; ring x: how many more the ring carries\n"
        "core wait: of the time; on a core each it is other work on the machine: measure again where it is large"
    )
    return "\n".join([*aligned(lines, 2), legend, *gate_lines(rows, size)])


def gate_lines(rows: Sequence[Row], size: int) -> list[str]:
    """A line for each gate, or one that says why there is none."""
    judged = verdicts(rows, size)
    if not judged:
        return [f"gates: only with --size {GATES_BYTES} and --cores {GATES_CORES}"]
    return [
        f"gate, {gate.what}: {ratio:.2f} times as good as {NAMES[GATES_WIRE]}, wanted {gate.least:.2f} "
        f"({gate.ring:,}{gate.unit} against {gate.other:,}{gate.unit}): {'reached' if good else 'MISSED'}"
        for gate, ratio, good in judged
    ]
