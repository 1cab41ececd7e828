"""From what the user calls a model to its files, and everything that is read from them before weights are.

Owns the meaning of MODEL on the command line. The names that other parts need are all here: resolve_model,
read_model_info, load_tokenizer, load_chat_template, load_special_tokens, and the ModelError that each of them raises
with one line for the user. Never opens weights in a format that can run code, never guesses between two models.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from procs.model_download import SMOLLM2, PackagedModel, Progress, fetch
from procs.model_info import PICKLE_SUFFIXES, read_model_info, refuse_other_files
from procs.tokenizer_files import load_chat_template, load_special_tokens, load_tokenizer
from shm.tensor_map import ModelError

__all__ = [
    "DEFAULT_MODEL",
    "ModelError",
    "Progress",
    "load_chat_template",
    "load_special_tokens",
    "load_tokenizer",
    "read_model_info",
    "resolve_model",
]

PACKAGED_MODELS: dict[str, PackagedModel] = {SMOLLM2.name: SMOLLM2}
DEFAULT_MODEL = SMOLLM2.name

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*"]


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The absolute path of a model: a .gguf file or a folder in Hugging Face layout, for read_model_info and the
    loaders.

    name: a known name (DEFAULT_MODEL), a path, or a hub id (org/name). A path that exists comes before a hub id.
    Downloads what is not cached; progress(what, bytes done, bytes in all) is told about it (procs.model_progress
    shows it). Raises ModelError.
    """
    if name in PACKAGED_MODELS:
        return fetch(PACKAGED_MODELS[name], progress or _silent)
    if not name:
        raise ModelError("the model's name is empty")
    path = Path(name).expanduser()
    if path.is_dir():
        return _only_gguf_of(path.absolute())
    if path.exists():
        refuse_other_files(path)
        return path.absolute()
    if name.startswith(("/", "./", "../", "~")) or path.suffix in {".gguf", ".safetensors", *PICKLE_SUFFIXES}:
        raise ModelError(f"{name}: no such file or folder")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    known = ", ".join(PACKAGED_MODELS)
    raise ModelError(f"unknown model {name!r}: not a known name ({known}), a file, a folder, or a hub id (org/name)")


def _silent(_what: str, _bytes_done: int, _bytes_total: int) -> None:
    return


def _only_gguf_of(folder: Path) -> Path:
    """The folder itself, or the one GGUF file in a folder that holds nothing else to serve."""
    if (folder / "config.json").exists():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{folder}: it holds {len(files)} GGUF files; name one of them, such as {files[0].name}")
    raise ModelError(f"{folder}: not a model (it has neither config.json nor a GGUF file)")


def _from_hub(hub_id: str) -> Path:
    # Imported here: it takes a tenth of a second, which no other start should pay.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except LocalEntryNotFoundError:
        raise ModelError(f"{hub_id}: no such folder here, and the hub cannot be reached") from None
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{hub_id}: no such folder here, and the hub says: {reason[0]}") from None
