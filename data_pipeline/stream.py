"""The stream of batches that one rank trains on: a pure function of the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.batches import Batch
from data_pipeline.config import DataConfig
from data_pipeline.corpus import Corpus, CorpusSplit
from data_pipeline.errors import DataError
from data_pipeline.lanes import Lanes, Sequences
from data_pipeline.masking import Masker
from data_pipeline.mixing import rows_of_sources
from data_pipeline.packing import PackingRules


@dataclass(frozen=True)
class _Source:
    lanes: Lanes
    at: NDArray[np.int64]  # the rank's rows that it fills


@dataclass(frozen=True)
class _Phase:
    """A stretch of steps with one sequence length and packing."""

    first_step: int
    rules: PackingRules
    sources: list[_Source]
    masker: Masker


class BatchStream:
    """Batches of the rows that `rank` owns: [rank * R, (rank + 1) * R) of the global batch.

    `splits` is one split, or one for each name in `config.mixture`. Raises DataError when the
    global batch does not divide by the world size, a split has fewer samples than there are
    ranks or not a single full sequence, or the corpora of a mixture differ in vocabulary.
    """

    def __init__(
        self,
        splits: CorpusSplit | Mapping[str, CorpusSplit],
        config: DataConfig,
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if global_batch_size % world_size:
            raise DataError(
                f"global batch size: {global_batch_size} rows do not divide by {world_size} ranks"
            )
        self.splits = [splits] if isinstance(splits, CorpusSplit) else list(splits.values())
        self.config, self.seed = config, seed
        self.vocabulary = self.splits[0].vocabulary
        _require_one_vocabulary(self.splits)
        self._world_size = world_size
        rows = global_batch_size // world_size
        self._first_row, self._row_count = rank * rows, rows
        weights = (
            [1.0]
            if isinstance(splits, CorpusSplit)
            else [config.mixture[name].weight for name in splits]
        )
        owners = rows_of_sources(weights, global_batch_size)
        starts = [0, *(phase.from_step for phase in config.phases)]
        self._phases = [
            self._phase(start, length, kind, owners)
            for start, (length, kind) in zip(starts, config.lengths_and_packings(), strict=True)
        ]
        self.unreadable_rows = 0

    @classmethod
    def open(
        cls,
        config: DataConfig,
        split: str,
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> BatchStream:
        """The stream over the split called "train" or "val" of the corpora that `config` names."""
        return cls(open_splits(config, split), config, seed, global_batch_size, rank, world_size)

    @property
    def samples_per_epoch(self) -> int:
        """Sequences that the corpora make, in the first phase."""
        return sum(source.lanes.counts.total for source in self._phases[0].sources)

    @property
    def capacity(self) -> int:
        """M, the number of slots for masked positions in each row, in the first phase."""
        return self._phases[0].masker.capacity

    def batch(self, step: int) -> Batch:
        """The rank's rows of global step `step` (from 0)."""
        phase = self._phase_at(step)
        length = phase.rules.length
        rows = Sequences.empty(self._row_count, length, self.vocabulary)
        for source in phase.sources:
            source.lanes.fill(step - phase.first_step, rows, source.at)
        self.unreadable_rows += int(np.count_nonzero(~rows.readable))
        masked = phase.masker(rows.input_ids, rows.epochs, rows.sample_ids, step)
        return Batch(
            input_ids=masked.input_ids,
            segment_ids=rows.segment_ids,
            attention_mask=(np.arange(length) < rows.lengths[:, None]).astype(np.int64),
            masked_positions=masked.positions,
            masked_labels=masked.labels,
            pair_labels=rows.pair_labels if phase.rules.is_pair else None,
            sample_ids=rows.sample_ids,
            epochs=rows.epochs,
        )

    def samples(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs [R], sample ids [R]) of the rank's rows of a step; reads no token data."""
        phase = self._phase_at(step)
        epochs, sample_ids = np.zeros((2, self._row_count), np.int64)
        for source in phase.sources:
            epochs[source.at], sample_ids[source.at] = source.lanes.samples(step - phase.first_step)
        return epochs, sample_ids

    def _phase_at(self, step: int) -> _Phase:
        starts = [phase.first_step for phase in self._phases]
        return self._phases[bisect_right(starts, step) - 1]

    def _phase(self, first_step: int, length: int, kind: str, owners: NDArray[np.int64]) -> _Phase:
        rules = PackingRules(kind, length, self.config.short_sequence_probability)
        mine = owners[self._first_row : self._first_row + self._row_count]
        sources = []
        for number, split in enumerate(self.splits):
            rows = np.flatnonzero(owners == number)  # of the global batch
            at = np.flatnonzero(mine == number)  # of this rank
            own = np.searchsorted(rows, at + self._first_row)
            lanes = Lanes(
                split,
                rules,
                self.seed,
                batch_size=len(rows),
                rows=own,
                source=number,
                skip_bad_shards=self.config.on_bad_shard == "skip",
            )
            _require_samples(split, rules, lanes.counts.total, self._world_size)
            sources.append(_Source(lanes, at))
        counts = sum(split.index.token_counts for split in self.splits)
        masker = Masker(
            self.seed,
            self.config.masking,
            self.vocabulary,
            length,
            token_counts=np.asarray(counts),
            word_starts=self.splits[0].word_starts,
        )
        return _Phase(first_step, rules, sources, masker)


def open_corpora(config: DataConfig) -> dict[str, Corpus]:
    """The corpora by name: those of the mixture, or the one at `path`, by its folder's name."""
    sources = {name: source.path for name, source in config.mixture.items()}
    if not sources:
        if not config.path:
            raise DataError("data.path: must be set to a corpus made by `tandem data build`")
        sources = {config.path.rstrip("/").rpartition("/")[2]: config.path}
    return {
        name: Corpus.open(path, config.cache_dir, config.cache_gb) for name, path in sources.items()
    }


def open_splits(config: DataConfig, split: str) -> CorpusSplit | dict[str, CorpusSplit]:
    """The split called "train" or "val" of the corpus, or of each corpus of the mixture."""
    splits = {name: corpus.split(split) for name, corpus in open_corpora(config).items()}
    return splits if config.mixture else next(iter(splits.values()))


def rows_for_tokens(split: CorpusSplit, config: DataConfig, tokens: int, multiple: int) -> int:
    """The global batch size at which a batch holds about `tokens` tokens, padding not counted.

    A multiple of `multiple` (the world size, say), at least that. For packings whose sequences
    are short, such as sentence_pair.
    """
    rules = PackingRules(config.packing, config.sequence_length, config.short_sequence_probability)
    samples = split.sequence_counts(rules).total
    per_sequence = split.index.tokens / samples + rules.length - rules.capacity
    return max(1, round(tokens / per_sequence / multiple)) * multiple


def _require_one_vocabulary(splits: list[CorpusSplit]) -> None:
    for split in splits[1:]:
        if split.vocabulary.fingerprint != splits[0].vocabulary.fingerprint:
            raise DataError(
                f"{split.name}: built with another vocabulary than {splits[0].name}; "
                "build the corpora of a mixture with one tokenizer"
            )


def _require_samples(split: CorpusSplit, rules: PackingRules, total: int, world_size: int) -> None:
    tokens = split.index.tokens + rules.length - rules.capacity
    if tokens < rules.length:
        raise DataError(
            f"{split.name}: {tokens} tokens do not make a single full sequence at "
            f"sequence_length {rules.length}"
        )
    if total < world_size:
        raise DataError(
            f"{split.name}: {total} samples are too few for {world_size} ranks; "
            "use fewer ranks or more text"
        )
