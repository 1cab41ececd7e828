"""What a drafter learns from: the target's own greedy answers, and its states at every place of them.

Owns the choice of conversations, their split, and the files: one safetensors file a shard, made in the order of the
conversations, so that a run that was interrupted goes on with the first shard that is missing. The target runs on the
host device's own kernels, in the precision that serves, so that what is learnt from is what will be drafted for.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from procs.chat_template import ChatTemplate
from procs.tokenizer_files import load_chat_template, load_special_tokens, load_tokenizer
from shm.config import ModelInfo
from tools.sharegpt_file import entries

SPLITS = ("train", "validation", "test")
HELD_OUT = 40  # one conversation of so many is for validation, another for the test
PAGE = 16

Told = Callable[[str], None]


def split_of(conversation: str) -> str:
    """Where a conversation belongs, by its id alone: the same in every run, whatever else is in the data."""
    number = int.from_bytes(hashlib.sha256(conversation.encode()).digest()[:8], "big") % HELD_OUT
    return {0: "validation", 1: "test"}.get(number, "train")


def conversations(path: Path) -> Iterator[tuple[str, str]]:
    """(id, what the person asked first) of ShareGPT's conversations. The file may be cut off anywhere.

    Parts of one conversation (`id_0`, `id_1`, ...) come one by one: only its first part begins with a question.
    """
    for entry in entries(path):
        turns = entry.get("conversations") or []
        if str(entry["id"]).endswith("_0") and turns and turns[0].get("from") == "human":
            yield str(entry["id"])[:-2], str(turns[0]["value"])


@dataclass(frozen=True)
class Example:
    """One prompt and its greedy answer: tokens i32[n], of which the first `prompt` are the prompt; states
    f16[n - 1, taps, hidden], the target's residual stream behind each tapped layer, at every place but the last; and
    sizes f32[n - 1, taps], by whose mean square's root each state was divided.
    """

    tokens: NDArray[np.int32]
    prompt: int
    states: NDArray[np.float16]
    sizes: NDArray[np.float32]


def default_taps(layers: int) -> tuple[int, ...]:
    """After a third, two thirds and all of a model's layers: what drafters are shown of it."""
    return tuple(sorted({max(1, layers * third // 3) - 1 for third in (1, 2, 3)}))


class Writer:
    """The target, writing greedy answers to a batch of prompts at a time."""

    def __init__(self, info: ModelInfo, batch: int, max_len: int, threads: int, dtype: str = "int8") -> None:
        """max_len: of prompt and answer together."""
        self.info, self.batch, self.max_len = info, batch, max_len
        self._per_row = -(-max_len // PAGE)
        self._model = HostLlama(
            info,
            open_weights(info),
            dtype=dtype,
            page_size=PAGE,
            pages=1 + batch * self._per_row,
            pages_per_row=self._per_row,
            max_tokens=max(batch, max_len),
            max_seqs=batch,
            threads=threads,
            taps=default_taps(info.num_layers),
        )
        self._shape = (max_len, len(self._model.taps), info.hidden_size)
        self._pages = 1 + np.arange(batch * self._per_row, dtype=np.int32).reshape(batch, self._per_row)
        self._logits = np.zeros((batch, info.vocab_size), np.float32)

    def answer(self, prompts: Sequence[Sequence[int]], limit: int) -> list[Example]:
        """Answer all prompts, at most `batch` of them, with at most `limit` tokens each."""
        assert 0 < len(prompts) <= self.batch
        texts = [list(prompt) for prompt in prompts]
        kept = [(np.zeros(self._shape, np.float16), np.zeros(self._shape[:2], np.float32)) for _ in prompts]
        for row, text in enumerate(texts):
            self._pass([row] * len(text), list(range(len(text))), text, [len(text) - 1], kept)
            text.append(int(self._logits[0].argmax()))
        running = list(range(len(texts)))
        while running := [row for row in running if self._goes_on(texts[row], len(prompts[row]), limit)]:
            places = [len(texts[row]) - 1 for row in running]
            self._pass(running, places, [texts[row][-1] for row in running], list(range(len(running))), kept)
            for row, best in zip(running, self._logits[: len(running)].argmax(axis=1).tolist(), strict=True):
                texts[row].append(best)
        made = zip(texts, prompts, kept, strict=True)
        return [
            Example(np.array(text, np.int32), len(prompt), states[: len(text) - 1], sizes[: len(text) - 1])
            for text, prompt, (states, sizes) in made
        ]

    def _goes_on(self, text: list[int], prompt: int, limit: int) -> bool:
        return text[-1] not in self.info.eos_token_ids and len(text) < min(prompt + limit, self.max_len)

    def _pass(
        self,
        rows: list[int],
        places: list[int],
        tokens: list[int],
        wanted: list[int],
        kept: list[tuple[NDArray[np.float16], NDArray[np.float32]]],
    ) -> None:
        given, at, seqs, chosen = (np.array(part, np.int32) for part in (tokens, places, rows, wanted))
        self._model.forward(given, at, seqs, self._pages, chosen, self._logits[: len(wanted)])
        tapped = self._model.tapped[: len(rows)]
        sizes = np.sqrt(np.square(tapped).mean(axis=2) + self.info.rms_eps)
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            kept[row][0][place], kept[row][1][place] = tapped[i] / sizes[i, :, None], sizes[i]


def questions_of(source: Path, split: str) -> Iterator[str]:
    """The first questions of one split. What is asked in a conversation for training, word for word, is in no other
    split: the answer would be the same as well.
    """
    known: set[str] = set()
    if split != "train":
        known = {_words(question) for name, question in conversations(source) if split_of(name) == "train"}
    for name, question in conversations(source):
        if split_of(name) == split and question.strip() and _words(question) not in known:
            yield question


def _words(question: str) -> str:
    return " ".join(question.lower().split())


def prompts_of(source: Path, model: Path, split: str, longest: int) -> Iterator[list[int]]:
    """Token ids of the questions of one split, as a chat, where they have at most `longest`."""
    tokenizer, template = load_tokenizer(model), load_chat_template(model)
    assert template is not None, "the model has no chat template"
    chat = ChatTemplate(template, load_special_tokens(model))
    for question in questions_of(source, split):
        text = chat.render([{"role": "user", "content": question}])
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) <= longest:
            yield ids


def write_shards(
    folder: Path, writer: Writer, prompts: Iterator[list[int]], shards: int, batches: int, limit: int, told: Told
) -> None:
    """Make `shards` files of `batches` batches each; those that are there are left as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(shards):
        chosen = [prompt for _, prompt in zip(range(batches * writer.batch), prompts, strict=False)]
        file = folder / f"shard{number:03d}.safetensors"
        if file.exists() or not chosen:
            continue
        chosen.sort(key=len)  # of about one length: nobody in a batch waits for long
        examples: list[Example] = []
        for begin in range(0, len(chosen), writer.batch):
            examples += writer.answer(chosen[begin : begin + writer.batch], limit)
            told(f"{file.name}: {len(examples)} of {len(chosen)} answers")
        save_shard(file, examples)


def save_shard(file: Path, examples: Sequence[Example]) -> None:
    """Write a file whole or not at all."""
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([example.tokens for example in examples]),
        "lengths": np.array([len(example.tokens) for example in examples], np.int32),
        "prompts": np.array([example.prompt for example in examples], np.int32),
        "states": np.concatenate([example.states for example in examples]),
        "sizes": np.concatenate([example.sizes for example in examples]),
    }
    work = file.with_suffix(".part")
    save_file(arrays, work)
    work.replace(file)


def load_shard(file: Path) -> list[Example]:
    """The examples of a file."""
    arrays = load_file(file)
    ends = np.cumsum(arrays["lengths"])
    tokens = np.split(arrays["tokens"], ends[:-1])
    begins = (ends - np.arange(1, len(ends) + 1))[:-1]  # a text has one state less than it has tokens
    states, sizes = (np.split(arrays[name], begins) for name in ("states", "sizes"))
    return [Example(t, int(p), s, z) for t, p, s, z in zip(tokens, arrays["prompts"], states, sizes, strict=True)]
