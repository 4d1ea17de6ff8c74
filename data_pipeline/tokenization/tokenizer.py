"""Loading and saving tokenizers, and the facts that the pipeline needs about a vocabulary.

A tokenizer is named by a path, which is one of

- a folder in Hugging Face format (``tokenizer.json``), as `training.train` writes it;
- a folder with BERT's ``vocab.txt``, with GPT-2's vocabulary and merges, or with a SentencePiece
  model under a name that `transformers` knows;
- a SentencePiece ``.model`` file (unigram or BPE).

A corpus always holds its tokenizer in Hugging Face format, for ``transformers.AutoTokenizer``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models

from data_pipeline.errors import DataError, as_data_errors
from data_pipeline.tokenization import vocabularies
from data_pipeline.tokenization.vocabularies import (
    CONFIG_FILE,
    Roles,
    read_settings,
    with_settings,
)

TOKENIZER_FILES = (
    "tokenizer.json",
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
WORD_MARKS = ("\u0120", "\u010a", "\u2581")  # byte-level space and line feed, unigram space


@dataclass(frozen=True)
class Vocabulary:
    """The facts about a tokenizer that packing and masking need.

    `special` holds every id that is not ordinary text. `fingerprint` is the SHA-256 of the map
    from token to id, so equal fingerprints mean equal ids. `between` holds the tokens that the
    tokenizer puts between the texts of a pair, as RoBERTa's puts two; empty: one [SEP].
    """

    vocab_size: int
    pad: int
    cls: int
    sep: int
    mask: int
    special: tuple[int, ...]
    fingerprint: str
    between: tuple[int, ...] = ()

    @cached_property
    def is_special(self) -> NDArray[np.bool_]:
        """[vocab_size] True for special tokens."""
        table = np.zeros(self.vocab_size, bool)
        table[list(self.special)] = True
        return table

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """The ids of all ordinary tokens, ascending."""
        return np.flatnonzero(~self.is_special)

    def with_special(
        self, texts: Sequence[Sequence[int] | NDArray[np.integer]]
    ) -> tuple[NDArray[np.integer], list[int]]:
        """The ids of a task's one or two texts with special tokens, and the column of each text."""
        parts: list[Any] = [[self.cls]]
        columns, column = [], 1
        for text, behind in zip(texts, self._behind[-len(texts) :], strict=True):
            columns.append(column)
            parts += [text, behind]
            column += len(text) + len(behind)
        return np.concatenate(parts), columns

    def special_in(self, texts: int) -> int:
        """How many special tokens stand in a sequence of one or two texts."""
        return 1 + sum(map(len, self._behind[-texts:]))

    @cached_property
    def _behind(self) -> list[NDArray[np.int64]]:
        """The tokens behind the first text of a pair, and behind the last text."""
        return [np.array(self.between or (self.sep,)), np.array([self.sep])]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `corpus.json`."""
        tree = {**asdict(self), "special": list(self.special), "between": list(self.between)}
        return tree if self.between else {key: tree[key] for key in tree if key != "between"}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Vocabulary:
        """The reverse of `to_json`."""
        lists = {key: tuple(tree.get(key, ())) for key in ("special", "between")}
        return cls(**{**tree, **lists})


def load(path: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The tokenizer at `path`, without truncation and padding, and its vocabulary.

    A ``tokenizer.json`` must have pad, cls, sep and mask tokens; to the other formats missing ones
    are added after the last id. Raises DataError if the tokenizer is missing, unreadable or lacks
    one of these tokens.
    """
    tokenizer, roles = read(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, _describe(tokenizer, roles, path)


def save(tokenizer: tokenizers.Tokenizer, roles: Roles, out: Path) -> list[str]:
    """Write the folder that `load` and ``transformers.AutoTokenizer`` read; returns its files."""
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token for role, token in roles.items()},
    }
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    # Last, as it can be read alone, without the roles in its config. The library's own `save`
    # raises a bare Exception where the disk is full.
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return ["tokenizer.json", CONFIG_FILE]


def install(path: Path, out: Path) -> list[str]:
    """Write the tokenizer at `path` to the folder `out`, in Hugging Face format.

    A folder in that format is copied, unless its config overrides its ``tokenizer.json``: some
    readers ignore such an override. Also where its config names no class: `transformers` would read
    it as the tokenizer of the model that is exported beside it. Returns the names of the files
    written.
    """
    out.mkdir(parents=True, exist_ok=True)
    names_class = path.is_dir() and "tokenizer_class" in read_settings(path)
    if names_class and _config_changes_nothing(path / "tokenizer.json"):
        names = [name for name in TOKENIZER_FILES if (path / name).is_file()]
        for name in names:
            shutil.copyfile(path / name, out / name)
        return names
    return save(*read(path), out)


def digest(tokenizer: tokenizers.Tokenizer) -> str:
    """SHA-256 of all that decides what a text becomes: normalizer, splitting, vocabulary.

    The fingerprint of a vocabulary does not tell tokenizers apart that differ in accents, case or
    the first space. A newer `tokenizers` may write another digest of the same.
    """
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def word_starts(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """[vocab_size] True for tokens that begin a word.

    WordPiece marks tokens that continue a word (``##``). Byte-level BPE and unigram mark tokens
    that begin one. A punctuation mark is a word of its own, as in the pre-tokenizers. In
    byte-level tokens a part of a longer character is none, whatever its sign looks like.
    """
    starts = np.ones(vocabulary.vocab_size, bool)
    wordpiece = isinstance(tokenizer.model, models.WordPiece)
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if wordpiece:
            starts[number] = not token.startswith("##")
        else:
            first = token[:1]
            is_letter = first.isalnum() or (byte_level and not first.isascii())
            starts[number] = first in WORD_MARKS or not is_letter
    starts[list(tokenizer.get_added_tokens_decoder())] = True  # a word that was added is one
    return starts


def unknown_id(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The id of what the vocabulary has no entry for; None where everything has one."""
    model = json.loads(tokenizer.to_str())["model"]
    if isinstance(number := model.get("unk_id"), int):  # of unigram
        return number
    return None if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])


def word_prefix(tokenizer: tokenizers.Tokenizer) -> str:
    """The text to put before a word that is encoded alone, for the ids of running text.

    A space for tokenizers in which a word's tokens hold the space before it (byte-level BPE,
    some SentencePiece models) and which do not add that space themselves.
    """
    after_space = tokenizer.encode("a a", add_special_tokens=False).ids
    alone = tokenizer.encode("a", add_special_tokens=False).ids
    return "" if after_space == alone + alone else " "


def read(path: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    """The tokenizer at `path` as it is, in any form, and the token of each role."""
    if path.suffix == ".model" and path.is_file():
        return vocabularies.from_sentencepiece(path, {})
    settings = read_settings(path)
    if (path / "tokenizer.json").is_file():
        tokenizer = _read_json(path / "tokenizer.json")
        tokenizer = with_settings(tokenizer, settings, path / "tokenizer.json")
        roles = vocabularies.roles_in(tokenizer, settings)
        if {"cls", "sep"} <= roles.keys() and not _is_framed(tokenizer, roles):
            tokenizer = vocabularies.framed(tokenizer, roles, settings)  # as it is read here
        return tokenizer, roles
    if (path / "vocab.txt").is_file():
        return vocabularies.from_vocab_txt(path / "vocab.txt", settings)
    files = vocabularies.byte_level_files(path)
    if files:
        return vocabularies.from_byte_level(*files, settings)
    model = vocabularies.sentencepiece_file(path)
    if model:
        return vocabularies.from_sentencepiece(model, settings)
    if not path.exists():
        raise DataError(f"{path}: no such folder; name one with a tokenizer: none is downloaded")
    raise DataError(f"{path}: holds no tokenizer; train one with `tandem tokenizer train`")


def _is_framed(tokenizer: tokenizers.Tokenizer, roles: Roles) -> bool:
    """Whether the tokenizer puts [CLS] before a text, and [SEP] behind it."""
    cls, sep = (tokenizer.token_to_id(roles[role]) for role in ("cls", "sep"))
    framed, bare = (tokenizer.encode("a", add_special_tokens=given) for given in (True, False))
    padded = zip(framed.ids, framed.attention_mask, strict=True)  # some pad every text
    text = [number for number, real in zip(bare.ids, bare.attention_mask, strict=True) if real]
    return [number for number, real in padded if real] == [cls, *text, sep]


def _read_json(path: Path) -> tokenizers.Tokenizer:
    with as_data_errors(f"{path}: not a tokenizer"):
        return tokenizers.Tokenizer.from_file(str(path))


def _config_changes_nothing(path: Path) -> bool:
    """Whether a ``tokenizer.json`` exists at `path` whose config overrides nothing in it."""
    if not path.is_file():
        return False
    return read(path.parent)[0].to_str() == _read_json(path).to_str()


def _describe(tokenizer: tokenizers.Tokenizer, roles: Roles, path: Path) -> Vocabulary:
    ids: dict[str, int] = {}
    for role in ("pad", "cls", "sep", "mask"):
        number = tokenizer.token_to_id(roles.get(role, ""))
        if number is None:
            raise DataError(f"{path}: the tokenizer has no {role} token")
        ids[role] = number
    _require_distinct(roles, tokenizer, path)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    special |= {number for token in roles.values() if (number := vocabulary.get(token)) is not None}
    # Ids may have gaps. The size is that of the embedding table; ids in a gap count as special.
    size = max(vocabulary.values()) + 1
    special |= set(range(size)) - set(vocabulary.values())
    if len(special) == size:
        raise DataError(f"{path}: the vocabulary has no ordinary tokens")
    canonical = json.dumps(sorted(vocabulary.items()), ensure_ascii=True).encode()
    return Vocabulary(
        vocab_size=size,
        special=tuple(sorted(special)),
        fingerprint=hashlib.sha256(canonical).hexdigest(),
        between=_between(tokenizer, ids["cls"], ids["sep"]),
        **ids,
    )


def _between(tokenizer: tokenizers.Tokenizer, cls: int, sep: int) -> tuple[int, ...]:
    """`Vocabulary.between` by the tokenizer's post-processor: what it makes of two empty texts.

    A form that does not begin with [CLS], or end with [SEP], is not that of an encoder's pairs.
    """
    ids = tokenizer.encode("", "").ids
    between = tuple(ids[1:-1])
    if len(ids) < 3 or (ids[0], ids[-1]) != (cls, sep) or between == (sep,):
        return ()
    return between


def _require_distinct(roles: Roles, tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Raise DataError if one token has two roles: its meaning would be ambiguous."""
    seen: dict[int, str] = {}
    for role, token in roles.items():
        number = tokenizer.token_to_id(token)
        if number is not None and number in seen:
            raise DataError(f"{path}: {token} is both the {seen[number]} and the {role} token")
        if number is not None:
            seen[number] = role
