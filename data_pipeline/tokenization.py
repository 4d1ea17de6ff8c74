"""Tokenizers: training them, and what the pipeline needs to know about one.

A tokenizer is a folder that ``transformers.AutoTokenizer`` loads: ``tokenizer.json`` (the
`tokenizers` format) and ``tokenizer_config.json`` (which special token is which).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipeline.documents import read_documents
from data_pipeline.errors import DataError

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)
WORD_MARKS = ("\u0120", "\u010a", "\u2581")  # byte-level space and line feed, unigram space
ROLES = ("pad", "cls", "sep", "mask")


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


def train(
    inputs: Sequence[str], kind: str, vocab_size: int, out: str, *, cased: bool = False
) -> None:
    """Train a tokenizer on text files and write its folder.

    Raises DataError for missing or empty inputs and for an unknown kind.
    """
    if kind != "wordpiece":
        raise DataError(f"--kind {kind}: must be wordpiece")
    documents = read_documents(inputs)
    first = next(documents, None)
    if first is None:
        raise DataError(f"{', '.join(inputs)}: no documents with text there")
    save(train_wordpiece(itertools.chain([first], documents), vocab_size, not cased), Path(out))


def train_wordpiece(
    documents: Iterable[str], vocab_size: int, lowercase: bool = True
) -> tokenizers.Tokenizer:
    """Train a BERT-style WordPiece tokenizer: [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        limit_alphabet=1000,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    add_bert_template(tokenizer)
    return tokenizer


def add_bert_template(tokenizer: tokenizers.Tokenizer) -> None:
    """Make the tokenizer add ``[CLS] A [SEP] B [SEP]`` around what it encodes."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )


def save(tokenizer: tokenizers.Tokenizer, out: Path) -> None:
    """Write the folder that `load` and ``transformers.AutoTokenizer`` read."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        **SPECIAL_TOKENS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """The tokenizer in `folder`, ready to encode whole documents without special tokens.

    Raises DataError when the folder is missing, cannot be read, or lacks a pad, cls, sep or mask
    token.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{folder}: holds no tokenizer.json; make one with `tandem tokenizer train`"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, _describe(tokenizer, folder)


def _describe(tokenizer: tokenizers.Tokenizer, folder: Path) -> Vocabulary:
    roles = _roles(folder)
    ids: dict[str, int] = {}
    for role in ROLES:
        number = tokenizer.token_to_id(roles.get(role, ""))
        if number is None:
            raise DataError(f"{folder}: the tokenizer has no {role} token")
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


def _roles(folder: Path) -> dict[str, str]:
    """Which token plays which part: ``{"pad": "[PAD]", ...}``, from the folder's config files."""
    tree: dict = dict(SPECIAL_TOKENS)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            tree |= json.loads(path.read_text(encoding="utf-8"))
    roles = {}
    for role in (*ROLES, "unk"):
        token = tree.get(f"{role}_token")
        if token:
            roles[role] = token["content"] if isinstance(token, dict) else token
    return roles


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


def copy_folder(source: Path, target: Path) -> list[str]:
    """Copy the files of a tokenizer folder; returns their names."""
    target.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in source.iterdir() if path.name in TOKENIZER_FILES)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names
