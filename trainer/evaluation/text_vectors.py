"""Vectors of texts, and of the words in them, computed by a model.

The vector of a text is the last hidden state of its first token ([CLS]), the mean of its last
hidden states, or the mean of its tokens' word embeddings, which ignore the context. The vector of
a word is the mean over its pieces, in the context of its text or without it.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline import DataError
from data_pipeline.augmentation.word_vectors import read_entries
from data_pipeline.text.sentences import marks, word_pattern
from data_pipeline.tokenization.tokenizer import Vocabulary, load
from model import Model, ModelConfig, encoder_from_pretrained, longest_text

_log = logging.getLogger(__name__)

CLS, MEAN, STATIC = "cls", "mean", "static"
POOLINGS = (CLS, MEAN, STATIC)
Vector = NDArray[np.float32]
_INSIDE_WORDS = "'\u2019-"


@dataclass(frozen=True)
class WordVectors:
    """One occurrence of a word: its text (from 0), its first character, and its vectors."""

    word: str
    text: int
    start: int
    vectors: dict[str, Vector]  # MEAN, in context: [H]; STATIC: [width of the word embeddings]


@dataclass(frozen=True)
class TextVectors:
    """A text with its vectors by pooling, and the vectors of its words, in order."""

    text: str
    tokens: int  # with [CLS] and [SEP]
    vectors: dict[str, Vector]
    words: list[WordVectors]


def own_pooling(config: ModelConfig) -> tuple[str, bool]:
    """How a model makes a text's vector, and whether it scales it to length 1.

    A model with a head for vectors without weights does as the head; any other takes the mean.
    """
    for head in config.task_heads.values():
        if head.is_pooled_state:
            return (CLS if head.pooling == "first" else MEAN), head.normalise
    return MEAN, False


def scaled(vector: Vector) -> Vector:
    """The vector with length 1; zeros stay."""
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


@torch.inference_mode()
def warn_of_decoder(model: Model, vocabulary: Vocabulary, folder: Path) -> None:
    """Log a line where the first token's state does not depend on the tokens behind it."""
    device = next(model.parameters()).device
    tokens = torch.tensor(
        [[vocabulary.cls, token, vocabulary.sep] for token in vocabulary.ordinary[:8]],
        device=device,
    )
    segments = torch.zeros_like(tokens) if model.config.reads_segments else None
    first = model.encode(tokens, segments).last_hidden_state[:, 0]
    if len(tokens) > 1 and torch.equal(first, first[:1].expand_as(first)):
        _log.warning(
            "%s: is a decoder: a token sees only those before it, so `cls` is the same for every "
            "text, and `mean` knows little of the ends of texts",
            folder,
        )


class TextEncoder:
    """An exported model with its own tokenizer."""

    def __init__(self, folder: Path, vectors: Path | None = None) -> None:
        """`vectors` is a file of word vectors that are the static ones, instead of the model's.

        Raises ModelError where there is no model, DataError where there is no tokenizer.
        """
        self.folder, self.vectors = folder, vectors
        self.model = encoder_from_pretrained(folder)
        self.tokenizer, self.vocabulary = load(folder)
        warn_of_decoder(self.model, self.vocabulary, folder)

    def encode(self, texts: Sequence[str], word: str = "") -> list[TextVectors]:
        """The vectors of each text, which do not depend on the other texts.

        A given `word` counts as one word even if it would be split ("New York", "U.S."). Raises
        DataError, naming the text, for one that has no tokens or is too long for the model.
        """
        encoded = [self._encode(text, number, word) for number, text in enumerate(texts)]
        return encoded if self.vectors is None else with_vectors(encoded, self.vectors)

    @torch.inference_mode()
    def _encode(self, text: str, number: int, word: str) -> TextVectors:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = torch.tensor([[self.vocabulary.cls, *encoding.ids, self.vocabulary.sep]])
        self._require_readable(ids, number)
        states = self.model.encode(ids).last_hidden_state[0]
        static = self.model.word_vectors(ids[0])
        # Without [CLS] and [SEP], as the offsets are.
        tokens = {MEAN: states[1:-1].numpy(), STATIC: static[1:-1].numpy()}
        words = []
        for start, end in spans_of_words(text, word):
            pieces = [i for i, (s, e) in enumerate(encoding.offsets) if s < end and e > start]
            if pieces:
                vectors = {name: of[pieces].mean(axis=0) for name, of in tokens.items()}
                words.append(WordVectors(text[start:end], number, start, vectors))
        vectors = {
            CLS: states[0].numpy(),
            MEAN: states.mean(dim=0).numpy(),
            STATIC: tokens[STATIC].mean(axis=0),
        }
        return TextVectors(text, ids.shape[1], vectors, words)

    def _require_readable(self, ids: torch.Tensor, number: int) -> None:
        length, longest = ids.shape[1], longest_text(self.folder, self.model.config)
        if length == 2:
            raise DataError(f"text {number + 1}: is empty")
        if longest is not None and length > longest:
            raise DataError(
                f"text {number + 1}: has {length} tokens, and the model reads {longest}; shorten it"
            )
        if int(ids.max()) >= self.model.config.vocab_size:
            raise DataError(
                f"{self.folder}: its tokenizer has more tokens than its model; "
                "it belongs to another model"
            )


def with_vectors(texts: Sequence[TextVectors], path: Path) -> list[TextVectors]:
    """The texts with the static vectors that a file has of their words.

    A word has the vector of its spelling or, without that, of one that differs in capitals only;
    else zeros, which are in no mean. Raises DataError for a text of which no word has a vector.
    """
    words = {occurrence.word.casefold() for text in texts for occurrence in text.words}
    beginnings = {word.partition(" ")[0] for word in words}
    known: dict[str, Vector] = {}
    for word, row in read_entries(path, beginnings):
        known.setdefault(word, row)
        known.setdefault(word.casefold(), row)
    return [_with_static(text, number, known, path) for number, text in enumerate(texts, start=1)]


def _with_static(
    text: TextVectors, number: int, known: Mapping[str, Vector], path: Path
) -> TextVectors:
    rows = [
        known.get(occurrence.word, known.get(occurrence.word.casefold()))
        for occurrence in text.words
    ]
    vectors = [row for row in rows if row is not None]
    if not vectors:
        raise DataError(f"text {number}: {path} has no vector of any of its words")
    none = np.zeros_like(vectors[0])
    words = [
        replace(occurrence, vectors={**occurrence.vectors, STATIC: none if row is None else row})
        for occurrence, row in zip(text.words, rows, strict=True)
    ]
    mean = np.stack(vectors).mean(axis=0)
    return replace(text, vectors={**text.vectors, STATIC: mean}, words=words)


def spans_of_words(text: str, word: str) -> list[tuple[int, int]]:
    """(start, end) of each word in the text, in characters; a given `word` is matched first."""
    given = [match.span() for match in _whole(word).finditer(text)] if word else []
    others = (match.span() for match in word_pattern(_INSIDE_WORDS).finditer(text))
    apart = [span for span in others if all(span[1] <= a or span[0] >= b for a, b in given)]
    return sorted([*given, *apart])


def occurrences(texts: Sequence[TextVectors], word: str) -> list[WordVectors]:
    """The occurrences of a word, ignoring case. Raises DataError for a text without it."""
    matches = []
    for number, text in enumerate(texts):
        here = [occurrence for occurrence in text.words if is_word(occurrence, word)]
        if not here:
            raise DataError(f"text {number + 1}: the word {word!r} is not in it")
        matches += here
    return matches


def is_word(occurrence: WordVectors, word: str) -> bool:
    """Whether an occurrence is one of `word`."""
    return occurrence.word.casefold() == word.casefold()


def neighbours(
    occurrence: WordVectors, texts: Sequence[TextVectors], pooling: str, count: int
) -> list[tuple[WordVectors, float]]:
    """The words of the texts that are closest to an occurrence, and their cosine similarities.

    Occurrences of the same word are left out; of another word, only the closest one is listed.
    """
    others = [
        other for text in texts for other in text.words if not is_word(other, occurrence.word)
    ]
    ranked = sorted(
        ((other, cosine(occurrence.vectors[pooling], other.vectors[pooling])) for other in others),
        key=lambda pair: -pair[1],
    )
    first: dict[str, tuple[WordVectors, float]] = {}
    for other, similarity in ranked:
        first.setdefault(other.word.casefold(), (other, similarity))
    return list(first.values())[:count]


def similarities(vectors: Sequence[Vector]) -> NDArray[np.float64]:
    """The cosine similarity of each pair of vectors: [n, n]."""
    return np.array([[cosine(first, second) for second in vectors] for first in vectors])


def cosine(first: Vector, second: Vector) -> float:
    """The cosine of the angle between two vectors, at most 1; 0 where one of them is 0."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.clip(a @ b / lengths, -1.0, 1.0)) if lengths else 0.0


def _whole(word: str) -> re.Pattern[str]:
    """A pattern for the whole word, ignoring case."""
    letter = rf"[\w{marks()}]"
    return re.compile(rf"(?<!{letter}){re.escape(word)}(?!{letter})", re.IGNORECASE)
