"""Text without a gap, across documents and sentences."""

import numpy as np

from data_pipeline.packing.sequences import Packing, PackingRules, Spans, register_packing
from data_pipeline.shards.blocks import Block


@register_packing
class Contiguous(Packing):
    """Across documents; a sentence may be split, so that only the end of a block is padded."""

    name = "contiguous"

    def spans(self, block: Block, rules: PackingRules) -> Spans:
        # The last sequence's own [SEP] replaces the separator of the last document.
        size = len(block.tokens) + len(block.documents) - 1
        starts = np.arange(0, size, rules.capacity)
        return Spans.single(starts, np.minimum(rules.capacity, size - starts))
