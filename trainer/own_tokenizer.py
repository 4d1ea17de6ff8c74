"""The tokenizer in a model's folder, and whether it is the model's."""

from __future__ import annotations

from pathlib import Path

from data_pipeline import DataError, TextEncoder
from data_pipeline.tokenization.tokenizer import Vocabulary
from model import ModelConfig


def open_encoder(folder: Path, config: ModelConfig, sequence_length: int) -> TextEncoder:
    """The encoder of texts for the model in `folder`, into at most `sequence_length` tokens.

    Fewer where the model cannot read as many. Raises DataError without its tokenizer.
    """
    encoder = TextEncoder(folder, min(sequence_length, config.longest_sequence or sequence_length))
    require_own_tokenizer(folder, encoder.vocabulary, config)
    return encoder


def require_own_tokenizer(folder: Path, vocabulary: Vocabulary, config: ModelConfig) -> None:
    """Raise DataError where the tokenizer in `folder` has tokens that its model lacks."""
    if vocabulary.vocab_size > config.vocab_size:
        raise DataError(
            f"{folder}: its tokenizer has more tokens than its model; it belongs to another model"
        )
