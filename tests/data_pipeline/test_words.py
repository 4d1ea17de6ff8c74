"""The table of words, and unigram segmentation of many words at once."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers

from data_pipeline.joined_text import PADDING, edges
from data_pipeline.unigram import LONGEST, ordinary_words_of
from data_pipeline.word_table import WordTable


def in_windows(
    words: list[bytes],
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Words end to end, eight bytes from each place on, and where each starts and ends."""
    data = np.frombuffer(b"".join(words) + bytes(PADDING), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(data, 8).copy().view("<u8")[:, 0]
    found = edges([len(word) for word in words])
    return windows, found[:-1], found[1:]


WORDS = st.lists(
    st.binary(min_size=1, max_size=40).filter(lambda word: 0 not in word)
    | st.sampled_from([b"a" * size for size in range(1, 40)]),
    max_size=60,
)


@given(st.lists(WORDS, max_size=4), st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_words_have_the_same_number_exactly_when_they_are_equal(
    calls: list[list[bytes]], kept: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.word_table.FIRST_SLOTS", 4)  # it grows, and slots collide
        table = WordTable()
    numbers: dict[bytes, int] = {}
    for words in calls:
        for word, number in zip(words, table.numbers(*in_windows(words)).tolist(), strict=True):
            assert numbers.setdefault(word, number) == number
    assert len({*numbers.values()}) == len(numbers)
    assert all(0 < number < len(table) for number in numbers.values())
    table.forget_after(kept)
    assert len(table) <= max(1, kept)
    left = [word for word, number in numbers.items() if number < kept]
    assert table.numbers(*in_windows(left)).tolist() == [numbers[word] for word in left]


def unigram(pieces: list[tuple[str, float]]) -> tokenizers.Tokenizer:
    """A tokenizer of these pieces, which have SentencePiece's mark."""
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *pieces], 0, False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


LETTERS = ["a", "b", "\u00e9", "\u2014"]
PIECES = st.dictionaries(
    st.builds(
        lambda mark, text: mark + "".join(text),
        st.sampled_from(["", "\u2581"]),
        st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5),
    ),
    st.sampled_from([-1.0, -2.0, -3.0, -0.1, -0.7]),  # many sums are equal
    max_size=30,
)


@given(PIECES, st.lists(st.text(LETTERS, min_size=1, max_size=LONGEST), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_words_are_cut_as_tokenizers_cuts_them(pieces: dict[str, float], words: list[str]) -> None:
    tokenizer = unigram([*{"\u2581": -4.0, "a": -5.0, "b": -5.0, **pieces}.items()])
    these, ids, sizes = ordinary_words_of(tokenizer)(
        *in_windows([f" {word}".encode() for word in words])
    )
    vocabulary = tokenizer.get_vocab()
    possible = [
        vocabulary.keys() >= {*word} and len(f" {word}".encode()) <= LONGEST for word in words
    ]
    assert these.tolist() == possible
    found = np.split(ids, np.cumsum(sizes))[:-1]
    taken = [word for word, is_taken in zip(words, possible, strict=True) if is_taken]
    assert [part.tolist() for part in found] == [tokenizer.encode(word).ids for word in taken]


def test_a_vocabulary_without_the_mark_leaves_all_words_to_the_library() -> None:
    tokenizer = unigram([("a", -1.0), ("\u2581a", -1.5)])
    these, ids, _ = ordinary_words_of(tokenizer)(*in_windows([b" a", b" aa", b" "]))
    assert not these.any()
    assert not len(ids)
