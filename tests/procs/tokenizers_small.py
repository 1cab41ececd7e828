"""Small tokenizers for tests, one of each kind that the Llama family has; none is read from a file."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.model_factory import EOS_TOKEN_IDS, MERGES, SPECIAL_TOKENS, vocabulary

WORDS = ["▁", "▁the", "▁a", "he", "l", "o", "▁▁", "é", "€", "😀", "b▁c", ".", "<0xZZ>", "�"]


def byte_level(*, more: tuple[str, ...] = ("plain added", "<think>")) -> Tokenizer:
    """The tests' model's tokenizer: 3 special tokens, 256 bytes, merges; then added tokens that are ordinary text."""
    tokens = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.BPE(tokens, [tuple(merge.split(" ")) for merge in MERGES]))  # type: ignore[misc]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in more])
    return tokenizer


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind: words with the mark of a space, and every byte as a token of its own."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return tokenizer


def metaspace(scheme: str = "always") -> Tokenizer:
    """The kind whose decoder takes the mark off the first word only."""
    tokens = ["<unk>", "<s>", "</s>", *WORDS]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace("▁", scheme)  # type: ignore[arg-type]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return tokenizer


__all__ = ["EOS_TOKEN_IDS", "byte_level", "metaspace", "sentencepiece"]
