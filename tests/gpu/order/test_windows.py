"""Drafts with the real scheduler, in any order of the device: every row gets its own tokens, however many at a time."""

from typing import Any

import numpy as np
import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.policies import Eager, policies
from shm.ledger import FINISH_STOP
from shm.limits import WINDOW_MAX
from shm.stats import accepted_runs
from tests.gpu.mill_drafter import MillDrafter
from tests.gpu.order.served_mill import Asked, ServedMill, check, served_config, workload
from tests.gpu.paged_mill import reference
from tools.mill import VOCAB

STREAMS = ("schedule", "forward", "copy")
KINDS = ("mill", "ngram", "shared", "standalone")


def windowed(window: int = 3, **changes: Any) -> Any:
    """Few pages, so that rows are retracted: a row needs two windows beyond its count."""
    return served_config(**({"window": window, "kv_tokens": 36 + 8 * window, "draft_when": "always"} | changes))


def roomy(window: int) -> Any:
    return windowed(window, kv_tokens=200, max_len=32)


def serve(kind: str, asked: list[Asked], config: Any, policy: Any = None) -> ServedMill:
    mill = ServedMill(AdversaryDevice(policy or Eager()), config, asked, drafting=kind)
    check(asked, mill.run(), config)
    return mill


def accepted(mill: ServedMill) -> int:
    """Drafts that were accepted."""
    return sum(drafts * mill.total(accepted_runs(drafts)) for drafts in range(WINDOW_MAX))


def windows(mill: ServedMill) -> int:
    """Rows of steps with drafts."""
    return sum(mill.total(accepted_runs(drafts)) for drafts in range(WINDOW_MAX))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [2, 3, 5])
def test_every_request_gets_its_own_tokens_whoever_drafts(kind: str, window: int) -> None:
    for seed, policy in enumerate(policies(STREAMS, seeds=6)):
        try:
            serve(kind, workload(seed % 5), windowed(window), policy)
        except Exception as error:
            raise AssertionError(f"{policy.name}: {error}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_the_workloads_use_all_that_could_go_wrong(kind: str) -> None:
    """Control: retraction, prefixes, aborts, surplus, and drafts that are taken and that are not."""
    names = ("retractions_total", "prefix_hit_tokens_total", "aborted_total", "surplus_tokens_total")
    totals = dict.fromkeys((*names, "drafted_tokens_total", "accepted"), 0)
    for seed in range(5):
        mill = serve(kind, workload(seed), windowed())
        for name in totals:
            totals[name] += accepted(mill) if name == "accepted" else mill.total(name)
    taken = totals.pop("accepted")
    assert all(totals.values()), totals
    if kind in ("mill", "standalone"):  # to look up is of no use: the mill repeats nothing
        assert 0 < taken < totals["drafted_tokens_total"]


@pytest.mark.parametrize("window", [2, 4])
def test_the_target_as_its_own_draft_model_gains_whole_windows(window: int) -> None:
    """Exactly: every draft of every step is accepted."""
    asked = [Asked(prompt=[i, 7, 3 * i], max_new=1 + 3 * window, arrival=i) for i in range(1, 4)]
    mill = serve("standalone", asked, roomy(window))
    assert accepted(mill) == mill.total("drafted_tokens_total") > 0
    # Three steps of a whole window behind the first token, and those that were queued before the scheduler knew.
    assert 3 * len(asked) <= windows(mill) <= 5 * len(asked)


def test_texts_that_repeat_are_foreseen() -> None:
    """A model that says the same again and again."""
    asked = [Asked(prompt=[5, 6, 7, 8] * 4, max_new=8)]
    mill = ServedMill(AdversaryDevice(Eager()), windowed(4, kv_tokens=200, max_len=40), asked, drafting="ngram")
    vars(mill.program._model)["forward"] = go_round
    mill.program.capture()
    (got,) = mill.run()
    assert got == [5, 6, 7, 8, 5, 6, 7, 8]
    assert accepted(mill) >= 5


def go_round(tokens: Any, positions: Any, seqs: Any, pages: Any, logit_rows: Any, logits: Any, extents: Any) -> None:
    """See `gpu.step.Model`: behind 5 comes 6, and so on, and behind 8 comes 5."""
    logits[:] = 0
    for i, row in enumerate(logit_rows.tolist()):
        logits[i, {5: 6, 6: 7, 7: 8}.get(int(tokens[row]), 5)] = 1


def test_what_others_wrote_is_foreseen_where_that_is_shared() -> None:
    prompt = [9, 8, 7, 6, 5, 4]
    taken = {}
    for kind in ("ngram", "shared"):
        asked = [Asked(prompt=prompt, max_new=9), Asked(prompt=prompt, max_new=9, arrival=40)]
        taken[kind] = accepted(serve(kind, asked, roomy(4)))
    assert taken["shared"] >= taken["ngram"] + 4, "the second request writes what the first one wrote"


@pytest.mark.parametrize("kind", ["mill", "standalone"])
@pytest.mark.parametrize("place", range(1, 8))
def test_a_stop_id_inside_of_a_window_ends_the_row_there(kind: str, place: int) -> None:
    prompt = [3, 1, 4]
    text = reference(prompt, 12)
    assert text.index(text[place]) == place, "it comes only once"
    request = Asked(prompt=prompt, max_new=12, stop_ids=(text[place],))
    mill = ServedMill(AdversaryDevice(Eager()), roomy(4), [request], drafting=kind)
    (got,) = mill.run()
    assert got == text[: place + 1] and request.finish == FINISH_STOP


@pytest.mark.parametrize("limit", range(1, 10))
def test_a_limit_inside_of_a_window_cuts_there(limit: int) -> None:
    request = Asked(prompt=[3, 1, 4], max_new=limit)
    mill = serve("standalone", [request], roomy(4))
    assert int(mill.ledger.count[0]) == limit


def test_what_a_request_gets_does_not_depend_on_drafts() -> None:
    """Sampled requests too: a draft is taken where it is what the seed would have drawn."""
    texts = []
    for kind, window in (("mill", 1), ("mill", 4), ("ngram", 3), ("standalone", 5)):
        asked = workload(3)
        mill = ServedMill(AdversaryDevice(Eager()), windowed(window, kv_tokens=200), asked, drafting=kind)
        got = mill.run()
        texts.append([tokens for tokens, request in zip(got, asked, strict=True) if request.abort_after is None])
    assert all(text == texts[0] for text in texts)
    assert any(request.temperature for request in workload(3))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_switched_off_and_on_with_steps_in_flight(kind: str) -> None:
    """Windows of one and of four follow on each other, whatever is queued: nothing is drained, nothing lost."""
    chance = np.random.default_rng(0)
    for seed in range(4):
        asked, config = workload(seed), windowed(4)
        mill = ServedMill(AdversaryDevice(Eager()), config, asked, drafting=kind)
        mill.steps.drafting.drafts = lambda rows, mixed: int(chance.integers(2)) * 3  # type: ignore[method-assign]
        check(asked, mill.run(), config)


@pytest.mark.parametrize("window", [2, 4])
def test_the_draft_models_cache_is_right_after_steps_without_drafts(window: int) -> None:
    """Where a step had no drafts the draft model still passed over its token: it goes on to foresee everything."""
    asked = [Asked(prompt=[8, 3], max_new=4 * window + 6)]
    mill = ServedMill(AdversaryDevice(Eager()), roomy(window), asked, drafting="standalone")
    turns = iter([0, 0, 0, *[window - 1] * 40])
    mill.steps.drafting.drafts = lambda rows, mixed: next(turns) if rows else 0  # type: ignore[method-assign]
    check(asked, mill.run(), mill.config)
    assert accepted(mill) == mill.total("drafted_tokens_total") > 0


@pytest.mark.parametrize("window", [2, 4])
def test_the_draft_models_cache_is_right_after_chunks_hits_and_retractions(window: int) -> None:
    """It is the target itself, so a draft that is not taken shows a place of its cache that is wrong."""
    head = [7, 3, 9, 4, 8, 2, 6, 5, 1]
    asked = [Asked(prompt=[*head, i], max_new=13, arrival=2 * i) for i in range(6)]
    config = windowed(window, kv_tokens=36 + 2 * window, prefill_chunk=4)
    mill = ServedMill(AdversaryDevice(Eager()), config, asked, drafting="standalone")
    check(asked, mill.run(), config)
    assert mill.total("prefix_hit_tokens_total") > 0 and mill.total("retractions_total") > 0
    assert accepted(mill) == mill.total("drafted_tokens_total") > 0


class Scripted(MillDrafter):
    """Foresees so many tokens in each step, and notes the positions that each step writes."""

    def __init__(self, model: Any, gains: list[int]) -> None:
        super().__init__(model)
        self.gains, self.written = iter(gains), []

    def _draft(self, rows: Any, shape: Any) -> None:
        if not shape.decode:
            return
        self.luck = 4
        super()._draft(rows, shape)
        wrong = next(self.gains)  # the first draft that the target does not take
        if wrong < shape.window:
            rows.tokens[wrong] = (rows.tokens[wrong] + 1) % VOCAB
        self.written.append(rows.positions[: shape.tokens].tolist())


def test_two_windows_are_reserved_position_by_position() -> None:
    """One request over four steps, which gain 3, 4, 1 and 4 tokens: the third one writes the last position that is
    reserved, since the scheduler's count is a full window behind.
    """
    config = served_config(
        window=4, draft_when="always", max_running=1, page_size=1, kv_tokens=400, max_len=150, prefill_chunk=128
    )
    asked = [Asked(prompt=[1 + i % 90 for i in range(100)], max_new=13)]
    mill = ServedMill(AdversaryDevice(Eager()), config, asked)
    drafter = Scripted(mill.program._model, [3, 4, 1, 4, 4, 4])
    drafter.caches = mill.program.caches
    mill.program.drafter = drafter
    mill.program.capture()
    counted, reserved = [], []
    plan = mill.steps.plan

    def note(view: Any, step: int) -> Any:
        flight = plan(view, step)
        if flight is not None and flight.decodes:
            counted.append(int(mill.rows.state.counted[1]))
            reserved.append(int(mill.rows.state.page_count[1]) - 1)
        return flight

    mill.steps.plan = note  # type: ignore[method-assign]
    check(asked, mill.run(), config)
    # The scheduler plans the first decode step before it has seen the last chunk, whose length it knows all the same.
    assert counted[1:4] == [100, 103, 107]
    assert reserved[:4] == [107, 107, 110, 114]
    assert drafter.written[:4] == [list(range(start, start + 4)) for start in (100, 103, 107, 108)]
    assert all(max(positions) <= last for positions, last in zip(drafter.written, reserved, strict=True))
    assert max(drafter.written[2]) == reserved[2], "the worst case uses the last one"
