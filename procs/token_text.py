"""Tokens as text: what each token id stands for, and how the text of an output grows token by token.

A tokenizer's decoder is taken apart once into one piece per id, so that streamed pieces joined are, to the byte,
`Tokenizer.decode(ids, skip_special_tokens=True)`. Two kinds of decoder exist and cover the Llama family: bytes
(byte-level BPE: tokens are byte strings, their concatenation is read as UTF-8) and characters (SentencePiece style:
tokens are strings, `<0x..>` tokens are single bytes that are read as UTF-8 run by run). Any other is refused at the
start, never streamed nearly right. May never do I/O, and never look at more than the newest token and what is held
back: the cost of a token does not grow with the output.
"""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")

# At the start, this many random outputs are decoded both ways.
SAMPLES = 64
SAMPLE_TOKENS = 16


class UnknownDecoder(ValueError):
    """The tokenizer's decoder is none that can be streamed exactly."""


class Decoder(Protocol):
    """Turns one output's ids into text; text may lag behind, `flush` gives what is left once no more ids come."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteDecoder:
    """Byte-level tokens. Incomplete UTF-8 is kept until a later byte completes it or rules it out."""

    __slots__ = ("_pending", "_pieces", "_texts")

    def __init__(self, pieces: Sequence[bytes], texts: Sequence[str | None]) -> None:
        self._pieces = pieces
        self._texts = texts  # the piece as text, if it is whole characters by itself
        self._pending = b""

    def push(self, token: int) -> str:
        if not self._pending:
            text = self._texts[token]
            if text is not None:
                return text
        data = self._pending + self._pieces[token]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text


class CharacterDecoder:
    """SentencePiece-style tokens. A run of byte tokens is kept until it ends: whether it is UTF-8 is a question to the
    whole run.
    """

    __slots__ = ("_fallback", "_first", "_pieces", "_run", "_started", "_strip")

    def __init__(
        self, pieces: Sequence[str | None], first: Sequence[str | None], fallback: dict[int, int], strip: int
    ) -> None:
        self._pieces = pieces  # None: no part of the text, not even the end of a run
        self._first = first  # pieces of tokens that begin an output
        self._fallback = fallback  # token id -> byte
        self._strip = strip  # leading spaces still to be taken off the text
        self._started = False
        self._run = bytearray()

    def push(self, token: int) -> str:
        byte = self._fallback.get(token)
        if byte is not None:
            self._run.append(byte)
            self._started = True
            return ""
        piece = (self._pieces if self._started else self._first)[token]
        if piece is None:
            return ""
        self._started = True
        return self._stripped(self._end_run() + piece if self._run else piece)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text


class TextTable:
    """What each token id is as text; made once per process, shared by all rows."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, hidden: Collection[int] = ()) -> None:
        """Takes the tokenizer's decoder apart for ids 0 to vocab_size - 1.

        Special tokens, ids in `hidden` (ends of sequence, special or not) and ids that the tokenizer does not know give
        no text. Raises UnknownDecoder if the decoder has a step of another kind, or a sample comes out differently.
        """
        steps = _flatten(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else []
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        names = map(tokenizer.id_to_token, range(vocab_size))
        tokens = [None if token_id in hidden or name in special else name for token_id, name in enumerate(names)]
        if [step["type"] for step in steps] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            self._make = _byte_decoders(tokens)
        else:
            self._make = _character_decoders(tokens, steps)
        self._compare(tokenizer, [token_id for token_id in range(vocab_size) if token_id not in hidden])

    def decoder(self) -> Decoder:
        """Returns a decoder for one output, at its start."""
        return self._make()

    def _compare(self, tokenizer: Tokenizer, ids: list[int]) -> None:
        draw = random.Random(0)
        for _ in range(SAMPLES):
            sample = draw.choices(ids, k=SAMPLE_TOKENS)
            decoder = self.decoder()
            if "".join([*map(decoder.push, sample), decoder.flush()]) != tokenizer.decode(sample):
                raise UnknownDecoder(f"this tokenizer decodes {sample} in a way that cannot be streamed exactly")


def _byte_decoders(tokens: list[str | None]) -> Callable[[], Decoder]:
    pieces = [_byte_level(token) for token in tokens]
    return partial(ByteDecoder, pieces, [_whole_text(piece) for piece in pieces])


def _character_decoders(tokens: list[str | None], steps: list[dict[str, Any]]) -> Callable[[], Decoder]:
    kinds = [step["type"] for step in steps]
    first: list[str | None] | None = None
    fallback: dict[int, int] = {}
    strip = 0
    for at, step in enumerate(steps):
        fused = "Fuse" in kinds[:at]
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                tokens = _replaced(tokens, old, new)
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if len(steps) == 1:
                first = None if scheme == "never" else _replaced(tokens, mark, "")
                tokens = _replaced(tokens, mark, " ")
            case {"type": "ByteFallback"} if not fused:
                fallback = {
                    i: int(token[3:5], 16) for i, token in enumerate(tokens) if token and _BYTE.fullmatch(token)
                }
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                strip = start
            case {"type": "Fuse"}:
                pass
            case _:
                raise UnknownDecoder(f"this tokenizer's decoder ({' > '.join(kinds)}) cannot be streamed exactly")
    if not steps:
        raise UnknownDecoder("this tokenizer has no decoder")
    return partial(CharacterDecoder, tokens, first or tokens, fallback, strip)


def _replaced(tokens: list[str | None], old: str, new: str) -> list[str | None]:
    return [None if token is None else token.replace(old, new) for token in tokens]


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for member in decoder["decoders"] for step in _flatten(member)]


def _byte_alphabet() -> dict[str, int]:
    # Byte-level BPE writes each byte as one printable character: itself if it is one, else the next free one from
    # U+0100 on (Radford et al. 2019, GPT-2's encoder).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()  # an added token is written as it is


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
