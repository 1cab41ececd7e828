"""From what the user calls a drafter to its file.

Owns the meaning of --speculate where a trained drafter is named, and the place of those that are shipped.
"""

from __future__ import annotations

from pathlib import Path

from procs.tokenizer_files import digest_of, load_tokenizer
from shm.config import ModelInfo
from shm.drafter_file import DFLASH, FILE_NAME, MTP, DrafterFile
from shm.tensor_map import ModelError

# A folder for each model, in it one for each kind of drafter.
SHIPPED = Path(__file__).resolve().parent.parent / "gpu" / "drafters" / "shipped"
TRAINED = (MTP, DFLASH)
WITHOUT_MODEL = ("off", "ngram", "clocked")  # what --speculate may say for which there is no file


def find_drafter(name: str, target: ModelInfo, path_of_target: Path) -> DrafterFile | None:
    """The drafter for a model that `name` stands for: a kind, of which one is shipped for models of this shape, or a
    folder that holds one, or its file. None: it stands for no trained drafter. Raises ModelError, with the reason,
    where the drafter is not one of this model.
    """
    if name in WITHOUT_MODEL:
        return None
    if name in TRAINED:
        return _same_tokens(_shipped(name, target), target, path_of_target)
    try:
        path = Path(name).expanduser()
        path = path if path.name == FILE_NAME else path / FILE_NAME
        if not path.is_file():
            return None
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that nobody has
        raise ModelError(f"{name[:80]!r} is not the name of a drafter or of a folder ({error})") from None
    file = DrafterFile(path.resolve())
    file.check(target)
    return _same_tokens(file, target, path_of_target)


def _same_tokens(file: DrafterFile, target: ModelInfo, path_of_target: Path) -> DrafterFile:
    """Models of one shape may call other tokens by the same ids. Raises ModelError."""
    if file.tokens != digest_of(load_tokenizer(path_of_target)):
        raise ModelError(f"{file.path}: it is the drafter of another model than {target.name}: its tokens are others")
    return file


def _shipped(kind: str, target: ModelInfo) -> DrafterFile:
    models = []
    for path in sorted(SHIPPED.glob(f"*/{kind}/{FILE_NAME}")):
        file = DrafterFile(path)
        try:
            file.check(target)
        except ModelError:
            models.append(path.parent.parent.name)
            continue
        return file
    raise ModelError(
        f"no {kind} drafter is shipped for {target.name} (only for {', '.join(models) or 'no model'}); train one with "
        "python -m tools.train_drafter, and give --speculate the folder that it has written"
    )
