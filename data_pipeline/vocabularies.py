"""Vocabularies in the formats of others, made into tokenizers of the `tokenizers` library.

Each reader returns the tokenizer and which token plays which role. Roles that a vocabulary lacks
(GPT-2 has neither padding nor mask) are added behind its last id, so that all others keep theirs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from data_pipeline.errors import DataError

Roles = dict[str, str]  # "pad" -> "[PAD]", ...
# The usual names of each role; the first is used where one must be added.
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


def bert_tokenizer(model: models.Model, lowercase: bool) -> tokenizers.Tokenizer:
    """A tokenizer with BERT's normalizer and word splitting."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level_tokenizer(model: models.Model) -> tokenizers.Tokenizer:
    """A tokenizer with GPT-2's bytes and word splitting."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def from_vocab_txt(path: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    """BERT's ``vocab.txt``: a WordPiece token on each line. Cased if any word has a capital."""
    words = path.read_text(encoding="utf-8").splitlines()
    lowercase = not any(word != word.lower() and word[:1] not in "[<" for word in words)
    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = next((one for one in ROLES["unk"] if one in vocabulary), None)
    if unknown is None:
        raise DataError(f"{path}: has no [UNK] token")
    model = models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    return complete(bert_tokenizer(model, lowercase))


def byte_level_files(folder: Path) -> tuple[Path, Path] | None:
    """The vocabulary and merges of a byte-level BPE in a folder, if it has them."""
    for vocabulary, merges in BYTE_LEVEL_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return folder / vocabulary, folder / merges
    return None


def from_byte_level(vocabulary: Path, merges: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    """GPT-2's and RoBERTa's byte-level BPE."""
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocabulary}: not a BPE vocabulary: {error}") from None
    tokenizer = byte_level_tokenizer(model)
    if tokenizer.token_to_id(GPT2_END) is not None:
        tokenizer.add_special_tokens([GPT2_END])
    return complete(tokenizer)


def from_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    """A unigram ``.model`` of SentencePiece: same pieces, ids and normalization."""
    return from_sentencepiece_bytes(path.read_bytes(), str(path))


def from_sentencepiece_bytes(data: bytes, name: str) -> tuple[tokenizers.Tokenizer, Roles]:
    """The contents of a ``.model`` file; `name` is for messages."""
    try:
        schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        raise DataError(f"{name}: needs `pip install sentencepiece`") from None
    proto = schema.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError, derived from Exception
        raise DataError(f"{name}: not a SentencePiece model: {error}") from None
    if proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM:
        raise DataError(f"{name}: only unigram SentencePiece models can be read")
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    fallback = proto.trainer_spec.byte_fallback
    model = models.Unigram(pieces, proto.trainer_spec.unk_id, byte_fallback=fallback)
    tokenizer = tokenizers.Tokenizer(model)
    spec = proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if spec.add_dummy_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    control = [piece.piece for piece in proto.pieces if piece.type == piece.CONTROL]
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in control])
    return complete(tokenizer)


def complete(tokenizer: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, Roles]:
    """Find or add the special tokens, and have them put around what is encoded."""
    roles: Roles = {}
    for role, names in ROLES.items():
        found = [name for name in names if tokenizer.token_to_id(name) is not None]
        if found:
            roles[role] = found[0]
        elif role != "unk":  # bytes need none
            roles[role] = names[0]
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in roles.values()])
    cls, sep = roles["cls"], roles["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(one, tokenizer.token_to_id(one)) for one in (cls, sep)],
    )
    return tokenizer, roles
