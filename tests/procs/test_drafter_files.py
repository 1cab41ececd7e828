"""Which drafter a name stands for, and which models it is refused for. Those that are shipped, as they are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from procs import drafter_files
from procs.drafter_files import SHIPPED, TRAINED, find_drafter
from procs.model_files import resolve_model
from procs.model_info import read_model_info
from procs.tokenizer_files import digest_of, load_tokenizer
from shm.tensor_map import ModelError

MODEL = "smollm2-135m-instruct"
LEAST = {"mtp": 1.8, "dflash": 1.6}  # tokens a window of 3 drafts has to bring
BYTES_MAX = 16 << 20


@pytest.mark.model
@pytest.mark.parametrize("kind", TRAINED)
def test_one_is_shipped_for_the_default_model(kind: str) -> None:
    path = resolve_model(MODEL)
    found = find_drafter(kind, read_model_info(path), path)
    assert found is not None and found.kind == kind and found.path.is_relative_to(SHIPPED)
    assert find_drafter(str(found.path.parent), read_model_info(path), path) is not None, "or by its folder"


@pytest.mark.parametrize("kind", TRAINED)
def test_what_is_shipped_says_how_it_was_made_and_what_it_brings(kind: str) -> None:
    folder = SHIPPED / MODEL / kind
    told = json.loads((folder / "drafter.json").read_text())
    assert told["command"].startswith("python -m tools.train_drafter --kind " + kind)
    assert told["settings"]["kind"] == kind and told["settings"]["seed"] == 1 and told["settings"]["drafts"] == 3
    assert told["train_answer_tokens"] > 500_000 and told["train_seconds"] < 3 * 3600
    runs = told["test_runs"]
    windows = sum(runs)
    assert windows > 5_000
    assert sum(n * (1 + accepted) for accepted, n in enumerate(runs)) / windows >= LEAST[kind]
    assert (folder / "loss.svg").read_text().startswith("<svg")


def test_all_that_is_shipped_is_small() -> None:
    assert 0 < sum(file.stat().st_size for file in SHIPPED.rglob("*.safetensors")) <= BYTES_MAX


@pytest.mark.model
def test_a_model_of_another_shape_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = resolve_model(MODEL)
    other = replace(read_model_info(path), hidden_size=64, name="other")
    with pytest.raises(ModelError, match=rf"no mtp drafter is shipped for other .only for {MODEL}.*train_drafter"):
        find_drafter("mtp", other, path)
    folder = str(SHIPPED / MODEL / "mtp")
    with pytest.raises(ModelError, match=r"drafter of another model than other: its token_in.weight is \[576, 576\]"):
        find_drafter(folder, other, path)
    with pytest.raises(ModelError, match=r"it knows ids up to .*, and the model has 5000"):
        find_drafter(folder, replace(other, hidden_size=576, vocab_size=5000), path)
    monkeypatch.setattr(drafter_files, "SHIPPED", tmp_path)
    with pytest.raises(ModelError, match="only for no model"):
        find_drafter("mtp", other, path)
    assert find_drafter(str(tmp_path), other, path) is None


@pytest.mark.model
def test_a_model_of_the_same_shape_with_other_tokens_is_refused(tmp_path: Path) -> None:
    path = resolve_model(MODEL)
    tokenizer = load_tokenizer(path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert digest_of(load_tokenizer(tmp_path)) == digest_of(tokenizer), "GGUF or a folder, the tokens are the same"
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    one, another = list(vocabulary)[1000:1002]
    vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]
    saved["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    for name in ("dflash", str(SHIPPED / MODEL / "dflash")):
        with pytest.raises(ModelError, match="its tokens are others"):
            find_drafter(name, read_model_info(path), tmp_path)
