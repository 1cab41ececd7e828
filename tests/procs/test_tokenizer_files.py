"""Tokenizers and templates out of both formats, and out of the model whose ids are on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from procs.model_files import (
    DEFAULT_MODEL,
    ModelError,
    load_chat_template,
    load_special_tokens,
    load_tokenizer,
    resolve_model,
)
from tests.model_factory import CHAT_TEMPLATE, TinyLlama, vocabulary, write_json

GREEDY_FILE = Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl"
SPECIAL = "<|im_start|>"


def write_vocabulary(path: Path, **changes: Any) -> Path:
    """A GGUF file with nothing but a tokenizer."""
    tokens = changes.get("tokens", vocabulary())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(changes.get("types", [3, 3, 3] + [1] * (len(tokens) - 3)))
    writer.add_token_merges(changes.get("merges", ["h e"]))
    writer.add_bos_token_id(changes.get("bos", 0))
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return load_tokenizer(TinyLlama().write_hf(folder / "hf")), load_tokenizer(
        TinyLlama().write_gguf(folder / "m.gguf")
    )


PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    " the",
    "\n\n",
    "12",
    " ½",
    "é",
    "你好",
    "😀",
    "’s",
    "\r\n",
    "  ",
    "\u0000",
]


@settings(max_examples=100, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=8).map("".join))
def test_both_formats_give_the_same_ids_and_text(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    ids = [tokenizer.encode(text).ids for tokenizer in pair]
    assert ids[0] == ids[1]
    for tokenizer in pair:
        assert tokenizer.decode(ids[0], skip_special_tokens=False) == text


def test_special_tokens_are_single_and_leave_no_text(pair: tuple[Tokenizer, Tokenizer]) -> None:
    for tokenizer in pair:
        ids = tokenizer.encode("<|im_start|>a<|im_end|>").ids
        assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
        assert tokenizer.decode(ids) == "a"


def test_tokens_that_users_defined_are_whole_but_are_text(tmp_path: Path) -> None:
    tokens = [*vocabulary(), "<think>"]
    path = write_vocabulary(tmp_path / "m.gguf", tokens=tokens, types=[3] * 3 + [1] * 301 + [4])
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("<think>").ids == [304]
    assert tokenizer.decode([304]) == "<think>"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab 1234's", ["ab", " 1234", "'s"]),
        ("smollm", "ab 1234's", ["ab", " ", "1", "2", "3", "4", "'s"]),
        ("llama-bpe", "ab 1234'S\n\nx", ["ab", " ", "123", "4", "'S", "\n\n", "x"]),
        ("qwen2", "ab 1234'S\n\nx", ["ab", " ", "1", "2", "3", "4", "'S", "\n\n", "x"]),
    ],
)
def test_where_text_is_cut(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", pre=pre))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == words


def test_what_else_the_pre_tokenizers_differ_in(tmp_path: Path) -> None:
    # "the" is a token that no merge here makes; "e" and a combining accent are one letter after NFC.
    tokens = [*vocabulary(), "the"]
    for pre, whole_word in (("llama-bpe", True), ("gpt-2", False)):
        tokenizer = load_tokenizer(write_vocabulary(tmp_path / f"{pre}.gguf", pre=pre, tokens=tokens, add_bos=False))
        assert (tokenizer.encode("the").ids == [304]) is whole_word
    composed = load_tokenizer(write_vocabulary(tmp_path / "q.gguf", pre="qwen2"))
    assert composed.encode("e\u0301").ids == composed.encode("é").ids


@pytest.mark.parametrize(
    ("pre", "add_bos", "added"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_bos_token_where_the_model_wants_it(tmp_path: Path, pre: str, add_bos: bool | None, added: bool) -> None:
    changes = {} if add_bos is None else {"add_bos": add_bos}
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", pre=pre, bos=1, **changes))
    assert (tokenizer.encode("a").ids[0] == 1) is added
    assert tokenizer.encode("a", add_special_tokens=False).ids[0] != 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not supported"),
        ({"merges": ["h e", "nothere x"]}, "broken tokenizer"),
        ({"merges": ["whole"]}, "broken tokenizer"),
        ({"types": [3, 3]}, "304 tokens, 304 distinct, 2 types"),
        ({"tokens": ["a", "a", "b"], "types": [1, 1, 1], "merges": ["a b"]}, "3 tokens, 2 distinct"),
        ({"bos": 999, "add_bos": True}, "BOS token 999 is not in the vocabulary"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load_tokenizer(write_vocabulary(tmp_path / "m.gguf", **changes))


def test_a_broken_or_missing_tokenizer_file(tmp_path: Path) -> None:
    folder = TinyLlama().write_hf(tmp_path / "hf")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"it has no tokenizer.json"):
        load_tokenizer(folder)


def test_a_tokenizer_file_that_truncates_and_pads_does_neither(tmp_path: Path) -> None:
    folder = TinyLlama().write_hf(tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("x y z q v").ids) == 9
    assert len(load_tokenizer(folder).encode("x").ids) == 1


@pytest.mark.parametrize(
    ("chat_template", "expected"),
    [
        (CHAT_TEMPLATE, CHAT_TEMPLATE),
        (None, None),
        ([{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "only", "template": "O"}], "O"),
    ],
)
def test_chat_template_of_a_folder(tmp_path: Path, chat_template: Any, expected: str | None) -> None:
    folder = TinyLlama().write_hf(tmp_path / "hf")
    write_json(folder / "tokenizer_config.json", {"chat_template": chat_template})
    assert load_chat_template(folder) == expected
    (folder / "chat_template.jinja").write_text("J é", encoding="utf-8")
    assert load_chat_template(folder) == "J é"


@pytest.mark.parametrize(
    ("chat_template", "says"),
    [(5, "neither a string"), ([{"name": "a", "template": "A"}, {"name": "b", "template": "B"}], "named default")],
)
def test_a_chat_template_that_is_unclear(tmp_path: Path, chat_template: Any, says: str) -> None:
    folder = TinyLlama().write_hf(tmp_path / "hf")
    write_json(folder / "tokenizer_config.json", {"chat_template": chat_template})
    with pytest.raises(ModelError, match=says):
        load_chat_template(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="cannot be read"):
        load_chat_template(folder)


def test_template_and_special_tokens_of_both_formats(tmp_path: Path) -> None:
    folder, file = TinyLlama().write_hf(tmp_path / "hf"), TinyLlama().write_gguf(tmp_path / "m.gguf")
    assert load_chat_template(folder) == load_chat_template(file) == CHAT_TEMPLATE
    expected = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert load_special_tokens(folder) == load_special_tokens(file) == expected
    write_json(folder / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": None, "pad_token": 3})
    assert load_special_tokens(folder) == {"bos_token": "<s>"}
    (folder / "tokenizer_config.json").unlink()
    assert load_special_tokens(folder) == {}
    assert load_chat_template(folder) is None
    assert load_chat_template(write_vocabulary(tmp_path / "v.gguf")) is None


@pytest.mark.model
def test_the_default_model_gives_the_ids_on_record() -> None:
    from procs.chat_template import ChatTemplate

    path = resolve_model(DEFAULT_MODEL)
    source = load_chat_template(path)
    assert source is not None
    tokenizer, template = load_tokenizer(path), ChatTemplate(source, load_special_tokens(path))
    lines = [json.loads(line) for line in GREEDY_FILE.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 44
    for line in lines:
        text = line["prompt"]
        if line["chat"]:
            text = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        assert tokenizer.encode(text, add_special_tokens=not line["chat"]).ids == line["prompt_ids"], line["prompt"]
