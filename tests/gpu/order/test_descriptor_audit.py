"""The descriptor audit: silent over everything that the real scheduler sends, and loud over what it may never send."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.descriptor_audit import DescriptorAudit, DescriptorError
from gpu.device.adversary import AdversaryDevice
from gpu.device.policies import Eager
from procs.sched_rows import Rows
from shm.config import ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, StepLayout, StepView
from tests.gpu.order.served_mill import ServedMill, check, served_config, workload
from tests.procs.simulated_device import tiny_config
from tests.procs.simulated_server import SimulatedServer
from tests.procs.test_scheduler_mutations import workload as crowded
from tests.procs.test_scheduler_workloads import configs, requests

CONFIG = tiny_config(max_running=4, kv_tokens=80, page_size=4, max_len=24, prefill_chunk=8)
Step = dict[str, Any]


def describe(config: ServerConfig, number: int, step: Step) -> StepView:
    """decode: entries. chunks: entry, row, start, count, last. slots: entry, index, page. begin: entries."""
    layout = StepLayout(config)
    view = layout.view(np.full(layout.nbytes // 4, -99, np.int32))
    view.clear()
    view.step = number
    decode, chunks = step.get("decode", []), step.get("chunks", [])
    slots, begin = step.get("slots", []), step.get("begin", [])
    view.kind = step.get("kind", STEP_MIXED if chunks else STEP_DECODE)
    view.n_decode, view.n_chunks, view.n_slot_writes, view.n_sampling = map(len, (decode, chunks, slots, begin))
    view.decode_entries[: len(decode)] = decode
    for i, chunk in enumerate(chunks):
        view.chunks[:5, i] = chunk
    for i, slot in enumerate(slots):
        view.slot_writes[:, i] = slot
    for i, entry in enumerate(begin):
        view.set_sampling(i, entry, 0.0, 1.0, 0.0, 0, 7)
    return view


def audit(steps: list[Step], config: ServerConfig = CONFIG) -> None:
    auditor = DescriptorAudit(config)
    for number, step in enumerate(steps):
        auditor.check(describe(config, 100 + number, step))


def fill(entry: int, *pages: int, first: int = 0) -> list[tuple[int, int, int]]:
    return [(entry, first + i, page) for i, page in enumerate(pages)]


FIRST: Step = {"begin": [1], "slots": fill(1, 1, 2, 3), "chunks": [(1, 0, 0, 8, 1)]}  # a prompt of 8 tokens
SECOND: Step = {"begin": [2], "slots": fill(2, 4, 5, 6), "chunks": [(2, 1, 0, 5, 0)]}
RIGHT: list[Step] = [
    FIRST,
    SECOND | {"decode": [1]},
    {"decode": [1], "chunks": [(2, 1, 5, 4, 1)]},
    {"decode": [1, 2], "slots": fill(1, 7, first=3)},
    {"decode": [2, 1]},
    # Entry 1 has ended; its page 3 goes to a new row, pages 1 and 2 (8 full positions) are shared with it.
    {"decode": [2], "begin": [3], "slots": fill(3, 1, 2, 3), "chunks": [(3, 2, 8, 2, 1)]},
    {"decode": [3, 2], "begin": [1], "slots": [*fill(2, 8, first=3), *fill(1, 1, 7)], "chunks": [(1, 3, 4, 2, 1)]},
    {"decode": [1, 3]},  # entry 2 has ended
    {"decode": [1, 3], "begin": [2], "slots": [*fill(3, 9, first=3), *fill(2, 6, 5, 4)], "chunks": [(2, 4, 0, 6, 1)]},
]


def test_a_stream_of_descriptors_in_order_is_passed() -> None:
    audit(RIGHT)


WRONG: dict[str, tuple[str, list[Step]]] = {
    "decode before any chunk": ("step 100, entry 1: decodes before", [{"decode": [1]}]),
    "decode before the last chunk": ("step 102, entry 2: decodes before", [*RIGHT[:2], {"decode": [1, 2]}]),
    "decode beside the last chunk": (
        "step 102, entry 2: takes part 2 times",
        [*RIGHT[:2], {"decode": [1, 2], "chunks": [(2, 1, 5, 4, 1)]}],
    ),
    "twice in a step": ("step 101, entry 1: takes part 2 times", [FIRST, {"decode": [1, 1]}]),
    "a new life beside the old one": (
        "step 101, entry 1: takes part 2 times",
        [FIRST, FIRST | {"decode": [1], "slots": fill(1, 4, 5, 6)}],
    ),
    "a new life that does not say so": ("entry 1: a chunk without a life", [FIRST, FIRST | {"begin": [], "slots": []}]),
    "a life without a chunk": ("step 101, entry 2: a life begins without", [FIRST, {"decode": [1], "begin": [2]}]),
    "begins twice": ("entry 1: begins 2 times", [FIRST | {"begin": [1, 1]}]),
    "a new life on the old slots": ("entry 1: a chunk ends at 8, there are", [FIRST, FIRST | {"slots": []}]),
    "a gap between chunks": ("entry 2: a chunk begins at 6 instead of 5", [SECOND, {"chunks": [(2, 1, 6, 3, 1)]}]),
    "a chunk twice": ("entry 2: a chunk begins at 0 instead of 5", [SECOND, SECOND | {"begin": [], "slots": []}]),
    "a chunk of another row": ("entry 2: a chunk of another ledger row, 3", [SECOND, {"chunks": [(2, 3, 5, 3, 1)]}]),
    "a chunk of no row": (
        f"there is no ledger row {CONFIG.rows}",
        [{"begin": [1], "slots": fill(1, 1, 2), "chunks": [(1, CONFIG.rows, 0, 3, 1)]}],
    ),
    "a chunk without tokens": ("entry 2: a chunk without tokens", [SECOND, {"chunks": [(2, 1, 5, 0, 1)]}]),
    "chunks of a decode step": ("a decode step has chunks", [FIRST | {"kind": STEP_DECODE}]),
    "too many prompt tokens": ("9 prompt tokens in one step", [FIRST | {"chunks": [(1, 0, 0, 9, 1)]}]),
    "nobody": ("step 100: nobody takes part", [{}]),
    "entry 0": ("entry 0: there is no such entry", [FIRST, {"decode": [0, 1]}]),
    "entry past the table": ("entry 5: there is no such entry", [FIRST, {"decode": [5]}]),
    "page 0": ("entry 1, page 0: there is no such page", [FIRST | {"slots": fill(1, 1, 0, 3)}]),
    "page past the pool": ("page 21: there is no such page", [FIRST | {"slots": fill(1, 1, 21, 3)}]),
    "slots of entry 0": ("entry 0, page 1: a slot write for no request", [FIRST | {"slots": fill(0, 1)}]),
    "slots of a bystander": (
        "entry 1, page 7: pages for a row that takes no part",
        [FIRST, SECOND | {"slots": [*fill(2, 4, 5, 6), *fill(1, 7, first=3)]}],
    ),
    "a slot written twice": (
        "entry 1, page 7: slot 2 is written, the row has 3",
        [FIRST, {"decode": [1], "slots": fill(1, 7, first=2)}],
    ),
    "a slot left out": (
        "entry 1, page 7: slot 4 is written, the row has 3",
        [FIRST, {"decode": [1], "slots": fill(1, 7, first=4)}],
    ),
    "too few pages": (
        "step 105, entry 1: may reach 13 positions, has pages for 12",
        [FIRST, *({"decode": [1]} for _ in range(9))],
    ),
    "a page reused one step early": (
        "step 101, entry 1, page 3: a page of a row that takes part was given to another",
        [FIRST, SECOND | {"decode": [1], "slots": fill(2, 4, 3)}],
    ),
    "a page reused, and the old row is back": (
        "step 102, entry 1, page 2: a page of a row that takes part was given",
        [FIRST, SECOND | {"slots": fill(2, 4, 2)}, {"decode": [1]}],
    ),
    "a page twice in a row": ("entry 1, page 1: a page of a row", [FIRST | {"slots": fill(1, 1, 2, 1)}]),
    "a prefix that ends inside a page": (
        "entry 3: a prefix of 6 positions ends inside",
        [FIRST, {"begin": [3], "slots": fill(3, 1, 2, 9), "chunks": [(3, 2, 6, 3, 1)]}],
    ),
    "a prefix page that is not full": (
        "entry 3, page 5: 1 positions of a prefix's page are written",
        [SECOND, {"begin": [3], "slots": fill(3, 4, 5, 9), "chunks": [(3, 2, 8, 3, 1)]}],
    ),
    "a prefix page of the same step": (
        "entry 3, page 1: 0 positions",
        [{"begin": [1, 3], "slots": [*fill(1, 1, 2), *fill(3, 1, 9)], "chunks": [(1, 0, 0, 4, 1), (3, 2, 4, 2, 1)]}],
    ),
    "a prefix page that was reused": (
        "entry 3, page 2: a page of a row that takes part was given to another",
        [*RIGHT[:6], {"decode": [3], "begin": [4], "slots": fill(4, 2), "chunks": [(4, 3, 0, 2, 1)]}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_no_scheduler_may_send_is_named_by_step_entry_and_page(what: str) -> None:
    message, steps = WRONG[what]
    with pytest.raises(DescriptorError, match=message):
        audit(steps)


def test_a_windows_reach_is_taken_from_what_is_certain() -> None:
    """With W = 4 a row of 8 may stand at 9 to 12 after a step, and needs pages for 8 + 2 * 4 behind its chunk."""
    config = tiny_config(max_running=4, kv_tokens=96, max_len=24, prefill_chunk=8, window=4)
    start = FIRST | {"slots": fill(1, 1, 2, 3, 8)}
    audit([start, {"decode": [1]}, {"decode": [1]}, {"decode": [1], "slots": fill(1, 9, first=4)}], config)
    with pytest.raises(DescriptorError, match="may reach 17 positions, has pages for 16"):
        audit([start, {"decode": [1]}, {"decode": [1]}, {"decode": [1]}], config)


def test_a_page_that_a_row_may_still_write_is_no_prefix_for_a_row_beside_it() -> None:
    """Entry 1 stands at 9 to 12 after a window of 4: its third page may be full, or not."""
    config = tiny_config(max_running=4, kv_tokens=96, max_len=24, prefill_chunk=8, window=4)
    begin = {"begin": [3], "slots": fill(3, 1, 2, 3, 9, 10), "chunks": [(3, 2, 12, 3, 1)]}
    start = [FIRST | {"slots": fill(1, 1, 2, 3, 8, 11)}, {"decode": [1]}]
    audit([*start, begin], config)  # entry 1 has ended: what it wrote is known to the scheduler
    with pytest.raises(DescriptorError, match="step 102, entry 3, page 3: a page of the row is written by entry 1"):
        audit([*start, begin | {"decode": [1]}], config)


# ---------------------------------------------------------------------- the real scheduler


class Audited:
    """Has every descriptor of a simulated server audited as it is planned."""

    def __init__(self, server: SimulatedServer) -> None:
        self.server = server
        self.audit = DescriptorAudit(server.config)
        self.hook()

    def hook(self) -> None:
        plan = self.server.steps.plan

        def audited(view: StepView, step: int) -> Any:
            flight = plan(view, step)
            if flight is not None:
                self.audit.check(view)
            return flight

        self.server.steps.plan = audited  # type: ignore[method-assign]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_workload_of_the_scheduler_gives_an_alarm(data: st.DataObject) -> None:
    config = data.draw(configs())
    asked = data.draw(st.lists(requests(config.max_len), min_size=1, max_size=12))
    server = SimulatedServer(config, asked, data.draw(st.text("01", min_size=1, max_size=5)))
    Audited(server)
    server.run()


def test_no_crowded_workload_gives_an_alarm_whether_schedulers_die_or_not() -> None:
    totals = dict.fromkeys(("retractions_total", "prefix_hit_tokens_total", "aborted_total", "surplus_tokens_total"), 0)
    steps = 0
    for seed in range(40):
        server = crowded(seed)
        audited = Audited(server)
        chance = random.Random(seed)
        if seed % 2:
            while any(not request.finish for request in server.requests) and server.turn < 400:
                server.one_turn()
                if chance.random() < 0.05:
                    server.restart_scheduler(at_work=False)
                    audited.hook()
        else:
            server.run()
        steps += server.step
        for name in totals:
            totals[name] += server.total(name)
    assert all(value > 20 for value in totals.values()) and steps > 1000, (totals, steps)


def test_no_alarm_with_the_real_step_program() -> None:
    for seed in range(10):
        config, asked = served_config(), workload(seed)
        mill = ServedMill(AdversaryDevice(Eager()), config, asked)
        mill.audit = DescriptorAudit(config)
        check(asked, mill.run(), config)


# ---------------------------------------------------------------------- faults in what it sent


@cache
def recorded(seed: int) -> tuple[ServerConfig, list[Step]]:
    """The descriptors of a run, as steps that can be spoiled."""
    server = crowded(seed)
    server.run()
    layout, steps = StepLayout(server.config), []
    for payload in server.descriptors:
        whole = np.full(layout.nbytes // 4, -99, np.int32)
        whole[: len(payload) // 4] = np.frombuffer(payload, np.int32)
        view = layout.view(whole)
        steps.append(
            {
                "decode": view.decode_entries[: view.n_decode].tolist(),
                "chunks": view.chunks[:5, : view.n_chunks].T.tolist(),
                "slots": view.slot_writes[:, : view.n_slot_writes].T.tolist(),
                "begin": view.sampling[0, : view.n_sampling].tolist(),
            }
        )
    return server.config, steps


def rows_of(steps: list[Step]) -> dict[int, set[int]]:
    """Which pages each entry was given in its current life."""
    rows: dict[int, set[int]] = {}
    for step in steps:
        rows |= {entry: set() for entry in step["begin"]}
        for entry, _, page in step["slots"]:
            rows[entry].add(page)
    return rows


def fresh_pages(step: Step, entry: int, page_size: int) -> set[int]:
    """The pages that a new row is to write, without the prefix that it shares."""
    start = next(chunk[2] for chunk in step["chunks"] if chunk[0] == entry)
    return {page for e, index, page in step["slots"] if e == entry and index >= start // page_size}


def named(step: Step) -> set[int]:
    return {*step["decode"], *step["begin"], *(chunk[0] for chunk in step["chunks"])}


def one_step_early(steps: list[Step], at: int, page_size: int) -> bool:
    """Admit the first new row of a step with the step before it, which still has the row that its pages come from."""
    here, before, rows = steps[at], steps[at - 1], rows_of(steps[:at])
    for entry in here["begin"]:
        pages = fresh_pages(here, entry, page_size)
        if entry in named(before) or not any(rows[other] & pages for other in before["decode"]):
            continue
        for what, where in (("begin", lambda x: x), ("slots", lambda x: x[0]), ("chunks", lambda x: x[0])):
            before[what] = before[what] + [x for x in here[what] if where(x) == entry]
            here[what] = [x for x in here[what] if where(x) != entry]
        return True
    return False


def forget_the_new_life(steps: list[Step], at: int, page_size: int) -> bool:
    """A relay entry is used again, as after a retraction, and nobody says so."""
    entry = next((e for e in steps[at]["begin"] if any(e in s["begin"] for s in steps[:at])), 0)
    steps[at]["begin"] = [e for e in steps[at]["begin"] if e != entry]
    return bool(entry)


def lose_a_slot_write(steps: list[Step], at: int, page_size: int) -> bool:
    return bool(steps[at]["slots"]) and bool(steps[at]["slots"].pop(0))


def decode_with_the_last_chunk(steps: list[Step], at: int, page_size: int) -> bool:
    last = [chunk[0] for chunk in steps[at]["chunks"] if chunk[4]]
    steps[at]["decode"] = steps[at]["decode"] + last[:1]
    return bool(last)


SPOILED: list[tuple[Callable[[list[Step], int, int], bool], int]] = [
    (one_step_early, 3),
    (forget_the_new_life, 40),
    (lose_a_slot_write, 40),
    (decode_with_the_last_chunk, 40),
]


@pytest.mark.parametrize(("spoil", "times"), SPOILED, ids=[spoil.__name__ for spoil, _ in SPOILED])
def test_a_fault_in_what_the_scheduler_sent_is_found(spoil: Callable[[list[Step], int, int], bool], times: int) -> None:
    """With a window of 1, where the audit knows every length."""
    spoiled = missed = 0
    for config, steps in map(recorded, range(24)):
        if config.window > 1:
            continue
        audit(steps, config)
        faults = 0
        for at in range(1, len(steps)):
            if faults == 6:
                break
            copy = [{name: list(value) for name, value in step.items()} for step in steps]
            if not spoil(copy, at, config.page_size):
                continue
            faults += 1
            try:
                audit(copy[: at + 3], config)
                missed += 1
            except DescriptorError:
                pass
        spoiled += faults
    print(f"\n{spoil.__name__}: {spoiled} times, {missed} missed")
    assert spoiled >= times
    assert missed == 0


def test_a_scheduler_that_frees_a_row_one_step_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retraction as it must not be: the row's pages are free, and the step at hand still has the row."""
    top_up = Rows.top_up

    def early(self: Rows) -> Any:
        before = {entry: self.state.row[entry] for entry in np.flatnonzero(self.state.used).tolist()}
        rows, places, retracted = top_up(self)
        gone = [entry for entry in before if not self.state.used[entry]]
        return np.array([*rows.tolist(), *gone], np.int64), places, retracted

    monkeypatch.setattr(Rows, "top_up", early)
    found: list[str] = []
    for seed in range(40):
        server = crowded(seed)
        Audited(server)
        try:
            server.run()
        except DescriptorError as error:
            found.append(str(error))
        except Exception:  # noqa: BLE001 - the simulated device may notice something else before
            continue
    assert any("was given to another" in message for message in found), found
