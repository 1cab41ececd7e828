"""The step's own kernels against plain Python, for any tables and any batch."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.kernels.host_step import (
    OK,
    HostStepKernels,
    copy_ids,
    explain,
    gather_chunks,
    gather_decode,
    write_sampling,
    write_slots,
)
from gpu.kernels.step_kernels import NO_DRAFT, Gained, PassShape, Rows, Tables
from shm.records import StepLayout
from tests.gpu.paged_mill import small_config

PAGE, ENTRIES, PER_ROW, TOKENS = 4, 7, 5, 60
CAP = PAGE * PER_ROW
WINDOWS = (1, 2, 4)
LAYOUT = StepLayout(small_config())
SAMPLES = 2 * ENTRIES * WINDOWS[-1]


def tables(rng: np.random.Generator) -> Tables:
    pages = rng.integers(1, 50, (ENTRIES, PER_ROW), np.int32)
    pages[0] = 0
    length = rng.integers(0, CAP - WINDOWS[-1] + 1, ENTRIES).astype(np.int32)
    length[0] = 0
    return Tables(
        length=length,
        token=rng.integers(0, 99, ENTRIES).astype(np.int32),
        pages=pages,
        real=rng.random((3, ENTRIES)).astype(np.float32),
        top_k=rng.integers(0, 9, ENTRIES).astype(np.int32),
        seed=rng.integers(0, 2**64, ENTRIES, np.uint64),
    )


def rows() -> Rows:
    def ints(*shape: int) -> Any:
        return np.full(shape, -7, np.int32)

    return Rows(
        tokens=ints(TOKENS),
        positions=ints(TOKENS),
        seqs=ints(TOKENS),
        pages=ints(2 * ENTRIES, PER_ROW),
        starts=ints(2 * ENTRIES + 1),
        ends=ints(2 * ENTRIES),
        entries=ints(2 * ENTRIES),
        lengths=ints(2 * ENTRIES),
        logit_rows=ints(SAMPLES),
        places=ints(SAMPLES),
        real=np.zeros((3, SAMPLES), np.float32),
        top_k=ints(SAMPLES),
        seed=np.zeros(SAMPLES, np.uint64),
    )


def same_gainer(r: Rows, gainer: int, entry: int, length: int) -> None:
    assert r.entries[gainer] == entry
    assert r.lengths[gainer] == (length if entry else 0)


def same_sample(t: Tables, r: Rows, sample: int, entry: int, place: int) -> None:
    assert r.places[sample] == place
    assert (r.real[:, sample] == t.real[:, entry]).all()
    assert (r.top_k[sample], r.seed[sample]) == (t.top_k[entry], t.seed[entry])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_a_gather_lays_out_decode_rows_padding_and_chunks(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    t, r = tables(rng), rows()
    order = data.draw(st.permutations(range(1, ENTRIES)))
    live = data.draw(st.integers(0, 3))
    padded = data.draw(st.integers(live, 4))
    n_chunks = data.draw(st.integers(0, 3))
    poison, window = data.draw(st.booleans()), data.draw(st.sampled_from(WINDOWS))
    entries = np.full(ENTRIES, 99, np.int32)  # beyond the live rows: never to be looked at
    entries[:live] = order[:live]
    chunks = np.full((6, ENTRIES), 99, np.int32)
    ids = rng.integers(0, 99, 40).astype(np.int32)
    for c in range(n_chunks):
        start = data.draw(st.integers(0, CAP - 1))
        count = data.draw(st.integers(1, min(12, CAP - start)))
        chunks[:5, c] = order[live + c], 0, start, count, data.draw(st.integers(0, 1))
    before = Tables(*(plane.copy() for plane in t))
    assert gather_decode(t, entries, live, padded, window, r, PAGE, poison) == OK
    assert gather_chunks(t, chunks, n_chunks, ids, padded, window, r, PAGE, poison) == OK

    for i in range(padded):
        entry = int(entries[i]) if i < live else 0
        at = int(before.length[entry])
        first, last = i * window, (i + 1) * window
        assert r.tokens[first:last].tolist() == [before.token[entry]] + [NO_DRAFT] * (window - 1)
        assert r.positions[first:last].tolist() == list(range(at, at + window))
        assert (r.seqs[first:last] == i).all()
        assert r.logit_rows[first:last].tolist() == list(range(first, last))
        used = (at + window - 1) // PAGE + 1
        assert (r.pages[i, :used] == before.pages[entry, :used]).all()
        assert (r.pages[i, used:] == -7).all()
        assert (r.starts[i], r.ends[i]) == (first, at + window)
        same_gainer(r, i, entry, at + 1)
        for w in range(window):
            same_sample(before, r, first + w, entry, at + 1 + w)
    token = sample = decoded = padded * window
    gainer = padded
    for c in range(n_chunks):
        entry, _, start, count, last, _ = chunks[:, c].tolist()
        assert r.tokens[token : token + count].tolist() == ids[token - decoded : token - decoded + count].tolist()
        assert r.positions[token : token + count].tolist() == list(range(start, start + count))
        assert (r.seqs[token : token + count] == padded + c).all()
        assert (r.starts[padded + c], r.ends[padded + c]) == (token, start + count)
        used = (start + count - 1) // PAGE + 1
        assert (r.pages[padded + c, :used] == before.pages[entry, :used]).all()
        token += count
        if last:
            assert r.logit_rows[sample] == token - 1
            same_sample(before, r, sample, entry, start + count)
            same_gainer(r, gainer, entry, start + count)
            sample, gainer = sample + 1, gainer + 1
    assert r.starts[padded + n_chunks] == token
    assert (r.tokens[token:] == -7).all()
    assert (r.entries[gainer:] == -7).all()
    assert (r.logit_rows[sample:] == -7).all()

    marked = {int(e) for e in chunks[0, :n_chunks]} if poison else set()
    consumed = {int(e) for e in entries[:live]} if poison else set()
    for entry in range(ENTRIES):
        assert t.length[entry] == (-1 if entry in marked else before.length[entry])
        assert t.token[entry] == (-1 if entry in marked | consumed else before.token[entry])
    for name in ("pages", "real", "top_k", "seed"):  # a gather never writes a shared table
        assert (getattr(t, name) == getattr(before, name)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_a_row_gains_its_targets_up_to_the_first_that_no_draft_foresaw(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    decode, lasts = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2))
    window = data.draw(st.sampled_from(WINDOWS))
    shape = PassShape(decode, lasts, decode * window + lasts, lasts, window, window)
    r = rows()
    r.tokens[: shape.tokens] = rng.integers(0, 3, shape.tokens)
    r.entries[: shape.gainers] = rng.permutation(ENTRIES - 1)[: shape.gainers] + 1
    r.lengths[: shape.gainers] = rng.integers(1, CAP, shape.gainers)
    if decode and data.draw(st.booleans()):
        r.entries[decode - 1] = r.lengths[decode - 1] = 0  # padding
    targets = rng.integers(-1 if rng.random() < 0.3 else 0, 3, shape.samples).astype(np.int32)
    outcome = np.full((WINDOWS[-1], 8), -7, np.int32)
    gained = Gained(np.full(8, -7, np.int32), outcome, np.full(8, -7, np.int32))
    table = np.full(ENTRIES, -7, np.int32)
    before = r.lengths.copy()
    HostStepKernels(LAYOUT, page_size=PAGE, pages=9, poison=False).accept(r, targets, gained, table, shape)
    for i in range(shape.gainers):
        first, own = (i * window, window) if i < decode else (decode * window + i - decode, 1)
        run = [targets[first + w] for w in range(own)]
        count = 1
        while count < own and run[count - 1] >= 0 and r.tokens[first + count] == run[count - 1]:
            count += 1
        assert outcome[:, i].tolist() == [int(t) for t in run[:count]] + [-1] * (WINDOWS[-1] - count)
        assert (gained.counts[i], gained.newest[i]) == (count, run[count - 1])
        assert r.lengths[i] == (before[i] + count - 1 if before[i] else 0)
        assert table[r.entries[i]] == r.lengths[i]
    assert (outcome[:, shape.gainers :] == -7).all() and (gained.counts[shape.gainers :] == -7).all()
    assert np.count_nonzero(table != -7) == len(set(r.entries[: shape.gainers].tolist()))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 8), st.integers(-1, 6), st.integers(-1, 21)), max_size=12))
def test_slot_writes_are_applied_in_order_up_to_the_first_bad_one(writes: list[tuple[int, int, int]]) -> None:
    table = np.zeros((ENTRIES, PER_ROW), np.int32)
    expected = table.copy()
    planes = np.zeros((12, 3), np.int32)
    bad = None
    for i, (entry, index, page) in enumerate(writes):
        planes[i] = entry, index, page
        ok = 1 <= entry < ENTRIES and 0 <= index < PER_ROW and 1 <= page < 20
        if not ok and bad is None:
            bad = entry
        if bad is None:
            expected[entry, index] = page
    fault = write_slots(table, planes.T, len(writes), 20)
    assert (table == expected).all()
    assert (fault == OK) == (bad is None)
    if bad is not None:
        assert f"entry {bad}" in explain(fault)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, ENTRIES - 1), st.integers(0, 2**64 - 1), st.floats(0, 2, width=32), st.integers(0, 2**31 - 1)
)  # fmt: skip
def test_sampling_writes_carry_every_bit(entry: int, seed: int, value: float, top_k: int) -> None:
    real, ks, seeds = np.zeros((3, ENTRIES), np.float32), np.zeros(ENTRIES, np.int32), np.zeros(ENTRIES, np.uint64)
    writes = np.zeros((7, 4), np.int32)
    bits = writes.view(np.float32)
    writes[0, 0], writes[4, 0] = entry, top_k
    bits[1, 0], bits[2, 0], bits[3, 0] = value, 0.5, 0.25
    writes[5:, 0] = np.array([seed], np.uint64).view(np.int32)
    assert write_sampling(real, ks, seeds, writes, bits, 1) == OK
    assert (real[:, entry] == np.array([value, 0.5, 0.25], np.float32)).all()
    assert (int(ks[entry]), int(seeds[entry])) == (top_k, seed)
    others = np.arange(ENTRIES) != entry
    assert not real[:, others].any()
    assert not seeds[others].any()
    writes[0, 0] = 0
    assert "entry 0" in explain(write_sampling(real, ks, seeds, writes, bits, 1))


def test_chunk_ids_come_end_to_end_and_never_from_outside_of_a_row() -> None:
    plane = np.arange(40, dtype=np.int32).reshape(4, 10)
    chunks = np.zeros((6, 3), np.int32)
    chunks[:5, 0] = 1, 2, 3, 4, 0
    chunks[:5, 1] = 5, 0, 8, 2, 1
    ids = np.full(8, -7, np.int32)
    assert copy_ids(chunks, 2, plane, ids) == OK
    assert ids.tolist() == [23, 24, 25, 26, 8, 9, -7, -7]
    for row, start, count in ((4, 0, 1), (-1, 0, 1), (0, 8, 3), (0, -1, 2), (0, 0, 0), (0, 0, 9)):
        chunks[:5, 0] = 5, row, start, count, 0
        assert "entry 5" in explain(copy_ids(chunks, 1, plane, ids))
