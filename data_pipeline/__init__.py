"""Text -> tokenizer -> WebDataset shards -> ordered, packed, masked batches.

What a global step contains is a pure function of (index, seed, epoch, sequence length, packing):
it depends on no world size and on no restart, and any step can be had at any time.
"""

from data_pipeline.batches import Batch
from data_pipeline.build import build
from data_pipeline.config import DataConfig, MaskingConfig
from data_pipeline.corpus import Corpus, CorpusSplit
from data_pipeline.errors import DataError
from data_pipeline.stream import BatchStream
from data_pipeline.tokenization import Vocabulary

__all__ = [
    "Batch",
    "BatchStream",
    "Corpus",
    "CorpusSplit",
    "DataConfig",
    "DataError",
    "MaskingConfig",
    "Vocabulary",
    "build",
]
