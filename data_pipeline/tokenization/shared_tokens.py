"""The tokens that two vocabularies have in common, however each of them writes it down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models

from data_pipeline.tokenization.tokenizer import WORD_MARKS, load, word_starts

NONE = -1
_Token = tuple[bool, bytes]  # whether it begins a word, and its text without the space before it


def shared_tokens(ours: Path, theirs: Path) -> NDArray[np.int64]:
    """The id in another tokenizer's vocabulary of each of ours, [V]; -1 where it has none.

    Two tokens are the same that have the same text and both begin a word, or neither does. Each is
    the counterpart of one other at most: of the one that is written alike, else of the first.
    Special tokens have none. Raises DataError where there is no tokenizer.
    """
    (first, vocabulary), (second, _) = load(ours), load(theirs)
    mine, other = dict(_tokens(ours)), dict(_tokens(theirs))
    counterparts = np.full(vocabulary.vocab_size, NONE, np.int64)
    for number in mine:
        counterpart = second.token_to_id(str(first.id_to_token(number)))
        if counterpart is not None and other.get(counterpart) == mine[number]:
            counterparts[number] = counterpart
            del other[counterpart]
    by_token: dict[_Token, int] = {}
    for number, token in other.items():
        by_token.setdefault(token, number)
    for number, token in mine.items():
        if counterparts[number] == NONE:
            counterparts[number] = by_token.pop(token, NONE)
    return counterparts


def _tokens(folder: Path) -> Iterator[tuple[int, _Token]]:
    """The ordinary tokens of a tokenizer by their ids, ascending."""
    tokenizer, vocabulary = load(folder)
    starts, text_of = word_starts(tokenizer, vocabulary), _reader(tokenizer)
    for number in vocabulary.ordinary.tolist():
        yield number, (bool(starts[number]), text_of(str(tokenizer.id_to_token(number))))


def _reader(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """A function that gives the text of a token."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        known = _bytes_of_signs()
        return lambda token: bytes(known.get(sign, 0) for sign in token).lstrip(b" ")
    if isinstance(tokenizer.model, models.WordPiece):
        return lambda token: token.removeprefix("##").encode()
    return lambda token: token.lstrip("".join(WORD_MARKS)).encode()


def _bytes_of_signs() -> dict[str, int]:
    """The byte of each sign of byte-level tokens, as GPT-2's code has it.

    Printable bytes are written as themselves, and the others as the signs from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    signs = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **signs}
