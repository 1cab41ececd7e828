"""Encoding of prompts: short texts at once; long ones on a thread of their own, so that short ones need not wait.

On that thread, prompts of generations go before questions, which are answered for their own sake. Owns the model's
tokenizer and that thread. Knows nothing of requests: a text comes with what is to be done with its ids, which the
caller's own thread does. May never block its caller for more than one group of short texts.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tokenizers import Tokenizer

from procs.prompt_checks import BadRequest, check_text_length

# A megabyte of text takes about a second, as does a million ids.
LONG_TEXT_CHARS = 32 * 1024
LONG_IDS = 32 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """A text to encode, with the model's special tokens around it or without, and what to do with its ids.

    question: its id if it is the text of a question, not of a generation.
    """

    text: str
    add_special_tokens: bool
    then: Callable[[list[int]], None]
    question: int | None = None


# Runs on the thread; what it returns runs on the owner's.
_Job = Callable[[], Callable[[], None]]


class PromptEncoder:
    """`kick` is called, on another thread, whenever something long is done; then the owner calls take_long."""

    def __init__(self, tokenizer: Tokenizer, kick: Callable[[], None]) -> None:
        self.pending = 0  # long texts whose `then` was not called yet
        self._tokenizer = tokenizer
        self._kick = kick
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._changed = threading.Condition()  # guards the two below
        self._generations: deque[_Job] = deque()
        self._questions: dict[int, _Job] = {}  # by id, the oldest first
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="long texts", daemon=True).start()

    def encode(self, works: Sequence[Work]) -> None:
        """Encodes texts together and calls their `then` in order of add_special_tokens."""
        for special in (False, True):
            group = [work for work in works if work.add_special_tokens is special]
            for work, ids in zip(group, self._ids([work.text for work in group], special), strict=True):
                work.then(ids)

    def encode_later(self, work: Work) -> bool:
        """Takes a long text over; returns False, and does nothing, if it is short."""
        if len(work.text) <= LONG_TEXT_CHARS:
            return False
        self._later(lambda: self._ids([work.text], work.add_special_tokens)[0], work.then, work.question)
        return True

    def decode(self, ids: list[int], then: Callable[[str], None], question: int) -> None:
        """Calls `then` with the text of ids, special tokens as they are written: at once, or in take_long if long."""

        def text() -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=False)

        if len(ids) <= LONG_IDS:
            then(text())
        else:
            self._later(text, then, question)

    def cancel(self, question: int) -> None:
        """Forgets a long question that has not begun; one that has, or is not known, is left alone."""
        with self._changed:
            if self._questions.pop(question, None) is not None:
                self.pending -= 1

    def take_long(self) -> int:
        """Calls `then` of whatever long is done; returns how many."""
        done = 0
        while not self._done.empty():
            then = self._done.get()
            self.pending -= 1
            then()
            done += 1
        return done

    def check_length(self, text: str, max_len: int, param: str) -> None:
        """Raises BadRequest for a text that is too long whatever its tokens are, none being longer than the longest."""
        if len(text) > max_len:
            normalizer = self._tokenizer.normalizer
            normal = text if normalizer is None else normalizer.normalize_str(text)
            check_text_length(len(normal), self._longest_token, max_len, param)

    def check_vocabulary(self, ids: list[int], vocab_size: int, param: str) -> None:
        """Raises BadRequest for a text (its ids) with a token that the model has not.

        A tokenizer may know more tokens than the model has embeddings for, such as one that was added for padding.
        """
        if ids and max(ids) >= vocab_size:
            bad = max(ids)
            raise BadRequest(
                f"{param} holds {self._tokenizer.id_to_token(bad)!r}, a token of the tokenizer (id {bad}) that the "
                f"model does not have: its vocabulary has ids 0 to {vocab_size - 1}.",
                param,
            )

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        # "Fast" leaves out the offsets, which nobody reads. The library gives the GIL away meanwhile.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special) if texts else []
        return [encoding.ids for encoding in encodings]

    def _later(self, compute: Callable[[], T], then: Callable[[T], None], question: int | None) -> None:
        self.pending += 1

        def job() -> Callable[[], None]:
            return partial(then, compute())

        with self._changed:
            if question is None:
                self._generations.append(job)
            else:
                self._questions[question] = job
            self._changed.notify()

    def _next(self) -> _Job:
        with self._changed:
            while not self._generations and not self._questions:
                self._changed.wait()
            return (
                self._generations.popleft() if self._generations else self._questions.pop(next(iter(self._questions)))
            )

    def _run(self) -> None:
        while True:
            job = self._next()
            self._done.put(job())
            self._kick()
