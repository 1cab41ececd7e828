"""What a run under faults has shown: a line for each target and signal, and everything behind it as one document.

Owns the figures and their names. Pure functions over values: no clock, no socket, no printing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.bench_figures import aligned, percentile
from tools.chaos_check import KINDS, Fault, kinds_of
from tools.chaos_history import History
from tools.chaos_kill import HOWS, Cell, Kill, Strike
from tools.chaos_load import Told
from tools.chaos_processes import SUPERVISOR, Leaks

# The server's line about a death, as its supervisor writes it.
LINE = re.compile(r"^stepahead: (\w+) died \((.*)\), back after ([\d.]+) s in epoch (\d+); (\d+) (.*)$", re.MULTILINE)
AGAIN = re.compile(r"^stepahead: (\w+) died \((.*)\), and again [\d.]+ s later while it started$", re.MULTILINE)
UNDER_WAY_NS = 100_000_000  # for a token that its stage has let go of to reach the client
HEADINGS = (
    *("stage", "signal", "kills", "requests", *KINDS, "detection", "pause", "next", "recovery"),
    *("processes", "fds", "memfd", "pages", "zombies", "rows", "restarts", "untold", "back"),
)
LEGEND = """requests: under way during a kill, of which so many were lost, had something missing, doubled or different
detection: from the signal until the supervisor had collected the process; pause: the longest silence of
any stream around the kill; next: until the next token of any stream, taken as the end of the longest silence of all
of them that begins at most 0.1 s after the successor was there, for what comes sooner may have been under way;
recovery: until the first token of a request sent behind the kill; each p50/p99 in ms. The stage none: the same in
calm, without a kill
processes to rows: what an idle server holds more than before the phase, memfd in bytes; restarts: more than kills
untold: deaths without a line in the log; back: kills after which the server served again"""


class Line(NamedTuple):
    """What the server's log says of one death."""

    stage: str
    reason: str
    back_s: float
    epoch: int
    retried: int
    what: str


@dataclass(frozen=True)
class Story:
    """One request of the run: what was sent, what came, and what is wrong with it."""

    told: Told
    history: History
    faults: Sequence[Fault]


@dataclass
class Phase:
    """Some kills of one server, one after the other, and all requests that were sent meanwhile."""

    planned: Sequence[Kill] = ()  # none: calm
    strikes: list[Strike] = field(default_factory=list)
    probes: list[tuple[int, int]] = field(default_factory=list)  # in calm: when sent, and its first token; perf_counter
    stories: list[Story] = field(default_factory=list)
    leaks: Leaks = field(default_factory=Leaks)
    extra_restarts: int = 0  # more than kills
    unheard: int = 0  # 1: the server gave no metrics when all was over
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        """What is killed, and how, each once."""
        return list(dict.fromkeys(kill.cell for kill in self.planned))

    @property
    def name(self) -> str:
        """As it is told."""
        cells = self.cells
        return f"{cells[0].target}, {cells[0].how}" if len(cells) == 1 else f"{len(cells)} ways" if cells else "none"

    def stories_of(self, cell: Cell | None) -> list[Story]:
        """Those that were under way between a kill of the cell and its recovery; all of them if it is the only one.

        Something wrong with a request that met no kill may be anybody's doing, and is charged to all.
        """
        if len(self.cells) < 2:
            return self.stories
        spans = [(one.at_ns, one.recovered_ns or math.inf, one.kill.cell) for one in self.strikes]
        found = []
        for story in self.stories:
            met = {of for begin, end, of in spans if story.told.ended_ns > begin and story.told.sent_ns < end}
            if cell in met or (story.faults and not met):
                found.append(story)
        return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one cell. Times in milliseconds, one for each kill for which it is known."""

    stage: str
    signal: str
    kills: int
    requests: int
    faulty: Mapping[str, int]  # requests, by kind of fault
    detection_ms: Sequence[float]
    pause_ms: Sequence[float]
    next_ms: Sequence[float]
    recovery_ms: Sequence[float]
    leaks: Leaks
    extra_restarts: int
    unheard: int
    recovered: int  # kills after which the server served again
    untold: int  # deaths without a line in the log

    @property
    def is_clean(self) -> bool:
        """Whether nobody noticed more than a pause, and nothing is left."""
        harmed = any(self.faulty.values()) or bool(self.leaks) or self.extra_restarts or self.unheard or self.untold
        return not harmed and self.recovered == self.kills


def silence_ms(moments_ns: Iterable[Sequence[int]], begin_ns: int, end_ns: int) -> float:
    """The longest time between two moments of one stream that reaches into begin..end; 0 for none."""
    gaps = (
        later - earlier
        for moments in moments_ns
        if moments and moments[-1] > begin_ns and moments[0] < end_ns
        for earlier, later in itertools.pairwise(moments)
        if later > begin_ns and earlier < end_ns
    )
    return max(gaps, default=0) / 1e6


def next_ms(moments_ns: Sequence[int], begin_ns: int, end_ns: int) -> float:
    """From `begin_ns` to the end of the longest time between two moments that reaches into begin..end; 0 for none.

    moments_ns: of all streams together, in order.
    """
    gaps = [
        (later - earlier, later)
        for earlier, later in itertools.pairwise(moments_ns)
        if later > begin_ns and earlier < end_ns
    ]
    return (max(gaps)[1] - begin_ns) / 1e6 if gaps else 0.0


def step_ms(stories: Iterable[Story]) -> float:
    """The median time between two events of one stream, of clients that read at once; 0 for none."""
    gaps = [
        later - earlier
        for story in stories
        if story.told.request.is_patient
        for earlier, later in itertools.pairwise(story.told.answer.times_ns)
        if later > earlier
    ]
    return statistics.median(gaps) / 1e6 if gaps else 0.0


def row_of(cell: Cell | None, phases: Sequence[Phase]) -> Row:
    """Sum up what is known of one cell, or of calm. What a phase left behind is charged to all cells that it had."""
    phases = [phase for phase in phases if (cell in phase.cells if cell else not phase.cells)]
    strikes = [strike for phase in phases for strike in phase.strikes if strike.kill.cell == cell]
    pauses, nexts = [], []
    for phase in phases:
        patient = [story.told for story in phase.stories if story.told.request.is_patient]
        streams = [told.moments_ns() for told in patient]
        together = sorted(moment for told in patient for moment in told.answer.times_ns)
        last_ns = max((moments[-1] for moments in streams), default=0)
        spans = [(sent_ns, sent_ns, sent_ns, first_ns) for sent_ns, first_ns in phase.probes]
        for one in phase.strikes:
            if one.kill.cell == cell:
                end_ns = one.recovered_ns or last_ns
                spans.append((one.at_ns, one.deaths[-1].struck_ns, one.replaced_ns or end_ns, end_ns))
        for first_ns, begin_ns, there_ns, end_ns in spans:
            pauses.append(silence_ms(streams, first_ns, end_ns))
            nexts.append(next_ms(together, begin_ns, there_ns + UNDER_WAY_NS))
    leaks = Leaks()
    for phase in phases:
        leaks += phase.leaks
    deaths = [death for phase in phases for strike in phase.strikes for death in strike.deaths]
    told_of = [death for death in deaths if death.stage != SUPERVISOR]  # who would tell of that one's
    found = [kinds_of(story.faults) for phase in phases for story in phase.stories_of(cell)]
    return Row(
        stage=cell.target if cell else "none",
        signal=cell.how if cell else "-",
        kills=sum(kill.cell == cell for phase in phases for kill in phase.planned),
        requests=len(found),
        faulty={kind: sum(kind in kinds for kinds in found) for kind in KINDS},
        detection_ms=[ms for strike in strikes for death in strike.deaths if (ms := death.detection_ms) is not None],
        pause_ms=pauses,
        next_ms=nexts,
        recovery_ms=[
            *((first_ns - sent_ns) / 1e6 for phase in phases for sent_ns, first_ns in phase.probes),
            *(ms for strike in strikes if (ms := strike.recovery_ms) is not None),
        ],
        leaks=leaks,
        extra_restarts=sum(phase.extra_restarts for phase in phases),
        unheard=sum(phase.unheard for phase in phases),
        recovered=sum(strike.recovered_ns > 0 for strike in strikes),
        untold=max(0, len(told_of) - sum(len(phase.lines) for phase in phases)),
    )


def rows_of(phases: Sequence[Phase]) -> list[Row]:
    """A row for calm, then one for each cell, stage by stage."""
    cells = {cell for phase in phases for cell in phase.cells}
    order = sorted(cells, key=lambda cell: (cell.target, HOWS.index(cell.how)))
    calm = [row_of(None, phases)] if any(not phase.cells for phase in phases) else []
    return calm + [row_of(cell, phases) for cell in order]


def lines_in(log: str) -> list[Line]:
    """The deaths that a server's log tells of. Who died again before it was back has no epoch, and nothing retried."""
    whole = [
        Line(stage, reason, float(back), int(epoch), int(retried), what)
        for stage, reason, back, epoch, retried, what in LINE.findall(log)
    ]
    return whole + [Line(stage, reason, 0.0, 0, 0, "died again") for stage, reason in AGAIN.findall(log)]


def table_text(rows: Sequence[Row], step: float) -> str:
    """The table in columns of plain text, with its legend. step: milliseconds of a step in calm."""
    body = [
        (
            *(row.stage, row.signal, str(row.kills), str(row.requests), *(str(row.faulty[kind]) for kind in KINDS)),
            *(_quantiles(times) for times in (row.detection_ms, row.pause_ms, row.next_ms, row.recovery_ms)),
            *(
                str(getattr(row.leaks, name))
                for name in ("processes", "fds", "memfd_bytes", "pages", "zombies", "rows")
            ),
            *(str(row.extra_restarts), str(row.untold), f"{row.recovered}/{row.kills}"),
        )
        for row in rows
    ]
    return "\n".join([*aligned([HEADINGS, *body], left=2), LEGEND, f"a step in calm: {step:.1f} ms"])


def phase_text(phase: Phase) -> str:
    """A line for one phase, while others are still to come."""
    back = sum(strike.recovered_ns > 0 for strike in phase.strikes)
    found = [kinds_of(story.faults) for story in phase.stories]
    faulty = ", ".join(f"{sum(kind in kinds for kinds in found)} {kind}" for kind in KINDS)
    return f"{phase.name}: {back} of {len(phase.planned)} served again; {len(found)} requests, {faulty}"


def faults_text(phases: Sequence[Phase], most: int = 20) -> str:
    """A line for each faulty request, the first ones."""
    lines = []
    for phase in phases:
        lines += [f"{phase.name}: {note}" for note in phase.notes]
        for story in phase.stories:
            for fault in story.faults[:1]:
                what = f"{fault.kind} {fault.what} x{fault.count} in choice {fault.choice}"
                asked = f"request {story.told.request.number} ({story.told.request.kind})"
                lines.append(f"{phase.name}: {asked}: {what}: {fault.detail}")
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([*lines[:most], *more])


def document_of(phases: Sequence[Phase], step: float, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain values for JSON. about: the options of the run. Times in ms, instants since the first."""
    first_ns = min((story.told.sent_ns for phase in phases for story in phase.stories), default=0)
    rows = rows_of(phases)
    return {
        **about,
        "is_clean": all(row.is_clean for row in rows),
        "step_ms": step or None,
        "rows": [_row_document(row) for row in rows],
        "strikes": [_strike_document(strike, first_ns) for phase in phases for strike in phase.strikes],
        "lines": [line._asdict() for phase in phases for line in phase.lines],
        "notes": [note for phase in phases for note in phase.notes],
        "faults": [
            {
                "kills": phase.name,
                "request": story.told.request.number,
                "request_kind": story.told.request.kind,
                **dataclasses.asdict(fault),
                "at_ms": (fault.at_ns - first_ns) / 1e6,
            }
            for phase in phases
            for story in phase.stories
            for fault in story.faults
        ],
    }


def _row_document(row: Row) -> dict[str, Any]:
    times = {
        f"{name}_p{share}": percentile(values, share) if values else None
        for name in ("detection_ms", "pause_ms", "next_ms", "recovery_ms")
        if (values := getattr(row, name)) is not None
        for share in (50, 99)
    }
    return {**dataclasses.asdict(row), **times, "is_clean": row.is_clean}


def _strike_document(strike: Strike, first_ns: int) -> dict[str, Any]:
    return {
        "stage": strike.kill.cell.target,
        "signal": strike.kill.cell.how,
        "at_ms": (strike.at_ns - first_ns) / 1e6,
        "recovery_ms": strike.recovery_ms,
        "deaths": [
            {
                "stage": death.stage,
                "pid": death.pid,
                "after_ms": (death.struck_ns - strike.at_ns) / 1e6,
                "dead_ms": (death.dead_ns - death.struck_ns) / 1e6 if death.dead_ns else None,
                "detection_ms": death.detection_ms,
                "replaced_ms": (death.replaced_ns - death.struck_ns) / 1e6 if death.replaced_ns else None,
            }
            for death in strike.deaths
        ],
    }


def _quantiles(values: Sequence[float]) -> str:
    """The median and the 99th percentile, with a decimal where they are small."""
    told = [percentile(values, share) for share in (50, 99)] if values else []
    return "/".join(f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in told) or "-"
