"""Words that a masked language model would put into the place of a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tokenizers
import torch
from torch import Tensor

from data_pipeline import Vocabulary
from data_pipeline.augmentation.replacement import Sentence
from model import Model
from trainer.batches import rows_by_length

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
        ids = torch.full((len(queries), int(lengths.max())), self.vocabulary.pad)
        segments = torch.zeros_like(ids)
        for row, query in enumerate(queries):
            ids[row, : len(query.ids)] = torch.tensor(query.ids)
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
        best: list[list[int]] = (
            logits.topk(min(self.count, logits.shape[1]), dim=1).indices.cpu().tolist()
        )
        return best

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
