"""Training a tokenizer: ``tandem tokenizer train``."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from data_pipeline.errors import DataError
from data_pipeline.shards.writing import refuse_existing
from data_pipeline.text.documents import Problem, location_of, no_documents_error, read_documents
from data_pipeline.tokenization import sentencepiece_models
from data_pipeline.tokenization.library_errors import as_data_errors
from data_pipeline.tokenization.tokenizer import TOKENIZER_FILES, save
from data_pipeline.tokenization.vocabularies import (
    ROLES,
    Roles,
    bert_tokenizer,
    byte_level_tokenizer,
    complete,
)

SPECIAL_TOKENS = [names[0] for names in ROLES.values()]  # ids 0 to 4
KINDS = ("wordpiece", "bpe", "unigram")
LINE_CHARACTERS = 4000  # SentencePiece skips longer lines
MAX_VOCAB_SIZE = 1 << 20  # the libraries allocate memory for this many
UNIGRAM_LINES = 2_000_000


def train(
    inputs: Sequence[str], kind: str, vocab_size: int, out: str, *, cased: bool | None = None
) -> None:
    """Train a tokenizer on text and write it to the folder `out`, in Hugging Face format.

    [PAD] [UNK] [CLS] [SEP] [MASK] get the ids 0 to 4. By default WordPiece is uncased, like BERT's,
    and the other kinds are cased. Raises DataError for missing or empty inputs, an unknown kind, or
    a folder that holds a tokenizer. Also if the vocabulary size does not fit the text or the kind.
    """
    if kind not in KINDS:
        raise DataError(f"--kind {kind}: must be one of {', '.join(KINDS)}")
    refuse_existing(Path(out) / name for name in TOKENIZER_FILES)
    if not len(SPECIAL_TOKENS) < vocab_size <= MAX_VOCAB_SIZE:
        least = len(SPECIAL_TOKENS) + 1
        raise DataError(f"--vocab-size {vocab_size}: must be from {least} to {MAX_VOCAB_SIZE:,}")
    problems = _Problems()
    documents = read_documents(inputs, on_problem=problems)
    first = next(documents, None)
    if first is None:
        raise no_documents_error(inputs, problems.count, problems.first)
    trainer = {"wordpiece": _wordpiece, "bpe": _byte_level, "unigram": _unigram}[kind]
    lowercase = kind == "wordpiece" if cased is None else not cased
    with as_data_errors(f"--vocab-size {vocab_size}: the tokenizer cannot be trained"):
        tokenizer, roles = trainer(itertools.chain([first], documents), vocab_size, lowercase)
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size}: must be at least {size} for the characters of this text"
        )
    save(tokenizer, roles, Path(out))


class _Problems:
    """Counts unusable documents and describes the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first: str | None = None

    def __call__(self, problem: Problem) -> None:
        self.count += 1
        if self.first is None:
            self.first = f"{location_of(problem)}: {problem.reason}"


def _wordpiece(
    documents: Iterable[str], vocab_size: int, lowercase: bool
) -> tuple[tokenizers.Tokenizer, Roles]:
    tokenizer = bert_tokenizer(models.WordPiece(unk_token="[UNK]"), lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        limit_alphabet=1000,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return complete(tokenizer, {})


def _byte_level(
    documents: Iterable[str], vocab_size: int, lowercase: bool
) -> tuple[tokenizers.Tokenizer, Roles]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        raise DataError(f"--vocab-size {vocab_size}: byte-level BPE needs at least 261")
    tokenizer = byte_level_tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return complete(tokenizer, {})


def _unigram(
    documents: Iterable[str], vocab_size: int, lowercase: bool
) -> tuple[tokenizers.Tokenizer, Roles]:
    import sentencepiece

    model = io.BytesIO()
    pad, unk, cls, sep, mask = SPECIAL_TOKENS
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(documents),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=pad,
            unk_piece=unk,
            bos_piece=cls,
            eos_piece=sep,
            control_symbols=[mask],
            input_sentence_size=UNIGRAM_LINES,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"--vocab-size {vocab_size}: {_reason(str(error))}") from None
    return complete(sentencepiece_models.read(model.getvalue(), "the trained model"), {})


def _reason(words: str) -> str:
    """A message to the user for an error of SentencePiece, which quotes its source code."""
    for pattern, meaning in (
        (r"required_chars\. \d+ vs (\d+)", "must be at least {} for the characters of this text"),
        (r"a value <= (\d+)", "must be at most {} for this little text"),
    ):
        if match := re.search(pattern, words):
            return meaning.format(match[1])
    return "this text has no unigram vocabulary of this size; choose another size"


def _lines(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        for line in document.splitlines():
            for start in range(0, len(line), LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]
