"""Whether a request was told what it would have been told without faults: two histories, compared event by event.

Owns the verdict. Pure: no clock, no socket, no file. How pieces are cut is the server's affair, so what is compared is
the sequence of tokens, of characters and of log-probabilities of each choice, and the grammar around them: every event
has to continue the sequence of the history without faults exactly where the event before it ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

from tools.chaos_history import Event, History

Kind = Literal["lost", "missing", "doubled", "different"]
KINDS: tuple[Kind, ...] = ("lost", "missing", "doubled", "different")
# What drafts brought depends on which steps had them; everything else of the usage does not.
DRAFT_USAGE = "completion_tokens_details"


@dataclass(frozen=True)
class Fault:
    """One deviation. `what`: tokens, text, ...; `count`: how many of them; at_ns: when the client could see it."""

    kind: Kind
    what: str
    at_ns: int
    choice: int = 0
    count: int = 1
    detail: str = ""


@dataclass
class _Choice:
    """Everything that one choice was told, and in which event each element came."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    times_ns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # by sequence: (elements so far, when)
    prompt_ids: tuple[int, ...] | None = None
    roles: int = 0
    finishes: list[tuple[str, int]] = field(default_factory=list)
    behind_finish_ns: int | None = None  # when something came behind the end

    def take(self, event: Event) -> None:
        if self.finishes and (event.text or event.ids):
            self.behind_finish_ns = self.behind_finish_ns or event.at_ns
        self.ids += event.ids
        self.text += event.text
        for what, so_far in (("tokens", self.ids), ("text", self.text)):
            self.times_ns.setdefault(what, []).append((len(so_far), event.at_ns))
        self.roles += event.role is not None
        self.prompt_ids = event.prompt_ids if self.prompt_ids is None else self.prompt_ids
        if event.finish is not None:
            self.finishes.append((event.finish, event.at_ns))

    def when(self, what: str, index: int) -> int:
        """When element `index` of a sequence came; the last event for one that never did."""
        times = self.times_ns.get(what, [])
        return next((at for so_far, at in times if so_far > index), times[-1][1] if times else 0)


def check(baseline: History, found: History, *, excused: bool = False) -> list[Fault]:
    """All deviations of `found`; none means that the client was told exactly what it would have been told.

    baseline: the same request's history without faults, complete. excused: the connection may have been cut, so that
    what came has to be a beginning of the baseline; the same holds where the client left by itself.
    """
    assert baseline.end == "done", "a history to compare with has to be complete"
    faults = list(_lost(found, excused))
    is_whole = found.end == "done" and not faults
    wanted, told = _choices(baseline.events), _choices(found.events)
    for number in sorted(told.keys() - wanted.keys()):
        faults.append(Fault("different", "choice", told[number].when("tokens", 0), number, 1, "nobody asked for it"))
    for number, choice in wanted.items():
        has = told.get(number, _Choice())
        faults += _compare(number, choice, has, found.end_ns, is_whole)
    faults += _around(baseline.events, found, is_whole)
    return faults


def kinds_of(faults: Iterable[Fault]) -> set[Kind]:
    """Which kinds there are among them."""
    return {fault.kind for fault in faults}


def _lost(found: History, excused: bool) -> Iterator[Fault]:
    for event in found.events:
        if event.error is not None:
            yield Fault("lost", "error", event.at_ns, detail=event.error[:300])
    if found.end in ("refused", "late") or (found.end == "cut" and not excused):
        yield Fault("lost", found.end, found.end_ns, detail=found.told[:300])
    elif found.end == "done" and not any(event.done or event.error is not None for event in found.events):
        yield Fault("lost", "end", found.end_ns, detail="the answer ended without saying so")


def _choices(events: Iterable[Event]) -> dict[int, _Choice]:
    found: dict[int, _Choice] = {}
    for event in events:
        if event.usage is None and event.error is None and not event.done:
            found.setdefault(event.choice, _Choice()).take(event)
    return found


def _compare(number: int, wanted: _Choice, has: _Choice, end_ns: int, is_whole: bool) -> Iterator[Fault]:
    """One choice. is_whole: all of it has to be there, whether or not it said that it was finished."""
    complete = is_whole or bool(has.finishes)
    for what, a, b in (("tokens", wanted.ids, has.ids), ("text", wanted.text, has.text)):
        for kind, index, count, detail in deviations(a, b, complete):
            at_ns = end_ns if index >= len(b) else has.when(what, index)
            yield Fault(kind, what, at_ns, number, count, detail)
    if has.finishes and has.finishes[0][0] != wanted.finishes[0][0]:
        (finish, at_ns), right = has.finishes[0], wanted.finishes[0][0]
        yield Fault("different", "finish", at_ns, number, detail=f"{finish} instead of {right}")
    elif is_whole and not has.finishes:
        yield Fault("missing", "finish", end_ns, number)
    if len(has.finishes) > 1:
        yield Fault("doubled", "finish", has.finishes[1][1], number)
    if has.behind_finish_ns is not None:
        yield Fault("different", "order", has.behind_finish_ns, number, detail="a piece came behind the end")
    if has.roles > wanted.roles:
        yield Fault("doubled", "role", has.when("tokens", 0), number)
    if has.prompt_ids != wanted.prompt_ids and (has.prompt_ids is not None or complete):
        yield Fault("different", "prompt", has.when("tokens", 0), number)


def deviations(wanted: Sequence[Any], found: Sequence[Any], complete: bool) -> Iterator[tuple[Kind, int, int, str]]:
    """How a sequence deviates: (kind, index in `found`, how many elements, in words). complete: the end counts too."""
    if found == (wanted if complete else wanted[: len(found)]):
        return
    steps = [step for step in SequenceMatcher(None, wanted, found, autojunk=False).get_opcodes() if step[0] != "equal"]
    moved = Counter(str(found[j1:j2]) for tag, _, _, j1, j2 in steps if tag == "insert")
    for tag, i1, i2, j1, j2 in steps:
        surplus = tag == "insert" or (tag == "replace" and not complete and i2 == len(wanted))  # no more was due yet
        size = j2 - j1
        if surplus and _is_again(found, j1, j2):
            yield "doubled", j1, size, f"{_short(found[j1:j2])} once more"
        elif surplus:
            yield "different", j1, size, f"{_short(found[j1:j2])} instead of {_short(wanted[i1 : i1 + size])}"
        elif tag == "replace":
            yield "different", j1, max(i2 - i1, size), f"{_short(found[j1:j2])} instead of {_short(wanted[i1:i2])}"
        elif moved[str(wanted[i1:i2])]:
            yield "different", j1, i2 - i1, f"{_short(wanted[i1:i2])} in another place"
        elif complete or i2 < len(wanted):
            yield "missing", j1, i2 - i1, f"{_short(wanted[i1:i2])} left out"


def _is_again(found: Sequence[Any], begin: int, end: int) -> bool:
    """Whether the elements begin..end repeat their neighbours, or, where that can be no chance, anything before."""
    part, size = found[begin:end], end - begin
    if part in (found[max(0, begin - size) : begin], found[end : end + size]):
        return True
    return size > 3 and any(found[i : i + size] == part for i in range(begin - size + 1))


def _short(part: Sequence[Any]) -> str:
    return repr(part) if len(part) <= 12 else f"{part[:12]!r}..."


def _around(events: Sequence[Event], found: History, is_whole: bool) -> Iterator[Fault]:
    """What belongs to no choice: usage, the end, and that all events are of one answer."""
    wanted = [_lasting(event.usage) for event in events if event.usage is not None]
    usages = [(_lasting(event.usage), event.at_ns) for event in found.events if event.usage is not None]
    if len(usages) > len(wanted):
        yield Fault("doubled", "usage", usages[-1][1])
    elif is_whole and len(usages) < len(wanted):
        yield Fault("missing", "usage", found.end_ns)
    for right, (usage, at_ns) in zip(wanted, usages, strict=False):
        if usage != right:
            yield Fault("different", "usage", at_ns, detail=f"{usage} instead of {right}")
    dones = [i for i, event in enumerate(found.events) if event.done]
    if len(dones) > 1:
        yield Fault("doubled", "end", found.events[dones[1]].at_ns)
    elif dones and dones[0] + 1 < len(found.events):
        yield Fault("different", "order", found.events[-1].at_ns, detail="an event came behind the end")
    names = {event.answer: event.at_ns for event in found.events if event.answer}
    if len(names) > 1:
        yield Fault("different", "answer", list(names.values())[-1], detail=f"events of {len(names)} answers")


def _lasting(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (usage or {}).items() if name != DRAFT_USAGE}
