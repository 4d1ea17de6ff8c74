"""Text -> tokenizer -> WebDataset shards -> ordered, packed, masked batches.

The contents of a global step are a pure function of (index, seed, epoch, sequence length, packing).
They depend neither on the world size nor on restarts, and any step can be computed directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from data_pipeline.config import TASK_NAME, DataConfig, PhaseConfig, SourceConfig, TaskDataConfig
from data_pipeline.errors import BadShard, DataError, EmptyText
from data_pipeline.examples.example import (
    EncodedExample,
    EveryToken,
    SomeTokens,
    TextEncoder,
    View,
    with_masks,
)
from data_pipeline.examples.reading import ExampleSplit
from data_pipeline.examples.stream import (
    ExampleStream,
    JointStream,
    TaskSchedule,
    all_batches,
    open_stream,
)
from data_pipeline.masking.config import MaskingConfig
from data_pipeline.masking.masker import NO_LABEL
from data_pipeline.order import BatchSizes
from data_pipeline.reading.batches import DEFAULT_VIEW, MASKED, PAIRS, Batch, StoredLogits, Target
from data_pipeline.reading.corpus import Corpus, CorpusSplit, padding_fraction, rows_for_tokens
from data_pipeline.reading.stream import BatchStream, contents, open_corpora, open_splits
from data_pipeline.tokenization.tokenizer import Vocabulary

if TYPE_CHECKING:
    from data_pipeline.building.build import BuildOptions, build

__all__ = [
    "DEFAULT_VIEW",
    "MASKED",
    "NO_LABEL",
    "PAIRS",
    "TASK_NAME",
    "BadShard",
    "Batch",
    "BatchSizes",
    "BatchStream",
    "BuildOptions",
    "Corpus",
    "CorpusSplit",
    "DataConfig",
    "DataError",
    "EmptyText",
    "EncodedExample",
    "EveryToken",
    "ExampleSplit",
    "ExampleStream",
    "JointStream",
    "MaskingConfig",
    "PhaseConfig",
    "SomeTokens",
    "SourceConfig",
    "StoredLogits",
    "Target",
    "TaskDataConfig",
    "TaskSchedule",
    "TextEncoder",
    "View",
    "Vocabulary",
    "all_batches",
    "build",
    "contents",
    "open_corpora",
    "open_splits",
    "open_stream",
    "padding_fraction",
    "rows_for_tokens",
    "with_masks",
]


def __getattr__(name: str) -> Any:
    """Import `build` on first use: it imports a compiler, which training does not need."""
    if name in ("BuildOptions", "build"):
        from data_pipeline.building import build as building

        return getattr(building, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
