"""When to draft: windows of drafts for the next step, chosen by what steps of either kind have brought so far.

Owns the measurements. Drafting pays while a row gains more tokens than the step gets longer. What a row gains depends
on the text and the drafter, and is one number; how much longer the step gets depends on the machine and the batch, and
is measured for every size of it. The kind of step that loses is tried again now and then, ever more seldom. It never
waits and drains nothing: what it chooses holds from the next step on, and the answers do not depend on it.
"""

from collections import deque
from statistics import median

FIRST_PLAIN = 2  # steps without drafts before the first with them
TRIAL_ROWS = 8  # rows in all that a trial looks at, in a step or several
HOLD_STEPS, HOLD_STEPS_MAX = 128, 2048  # between two trials of the kind that loses
KEPT = 9  # times of each kind
REMEMBERED = 24  # rows that the estimated gain is the mean of, about
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

    def drafts(self, rows: int) -> int:
        """Drafts of each row in a step with so many decode rows."""
        if self._always or not rows:
            return self._drafts
        return self._drafts if self._batch(rows).drafts_next else 0

    def saw(self, rows: int, window: int, tokens: int, ns: int) -> None:
        """A decode step of so many rows gained so many tokens in this time."""
        if window > 1:
            self.gain += rows / (self._seen + rows) * (tokens / rows - self.gain)
            self._seen = min(self._seen + rows, REMEMBERED)
        if not self._always:
            self._batch(rows).saw(window > 1, ns, self.gain)

    def _batch(self, rows: int) -> "_Batch":
        size = rows.bit_length()
        if size not in self._batches:
            smaller = self._batches.get(size - 1)  # a step gets longer by drafts the more, the larger the batch is
            self._batches[size] = _Batch(max(1, TRIAL_ROWS >> (size - 1)), smaller is not None and smaller.loses)
        return self._batches[size]


class _Batch:
    """The choice for batches of about one size."""

    def __init__(self, trial_steps: int, loses: bool) -> None:
        """loses: what is expected of drafts, before anything is known."""
        self._trial_steps = trial_steps
        self._ns = {False: deque[int](maxlen=KEPT), True: deque[int](maxlen=KEPT)}  # by whether there were drafts
        self._pays = False
        self._hold = HOLD_STEPS
        self._wait = HOLD_STEPS if loses else FIRST_PLAIN  # steps until the other kind is tried
        self._trial = 0  # steps of it that are still to come

    @property
    def drafts_next(self) -> bool:
        """Whether the next step drafts."""
        return self._pays != (self._trial > 0)

    @property
    def loses(self) -> bool:
        """Whether drafts were tried and did not pay."""
        return bool(self._ns[True]) and not self._pays

    def saw(self, drafted: bool, ns: int, gain: float) -> None:
        """A step took this long; gain: what a row is expected to gain with drafts."""
        self._ns[drafted].append(ns)
        if self._trial and drafted != self._pays:
            self._trial -= 1
            if not self._trial:
                self._judge(gain, after_trial=True)
        elif not self._trial:
            self._wait -= 1
            if self._wait <= 0:
                self._trial = self._trial_steps
                self._ns[not self._pays].clear()  # what was measured long ago says little
            elif self._pays:
                self._judge(gain, after_trial=False)

    def _judge(self, gain: float, after_trial: bool) -> None:
        if not (self._ns[True] and self._ns[False]):
            return
        pays = gain > LEAD * median(self._ns[True]) / median(self._ns[False])
        if after_trial:
            self._hold = min(2 * self._hold, HOLD_STEPS_MAX) if pays == self._pays else HOLD_STEPS
        if after_trial or pays != self._pays:
            self._wait = self._hold
        self._pays = pays
