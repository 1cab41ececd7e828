"""Drafts that are looked up: the host's kernels and the plain reference agree on any texts, and on known ones."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.kernels import plain_ngram
from gpu.kernels.draft_kernels import MATCH_MAX, SHARED_LEAST, Text
from gpu.kernels.ngram import HostNgramKernels
from gpu.kernels.step_kernels import NO_DRAFT, Gained, PassShape, Rows
from tests.gpu.texts import Texts, random_gains, random_texts, rows_of

NOTHING = 90  # a token that no text has


def drafts_of(texts: list[list[int]], window: int, *, shared: bool = False) -> list[list[int]]:
    """What follows each text, entry by entry from 1 on, according to the host's kernels and the plain reference."""
    given = Texts.of(texts, width=64)
    shape = PassShape.of_decode(len(texts), window)
    found = []
    for look_up in (HostNgramKernels().look_up, plain_ngram.look_up):
        rows = rows_of(given, list(range(1, len(texts) + 1)), window)
        look_up(given.history, given.known, rows, shape, shared=shared)
        found.append(rows.tokens[: shape.tokens].reshape(-1, window)[:, 1:].tolist())
    assert found[0] == found[1]
    return found[0]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.booleans(), st.sampled_from((1, 2, 3, 8)))
def test_host_and_reference_draft_the_same(seed: int, window: int, shared: bool, letters: int) -> None:
    rng = np.random.default_rng(seed)
    texts, rows, shape = random_texts(rng, window, letters)
    host, plain = rows.tokens.copy(), rows.tokens.copy()
    before = texts.copy()
    HostNgramKernels().look_up(texts.history, texts.known, rows._replace(tokens=host), shape, shared=shared)
    plain_ngram.look_up(texts.history, texts.known, rows._replace(tokens=plain), shape, shared=shared)
    np.testing.assert_array_equal(host, plain)
    np.testing.assert_array_equal(texts.history, before.history)
    kept = np.arange(len(host)) % window == 0
    kept[shape.tokens :] = True
    np.testing.assert_array_equal(host[kept], rows.tokens[kept])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_host_and_reference_note_the_same(seed: int, planes: int) -> None:
    rows, gained, shape, texts = random_gains(np.random.default_rng(seed), planes)
    plain, before = texts.copy(), texts.copy()
    HostNgramKernels().note_gains(texts.history, texts.known, rows, gained, shape)
    plain_ngram.note_gains(plain.history, plain.known, rows, gained, shape)
    np.testing.assert_array_equal(texts.history, plain.history)
    np.testing.assert_array_equal(texts.known, plain.known)
    for i, entry in enumerate(rows.entries[: shape.gainers].tolist()):
        count, end = int(gained.counts[i]), int(rows.lengths[i]) + 1
        if entry:
            assert texts.known[entry] == end
            assert texts.history[entry, end - count : end].tolist() == gained.tokens[:count, i].tolist()
    others = np.setdiff1d(np.arange(len(texts.known)), rows.entries[: shape.gainers])
    np.testing.assert_array_equal(texts.history[others], before.history[others])
    np.testing.assert_array_equal(texts.history[0], before.history[0])


CASES: dict[str, tuple[list[int], list[int]]] = {  # a text, and what is drafted behind it
    "what followed": ([5, 1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7, 1]),
    "nothing matches": ([1, 2, 3, 4], [NO_DRAFT] * 4),
    "a single token": ([7], [NO_DRAFT] * 4),
    "the latest place": ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6]),
    "the longest match first": ([3, 1, 2, 5, 4, 1, 2, 6, 3, 1, 2], [5, 4, 1, 2]),
    "a period of one": ([4, 4], [4, 4, 4, 4]),
    "a period of two": ([9, 1, 2, 1, 2], [1, 2, 1, 2]),
    "a period of three": ([1, 2, 3, 1], [2, 3, 1, 2]),
    "no longer than MATCH_MAX": (
        [NOTHING, *range(MATCH_MAX), 60, *range(MATCH_MAX), 61, NOTHING, *range(MATCH_MAX)],
        [61, NOTHING, 0, 1],  # the first place has one token more
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_known_texts(case: str) -> None:
    text, expected = CASES[case]
    assert drafts_of([text], 5) == [expected]


def test_others_are_asked_only_if_it_is_shared_and_only_for_longer_matches() -> None:
    assert SHARED_LEAST == 3
    other = [1, 2, 3, 40, 41]
    assert drafts_of([other, [1, 2, 3]], 3) == [[NO_DRAFT] * 2] * 2
    assert drafts_of([other, [1, 2, 3]], 3, shared=True)[1] == [40, 41]
    assert drafts_of([other, [9, 2, 3]], 3, shared=True)[1] == [NO_DRAFT] * 2, "two tokens are too few"
    own = [1, 2, 3, 50, 51, 1, 2, 3]
    assert drafts_of([other, own], 3, shared=True)[1] == [50, 51], "no longer than one's own"
    assert drafts_of([[7, *other], [7, 1, 2, 3, 50, 7, 1, 2, 3]], 3, shared=True)[1] == [50, 7]
    assert drafts_of([[7, *other], [8, 1, 2, 3, 50, 7, 1, 2, 3]], 3, shared=True)[1] == [40, 41]
    assert drafts_of([[5], [*other, 1, 2], [*other, 1, 2, 3, 44], [1, 2, 3]], 3, shared=True)[3] == [40, 41]
    assert drafts_of([[1, 2, 3, 40], [1, 2, 3]], 4, shared=True)[1] == [40, 40, 40], "their period"


def test_a_text_in_an_entry_that_a_row_had_before_ends_where_it_is_known() -> None:
    texts = Texts.of([[1, 2, 3, 40, 41], [1, 2, 3]], width=16)
    texts.known[1] = 3
    rows = rows_of(texts, [2], 3)
    HostNgramKernels().look_up(texts.history, texts.known, rows, PassShape.of_decode(1, 3), shared=True)
    assert rows.tokens[1:3].tolist() == [NO_DRAFT] * 2, "what followed is no text any more"


def test_prompts_are_noted_from_their_begin() -> None:
    plane = np.arange(40, dtype=np.int32).reshape(4, 10)
    texts = Texts.of([[], [], []], width=12)
    HostNgramKernels().note_prompts(texts.history, texts.known, plane, [Text(3, 1, 6), Text(1, 0, 5)])
    assert texts.known.tolist() == [0, 5, 0, 6]
    assert texts.history[3].tolist() == [*range(10, 16), *[texts.FILL] * 6]
    assert texts.history[1].tolist() == [*range(5), *[texts.FILL] * 7]
    assert (texts.history[[0, 2]] == texts.FILL).all()


def test_a_text_grows_through_prompt_drafts_and_gains() -> None:
    """The three together, as a step has them."""
    kernels, text = HostNgramKernels(), [1, 2, 3, 4]
    texts = Texts.of([[], text], width=32)
    for gains in ([1], [2, 3], [4, 1, 2]):
        rows = rows_of(texts, [2], 3)
        kernels.look_up(texts.history, texts.known, rows, PassShape.of_decode(1, 3), shared=False)
        assert rows.tokens[1:3].tolist() == plain_next(text, 2)
        shape, count = PassShape.of_decode(1, 3), len(gains)
        rows.lengths[0] = len(text) - 1 + count
        planes = np.full((3, 1), -1, np.int32)
        planes[:count, 0] = gains
        gained = Gained(np.array([count], np.int32), planes, np.array(gains[-1:], np.int32))
        kernels.note_gains(texts.history, texts.known, rows, gained, shape)
        text += gains
        assert texts.known[2] == len(text) and texts.history[2, : len(text)].tolist() == text


def plain_next(text: list[int], count: int) -> Any:
    texts = Texts.of([text], width=32)
    rows: Rows = rows_of(texts, [1], count + 1)
    plain_ngram.look_up(texts.history, texts.known, rows, PassShape.of_decode(1, count + 1), shared=False)
    return rows.tokens[1 : count + 1].tolist()
