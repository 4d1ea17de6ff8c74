"""Converting vocabularies in other formats into tokenizers of the `tokenizers` library.

Each reader returns the tokenizer and the token of each role. Some vocabularies lack roles: GPT-2
has neither a padding nor a mask token. Missing tokens are added after the last id, so that no
other id changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.errors import DataError
from data_pipeline.tokenization import sentencepiece_models
from data_pipeline.tokenization.library_errors import as_data_errors

Roles = dict[str, str]  # "pad" -> "[PAD]", ...
Settings = Mapping[str, Any]  # the content of `CONFIG_FILE` and similar files
CONFIG_FILE = "tokenizer_config.json"
BERT_SETTINGS = {  # -> the attribute of `tokenizers`
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# The usual names of each role. The first is used when a token must be added.
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
GPT2_END = "<|endoftext|>"
BYTE_LEVEL_FILES = (
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("gpt2-vocab_hf.json", "gpt2-merges_hf.txt"),
)


def bert_tokenizer(
    model: models.Model, lowercase: bool, strip_accents: bool | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer with BERT's normalizer and word splitting.

    BERT strips accents where it folds case; so does `strip_accents` null.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level_tokenizer(
    model: models.Model, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """A tokenizer with GPT-2's byte-level alphabet and word splitting."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def from_vocab_txt(path: Path, settings: Settings) -> tuple[tokenizers.Tokenizer, Roles]:
    """A tokenizer from BERT's ``vocab.txt``, which has one WordPiece token per line.

    If the `settings` do not say whether it is cased, it is cased if any word has a capital.
    """
    words = _lines(path)
    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = next((one for one in _names("unk", settings) if one in vocabulary), None)
    if unknown is None:
        raise DataError(f"{path}: has no [UNK] token")
    model = models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    lowercase = not any(word != word.lower() and word[:1] not in "[<" for word in words)
    return complete(with_settings(bert_tokenizer(model, lowercase), settings, path), settings)


def _lines(path: Path) -> list[str]:
    """The lines of a text file, split at line feeds only: a token may hold other line breaks."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n").split("\n")


def with_settings(
    tokenizer: tokenizers.Tokenizer, settings: Settings, path: Path
) -> tokenizers.Tokenizer:
    """Apply the settings for BERT's normalizer, if the tokenizer has that normalizer."""
    normalizer = tokenizer.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        for key, attribute in BERT_SETTINGS.items():
            value = settings.get(key)
            if not isinstance(value, bool | None):
                raise DataError(f"{path.parent / CONFIG_FILE}: {key} must be true, false or null")
            if value is not None:
                setattr(normalizer, attribute, value)
        tokenizer.normalizer = normalizer
    return tokenizer


def byte_level_files(folder: Path) -> tuple[Path, Path] | None:
    """The files of a byte-level BPE in a folder, (vocabulary, merges); None if it has none."""
    for vocabulary, merges in BYTE_LEVEL_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return folder / vocabulary, folder / merges
    return None


def from_byte_level(
    vocabulary: Path, merges: Path, settings: Settings
) -> tuple[tokenizers.Tokenizer, Roles]:
    """A tokenizer from GPT-2's or RoBERTa's byte-level BPE."""
    with as_data_errors(f"{vocabulary}: not a BPE vocabulary"):
        model = models.BPE.from_file(str(vocabulary), str(merges))
    tokenizer = byte_level_tokenizer(model, bool(settings.get("add_prefix_space")))
    if tokenizer.token_to_id(GPT2_END) is not None:
        tokenizer.add_special_tokens([GPT2_END])
    return complete(tokenizer, settings)


def from_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    """A tokenizer with the pieces, ids and normalization of a SentencePiece ``.model``."""
    return complete(sentencepiece_models.read(path.read_bytes(), str(path)), {})


def complete(
    tokenizer: tokenizers.Tokenizer, settings: Settings
) -> tuple[tokenizers.Tokenizer, Roles]:
    """Find or add the special tokens, and set the post-processor that inserts [CLS] and [SEP]."""
    roles: Roles = {}
    for role in ROLES:
        names = _names(role, settings)
        found = [name for name in names if tokenizer.token_to_id(name) is not None]
        if found:
            roles[role] = found[0]
        elif role != "unk":  # a byte-level vocabulary needs no unknown token
            roles[role] = names[0]
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in roles.values()])
    cls, sep = roles["cls"], roles["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(one, tokenizer.token_to_id(one)) for one in (cls, sep)],
    )
    return tokenizer, roles


def _names(role: str, settings: Settings) -> tuple[str, ...]:
    """The possible names of a role's token, the likeliest first."""
    own = settings.get(f"{role}_token")
    return ROLES[role] if own is None else (str(own), *ROLES[role])
