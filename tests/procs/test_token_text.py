"""Streamed text equals the whole decode for every kind of tokenizer, whatever the tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from procs.token_text import ByteDecoder, TextTable, UnknownDecoder
from tests.procs.tokenizers_small import byte_level, metaspace, sentencepiece

KINDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(),
    "sentencepiece, no strip": sentencepiece(strip=False),
    "metaspace": metaspace(),
    "metaspace, first": metaspace("first"),
    "metaspace, never": metaspace("never"),
}
PAST_THE_TOKENIZER = 7  # a model's vocabulary may be padded
SIZES = {kind: tokenizer.get_vocab_size() + PAST_THE_TOKENIZER for kind, tokenizer in KINDS.items()}
TABLES = {kind: TextTable(tokenizer, SIZES[kind]) for kind, tokenizer in KINDS.items()}

# Bytes that are UTF-8 in part: cut characters, surrogates, overlong forms, numbers past U+10FFFF.
BYTES = st.lists(
    st.one_of(
        st.binary(max_size=3),
        st.text(max_size=3).map(lambda text: text.encode(errors="replace")),
        st.sampled_from(
            [b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\xf0\x80"]
        ),
    ),
    max_size=8,
).map(b"".join)


def streamed(table: TextTable, ids: list[int]) -> str:
    decoder = table.decoder()
    return "".join([*map(decoder.push, ids), decoder.flush()])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_random_ids(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, SIZES[kind] - 1), max_size=40))
    assert streamed(TABLES[kind], ids) == KINDS[kind].decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@settings(max_examples=100)
@given(data=BYTES)
def test_random_bytes(kind: str, data: bytes) -> None:
    # Both small tokenizers have three special tokens first, then the 256 bytes in order.
    ids = [3 + byte for byte in data]
    assert streamed(TABLES[kind], ids) == KINDS[kind].decode(ids)


@settings(max_examples=100)
@given(text=st.text(max_size=20), more=BYTES)
def test_text_leaves_as_soon_as_its_last_byte_is_there(text: str, more: bytes) -> None:
    decoder = TABLES["byte level"].decoder()
    encoded = text.encode()
    assert "".join(decoder.push(3 + byte) for byte in encoded) == text
    rest = "".join(decoder.push(3 + byte) for byte in more) + decoder.flush()
    assert rest == more.decode(errors="replace")


def test_a_special_token_inside_a_character_changes_nothing() -> None:
    for kind in ("byte level", "sentencepiece"):
        ids = [3 + 0xE2, 1, 3 + 0x82, 2, 3 + 0xAC]
        assert streamed(TABLES[kind], ids) == "€" == KINDS[kind].decode(ids)


def test_hidden_ids_give_no_text() -> None:
    table = TextTable(KINDS["byte level"], SIZES["byte level"], hidden=(3 + ord("x"),))
    assert streamed(table, [3 + byte for byte in b"axb"]) == "ab"


def test_work_per_token_does_not_grow() -> None:
    # What is kept is never more than the start of one character, even if nothing is ever valid.
    decoder = TABLES["byte level"].decoder()
    assert isinstance(decoder, ByteDecoder)
    for byte in [0xE2, 0xE2, 0xF0, 0x9F, 0x98, 0xFF, 1, 1] * 20:
        decoder.push(3 + byte)
        assert len(decoder._pending) < 4


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_of_another_kind_is_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnknownDecoder):
        TextTable(tokenizer, 2)


@pytest.mark.model
def test_the_default_model() -> None:
    from procs.model_files import DEFAULT_MODEL, load_tokenizer, read_model_info, resolve_model

    path = resolve_model(DEFAULT_MODEL)
    tokenizer, info = load_tokenizer(path), read_model_info(path)
    table = TextTable(tokenizer, info.vocab_size, info.eos_token_ids)
    draw = random.Random(1)
    for _ in range(2000):
        ids = draw.choices(range(info.vocab_size), k=20)
        assert streamed(table, ids) == tokenizer.decode(ids)
    for text in ("naïve 😀👩‍👩‍👧 日本語\r\n\t  é", "a" * 50, "١٢٣ \x00\x7f"):
        assert streamed(table, tokenizer.encode(text).ids) == text
