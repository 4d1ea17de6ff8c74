"""The fraction of padding in a job's sequences."""

from collections.abc import Mapping

from data_pipeline.config import DataConfig
from data_pipeline.packing.kinds.pairs import Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.reading.corpus import CorpusSplit
from data_pipeline.shards.blocks import Block

SAMPLED_BLOCKS = 256


def padding_fraction(split: CorpusSplit, rules: PackingRules) -> float:
    """The fraction of an epoch's positions that is padding, from the index alone.

    In a corpus with more than `SAMPLED_BLOCKS` blocks, about that many evenly spread blocks are
    sampled. For pairs the truncation differs a little from epoch to epoch.
    """
    blocks = len(split.index.blocks)
    used = sequences = 0
    for number in range(0, blocks, -(-blocks // SAMPLED_BLOCKS)):
        tokens, count = _tokens_of(split.boundaries(number, rules), rules)
        used += tokens
        sequences += count
    return 1.0 - used / (sequences * rules.length)


def padding_fractions(
    splits: CorpusSplit | Mapping[str, CorpusSplit], config: DataConfig
) -> list[float]:
    """The padding fraction of each phase of a job; corpora of a mixture count by their rows."""
    starts = (0, *(phase.from_step for phase in config.phases))
    return [_mean_fraction(splits, config, step) for step in starts]


def rows_for_tokens(
    splits: CorpusSplit | Mapping[str, CorpusSplit],
    config: DataConfig,
    step: int,
    tokens: int,
    multiple: int,
) -> int:
    """The global batch size at which a batch of `step` holds about `tokens` tokens without padding.

    It is a multiple of `multiple`, and at least `multiple`. This serves packings with short
    sequences, such as sentence_pair, and jobs whose sequence length changes.
    """
    length, _ = config.length_and_packing_at(step)
    per_sequence = length * (1.0 - _mean_fraction(splits, config, step))
    return max(1, round(tokens / per_sequence / multiple)) * multiple


def _mean_fraction(
    splits: CorpusSplit | Mapping[str, CorpusSplit], config: DataConfig, step: int
) -> float:
    length, kind = config.length_and_packing_at(step)
    rules = PackingRules(kind, length, config.short_sequence_probability)
    if isinstance(splits, CorpusSplit):
        return padding_fraction(splits, rules)
    weights = {name: weight for name, weight in config.weights_at(step).items() if weight}
    padding = sum(weights[name] * padding_fraction(splits[name], rules) for name in weights)
    return padding / sum(weights.values())


def _tokens_of(block: Block, rules: PackingRules) -> tuple[int, int]:
    """(tokens in the sequences of a block, special ones included, sequences)."""
    if rules.is_pair:
        pairs = pair_spans(Pool([block], [0]), rules, key=0)
        lengths = pairs.first_lengths + pairs.second_lengths + 3
        return int(lengths.sum()), len(lengths)
    spans = rules.packing.spans(block, rules)
    return int((spans.lengths + 2).sum()), len(spans)
