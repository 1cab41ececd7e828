"""When to draft: windows of drafts for the next step, chosen by what steps of either kind have brought so far.

Owns the measurements. Drafting pays while a row gains more tokens than the step gets longer. What a row gains depends
on the text and the drafter, and is one number; how much longer the step gets depends on the machine and the batch, and
is measured for every size of it. The kind of step that loses is tried again now and then, ever more seldom; and at once
when the other one seems to lose, because steps get longer with the texts: only times of the same moment are compared.
A trial is counted where its steps are launched, not where their results are seen: steps are queued ahead of results,
and each one too many would be paid for. It never waits and drains nothing: what it chooses holds from the next step on,
and the answers do not depend on it.
"""

from collections import deque
from statistics import median_low

from shm.limits import STEPS_IN_FLIGHT

FIRST_PLAIN = 2  # steps without drafts before the first with them
TRIAL_ROWS, TRIAL_STEPS = 8, 2  # rows in all that a trial looks at, and the fewest steps
HOLD_STEPS, HOLD_STEPS_MAX = 128, 512  # between two trials of the kind that loses
DOUBT_STEPS = 8  # from a trial to the next that is for a doubt
KEPT = 9  # times of each kind
REMEMBERED = 24  # rows that the estimated gain is the mean of, about
DATED = 4  # rows, as which it counts when drafts are tried again: texts may have changed since
LEAD = 1.03  # what drafting has to bring for its trouble


class DraftPolicy:
    """Chooses for one scheduler."""

    def __init__(self, drafts: int, *, always: bool) -> None:
        """drafts: behind the newest token of each row, where there are any."""
        self._drafts = drafts
        self._always = always or not drafts
        self._batches: dict[int, _Batch] = {}
        self.gain = 1.0 + drafts  # tokens that a row gains in a step with drafts; the best until it is known
        self._seen = 2.0  # rows, as which the first guess counts

    def drafts(self, rows: int, mixed: bool = False) -> int:
        """Drafts of each row in the step that is launched now, with so many decode rows.

        mixed: with chunks, of which no time is taken.
        """
        if self._always or not rows:
            return self._drafts
        batch = self._batch(rows)
        return self._drafts if (batch.pays if mixed else batch.launch()) else 0

    def gained(self, rows: int, tokens: int) -> None:
        """So many rows that go on gained so many tokens in a step with drafts."""
        if rows:
            self.gain += rows / (self._seen + rows) * (tokens / rows - self.gain)
            self._seen = min(self._seen + rows, REMEMBERED)

    def took(self, rows: int, drafted: bool, ns: int) -> None:
        """A step of so many decode rows, and without chunks, took this long."""
        if not self._always and self._batch(rows).took(drafted, ns, self.gain):
            self._seen = min(self._seen, DATED)

    def _batch(self, rows: int) -> "_Batch":
        size = (rows * 181 >> 7).bit_length()  # about sqrt(2) rows: powers of two are amid their size, not at an edge
        if size not in self._batches:
            smaller = self._batches.get(size - 1)  # a step gets longer by drafts the more, the larger the batch is
            self._batches[size] = _Batch(max(TRIAL_STEPS, TRIAL_ROWS >> (size - 1)), smaller)
        return self._batches[size]


class _Batch:
    """The choice for batches of about one size."""

    def __init__(self, trial_steps: int, smaller: "_Batch | None") -> None:
        """smaller: of batches of half the size. Where drafts lose there, they are expected to here, and as clearly."""
        self._trial_steps = trial_steps
        self._ns = {False: deque[int](maxlen=KEPT), True: deque[int](maxlen=KEPT)}  # by whether there were drafts
        self.pays = False
        loses = smaller is not None and smaller.loses
        self._hold: int = smaller._hold if smaller is not None and loses else HOLD_STEPS  # between two trials
        self._wait = self._hold if loses else FIRST_PLAIN  # steps until the other kind is tried
        self._to_launch = self._to_see = 0  # steps of a trial, of the kind that is not the rule
        self._overdue = 0  # steps that are the rule, seen since all of a trial was launched

    def launch(self) -> bool:
        """Whether the step that is launched now drafts."""
        if not self._to_launch:
            return self.pays
        self._to_launch -= 1
        return not self.pays

    @property
    def loses(self) -> bool:
        """Whether drafts were tried and did not pay."""
        return bool(self._ns[True]) and not self.pays

    def took(self, drafted: bool, ns: int, gain: float) -> bool:
        """A step took this long; gain: what a row is expected to gain with drafts. Returns whether a trial of drafts
        begins.
        """
        self._ns[drafted].append(ns)
        if self._to_see:
            self._on_trial(drafted != self.pays, gain)
            return False
        self._wait -= 1
        doubt = self.pays and self._hold - self._wait >= DOUBT_STEPS and not self._would_pay(gain)
        if self._wait > 0 and not doubt:
            return False
        self._to_launch = self._to_see = self._trial_steps
        self._overdue = 0
        self._ns[not self.pays].clear()  # what was measured long ago says little
        return not self.pays

    def _on_trial(self, tried: bool, gain: float) -> None:
        """A step of a trial was seen, or one that is the rule. Where results are lost, a trial has to end as well."""
        if tried:
            self._to_see -= 1
        elif not self._to_launch:
            self._overdue += 1
        if not self._to_see or self._overdue > STEPS_IN_FLIGHT:
            self._to_see = 0
            self._judge(gain)

    def _would_pay(self, gain: float) -> bool:
        if not all(self._ns.values()):
            return self.pays  # nothing to compare with
        return gain > LEAD * median_low(self._ns[True]) / median_low(self._ns[False])

    def _judge(self, gain: float) -> None:
        """After a trial, with times of both kinds from the same moment."""
        pays = self._would_pay(gain)
        self._hold = min(2 * self._hold, HOLD_STEPS_MAX) if pays == self.pays else HOLD_STEPS
        self._wait = self._hold
        self.pays = pays
