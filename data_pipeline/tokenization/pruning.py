"""Pruning a vocabulary to what a text needs: ``tandem tokenizer prune`` (arXiv 2010.05609).

Special and added tokens remain, the unknown token, the characters of the text, and then the most
frequent entries.
Remaining entries keep their order. A byte-pair entry needs the parts that it is merged of.
So a word whose entries all remain is read as before.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders

from configs.errors import OptionError
from data_pipeline.errors import DataError, as_data_errors
from data_pipeline.text.documents import read_documents
from data_pipeline.text.formats import ReadOptions
from data_pipeline.tokenization.comparison import encoded_words
from data_pipeline.tokenization.tokenizer import Vocabulary, load, read, unknown_id
from data_pipeline.tokenization.vocabularies import Roles


@dataclass(frozen=True)
class Coverage:
    """Shares of a text that the pruned tokenizer reads as before, and those that it does not.

    tokens: the share of the text's tokens whose entry remains. The others are shares of its words,
    which stand between white space. split: words of other tokens than before; unknown and
    unknown_before: words of which a part is unknown.
    """

    tokens: float
    split: float
    unknown: float
    unknown_before: float
    tokens_per_word: float
    tokens_per_word_before: float

    def lines(self) -> list[str]:
        """The figures in words."""
        longer = f"{self.tokens_per_word:.3f} tokens per word, {self.tokens_per_word_before:.3f}"
        unknown = f"{self.unknown:.3%} are unknown in part, {self.unknown_before:.3%}"
        return [
            f"{self.tokens:.2%} of the text's tokens keep their entry",
            f"{self.split:.2%} of its words are split otherwise: {longer} before",
            f"{unknown} before",
        ]


@dataclass(frozen=True)
class PrunedVocabulary:
    """A tokenizer with some entries of another: entry i was `kept[i]` there, ascending."""

    tokenizer: tokenizers.Tokenizer
    roles: Roles
    kept: NDArray[np.int64]
    entries_before: int
    coverage: Coverage


def prune(
    folder: Path, text: Sequence[str], size: int, reading: ReadOptions | None = None
) -> PrunedVocabulary:
    """The tokenizer in `folder` with at most `size` entries, the most frequent in the text.

    It has fewer where the text has no more. Raises DataError for a text without words, and for a
    size that leaves no room for the special tokens and the characters of the text.
    """
    tokenizer, vocabulary = load(folder)
    words = Counter[str]()
    for document in read_documents(text, reading):
        words.update(document.split())
    if not words:
        raise DataError(f"{text[0]}: holds no words")
    ids_of_words = list(encoded_words(tokenizer, words))
    counts = np.zeros(vocabulary.vocab_size, np.int64)
    for ids, count in zip(ids_of_words, words.values(), strict=True):
        np.add.at(counts, ids, count)
    kept = _kept(tokenizer, vocabulary, counts, size)
    pruned = _with_entries(tokenizer, kept, folder)
    coverage = _coverage(pruned, unknown_id(tokenizer), kept, words, ids_of_words)
    return PrunedVocabulary(pruned, read(folder)[1], kept, vocabulary.vocab_size, coverage)


def _kept(
    tokenizer: tokenizers.Tokenizer, facts: Vocabulary, counts: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """The ids that remain, ascending."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    model = json.loads(tokenizer.to_str())["model"]
    parts = _parts(model)
    added = tokenizer.get_added_tokens_decoder()
    kept = {*vocabulary.values()} & {*added, *facts.special, unknown_id(tokenizer)}
    kept |= {*_characters(tokenizer, model, counts)}
    if len(kept) > size:
        raise OptionError(
            f"--size {size}: must be {len(kept)} or more, for the special tokens and the "
            "characters of the text"
        )
    token_of = {number: token for token, number in vocabulary.items()}
    for number in np.lexsort((np.arange(len(counts)), -counts)).tolist():
        if not counts[number]:
            break
        needed = {vocabulary[token] for token in _made_of(token_of[number], parts)} - kept
        if len(kept) + len(needed) <= size:
            kept |= needed
    return np.array(sorted(kept))


def _parts(model: Mapping[str, Any]) -> dict[str, list[str]]:
    """The entries of which merges of byte-pair encoding make each entry."""
    parts: dict[str, list[str]] = {}
    for first, second in model.get("merges", ()):
        parts.setdefault(_merged(first, second, model), []).extend((first, second))
    return parts


def _merged(first: str, second: str, model: Mapping[str, Any]) -> str:
    return first + second.removeprefix(model.get("continuing_subword_prefix") or "")


def _made_of(token: str, parts: Mapping[str, Sequence[str]]) -> set[str]:
    """The token, and every entry of which it may be merged."""
    made, rest = set[str](), [token]
    while rest:
        if (part := rest.pop()) not in made:
            made.add(part)
            rest += parts.get(part, ())
    return made


def _characters(
    tokenizer: tokenizers.Tokenizer, model: Mapping[str, Any], counts: NDArray[np.int64]
) -> Iterator[int]:
    """The entries of single characters that the text has, in any place, and of all bytes.

    A word whose entry is gone can then be split, and is not unknown.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    inside = model.get("continuing_subword_prefix") or ""
    bare = {token: token.removeprefix(inside) for token in vocabulary}
    used = {c for token, number in vocabulary.items() if counts[number] for c in bare[token]}
    is_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
    for token, number in vocabulary.items():
        is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
        if is_byte or (len(bare[token]) == 1 and (is_bytes or bare[token] in used)):
            yield number


def _with_entries(
    tokenizer: tokenizers.Tokenizer, kept: NDArray[np.int64], folder: Path
) -> tokenizers.Tokenizer:
    """The tokenizer with these entries alone, renumbered from 0."""
    new = {int(old): number for number, old in enumerate(kept)}
    tree = json.loads(tokenizer.to_str())
    model = tree["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [piece for old, piece in enumerate(model["vocab"]) if old in new]
        model["unk_id"] = None if model["unk_id"] is None else new[model["unk_id"]]
    else:
        entries = sorted(model["vocab"].items(), key=lambda entry: entry[1])
        model["vocab"] = {token: new[old] for token, old in entries if old in new}
    if "merges" in model:
        has = model["vocab"]
        model["merges"] = [
            [first, second]
            for first, second in model["merges"]
            if {first, second, _merged(first, second, model)} <= has.keys()
        ]
    for token in tree["added_tokens"]:
        token["id"] = new[token["id"]]
    _renumber_special(tree["post_processor"] or {}, new)
    with as_data_errors(f"{folder}: its tokenizer cannot be pruned"):
        pruned = tokenizers.Tokenizer.from_str(json.dumps(tree))
    before = tokenizer.get_vocab(with_added_tokens=True)
    expected = {token: new[old] for token, old in before.items() if old in new}
    if pruned.get_vocab(with_added_tokens=True) != expected:
        raise DataError(f"{folder}: its tokenizer cannot be pruned: added tokens would get new ids")
    return pruned


def _renumber_special(processor: dict[str, Any], new: Mapping[int, int]) -> None:
    """Renumber the tokens that a post-processor puts around texts."""
    for part in processor.get("processors", [processor]):
        for key in {"cls", "sep"} & part.keys():
            part[key][1] = new[part[key][1]]
        for special in part.get("special_tokens", {}).values():
            special["ids"] = [new[old] for old in special["ids"]]


def _coverage(
    pruned: tokenizers.Tokenizer,
    unknown_before: int | None,
    kept: NDArray[np.int64],
    words: Mapping[str, int],
    ids_before: Sequence[Sequence[int]],
) -> Coverage:
    """How the pruned tokenizer reads the `words`, which had these ids before."""
    new = {int(old): number for number, old in enumerate(kept)}
    unknown = unknown_id(pruned)
    remaining, tokens_before = 0, 0
    of_words = np.zeros(5)
    for now, before, count in zip(
        encoded_words(pruned, words), ids_before, words.values(), strict=True
    ):
        remaining += count * sum(old in new and old != unknown_before for old in before)
        tokens_before += count * len(before)
        is_split = now != [new.get(old) for old in before]
        of_word = is_split, unknown in now, unknown_before in before, len(now), len(before)
        of_words += count * np.array(of_word)
    return Coverage(remaining / tokens_before, *(of_words / sum(words.values())).tolist())
