"""Steps: planning one from the state of the batch, and working its result, one step old, back into it.

Owns the steps in flight. It never waits and never touches a ring: `plan` fills a descriptor that it is given, `apply`
takes a result that has come. A descriptor names rows by their entry numbers; it holds no token and no length of a
running row, since when it is written neither is known here: the step before is still running.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from procs import policy
from procs.batch_state import BatchState, Ints
from procs.draft_policy import DraftPolicy
from procs.sched_rows import Rows
from shm.ledger import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Ledger
from shm.limits import STEPS_IN_FLIGHT
from shm.records import (
    CHUNK_COUNT,
    CHUNK_ENTRY,
    CHUNK_LAST,
    CHUNK_ROW,
    CHUNK_START,
    SLOT_ENTRY,
    SLOT_INDEX,
    SLOT_PAGE,
    STEP_DECODE,
    STEP_MIXED,
    ResultView,
    StepView,
)
from shm.stats import accepted_runs


class Flight(NamedTuple):
    """A step that is queued or running: what its result will be about, frozen when the step was planned.

    The batch goes on changing while the step runs, so each row is named together with its incarnation.
    """

    step: int
    entries: Ints  # i64[n], one per row of the result: the decode rows, then the rows whose last chunk it is
    incarnations: Ints  # i64[n]
    decodes: int
    chunk_entries: Ints  # i64[c], all chunks
    chunk_incarnations: Ints  # i64[c]
    chunk_ends: Ints  # i64[c]: positions in the KV cache once the step is done


NO_ROWS: Ints = np.empty(0, dtype=np.int64)


class Steps:
    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.in_flight: deque[Flight] = deque()
        self.drafting = DraftPolicy(rows.config.drafts, always=rows.config.draft_when == "always")
        self._prefill_chunk = rows.config.prefill_chunk

    @property
    def state(self) -> BatchState:
        return self.rows.state

    # ------------------------------------------------------------------ planning

    def plan(self, view: StepView, step: int) -> Flight | None:
        """Fill `view` with the next step and count it as in flight, or return None if there is nothing to run."""
        state = self.state
        assert len(self.in_flight) < STEPS_IN_FLIGHT
        decode, places, retracted = self.rows.top_up()
        writes = _write_slots(view, 0, places, state)
        chunks, counts, sampling, writes = self._plan_prefill(view, writes, may_admit=not retracted)
        if not len(decode) and not len(chunks):
            return None
        view.decode_entries[: len(decode)] = decode
        finals = NO_ROWS
        if len(chunks):
            starts = state.cursor[chunks]
            ends = starts + counts
            last = ends == state.fill[chunks]
            view.chunks[CHUNK_ENTRY, : len(chunks)] = chunks
            view.chunks[CHUNK_ROW, : len(chunks)] = state.row[chunks]
            view.chunks[CHUNK_START, : len(chunks)] = starts
            view.chunks[CHUNK_COUNT, : len(chunks)] = counts
            view.chunks[CHUNK_LAST, : len(chunks)] = last
            state.cursor[chunks] = ends
            finals = chunks[last]
            self.rows.stats.add("prefill_tokens_total", int(counts.sum()))
        else:
            ends = NO_ROWS
        view.kind = STEP_MIXED if len(chunks) else STEP_DECODE
        view.n_decode, view.n_chunks, view.drafts = (
            len(decode),
            len(chunks),
            self.drafting.drafts(len(decode), len(chunks) > 0),
        )
        view.n_slot_writes, view.n_sampling = writes, sampling
        view.step = step
        entries = np.concatenate((decode, finals)) if len(finals) else decode
        state.in_flight[entries] += 1
        incarnation = state.incarnation
        flight = Flight(step, entries, incarnation[entries], len(decode), chunks, incarnation[chunks], ends)
        self.in_flight.append(flight)
        return flight

    def _plan_prefill(self, view: StepView, writes: int, may_admit: bool) -> tuple[Ints, Ints, int, int]:
        """Share the step's prefill tokens: rows that have begun first, then the queue, both first come first.

        Nobody is admitted in a step that had to retract: the pages just won are for the rows that stay. Returns
        entries and token counts of the chunks, i64[c] each, and how many sampling changes and slot writes there are.
        """
        state, rows = self.state, self.rows
        chunks, counts, left = NO_ROWS, NO_ROWS, self._prefill_chunk
        begun = policy.prefill_rows(state)
        if len(begun):
            counts = policy.split_budget(state.fill[begun] - state.cursor[begun], left)
            left -= int(counts.sum())
            chunks, counts = begun[counts > 0], counts[counts > 0]
        admitted: list[int] = []
        while may_admit and left > 0:
            entry = rows.admit(view.slot_writes.shape[1] - writes)
            if not entry:
                break
            pages = int(state.page_count[entry])
            writes = _write_slots(view, writes, np.stack((np.full(pages, entry), np.arange(pages))), state)
            _write_sampling(view, len(admitted), entry, rows.ledger, int(state.row[entry]))
            admitted.append(entry)
            left -= int(state.fill[entry] - state.cursor[entry])
        if admitted:
            new = np.array(admitted)
            tokens = state.fill[new] - state.cursor[new]
            tokens[-1] += min(left, 0)  # the last one admitted gets what was left of the budget
            chunks, counts = np.concatenate((chunks, new)), np.concatenate((counts, tokens))
        return chunks, counts, len(admitted), writes

    # ------------------------------------------------------------------ results

    def apply(self, result: ResultView) -> Flight:
        """Work the result of the oldest step in flight into the batch and the ledger. Returns that step.

        Rows that ended or were retracted since are stale: their part is dropped. The rest of the array work is over all
        rows at once, whatever their number.
        """
        flight = self.in_flight.popleft()
        state, rows = self.state, self.rows
        assert result.n_rows == len(flight.entries) and result.window <= state.window
        if len(flight.chunk_entries):
            here = state.incarnation[flight.chunk_entries] == flight.chunk_incarnations
            state.counted[flight.chunk_entries[here]] = flight.chunk_ends[here]
        entries = flight.entries
        if not len(entries):
            return flight
        counts = result.counts[: len(entries)]
        tokens = result.tokens[: result.window, : len(entries)]
        produced = int(counts.sum())
        current = state.incarnation[entries] == flight.incarnations
        self._count_drafts(flight, result, counts[current[: flight.decodes].nonzero()[0]])
        finals = entries[flight.decodes :][current[flight.decodes :]]
        if np.count_nonzero(current) < len(current):
            keep = np.flatnonzero(current)
            entries, counts, tokens = entries[keep], counts[keep], tokens[:, keep]
        taken = self._accept(entries, tokens, counts, finals, result.window - 1) if len(entries) else 0
        rows.stats.add("decode_tokens_total", taken)
        rows.stats.add("surplus_tokens_total", produced - taken)
        return flight

    def lose_device(self, memory: int, streak: int) -> None:
        """The gpu process has died, and with it all steps in flight; and what was in its memory, unless its successor
        has the same (`memory`, see `Control.memory`). streak: of its deaths, see `Control.streak`.
        """
        state, running = self.state, set[int]()
        for flight in self.in_flight:
            for entries, lives in (
                (flight.entries, flight.incarnations),
                (flight.chunk_entries, flight.chunk_incarnations),
            ):
                running |= set(entries[state.incarnation[entries] == lives].tolist())
        self.rows.forget_device(np.array(sorted(running), dtype=np.int64), memory, streak)

    def drop(self) -> Flight:
        """Take the oldest step in flight as one that did not run. `lose_device` has queued its rows again."""
        return self.in_flight.popleft()

    def _count_drafts(self, flight: Flight, result: ResultView, counts: NDArray[np.int32]) -> None:
        """counts: tokens gained by the decode rows that still run; what others gain is nobody's."""
        stats, drafted = self.rows.stats, result.window > 1
        if not flight.decodes or self.state.window == 1:
            return
        if drafted and len(counts):
            stats.add("drafted_tokens_total", len(counts) * (result.window - 1))
            for run, times in enumerate(np.bincount(counts - 1).tolist()):
                stats.add(accepted_runs(run), times)
            self.drafting.gained(len(counts), int(counts.sum()))
        if not len(flight.chunk_entries):
            self.drafting.took(flight.decodes, drafted, result.end_ns - result.begin_ns)

    def _accept(
        self, entries: Ints, tokens: NDArray[np.int32], counts: NDArray[np.int32], finals: Ints, drafts: int
    ) -> int:
        """Give `entries` their tokens, end those that are at an end, and say so. Returns how many tokens were kept.

        `finals` are the last of them, whose prompt has just been completed: from now on others can share it. The
        others had so many drafts.
        """
        state, rows = self.state, self.rows
        state.in_flight[entries] -= 1
        limits = state.limit[entries]
        taken, stopped = policy.accept(tokens, counts, state.stop_ids[entries], limits - state.outputs[entries])
        if drafts:
            decoded = len(entries) - len(finals)
            rows.count_drafts(entries[:decoded], drafts, taken[:decoded])
        outputs = rows.write_tokens(entries, tokens, taken)
        ledger_rows, generations = state.row[entries], state.generation[entries]
        for entry in finals.tolist():
            rows.keep_prefix(entry)
        ended = (stopped | (outputs == limits)).nonzero()[0]
        finishes = np.zeros(len(entries), dtype=np.int64)  # FINISH_NONE
        if len(ended):
            finishes[ended] = np.where(stopped[ended], FINISH_STOP, FINISH_LENGTH)
            rows.end(ledger_rows[ended], finishes[ended])
        rows.report(ledger_rows, generations, outputs, finishes)
        rows.observe_progress(entries[finishes == FINISH_NONE])
        return int(taken.sum())


def _write_slots(view: StepView, begin: int, places: Ints, state: BatchState) -> int:
    """Append slot writes for `places` (i64[2, n]: entry, index) behind the first `begin`; returns their number then."""
    count: int = places.shape[1]
    if count:
        section = view.slot_writes[:, begin : begin + count]
        section[SLOT_ENTRY], section[SLOT_INDEX] = places
        section[SLOT_PAGE] = state.pages[places[0], places[1]]
    return begin + count


def _write_sampling(view: StepView, index: int, entry: int, ledger: Ledger, row: int) -> None:
    """A row's sampling parameters: sent once, with its first chunk."""
    view.set_sampling(
        index,
        entry,
        float(ledger.temperature[row]),
        float(ledger.top_p[row]),
        float(ledger.min_p[row]),
        int(ledger.top_k[row]),
        int(ledger.seed[row]),
    )
