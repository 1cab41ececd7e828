"""Stop strings and hold-back against a plain search of the whole text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from procs.text_stream import OutputText, StopScan, StopStrings
from procs.token_text import TextTable
from shm.limits import MAX_STOP_CHARS, MAX_STOP_STRINGS
from tests.procs.tokenizers_small import byte_level

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()
TABLE = TextTable(TOKENIZER, VOCAB)

# Few characters, so that stop strings overlap with the text and with each other.
CHARS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


def plain_cut(text: str, stops: list[str]) -> tuple[str, int]:
    """The rule, word by word: the stop string complete first, of those the longest. Returns (text, its end or 0)."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], end
    return text, 0


def plain_held(text: str, stops: list[str]) -> str:
    """The longest end of `text` that some stop string begins with."""
    return next(text[at:] for at in range(len(text) + 1) if any(stop.startswith(text[at:]) for stop in stops))


@settings(max_examples=100)
@given(pieces=st.lists(CHARS, max_size=8), stops=STOPS)
@example(pieces=["aab"], stops=["b", "aab"])
@example(pieces=["a", "ab", "a", "bb"], stops=["abab", "bab"])
def test_scan_is_the_plain_search(pieces: list[str], stops: list[str]) -> None:
    scan = StopScan(StopStrings(stops))
    left = seen = ""
    for piece in pieces:
        seen += piece
        text, stopped = scan.feed(piece)
        left += text
        expected, end = plain_cut(seen, stops)
        assert stopped == bool(end)
        if stopped:
            assert left == expected
            return
        assert left + plain_held(seen, stops) == seen
    assert left + scan.flush() == seen


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=30), cuts=st.lists(st.integers(0, 30)), data=st.data())
def test_output_does_not_depend_on_how_tokens_come(ids: list[int], cuts: list[int], data: st.DataObject) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    spans = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 4)).map(
        lambda s: whole[s[0] : sum(s)] or "x"
    )
    stops = data.draw(st.lists(spans, max_size=3))
    expected, end = plain_cut(whole, stops)
    automaton = StopStrings(stops) if stops else None

    one_by_one = OutputText(TABLE, automaton)
    left = [one_by_one.push([token]) for token in ids]
    text = "".join([*left, one_by_one.flush()])
    assert text == expected
    assert bool(one_by_one.stop_count) == bool(end)

    several = OutputText(TABLE, automaton)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for first, last in pairwise(bounds):
        so_far = several.push(ids[first:last])
        assert "".join(left[first:last]) == so_far or several.stop_count
    several.flush()
    assert several.stop_count == one_by_one.stop_count


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), data=st.data())
def test_stop_count_is_the_token_that_completed_it(ids: list[int], data: st.DataObject) -> None:
    whole = TOKENIZER.decode(ids)
    stop = data.draw(st.sampled_from([whole[a : a + 3] for a in range(len(whole))] or ["x"]))
    output = OutputText(TABLE, StopStrings([stop]))
    output.push(ids)
    output.flush()
    if not whole:
        return
    count = output.stop_count
    assert stop in TOKENIZER.decode(ids[:count])
    # One token less shows no complete stop string, unless an unfinished character at its end only looks like one.
    before = OutputText(TABLE, None)
    assert stop not in before.push(ids[: count - 1])


def test_a_stop_string_across_three_tokens_never_leaves() -> None:
    output = OutputText(TABLE, StopStrings(["the end"]))
    tokens = TOKENIZER.encode("so the other thing, the endless").ids
    left = []
    for token in tokens:
        left.append(output.push([token]))
        assert "the e" not in "".join(left)
    assert "".join(left) == "so the other thing, "
    assert TOKENIZER.decode(tokens[: output.stop_count]).endswith("the end")


def test_an_unfinished_character_can_complete_a_stop_string_at_the_end() -> None:
    output = OutputText(TABLE, StopStrings(["x\ufffd"]))
    assert output.push([3 + ord("a"), 3 + ord("x"), 3 + 0xE2]) == "a"
    assert output.stop_count == 0
    assert output.flush() == ""
    assert output.stop_count == 3


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=20), stop_id=st.integers(0, VOCAB - 1), data=st.data())
def test_a_stop_token_is_counted_and_gives_no_text(ids: list[int], stop_id: int, data: st.DataObject) -> None:
    ids = [token for token in ids if token != stop_id]
    # A stop string that its text would complete.
    stops = StopStrings(["never there", "\u20ac" + (TOKENIZER.decode([stop_id]) or "x")])
    assume("\u20ac" not in TOKENIZER.decode(ids))
    whole = OutputText(TABLE, stops, [stop_id])
    text = whole.push([*ids, stop_id]) + whole.flush()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert (whole.count, whole.stop_count) == (len(ids) + 1, 0)

    cut = data.draw(st.integers(0, len(ids)))
    streamed = OutputText(TABLE, stops, [stop_id])
    pieces = [streamed.push(ids[:cut]), streamed.push(ids[cut:]), streamed.push([stop_id]), streamed.flush()]
    assert "".join(pieces) == text
    assert streamed.count == whole.count


def test_held_text_is_flushed() -> None:
    output = OutputText(TABLE, StopStrings(["stop"]))
    assert output.push([3 + byte for byte in b"a sto"]) == "a "
    assert output.flush() == "sto"


def test_nothing_leaves_after_a_stop_string() -> None:
    output = OutputText(TABLE, StopStrings(["b"]))
    assert output.push([3 + byte for byte in b"abc"]) == "a"
    assert output.push([3 + byte for byte in b"de"]) == ""
    assert output.flush() == ""
    assert (output.stop_count, output.count) == (2, 2)


def test_the_largest_stop_strings() -> None:
    stops = ["a" * at + "b" + "a" * (MAX_STOP_CHARS - at - 1) for at in range(MAX_STOP_STRINGS)]
    scan = StopScan(StopStrings(stops))
    text = "a" * 500 + "b" + "a" * (MAX_STOP_CHARS - 2)
    left = "".join(scan.feed(char)[0] for char in text)
    assert text.startswith(left)
    last, stopped = scan.feed("a")
    assert stopped
    assert (left + last, 1) == (plain_cut(text + "a", stops)[0], 1)
