"""Break one rule of the scheduler at a time: the workloads must notice. And unbroken, they must meet every
situation."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from procs import policy
from procs.batch_state import BatchState
from procs.prefix_cache import PrefixCache
from procs.sched_rows import Rows
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import Request, SimulatedServer

WORKLOADS = 20


def workload(seed: int) -> SimulatedServer:
    """A crowded little server: a cache for about two rows, shared prompts, every way to end."""
    rng = random.Random(seed)
    window = rng.choice([1, 1, 4])
    config = tiny_config(
        max_running=rng.randint(2, 5),
        max_len=24,
        page_size=rng.choice([1, 2, 4]),
        kv_tokens=rng.choice([32, 36, 48]),
        prefill_chunk=rng.choice([3, 16]),
        window=window,
    )
    requests = []
    for _ in range(12):
        prompt = [rng.randint(0, 1)] * rng.randint(1, 9)
        prompt[-1] = rng.randint(0, 3)
        requests.append(
            Request(
                prompt=prompt,
                max_new=rng.randint(2, 20),
                arrival=rng.randint(0, 8),
                seed=rng.randint(0, 1),
                stop_ids=(rng.randint(0, 39),) * rng.randint(0, 1),
                ignore_eos=rng.random() < 0.7,
                abort_after=rng.randint(0, 8) if rng.random() < 0.2 else None,
                text_stop=rng.randint(1, 8) if rng.random() < 0.2 else None,
            )
        )
    return SimulatedServer(config, requests, lazy=rng.choice(["0", "1", "01", "110"]))


def run_all() -> dict[str, int]:
    totals: dict[str, int] = {}
    for seed in range(WORKLOADS):
        server = workload(seed).run()
        for name, value in server.stats.read_stage("scheduler").items():
            if isinstance(value, int):
                totals[name] = totals.get(name, 0) + value
    return totals


def test_the_workloads_meet_every_situation() -> None:
    totals = run_all()
    for name in ("aborted_total", "prefix_hit_tokens_total", "evicted_pages_total", "surplus_tokens_total"):
        assert totals[name] >= WORKLOADS, f"{name} is {totals[name]}"
    assert totals["retractions_total"] >= WORKLOADS // 2


def one_window(state: BatchState, rows: Any) -> Any:
    known = np.maximum(state.counted[rows], state.fill[rows])
    return np.maximum(-(-(known + state.window) // state.page_size) - state.page_count[rows], 0)


def same_incarnation(original: Callable[..., None]) -> Callable[..., None]:
    def end(self: BatchState, entry: int) -> None:
        original(self, entry)
        self.incarnation[entry] -= 1

    return end


def keep_uncounted(self: Rows, entry: int, own_only: bool) -> Any:
    state = self.state
    full = min(int(state.page_count[entry]) * state.page_size, self.config.max_len) // state.page_size
    tokens = self.ledger.tokens[int(state.row[entry]), : full * state.page_size]
    return self.cache.extend(state.shared_pages(entry), tokens, state.pages[entry, :full], own_only)


def hold_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    def extend(self: PrefixCache, path: Any, tokens: Any, pages: Any, own_only: bool) -> Any:
        return original(self, path, tokens, pages, False)

    return extend


def free_everything(self: Rows, entry: int) -> None:
    self.pool.give(self.state.pages[entry, : int(self.state.page_count[entry])])
    self.state.page_count[entry] = self.state.shared[entry] = 0
    self.state.end(entry)


def count_the_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_tokens(self: Rows, entries: Any, tokens: Any, taken: Any) -> Any:
        outputs = original(self, entries, tokens, taken)
        self.state.counted[entries] += 1
        return outputs

    return write_tokens


def decode_before_the_prompt_is_done(state: BatchState) -> Any:
    return np.flatnonzero(state.outputs + state.in_flight < state.limit)


def match_everything(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tokens: original(self, np.append(tokens, 0).astype(np.int32))


def lose_the_output(original: Callable[..., None]) -> Callable[..., None]:
    def retract(self: Rows, entry: int) -> None:
        row = int(self.state.row[entry])
        original(self, entry)
        self.ledger.count[row] = 0

    return retract


def evict_anything(original: Callable[..., None]) -> Callable[..., None]:
    def lock(self: PrefixCache, path: Any) -> None:
        original(self, path)
        for page in path.tolist():
            self._idle[page] = None

    return lock


MUTATIONS: dict[str, tuple[type | Any, str, Any]] = {
    "reserve one window": (policy, "pages_wanted", one_window),
    "one incarnation": (BatchState, "end", same_incarnation(BatchState.end)),
    "free shared pages": (Rows, "_release", free_everything),
    "keep uncounted pages": (Rows, "_extend", keep_uncounted),
    "hold other rows' copies": (PrefixCache, "extend", hold_copies(PrefixCache.extend)),
    "count one too many": (Rows, "write_tokens", count_the_drafts(Rows.write_tokens)),
    "decode too early": (policy, "decode_rows", decode_before_the_prompt_is_done),
    "match the last token": (PrefixCache, "match", match_everything(PrefixCache.match)),
    "lose output at retraction": (Rows, "_retract", lose_the_output(Rows._retract)),
    "never release a prefix": (PrefixCache, "unlock", lambda self, path: None),
    "evict what is in use": (PrefixCache, "lock", evict_anything(PrefixCache.lock)),
    "ignore text stops and aborts": (Rows, "observe", lambda self: None),
    "admit whatever fits or not": (policy, "may_admit", lambda *_: True),
    "no stop ids": (policy, "accept", lambda tokens, counts, stops, room: (np.minimum(counts, room), room < 0)),
    "no limit": (policy, "accept", lambda tokens, counts, stops, room: (counts.astype(int), room < 0)),
}


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_broken_rule_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = MUTATIONS[rule]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_all()
