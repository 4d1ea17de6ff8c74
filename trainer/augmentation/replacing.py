"""TinyBERT's augmentation: copies of examples in which words are replaced by their candidates."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from data_pipeline import DataError, Vocabulary
from data_pipeline.augmentation.replacement import (
    Replacement,
    Sentence,
    is_english,
    is_word,
    replaceable,
)
from data_pipeline.augmentation.word_vectors import WordVectors
from data_pipeline.reading.batches import filled
from data_pipeline.task_files.contents import read_lines
from data_pipeline.tokenization.tokenizer import load as load_tokenizer
from model import Model, ModelError, encoder_from_pretrained
from trainer.augmentation.augmenting import Row
from trainer.batches import rows_by_length
from trainer.job_data.encoding import digest_of
from trainer.task_facts import require_own_tokenizer

TOKENS = 1 << 13  # of one forward pass, padding included
LONGEST = 512  # without a limit of the model's own
WORD_STARTS = ("\u0120", "\u2581")  # of byte-level BPE and of SentencePiece
CONTINUES = "##"  # of WordPiece


@dataclass(frozen=True)
class _Query:
    """A sequence with one mask: where it is, and of which word of which sentence."""

    sentence: int
    word: int
    ids: tuple[int, ...]
    first: int  # tokens of its first segment, special ones included
    position: int


@dataclass(frozen=True)
class MaskedWords:
    """The `count` tokens most probable in the place of a word, those that begin no word left out.

    beside_original: the sentence with the mask is read as the first of a pair whose second is the
    sentence without it, as TinyBERT's code does; otherwise alone, as its paper says.
    """

    model: Model
    tokenizer: tokenizers.Tokenizer
    vocabulary: Vocabulary
    count: int
    beside_original: bool = True

    def candidates(
        self, sentences: Sequence[Sentence], words: Sequence[Sequence[int]]
    ) -> list[dict[int, list[str]]]:
        """Candidates for these `words` of each sentence, which have one piece each.

        A word behind the longest sequence that the model reads has none.
        """
        by_sentence: list[dict[int, list[str]]] = [{} for _ in sentences]
        queries = [
            query
            for number, (sentence, chosen) in enumerate(zip(sentences, words, strict=True))
            for query in self._queries(number, sentence, chosen)
        ]
        for rows in rows_by_length([len(query.ids) for query in queries], TOKENS):
            some = [queries[row] for row in rows]
            for query, tokens in zip(some, self._most_probable(some), strict=True):
                original = sentences[query.sentence].ids[query.position - 1]
                by_sentence[query.sentence][query.word] = self._whole_words(tokens, original)
        return by_sentence

    def _queries(self, number: int, sentence: Sentence, words: Sequence[int]) -> Iterator[_Query]:
        special, longest = self.vocabulary, self.model.config.longest_sequence or LONGEST
        for word in words:
            (piece,) = sentence.words[word].pieces
            if piece + 1 >= longest:
                continue
            masked = (*sentence.ids[:piece], special.mask, *sentence.ids[piece + 1 :])
            texts = [masked, sentence.ids] if self.beside_original else [masked]
            ids, columns = special.with_special(texts)
            first = columns[1] if self.beside_original else len(ids)
            yield _Query(number, word, tuple(ids[:longest].tolist()), first, piece + 1)

    @torch.inference_mode()
    def _most_probable(self, queries: Sequence[_Query]) -> list[list[int]]:
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(query.ids) for query in queries])
        ids = torch.from_numpy(filled([query.ids for query in queries], self.vocabulary.pad))
        segments = torch.zeros_like(ids)
        for row, query in enumerate(queries):
            segments[row, query.first : len(query.ids)] = 1
        rows = torch.arange(len(queries)) * ids.shape[1]
        positions = rows + torch.tensor([query.position for query in queries])
        logits: Tensor | None = self.model(
            ids.to(device),
            segments.to(device),
            lengths.to(device) if len(set(lengths.tolist())) > 1 else None,
            positions.to(device),
        ).logits
        assert logits is not None, "a model without a masked-LM head"
        return logits.topk(min(self.count, logits.shape[1]), dim=1).indices.cpu().tolist()

    def _whole_words(self, tokens: Sequence[int], original: int) -> list[str]:
        """The texts of those tokens that begin a word where the original does, in order."""
        begins = self._text(original).startswith(WORD_STARTS)
        kept = [
            token
            for token in tokens
            if not self.vocabulary.is_special[token]
            and not self._text(token).startswith(CONTINUES)
            and self._text(token).startswith(WORD_STARTS) == begins
        ]
        words = [self.tokenizer.decode([token]).strip() for token in kept]
        return [word for word in words if word]

    def _text(self, token: int) -> str:
        return str(self.tokenizer.id_to_token(token))


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replacing:
    """TinyBERT's augmentation: its settings, and where candidates come from.

    vectors: a file in GloVe's format; None: the input embeddings of the model in `folder`.
    stop_words: a file of the words of a language that are not replaced, a word on each line; None:
    the rules of TinyBERT's code, which are English's.
    """

    folder: Path
    replacement: Replacement
    candidates: int = 15
    vectors: Path | None = None
    beside_original: bool = True
    stop_words: Path | None = None

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal results; DataError for a file that is not there."""
        return {
            **dataclasses.asdict(self.replacement),
            "candidates": self.candidates,
            "beside_original": self.beside_original,
            **{name: digest_of(path) for name, path in self._files.items()},
        }

    @property
    def files(self) -> Sequence[Path]:
        """The files and folders that `over` reads."""
        return list(self._files.values())

    @property
    def _files(self) -> dict[str, Path]:
        files = {"vectors": self.vectors, "stop_words": self.stop_words}
        return {
            "model": self.folder,
            **{name: path for name, path in files.items() if path is not None},
        }

    def read_stop_words(self) -> frozenset[str] | None:
        """The words of the file in small letters. Raises DataError where it holds none."""
        if self.stop_words is None:
            return None
        lines = (line.strip() for _, line in read_lines(str(self.stop_words)))
        words = frozenset(line.lower() for line in lines if line)
        if not words:
            raise DataError(f"{self.stop_words}: holds no words")
        return words

    def over(self, rows: Sequence[Row], texts: Sequence[str], device: torch.device) -> _Copies:
        """The maker of the copies. Loads the model; ModelError where it predicts no words."""
        if self.stop_words is None and not is_english(row[text] for row in rows for text in texts):
            _log.warning(
                "the texts do not look English: words with other letters than a to z stay, and "
                "only English stop words are known; give --stop-words FILE for their language"
            )
        return _Copies(self, texts, device)


class _Copies:
    """Makes copies of examples, with the words of one text at a time replaced."""

    def __init__(self, settings: Replacing, texts: Sequence[str], device: torch.device) -> None:
        self._settings, self._texts = settings, texts
        model = encoder_from_pretrained(settings.folder)
        if model.head is None:
            raise ModelError(f"{settings.folder}: has no masked-LM head; name a pre-trained model")
        self._tokenizer, vocabulary = load_tokenizer(settings.folder)
        require_own_tokenizer(settings.folder, vocabulary, model.config)
        self._vectors = WordVectors.read(settings.vectors) if settings.vectors else None
        self._stop_words = settings.read_stop_words()
        english = self._stop_words is None
        self._inputs = None if settings.vectors else InputVectors(model, self._tokenizer, english)
        self._masked = MaskedWords(
            model.to(device),
            self._tokenizer,
            vocabulary,
            settings.candidates,
            settings.beside_original,
        )

    def __call__(self, rows: Sequence[Row], first: int) -> Iterator[Row]:
        sentences = [
            Sentence.read(row[field], self._tokenizer) for row in rows for field in self._texts
        ]
        candidates = self._candidates(sentences)
        for number, row in enumerate(rows):
            yield row
            for place, field in enumerate(self._texts):
                at = number * len(self._texts) + place
                copies = self._settings.replacement.copies_of(
                    sentences[at], candidates[at], first + number, place
                )
                yield from ({**row, field: text} for text in copies)

    def _candidates(self, sentences: Sequence[Sentence]) -> list[dict[int, list[str]]]:
        """For each sentence, the candidates of its replaceable words, by the words' numbers."""
        words = [replaceable(sentence, self._stop_words) for sentence in sentences]
        single = [
            [word for word in numbers if len(sentence.words[word].pieces) == 1]
            for sentence, numbers in zip(sentences, words, strict=True)
        ]
        by_sentence = self._masked.candidates(sentences, single)
        for sentence, numbers, known, candidates in zip(
            sentences, words, single, by_sentence, strict=True
        ):
            for word in set(numbers) - set(known):
                candidates[word] = self._nearest(sentence, word)
        return [{word: said for word, said in by_word.items() if said} for by_word in by_sentence]

    def _nearest(self, sentence: Sentence, number: int) -> list[str]:
        word, count = sentence.words[number], self._settings.candidates
        if self._vectors is not None:
            return self._vectors.nearest(word.text, count)
        assert self._inputs is not None
        return self._inputs.nearest([sentence.ids[piece] for piece in word.pieces], count)


class InputVectors:
    """The words of letters that a model knows as one piece each, by their input embeddings.

    The vector of a word of several pieces is the mean of theirs.
    """

    @torch.inference_mode()
    def __init__(self, model: Model, tokenizer: tokenizers.Tokenizer, english: bool) -> None:
        known = sorted((number, token) for token, number in tokenizer.get_vocab().items())
        if any(token.startswith(WORD_STARTS) for _, token in known):  # others are inside of words
            known = [(number, token) for number, token in known if token.startswith(WORD_STARTS)]
        self._all = model.word_vectors(torch.arange(model.config.vocab_size)).float().numpy()
        pairs = [(number, token.lstrip("".join(WORD_STARTS))) for number, token in known]
        words = [(number, word) for number, word in pairs if is_word(word, english)]
        self._vectors = WordVectors(
            [word for _, word in words], self._all[[number for number, _ in words]]
        )

    def nearest(self, pieces: Sequence[int], count: int) -> list[str]:
        """The `count` words nearest to the word with these pieces, by their ids."""
        return self._vectors.nearest_to(np.mean(self._all[list(pieces)], axis=0), count)
