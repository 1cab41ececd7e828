"""The prompts whose answers repeat much of them: of both kinds, with what is to be repeated, the same each time."""

import ast
import json
import sys
from pathlib import Path

import pytest

from tools import repeating_prompts


def written(file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["repeating_prompts", str(file)])
    repeating_prompts.main()
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


def test_both_kinds_in_turn_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = written(tmp_path / "once", monkeypatch)
    assert prompts == written(tmp_path / "again", monkeypatch)
    assert len(prompts) == len(set(prompts)) == repeating_prompts.PROMPTS
    for edit, quote in zip(prompts[::2], prompts[1::2], strict=True):
        assert edit.startswith("Here is a Python function") and quote.startswith("Text:")


def test_an_edit_shows_a_whole_function_and_how_its_new_one_begins() -> None:
    for prompt in repeating_prompts.edits():
        code, _, request = prompt.partition("\n\nHere is the same function with ")
        (function,) = ast.parse(code.removeprefix("Here is a Python function:\n\n")).body
        assert isinstance(function, ast.FunctionDef)
        old = next(argument.arg for argument in function.args.args if argument.arg != "self")
        first = request.strip().splitlines()[-1]
        assert f"`{old}` renamed to `{old}_`" in request and f"{old}_" in first
        assert first.startswith(f"def {function.name}(")


def test_a_quote_has_its_text_once_and_no_mark_that_would_end_it(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    texts = ['He said "no". ' + "x" * 400, "short", "y" * 900, "z" * 500]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    first, second = repeating_prompts.quotes(file)
    assert "He said 'no'. xxx" in first and first.endswith('in quotes:\n"') and first.count('"') == 3
    assert "z" * 500 in second
