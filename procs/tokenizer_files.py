"""What a model's files say about text: tokenizer, chat template, special tokens.

Owns the building of a byte-level BPE tokenizer from GGUF metadata and the reading of the tokenizer files of a folder
in Hugging Face layout. Never renders a template and never encodes (procs.tokenizer does); never reads a weight. A
tokenizer that would have to be guessed is refused: a wrong split gives wrong ids without any error.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shm.gguf_file import GgufFile
from shm.safetensors_file import read_json
from shm.tensor_map import ModelError

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# The words that byte-level BPE merges within, as published with Llama 3; Qwen 2 differs in the number of digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Split:
    """How text is cut before merging. words: a regular expression, or None for GPT-2's, which the library has built
    in.
    """

    words: str | None = None
    single_digits: bool = False
    whole_words: bool = False  # a word that is a token is taken as it is, whatever its merges would give
    compose: bool = False  # Unicode NFC first
    add_bos: bool = False  # where the metadata do not say


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "llama-bpe": _Split(_WORDS.replace("DIGITS", "{1,3}"), whole_words=True, add_bos=True),
    "qwen2": _Split(_WORDS.replace("DIGITS", ""), compose=True),
}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a .gguf file or a folder in Hugging Face layout; about 0.2 s for 50,000 tokens.

    Special tokens are matched before anything else; `encode(text, add_special_tokens=True)` adds what the model wants
    added (a BOS token or nothing). Neither truncates nor pads. Raises ModelError.
    """
    path = Path(path)
    if not path.is_dir():
        return _build_tokenizer(GgufFile(path))
    file = path / TOKENIZER_FILE
    check_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for whatever is wrong with the file
        raise ModelError(f"{file}: not a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def digest_of(tokenizer: Tokenizer) -> bytes:
    """32 bytes that tell whether two models have the same tokens under the same ids."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).digest()


def check_tokenizer(path: str | Path, file: GgufFile | None = None) -> None:
    """Raise ModelError if load_tokenizer cannot work, in little time. file: the parsed GGUF file, if there is one
    already.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / TOKENIZER_FILE).is_file():
            sentencepiece = (path / "tokenizer.model").is_file()
            hint = "; tokenizer.model alone is not supported" if sentencepiece else ""
            raise ModelError(f"{path}: it has no {TOKENIZER_FILE}{hint}")
        return
    file = file or GgufFile(path)
    model = file.text("tokenizer.ggml.model", "none")
    if model != "gpt2":
        raise ModelError(f"{path}: tokenizer model {model!r} is not supported (gpt2, which is byte-level BPE, is)")
    split = file.text("tokenizer.ggml.pre", "none")
    if split not in _SPLITS:
        raise ModelError(f"{path}: pre-tokenizer {split!r} is not supported ({', '.join(_SPLITS)} are)")


def load_chat_template(path: str | Path) -> str | None:
    """The model's chat template (Jinja source), or None if it has none. Raises ModelError for a broken file."""
    path = Path(path)
    if not path.is_dir():
        return GgufFile(path).text("tokenizer.chat_template", "") or None
    try:
        return (path / TEMPLATE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path / TEMPLATE_FILE}: cannot be read ({error})") from None
    template = _tokenizer_config(path).get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        if template is None:
            raise ModelError(f"{path / TOKENIZER_CONFIG_FILE}: none of its chat templates is named default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path / TOKENIZER_CONFIG_FILE}: chat_template is neither a string nor a list of named ones")
    return template


def load_special_tokens(path: str | Path) -> dict[str, str]:
    """What a chat template may refer to: "bos_token", "eos_token", "unk_token", "pad_token" -> text, as far as they
    exist.
    """
    path = Path(path)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    if path.is_dir():
        config = _tokenizer_config(path)
        contents = {name: config.get(name) for name in names}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in contents.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}
    file = GgufFile(path)
    tokens = file.texts("tokenizer.ggml.tokens")
    keys = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    ids = {name: file.integer(f"tokenizer.ggml.{key}", -1) for name, key in zip(names, keys, strict=True)}
    return {name: tokens[token_id] for name, token_id in ids.items() if 0 <= token_id < len(tokens)}


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / TOKENIZER_CONFIG_FILE
    return read_json(file) if file.is_file() else {}


def _build_tokenizer(file: GgufFile) -> Tokenizer:
    check_tokenizer(file.path, file)
    split = _SPLITS[file.text("tokenizer.ggml.pre")]
    tokens = file.texts("tokenizer.ggml.tokens")
    kinds = file.integers("tokenizer.ggml.token_type")
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise ModelError(
            f"{file.path}: broken tokenizer: {len(tokens)} tokens, {len(vocabulary)} distinct, {len(kinds)} types"
        )
    merges = [_halves(merge) for merge in file.texts("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a merge of unknown tokens
        raise ModelError(f"{file.path}: broken tokenizer: {error}") from None
    if split.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    marked = [
        (text, kind) for text, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    # In the order of the ids and all in one call: the library orders the matching by it.
    tokenizer.add_tokens([AddedToken(text, special=kind != _USER_DEFINED, normalized=False) for text, kind in marked])
    if file.flag("tokenizer.ggml.add_bos_token", split.add_bos):
        bos_id = file.integer("tokenizer.ggml.bos_token_id")
        if not 0 <= bos_id < len(tokens):
            raise ModelError(f"{file.path}: broken tokenizer: the BOS token {bos_id} is not in the vocabulary")
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, bos_id)])
    return tokenizer


def _halves(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.words is not None:
        steps.append(pre_tokenizers.Split(Regex(split.words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.words is None))
    return pre_tokenizers.Sequence(steps)
