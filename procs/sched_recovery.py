"""What a fresh scheduler finds in the ledger: rows that an earlier one left behind, at whatever instruction it died.

Owns the way back from the ledger into the queue. It never trusts anything but the ledger: the batch starts empty, and
what the device still runs for the earlier scheduler is dropped by its step numbers. What is in the page pool and in the
prefix cache is the business of `sched_adoption`, and decides how much is prefilled, not what comes of it.

A scheduler stores tokens, then the count, then finish, then done, then tells the detokenizer. It may have died
between any two of these, so each row is brought to where the next store would have brought it, and the detokenizer is
told once more.
"""

import numpy as np

from procs.batch_state import Ints
from procs.sched_rows import Rows
from shm.ledger import FINISH_LENGTH, FINISH_NONE, FINISH_STOP


def recover(rows: Rows, streak: int, at_work: bool = True) -> int:
    """Queue every live row again, oldest first, with its prompt and output so far. Returns how many there are.

    streak: of the schedulers' deaths, see `Control.streak`.
    at_work: the scheduler before died while it worked on its batch; one that waited for the device died of no row.
    """
    ledger = rows.ledger
    ready = ledger.ready.copy()
    known = (ready > 0) & (ready == ledger.generation)
    live = np.flatnonzero(known & (ledger.done != ready))
    done = np.flatnonzero(known & (ledger.done == ready) & (ledger.freed != ready))
    live = live[np.argsort(ledger.arrival_ns[live], kind="stable")]
    for row in live.tolist():
        rows.enqueue(row, int(ready[row]))
    rows.quarantine.remember(live)
    rows.stats.add("requeued_total", len(live))
    begun = live[(ledger.count[live] > 0) | (ledger.finish[live] != FINISH_NONE)]
    if len(begun):
        due = finishes_due(rows, begun)
        ended = np.flatnonzero(due)
        rows.end(begun[ended], due[ended])
        rows.report(begun, ready[begun], ledger.count[begun], due)
    in_batch = live[(ledger.admitted[live] == ready[live]) & (ledger.done[live] != ready[live])]
    if len(in_batch):
        ledger.admitted[in_batch] = 0  # first: a death from here on is not counted once more
        if at_work:
            rows.give_up(rows.quarantine.blame("scheduler", streak, in_batch))
    if len(done):
        rows.report(done, ready[done], ledger.count[done], ledger.finish[done])
    return len(live)


def finishes_due(rows: Rows, live: Ints) -> Ints:
    """i64[n]: the finish that each begun row's newest token calls for, whether it was stored or not."""
    ledger = rows.ledger
    due = np.zeros(len(live), dtype=np.int64)
    for at, row in enumerate(live.tolist()):
        count = int(ledger.count[row])
        if ledger.finish[row] != FINISH_NONE:
            due[at] = ledger.finish[row]
        elif ledger.tokens[row, int(ledger.prompt_len[row]) + count - 1] in rows.stop_ids(row):
            due[at] = FINISH_STOP
        elif count >= rows.limit(row):
            due[at] = FINISH_LENGTH
    return due
