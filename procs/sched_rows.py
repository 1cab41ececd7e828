"""The rows' way through the scheduler: queued, admitted, topped up, retracted, ended.

Owns the queue, the batch state, the page pool, the prefix cache and the scheduler's planes of the ledger. It never
talks to the device (a step is planned in `sched_steps`), never chooses (that is `policy`), and works row by row only
for rows that begin, end or need pages.

Everything here can be rebuilt from the ledger: a fresh scheduler queues every live row again with prompt and output
so far. Where it finds the batch tables of the one before, rows find their pages again (`sched_adoption`).

Why the pages of a row that ends or is retracted are free at once, though a step in flight may still write to them.
Let L be the last step that has the row; no later one is queued with it. Its page P goes to another row, whose slot
writes travel with a step behind L. (1) L reads the slot table before its fence, and those slot writes run behind the
fence: L finds the old row, so it writes to that row's own pages and to no other. (2) The passes of the later step run
behind those of L on the forward stream, and the new owner writes every position of P before it reads it: what L left
there is gone by then. (3) P can become part of a shared prefix only when the result of the new owner's last chunk has
been processed; that step ran behind L, so nothing of L is still to come. (4) What the old row itself leaves in the
prefix cache are its counted positions, and L writes at or beyond the count.

The same holds across schedulers, where L is of one that died. Its steps stay in the step ring, in front of those of its
successor and on the same streams, so (1) and (2) do not ask who queued them. (3) A page can also become part of a
prefix by adoption; then it is counted, by a result that came behind L, or it is one of those in (4). (4) What the dead
one had counted it knew from results, and L is a step whose result it had not worked in: a chunk of it begins at the
cursor, a window at the length that the steps before left on the device, and neither is below the count. Only mtp writes
below, at the place before the newest token's: the bits that stand there.
"""

import time
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from procs import policy
from procs.batch_state import NO_STOP_ID, BatchState, Ints
from procs.pages import PagePool, Pages
from procs.prefix_cache import PrefixCache
from procs.quarantine import Quarantine
from shm.batch_tables import BatchTables
from shm.config import ServerConfig
from shm.faults import fault, wrong
from shm.ledger import FINISH_ABORT, FINISH_ERROR, FINISH_NONE, FINISH_STOP, Ledger
from shm.limits import MAX_STOP_TOKEN_IDS
from shm.records import PROGRESS_PLANES
from shm.stats import StatsWriter

NOT_LIVE = -1  # a generation that no row ever has


class Rows:
    """All rows that were handed to the scheduler and are not done."""

    def __init__(
        self, config: ServerConfig, ledger: Ledger, stats: StatsWriter, tables: BatchTables | None = None
    ) -> None:
        """tables: see `BatchState`."""
        self.config = config
        self.ledger = ledger
        self.stats = stats
        assert config.pages_per_row < config.pages, "a lone request always fits"
        self._eos = np.array(config.model.eos_token_ids, dtype=np.int32)
        width = MAX_STOP_TOKEN_IDS + len(self._eos)
        self.state = BatchState(
            config.max_running, config.pages_per_row, config.page_size, config.window, width, tables
        )
        self.pool = PagePool(config.pages)
        self.cache = PrefixCache(config.pages, config.page_size, behind=int(config.speculate == "mtp"))
        self.waiting: OrderedDict[int, int] = OrderedDict()  # ledger row -> generation, in the order of admission
        self.quarantine = Quarantine(ledger)
        self.outbox: list[NDArray[np.int32]] = []  # i32[4, n]: row, generation, count, finish, for the detokenizer
        self.headroom = policy.HEADROOM_CALM
        # By ledger row, so that looking for aborts and text stops is one comparison over all rows, queued or running.
        self._live = np.full(config.rows, NOT_LIVE, dtype=np.int64)
        self._entry_of = np.zeros(config.rows, dtype=np.int64)  # 0 = queued
        self._refused: tuple[int, ...] = ()
        self._admissions = 0

    @property
    def pages_available(self) -> int:
        return self.pool.free + self.cache.evictable

    # ------------------------------------------------------------------ in

    def enqueue(self, row: int, generation: int) -> None:
        """Queue a ledger row that the tokenizer made ready, with its prompt and whatever output it has.

        Being told twice, or of an earlier life of the row, is harmless.
        """
        ledger = self.ledger
        known = self._live[row] == generation or ledger.done[row] == generation
        if known or ledger.ready[row] != generation or ledger.generation[row] != generation:
            return
        assert self._live[row] == NOT_LIVE, "a row is given out again only after it was done"
        self._live[row] = generation
        self._entry_of[row] = 0
        self.waiting[row] = generation
        if ledger.begun[row] != generation:
            ledger.count[row] = 0
            ledger.finish[row] = FINISH_NONE
            ledger.draft_steps[row] = ledger.drafted[row] = ledger.accepted[row] = 0
            ledger.scheduler_deaths[row] = ledger.gpu_deaths[row] = ledger.admitted[row] = 0
            ledger.scheduler_in_a_row[row] = ledger.gpu_in_a_row[row] = 0
            ledger.begun[row] = generation

    # ------------------------------------------------------------------ running

    def admit(self, slot_writes_left: int) -> int:
        """Start the request at the head of the queue and return its entry, or 0 if it has to wait.

        Suspects go before the others, and each has the device for itself.
        """
        state, ledger, suspects = self.state, self.ledger, self.quarantine.suspects
        if not self.waiting or not state.has_free_entry or (suspects and state.running):
            return 0
        row = next(row for row in self.waiting if not suspects or row in suspects)
        generation = self.waiting[row]
        # What the answer depends on. What the tree alone can change is how much of the prompt is found in it.
        situation = (row, generation, self.pages_available, state.running, self.headroom, self.cache.inserted)
        if situation == self._refused:  # nothing changed since: do not walk the tree again in every step
            return 0
        prompt, outputs = int(ledger.prompt_len[row]), int(ledger.count[row])
        fill = prompt + outputs
        assert prompt > 0 and fill < self.config.max_len, f"row {row}: {prompt} prompt and {outputs} output tokens"
        total = policy.pages_for_prompt(state, fill)
        if total > slot_writes_left:
            return 0
        path = self.cache.match(ledger.tokens[row, :fill])
        available = self.pages_available - self.cache.idle_on(path)
        if not policy.may_admit(total - len(path), available, state.running, self.headroom):
            self._refused = situation
            return 0
        del self.waiting[row]
        ledger.admitted[row] = generation
        self.quarantine.admitted(row)
        fault("scheduler.row_admitted", lambda: (int(ledger.seed[row]),))
        self._admissions += 1
        entry = state.begin(row, generation, self._admissions)
        self._entry_of[row] = entry
        self.cache.lock(path)
        fresh = self._take(total - len(path))
        state.append_pages(np.array([entry]), np.array([total]), np.concatenate((path, fresh)))
        state.shared[entry] = len(path)
        hit = len(path) * state.page_size
        state.prompt[entry], state.fill[entry], state.outputs[entry] = prompt, fill, outputs
        state.cursor[entry] = state.counted[entry] = hit  # behind row and pages, which it says something about
        state.limit[entry] = self.limit(row)
        state.stop_ids[entry] = self.stop_ids(row)
        stats = self.stats
        stats.add("admitted_total")
        stats.add("prompt_tokens_total", fill)
        stats.add("prefix_hit_tokens_total", hit)
        if outputs == 0:
            stats.observe("queue_s", max(0, time.monotonic_ns() - int(ledger.arrival_ns[row])) * 1e-9)
        return entry

    def top_up(self) -> tuple[Ints, Ints, int]:
        """Choose the next step's decode rows and fill each up to two windows beyond its count.

        Makes room by evicting cached prefixes, then by retracting rows. Returns the entries, i64[n], the new pages'
        places, i64[2, m] (entry and index in the row), and how many rows were retracted.
        """
        state = self.state
        rows = policy.decode_rows(state)
        wanted = policy.pages_wanted(state, rows)
        retracted = 0
        while (total := int(wanted.sum())) > self.pages_available:
            self._retract(policy.retraction_victim(state))
            retracted += 1
            rows = policy.decode_rows(state)
            wanted = policy.pages_wanted(state, rows)
        if total == 0:
            return rows, np.empty((2, 0), dtype=np.int64), retracted
        needy = np.flatnonzero(wanted)
        return rows, state.append_pages(rows[needy], wanted[needy], self._take(total)), retracted

    def count_drafts(self, entries: Ints, drafts: int, taken: Ints) -> None:
        """`entries` kept so many tokens (i64[n]) of a step with so many drafts for each."""
        ledger, rows = self.ledger, self.state.row[entries]
        ledger.draft_steps[rows] += 1
        ledger.drafted[rows] += drafts
        ledger.accepted[rows] += (taken - 1).astype(np.int32)

    def write_tokens(self, entries: Ints, tokens: NDArray[np.int32], taken: Ints) -> Ints:
        """Append the first `taken` (i64[n]) of `tokens` (i32[window, n]) to the output of `entries`: tokens, then
        counts.

        Returns the new numbers of output tokens, i64[n].
        """
        state, ledger = self.state, self.ledger
        rows, prompt, outputs = state.row[entries], state.prompt[entries], state.outputs[entries]
        end = prompt + outputs
        if wrong("scheduler.counts_before_tokens"):
            ledger.count[rows] = outputs + taken
            time.sleep(0.005)  # for a death to fall between
        for offset, column in enumerate(tokens):
            some = np.flatnonzero(taken > offset) if offset else slice(None)  # every row gains at least one
            ledger.tokens[rows[some], end[some] + offset] = column[some]
        fault("scheduler.tokens_stored", lambda: map(int, ledger.seed[rows]))
        outputs += taken
        state.outputs[entries] = outputs
        state.counted[entries] = prompt + outputs - 1
        ledger.count[rows] = outputs
        fault("scheduler.count_stored")
        return outputs

    def keep_prefix(self, entry: int) -> None:
        """Let other requests find the row's full counted pages, while it goes on."""
        self.state.shared[entry] = len(self._extend(entry, own_only=True))

    def _extend(self, entry: int, own_only: bool) -> Pages:
        """Put the row's full counted pages into the prefix cache; returns the path that it holds now."""
        state = self.state
        path, full = state.shared_pages(entry), int(state.counted[entry]) // state.page_size
        if full <= len(path):
            return path
        tokens = self.ledger.tokens[int(state.row[entry]), : full * state.page_size + self.cache.behind]
        return self.cache.extend(path, tokens, state.pages[entry, :full], own_only)

    # ------------------------------------------------------------------ out

    def observe(self) -> None:
        """End the rows that the detokenizer found a stop string in, then those that the frontend aborted."""
        ledger = self.ledger
        for flag, reason in ((ledger.text_stop, FINISH_STOP), (ledger.abort, FINISH_ABORT)):
            rows = (flag == self._live).nonzero()[0]
            if len(rows):
                generations = self._live[rows]
                reasons = np.full(len(rows), reason)
                self.end(rows, reasons)
                self.report(rows, generations, ledger.count[rows], reasons)

    def end(self, rows: Ints, reasons: Ints) -> None:
        """End ledger rows, i64[n], queued or running: finish, then done, then never touch them again."""
        ledger = self.ledger
        for row, entry in zip(rows.tolist(), self._entry_of[rows].tolist(), strict=True):
            if entry:
                self._release(entry)
            else:
                del self.waiting[row]
            self.quarantine.forget(row)
        ledger.finish[rows] = reasons
        fault("scheduler.finish_stored")
        ledger.done[rows] = self._live[rows]
        fault("scheduler.done_stored")
        self._live[rows] = NOT_LIVE
        self._entry_of[rows] = 0
        aborted = int(np.count_nonzero(reasons == FINISH_ABORT))
        self.stats.add("finished_total", len(rows) - aborted)
        self.stats.add("aborted_total", aborted)
        self.headroom = max(policy.HEADROOM_CALM, self.headroom - len(rows))

    def report(self, rows: Ints, generations: Ints, counts: NDArray[np.generic], finishes: NDArray[np.generic]) -> None:
        """Put a record for the detokenizer into the outbox, one column per ledger row."""
        record = np.empty((PROGRESS_PLANES, len(rows)), dtype=np.int32)
        record[0], record[1], record[2], record[3] = rows, generations, counts, finishes
        self.outbox.append(record)

    def _retract(self, entry: int) -> None:
        """Take a row out of the batch and queue it first. Its output so far becomes part of its prompt.

        What a step in flight still produces for it is dropped, and computed again later to the same bits: arithmetic is
        exact row by row, and randomness depends on seed and position alone.
        """
        row, generation = int(self.state.row[entry]), int(self.state.generation[entry])
        self._release(entry)
        self._entry_of[row] = 0
        self.ledger.admitted[row] = 0
        self.waiting[row] = generation
        self.waiting.move_to_end(row, last=False)
        self.headroom = policy.HEADROOM_TIGHT
        self.stats.add("retractions_total")

    def forget_device(self, running: Ints, memory: int, streak: int) -> None:
        """Queue every row of the batch again, in the order in which they were admitted. `running`: entries, i64[n], in
        the steps that were lost. memory: what the device has now, see `Control.memory`; if it is another one than
        before, all cached prefixes are lost as well. streak: of the gpu process' deaths, see `Control.streak`.
        """
        poison = self.quarantine.blame("gpu", streak, self.state.row[running])
        state = self.state
        batch = np.flatnonzero(state.used)
        for entry in batch[np.argsort(-state.order[batch])].tolist():
            self._retract(entry)
        if memory != state.tables.memory:
            self.pool.give(self.cache.evict(self.cache.cached))
            state.tables.memory = memory
        self._refused = ()
        self.stats.add("rerun_total", len(batch))
        self.give_up(poison)

    def give_up(self, poison: list[int]) -> None:
        """End ledger rows that processes die of."""
        if poison:
            rows = np.array(poison)
            generations, reasons = self._live[rows], np.full(len(rows), FINISH_ERROR)
            self.end(rows, reasons)
            self.report(rows, generations, self.ledger.count[rows], reasons)
            self.stats.add("poison_total", len(rows))

    def observe_progress(self, entries: Ints) -> None:
        """`entries` that still run have had a result. A suspect that got on makes room for the next one."""
        for row in self.quarantine.gained(self.state.row[entries]):
            if self.quarantine.suspects:
                self._retract(int(self._entry_of[row]))

    def _release(self, entry: int) -> None:
        """Free an entry and its pages at once (see above why that is right), keeping its counted pages in the cache."""
        state = self.state
        path = self._extend(entry, own_only=False)
        pages = state.pages[entry, : int(state.page_count[entry])]
        private = np.ones(len(pages), dtype=np.bool_)
        private[: len(path)] = pages[: len(path)] != path
        self.pool.give(pages[private])
        self.cache.unlock(path)
        state.page_count[entry] = state.shared[entry] = 0
        state.end(entry)

    def _take(self, count: int) -> Pages:
        if count > self.pool.free:
            evicted = self.cache.evict(count - self.pool.free)
            self.pool.give(evicted)
            self.stats.add("evicted_pages_total", len(evicted))
        return self.pool.take(count)

    def limit(self, row: int) -> int:
        """Output tokens at which the ledger row ends."""
        return min(int(self.ledger.max_new[row]), self.config.max_len - int(self.ledger.prompt_len[row]))

    def stop_ids(self, row: int) -> NDArray[np.int32]:
        """i32[s]: the token ids that end the ledger row, the model's own among them unless it ignores those."""
        eos = np.full_like(self._eos, NO_STOP_ID) if self.ledger.ignore_eos[row] else self._eos
        return np.concatenate((self.ledger.stop_ids[row], eos))

    @property
    def pages_in_rows(self) -> int:
        """Pages that belong to one row alone."""
        return int((self.state.page_count - self.state.shared).sum())
