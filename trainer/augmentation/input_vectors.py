"""The word embedding of a model as word vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
import torch

from data_pipeline.augmentation.word_vectors import WordVectors
from model import Model
from trainer.augmentation.masked_words import WORD_STARTS


class InputVectors:
    """The words of letters that a model knows as one piece each, by their input embeddings.

    The vector of a word of several pieces is the mean of theirs.
    """

    @torch.inference_mode()
    def __init__(self, model: Model, tokenizer: tokenizers.Tokenizer) -> None:
        known = sorted((number, token) for token, number in tokenizer.get_vocab().items())
        if any(token.startswith(WORD_STARTS) for _, token in known):  # others are inside of words
            known = [(number, token) for number, token in known if token.startswith(WORD_STARTS)]
        self._all = model.word_vectors(torch.arange(model.config.vocab_size)).float().numpy()
        pairs = [(number, token.lstrip("".join(WORD_STARTS))) for number, token in known]
        words = [(number, word) for number, word in pairs if word.isascii() and word.isalpha()]
        self._vectors = WordVectors(
            [word for _, word in words], self._all[[number for number, _ in words]]
        )

    def nearest(self, pieces: Sequence[int], count: int) -> list[str]:
        """The `count` words nearest to the word with these pieces, by their ids."""
        return self._vectors.nearest_to(np.mean(self._all[list(pieces)], axis=0), count)
