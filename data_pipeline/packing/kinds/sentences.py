"""Whole sentences, as many as fit."""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.packing import sequences
from data_pipeline.packing.sequences import PackingRules, Pieces, SentencePacking


@sequences.register_packing
class FullSentences(SentencePacking):
    """Sentences until the next does not fit, across documents."""

    name = "full_sentences"

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return sequences.until_full(cut, rules, key)


@sequences.register_packing
class DocSentences(SentencePacking):
    """Sentences of one document until the next does not fit."""

    name = "doc_sentences"

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return np.minimum(sequences.until_full(cut, rules, key), cut.document_ends)
