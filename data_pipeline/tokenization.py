"""Tokenizers: finding and reading them, and what the pipeline needs to know about one.

A tokenizer is named by a path, which is one of

- a folder in Hugging Face format (``tokenizer.json``), as `tokenizer_training.train` writes it;
- a folder with BERT's ``vocab.txt``, or with GPT-2's vocabulary and merges;
- a SentencePiece ``.model`` file (unigram).

Whatever it was, a corpus holds it in Hugging Face format, for ``transformers.AutoTokenizer``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models

from data_pipeline import vocabularies
from data_pipeline.errors import DataError
from data_pipeline.vocabularies import ROLES, Roles

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
WORD_MARKS = ("\u0120", "\u010a", "\u2581")  # byte-level space and line feed, unigram space


@dataclass(frozen=True)
class Vocabulary:
    """What packing and masking need of a tokenizer.

    `special` holds every id that is not ordinary text. `fingerprint` is the SHA-256 of the map
    from token to id: equal exactly when ids mean the same.
    """

    vocab_size: int
    pad: int
    cls: int
    sep: int
    mask: int
    special: tuple[int, ...]
    fingerprint: str

    @cached_property
    def is_special(self) -> NDArray[np.bool_]:
        """[vocab_size] whether an id is a special token."""
        table = np.zeros(self.vocab_size, bool)
        table[list(self.special)] = True
        return table

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """The ids of all ordinary tokens, ascending."""
        return np.flatnonzero(~self.is_special)

    def to_json(self) -> dict:
        """Plain values, for `corpus.json`."""
        return {**asdict(self), "special": list(self.special)}

    @classmethod
    def from_json(cls, tree: dict) -> Vocabulary:
        """The reverse of `to_json`."""
        return cls(**{**tree, "special": tuple(tree["special"])})


def load(path: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The tokenizer at `path`, ready to encode whole documents without special tokens.

    Raises DataError when there is none, it cannot be read, or its ``tokenizer.json`` lacks a pad,
    cls, sep or mask token. To the other kinds of vocabulary these are added at the end.
    """
    tokenizer, roles = _read(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, _describe(tokenizer, roles, path)


def save(tokenizer: tokenizers.Tokenizer, roles: Roles, out: Path) -> list[str]:
    """Write the folder that `load` and ``transformers.AutoTokenizer`` read; returns its files."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token for role, token in roles.items()},
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return ["tokenizer.json", "tokenizer_config.json"]


def install(path: Path, out: Path) -> list[str]:
    """Put the tokenizer at `path` into the folder `out`, in Hugging Face format.

    A folder that is in that format is copied. Returns the names of the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (path / "tokenizer_config.json").is_file() and (path / "tokenizer.json").is_file():
        names = [name for name in TOKENIZER_FILES if (path / name).is_file()]
        for name in names:
            shutil.copyfile(path / name, out / name)
        return names
    return save(*_read(path), out)


def word_starts(tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """[vocab_size] whether a token begins a word.

    WordPiece marks what continues a word (``##``), byte-level BPE and unigram mark what begins
    one. Punctuation is a word of its own, as the pre-tokenizers have it.
    """
    starts = np.ones(vocabulary.vocab_size, bool)
    wordpiece = isinstance(tokenizer.model, models.WordPiece)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if wordpiece:
            starts[number] = not token.startswith("##")
        else:
            starts[number] = token[:1] in WORD_MARKS or not token[:1].isalnum()
    return starts


def _read(path: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    if (path / "tokenizer.json").is_file():
        return _read_json(path), _roles(path)
    if (path / "vocab.txt").is_file():
        return vocabularies.from_vocab_txt(path / "vocab.txt")
    files = vocabularies.byte_level_files(path)
    if files:
        return vocabularies.from_byte_level(*files)
    if path.suffix == ".model" and path.is_file():
        return vocabularies.from_sentencepiece(path)
    raise DataError(f"{path}: holds no tokenizer; make one with `tandem tokenizer train`")


def _read_json(folder: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from None


def _describe(tokenizer: tokenizers.Tokenizer, roles: Roles, path: Path) -> Vocabulary:
    ids: dict[str, int] = {}
    for role in ("pad", "cls", "sep", "mask"):
        number = tokenizer.token_to_id(roles.get(role, ""))
        if number is None:
            raise DataError(f"{path}: the tokenizer has no {role} token")
        ids[role] = number
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    special |= {number for token in roles.values() if (number := vocabulary.get(token)) is not None}
    # Ids may have holes: the size is what an embedding table must have.
    size = max(vocabulary.values()) + 1
    special |= set(range(size)) - set(vocabulary.values())
    canonical = json.dumps(sorted(vocabulary.items()), ensure_ascii=True).encode()
    return Vocabulary(
        vocab_size=size,
        special=tuple(sorted(special)),
        fingerprint=hashlib.sha256(canonical).hexdigest(),
        **ids,
    )


def _roles(folder: Path) -> Roles:
    """Which token plays which part, from the folder's config files; BERT's names by default."""
    tree = {f"{role}_token": names[0] for role, names in ROLES.items()}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                tree |= json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{path}: not valid JSON: {error}") from None
    roles = {}
    for role in ROLES:
        token = tree.get(f"{role}_token")
        if token:
            roles[role] = token["content"] if isinstance(token, dict) else token
    return roles
