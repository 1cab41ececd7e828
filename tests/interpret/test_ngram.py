"""Drafts that are looked up: Triton's kernels, the host's and the plain reference draft and note the same.

What the kernels touch is exactly what they need. Blocks are made small, so that a text takes several of them.
"""

from typing import Any

import numpy as np
import pytest
import torch

from gpu.device.protocol import DeviceError
from gpu.kernels import plain_ngram, triton_ngram
from gpu.kernels.draft_kernels import MATCH_MAX, Text
from gpu.kernels.ngram import HostNgramKernels
from gpu.kernels.step_kernels import NO_DRAFT, Gained, PassShape, Rows
from gpu.kernels.triton_ngram import TritonNgramKernels
from tests.gpu.texts import Texts, random_gains, random_texts, rows_of
from tests.interpret.access import trace
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ngram, "PLACES_BLOCK", 8)
    monkeypatch.setattr(triton_ngram, "GAINS_BLOCK", 4)


def tensors(arrays: Any) -> Any:
    return type(arrays)(*map(torch.from_numpy, arrays))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_look_ups_draft_the_same_on_all_three(seed: int, shared: bool) -> None:
    window = 2 + seed % 4
    given, rows, shape = random_texts(np.random.default_rng(seed), window, letters=(1, 2, 4, 8)[seed // 2 % 4])
    host, cuda = rows.tokens.copy(), rows.tokens.copy()
    HostNgramKernels().look_up(given.history, given.known, rows._replace(tokens=host), shape, shared=shared)
    kernels, made = TritonNgramKernels(shape.decode, "cpu"), tensors(rows._replace(tokens=cuda))
    texts = torch.from_numpy(given.history), torch.from_numpy(given.known)
    with trace() as seen:
        kernels.look_up(*texts, made, shape, shared=shared)
    plain_ngram.look_up(given.history, given.known, rows, shape, shared=shared)
    np.testing.assert_array_equal(host, rows.tokens)
    np.testing.assert_array_equal(cuda, rows.tokens)
    assert not kernels._best.any(), "nothing is left for the next look-up"
    assert seen.kernels == ["search_kernel", "draft_kernel"]

    live = [entry for entry in rows.entries[: shape.decode].tolist() if entry]
    read = np.zeros(given.history.shape, np.bool_)
    for entry in live:
        at = given.known[entry] - 1
        read[entry, : at + 1] |= at > 0  # nothing lies before a single token
        for other in range(1, len(read)) if shared else ():
            if other != entry:
                read[other, : max(0, given.known[other] - 1)] = True
                if given.known[other] > 1:
                    read[entry, max(0, at + 1 - MATCH_MAX) : at + 1] = True
    found = np.asarray(seen.read(texts[0]))
    assert not (read & ~found).any()
    last = np.zeros(read.shape, np.bool_)
    for entry in range(1, len(read)):
        last[entry, max(0, given.known[entry] - 1)] = (
            given.known[entry] > 0
        )  # may be drafted, and is compared with none
    assert not (found & ~read & ~last).any()
    drafted = np.zeros(len(cuda), np.bool_)
    for i, entry in enumerate(rows.entries[: shape.decode].tolist()):
        alone = rows_of(given, [entry], window)
        alone.tokens[1:window] = -9
        plain_ngram.look_up(given.history, given.known, alone, PassShape.of_decode(1, window), shared=shared)
        drafted[i * window + 1 : (i + 1) * window] = alone.tokens[1] != -9
    np.testing.assert_array_equal(seen.written(made.tokens), drafted)
    for array in (*texts, made.positions, made.entries):
        assert not seen.written(array).any()
    assert not seen.read(made.tokens).any()
    if not shared:
        assert not seen.read(texts[1]).any()


@pytest.mark.parametrize("seed", range(6))
def test_gains_are_noted_the_same_on_all_three(seed: int) -> None:
    rows, gained, shape, given = random_gains(np.random.default_rng(seed), planes=1 + seed % 4)
    host, cuda, before = given.copy(), given.copy(), given.copy()
    HostNgramKernels().note_gains(host.history, host.known, rows, gained, shape)
    texts, made, gains = (torch.from_numpy(cuda.history), torch.from_numpy(cuda.known)), tensors(rows), tensors(gained)
    with trace() as seen:
        TritonNgramKernels(shape.decode, "cpu").note_gains(*texts, made, gains, shape)
    plain_ngram.note_gains(given.history, given.known, rows, gained, shape)
    for texts_of in (host, cuda):
        np.testing.assert_array_equal(texts_of.history, given.history)
        np.testing.assert_array_equal(texts_of.known, given.known)
    live = [(i, entry) for i, entry in enumerate(rows.entries[: shape.gainers].tolist()) if entry]
    written, taken = np.zeros(before.history.shape, np.bool_), np.zeros(gained.tokens.shape, np.bool_)
    for i, entry in live:
        written[entry, rows.lengths[i] + 1 - gained.counts[i] : rows.lengths[i] + 1] = True
        taken[: gained.counts[i], i] = True
    np.testing.assert_array_equal(seen.written(texts[0]), written)
    assert np.flatnonzero(seen.written(texts[1])).tolist() == sorted(entry for _, entry in live)
    np.testing.assert_array_equal(seen.read(gains.tokens), taken)
    assert not any(seen.read(array).any() for array in (*texts, gains.newest))
    assert not any(seen.written(array).any() for array in (*gains, made.entries, made.lengths))


WILD = np.array([-(2**31), -1, 0, 11, 12, 13, 18, 19, 20, 2**30, 2**31 - 1], np.int32)  # 12 entries, 19 places


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["positions", "entries"])
def test_a_look_up_touches_nothing_else_whatever_the_device_holds(name: str, shared: bool) -> None:
    """The trace raises before a kernel touches what it was not given."""
    count, window = len(WILD), 3
    texts, limit = Texts.of([[*[1, 2] * 9, 1]] * count, width=19), 19 if name == "positions" else 12
    rows = rows_of(texts, list(range(1, count + 1)), window)
    if name == "positions":
        rows.positions[: count * window : window] = WILD
    else:
        rows.entries[:count] = WILD
    before, kernels = texts.copy(), TritonNgramKernels(count, "cpu")
    given, made = (torch.from_numpy(texts.history), torch.from_numpy(texts.known)), tensors(rows)
    with trace() as seen:
        kernels.look_up(*given, made, PassShape.of_decode(count, window), shared=shared)
    np.testing.assert_array_equal(texts.history, before.history)
    drafted = np.asarray(seen.written(made.tokens)).reshape(-1, window)[: count + 1].any(axis=1)
    sound = np.isin(WILD, np.arange(1, limit))
    np.testing.assert_array_equal(drafted[:count], sound)


@pytest.mark.parametrize("known", WILD.tolist())
def test_no_text_is_longer_than_its_row(known: int) -> None:
    """It is the last one, so what lies behind it is nobody's."""
    texts = Texts.of([[50, 3, 1, 2], [*range(60, 76), 3, 1, 2]], width=19)
    texts.known[2] = known
    rows, shape = rows_of(texts, [1], 4), PassShape.of_decode(1, 4)
    made = tensors(rows)
    with trace():
        kernels = TritonNgramKernels(1, "cpu")
        kernels.look_up(torch.from_numpy(texts.history), torch.from_numpy(texts.known), made, shape, shared=True)
    assert rows.tokens[1:4].tolist() == [NO_DRAFT] * 3, "nothing comes behind the end"
    texts.history[2] = [*range(60, 75), 3, 1, 2, 77]
    with trace():
        kernels.look_up(torch.from_numpy(texts.history), torch.from_numpy(texts.known), made, shape, shared=True)
    assert rows.tokens[1:4].tolist() == ([77] * 3 if known >= 19 else [NO_DRAFT] * 3)


@pytest.mark.parametrize("name", ["lengths", "counts", "entries"])
def test_a_gain_touches_nothing_else_whatever_the_device_holds(name: str) -> None:
    count, planes = len(WILD), 3
    texts = Texts.of([[1, 2] * 4] * count, width=19)
    rows = rows_of(texts, list(range(1, count + 1)), planes)
    rows.lengths[:count] = 9
    tokens = np.full((planes, count), 7, np.int32)
    gained = Gained(np.full(count, 2, np.int32), tokens, tokens[0].copy())
    wild = {"lengths": rows.lengths, "counts": gained.counts, "entries": rows.entries}[name]
    wild[:count] = WILD
    given, made = (torch.from_numpy(texts.history), torch.from_numpy(texts.known)), tensors(rows)
    with trace() as seen:
        TritonNgramKernels(1, "cpu").note_gains(*given, made, tensors(gained), PassShape.of_decode(count, planes))
    sound = {
        "lengths": (WILD >= 0) & (WILD < 19),
        "counts": (WILD > 0) & (WILD <= 3),
        "entries": (WILD > 0) & (WILD < 12),
    }
    places = np.flatnonzero(sound[name]) + 1 if name != "entries" else WILD[sound[name]]
    written = np.asarray(seen.written(given[0]))
    assert set(np.flatnonzero(written.any(axis=1)).tolist()) == set(places.tolist())
    assert np.flatnonzero(seen.written(given[1])).tolist() == sorted(places.tolist())
    assert not written[0].any()


def test_prompts_are_noted_the_same_on_host_and_cuda() -> None:
    plane, prompts = np.arange(40, dtype=np.int32).reshape(4, 10), [Text(3, 1, 6), Text(1, 0, 5)]
    host, cuda = (Texts.of([[], [], []], width=12) for _ in range(2))
    HostNgramKernels().note_prompts(host.history, host.known, plane, prompts)
    made = [torch.from_numpy(array) for array in (cuda.history, cuda.known, plane)]
    with trace() as seen:
        TritonNgramKernels(1, "cpu").note_prompts(*made, prompts)
    np.testing.assert_array_equal(cuda.history, host.history)
    np.testing.assert_array_equal(cuda.known, host.known)
    assert seen.read(made[2]).sum() == seen.written(made[0]).sum() == 6 + 5
    assert np.flatnonzero(seen.written(made[1])).tolist() == [1, 3]


@pytest.mark.parametrize("prompt", [(4, 0, 1), (-1, 0, 1), (1, 4, 1), (1, -1, 1), (1, 0, 0), (1, 0, -3), (1, 0, 11)])
def test_a_prompt_that_lies_outside_is_not_noted(prompt: tuple[int, int, int]) -> None:
    texts, plane = Texts.of([[], [], []], width=12), np.zeros((4, 10), np.int32)
    with pytest.raises(DeviceError, match="lies outside"):
        HostNgramKernels().note_prompts(texts.history, texts.known, plane, [Text(*prompt)])
    made = [torch.from_numpy(array) for array in (texts.history, texts.known, plane)]
    with pytest.raises(DeviceError, match="lies outside"):
        TritonNgramKernels(1, "cpu").note_prompts(*made, [Text(*prompt)])


def test_steps_without_drafts_or_rows_launch_nothing() -> None:
    texts = Texts.of([[1, 1, 1]], width=8)
    made: Rows = tensors(rows_of(texts, [1], 1))
    given, kernels = (torch.from_numpy(texts.history), torch.from_numpy(texts.known)), TritonNgramKernels(1, "cpu")
    nothing = torch.zeros(0, dtype=torch.int32)
    with trace() as seen:
        kernels.look_up(*given, made, PassShape.of_decode(1, 1), shared=True)
        kernels.look_up(*given, made, PassShape(0, 1, 4, 0, 4, 3), shared=True)
        kernels.note_gains(*given, made, Gained(nothing, nothing[:, None], nothing), PassShape(0, 1, 4, 0, 4, 3))
    assert seen.kernels == []
