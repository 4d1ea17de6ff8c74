"""Whether the tokenizer in a model's folder is the model's."""

from __future__ import annotations

from pathlib import Path

from data_pipeline import DataError
from data_pipeline.tokenization.tokenizer import Vocabulary
from model import ModelConfig


def require_own_tokenizer(folder: Path, vocabulary: Vocabulary, config: ModelConfig) -> None:
    """Raise DataError where the tokenizer in `folder` has tokens that its model lacks."""
    if vocabulary.vocab_size > config.vocab_size:
        raise DataError(
            f"{folder}: its tokenizer has more tokens than its model; it belongs to another model"
        )
