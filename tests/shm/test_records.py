"""Records: sections that do not overlap, and values that survive the ring."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.config import ServerConfig
from shm.limits import INTAKE_ROWS_MAX, RESULT_RING_SLOTS, STEP_RING_SLOTS
from shm.records import (
    CHUNK_PLANES,
    HEADER_INTS,
    SAMPLING_ENTRY,
    SAMPLING_MIN_P,
    SAMPLING_PLANES,
    SAMPLING_TEMPERATURE,
    SAMPLING_TOP_K,
    SAMPLING_TOP_P,
    SLOT_PLANES,
    STEP_MIXED,
    ResultLayout,
    StepLayout,
    StepView,
    intake_record,
    progress_record,
    progress_rows_max,
    read_intake,
    read_progress,
    ring_specs,
)
from shm.ring import Ring
from shm.segment import Segment
from tests.shm.small import config

U64 = st.integers(0, 2**64 - 1)


@st.composite
def configs(draw: st.DrawFn) -> ServerConfig:
    return config(
        max_running=draw(st.integers(1, 70)),
        max_len=draw(st.integers(2, 256)),
        page_size=draw(st.sampled_from([1, 16, 64])),
        prefill_chunk=draw(st.integers(1, 600)),
        window=draw(st.integers(1, 8)),
        kv_tokens=4096,
    )


def footprint(payload: npt.NDArray[np.int32], view: npt.NDArray[Any]) -> list[int]:
    """Return the indexes of the ints of the payload that a view consists of, by marking them."""
    payload[:] = 0
    view[...] = 1
    return np.flatnonzero(payload).tolist()


@settings(max_examples=40, deadline=None)
@given(configs())
def test_the_sections_tile_the_payloads(cfg: ServerConfig) -> None:
    step, result = StepLayout(cfg), ResultLayout(cfg)
    for layout, names in (
        (step, ("header", "decode_entries", "sampling", "chunks", "slot_writes")),
        (result, ("header", "counts", "tokens")),
    ):
        payload = np.zeros(layout.nbytes // 4, np.int32)
        view = layout.view(payload)
        marked = [i for name in names for i in footprint(payload, getattr(view, name))]
        assert sorted(marked) == list(range(payload.size)), "each int is in exactly one section"
    view = step.view(np.zeros(step.nbytes // 4, np.int32))
    assert step.slot_write_cap == 2 * cfg.pages_per_row + 4 * cfg.max_running + cfg.prefill_chunk
    assert view.decode_entries.shape == (cfg.max_running,)
    assert view.chunks.shape == (CHUNK_PLANES, cfg.max_running)
    assert view.sampling.shape == view.sampling_f32.shape == (SAMPLING_PLANES, cfg.max_running)
    assert view.slot_writes.shape == (SLOT_PLANES, step.slot_write_cap)
    results = result.view(np.zeros(result.nbytes // 4, np.int32))
    assert results.counts.shape == (cfg.max_running,)
    assert results.tokens.shape == (cfg.window, cfg.max_running)


@settings(max_examples=60, deadline=None)
@given(configs(), U64, st.data())
def test_a_step_survives_with_only_the_used_bytes_carried(cfg: ServerConfig, step: int, data: st.DataObject) -> None:
    layout = StepLayout(cfg)
    written = layout.view(np.full(layout.nbytes // 4, 77, np.int32))
    rng = np.random.default_rng(step % 1000)
    written.clear()
    assert (written.n_decode, written.n_chunks, written.n_slot_writes, written.n_sampling) == (0, 0, 0, 0)
    written.kind, written.step = STEP_MIXED, step
    written.n_decode = data.draw(st.integers(0, cfg.max_running))
    written.n_chunks = data.draw(st.integers(0, cfg.max_running))
    written.n_slot_writes = data.draw(st.integers(0, layout.slot_write_cap))
    written.n_sampling = data.draw(st.integers(0, min(3, cfg.max_running)))
    for section in (written.decode_entries, written.chunks, written.slot_writes):
        section[...] = rng.integers(-(2**31), 2**31, section.shape)
    seeds = [data.draw(U64) for _ in range(written.n_sampling)]
    for i, seed in enumerate(seeds):
        written.set_sampling(i, entry=i + 1, temperature=0.5 + i, top_p=0.9, min_p=0.1, top_k=40, seed=seed)
    carried = np.zeros(layout.nbytes // 4, np.int32)
    base = written.header.base
    assert base is not None
    carried[: written.used_nbytes // 4] = base[: written.used_nbytes // 4]
    read = layout.view(carried)
    assert (read.kind, read.step) == (STEP_MIXED, step)
    assert np.array_equal(read.decode_entries[: read.n_decode], written.decode_entries[: written.n_decode])
    assert np.array_equal(read.chunks[:, : read.n_chunks], written.chunks[:, : written.n_chunks])
    assert np.array_equal(read.slot_writes[:, : read.n_slot_writes], written.slot_writes[:, : written.n_slot_writes])
    assert read.seeds().tolist() == seeds
    for i in range(read.n_sampling):
        assert read.sampling[SAMPLING_ENTRY, i] == i + 1
        assert read.sampling[SAMPLING_TOP_K, i] == 40
        floats = [float(read.sampling_f32[p, i]) for p in (SAMPLING_TEMPERATURE, SAMPLING_TOP_P, SAMPLING_MIN_P)]
        assert floats == [np.float32(0.5 + i), np.float32(0.9), np.float32(0.1)]


@settings(deadline=None)
@given(U64, U64, U64)
def test_a_result_survives(begin_ns: int, end_ns: int, step: int) -> None:
    layout = ResultLayout(config(window=3))
    payload = np.zeros(layout.nbytes // 4, np.int32)
    written = layout.view(payload)
    written.n_rows, written.window = 2, 3
    written.begin_ns, written.end_ns, written.step = begin_ns, end_ns, step
    written.counts[:2] = [3, 1]
    written.tokens[:, 0] = [7, 8, 9]
    read = layout.view(payload.copy())
    assert (read.n_rows, read.window, read.begin_ns, read.end_ns, read.step) == (2, 3, begin_ns, end_ns, step)
    assert read.tokens[: read.counts[0], 0].tolist() == [7, 8, 9]


def test_a_step_with_few_slot_writes_is_a_short_record() -> None:
    layout = StepLayout(config())
    view = layout.view(np.zeros(layout.nbytes // 4, np.int32))
    assert view.used_nbytes == (HEADER_INTS + 14 * 4) * 4
    view.n_slot_writes = layout.slot_write_cap
    assert view.used_nbytes == layout.nbytes


ROWS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=INTAKE_ROWS_MAX)


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_intake_and_progress_round_trip(rows: list[int]) -> None:
    generations = [2**31 - 1 - row for row in rows]
    record = intake_record(np.asarray(rows, np.int64), generations)
    assert record.dtype == np.int32 and record.flags.c_contiguous
    assert [plane.tolist() for plane in read_intake(record.reshape(-1))] == [rows, generations]
    record = progress_record(rows, generations, [row // 2 for row in rows], [row % 5 for row in rows])
    planes = [plane.tolist() for plane in read_progress(record.reshape(-1))]
    assert planes == [rows, generations, [row // 2 for row in rows], [row % 5 for row in rows]]


def test_one_row_needs_no_list() -> None:
    assert intake_record(3, 9).tolist() == [[3], [9]]


@settings(max_examples=20, deadline=None)
@given(configs())
def test_every_ring_holds_its_largest_record(cfg: ServerConfig) -> None:
    specs = ring_specs(cfg)
    assert {name: (spec.producer, spec.consumer) for name, spec in specs.items()} == {
        "intake": ("tokenizer", "scheduler"),
        "step": ("scheduler", "gpu"),
        "result": ("gpu", "scheduler"),
        "progress": ("scheduler", "detokenizer"),
    }
    assert (specs["step"].slots, specs["result"].slots) == (STEP_RING_SLOTS, RESULT_RING_SLOTS)
    largest = {
        "intake": intake_record(np.zeros(INTAKE_ROWS_MAX), np.zeros(INTAKE_ROWS_MAX)),
        "progress": progress_record(*np.zeros((4, progress_rows_max(cfg)), np.int32)),
        "step": np.zeros(StepLayout(cfg).nbytes // 4, np.int32),
        "result": np.zeros(ResultLayout(cfg).nbytes // 4, np.int32),
    }
    for name, spec in specs.items():
        segment = Segment.create(name, Ring.size(spec.slots, spec.payload_bytes))
        Ring.create(segment, spec.slots, spec.payload_bytes, spec.schema)
        ring = Ring(segment, schema=spec.schema)
        producer, consumer = ring.attach_producer(), ring.attach_consumer()
        producer.push(largest[name])
        assert consumer.peek().nbytes == largest[name].nbytes == spec.payload_bytes
        if name == "step":
            assert isinstance(StepLayout(cfg).view(producer.slot()), StepView)
        segment.close()


def test_a_schema_depends_on_the_configuration() -> None:
    one, other = ring_specs(config(max_running=4)), ring_specs(config(max_running=5))
    assert all(one[name].schema != other[name].schema for name in one)
    assert len({spec.schema for spec in one.values()}) == 4
