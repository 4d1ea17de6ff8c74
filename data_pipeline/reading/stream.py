"""The stream of batches that one rank trains on; each batch is a pure function of its step."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.masking.masker import Masker
from data_pipeline.order import BatchSizes, rows_of_sources
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.reading.batches import MASKED, PAIRS, Batch, Target
from data_pipeline.reading.corpus import Corpus, CorpusSplit
from data_pipeline.reading.lanes import Lanes, Sequences
from data_pipeline.reading.other_tokens import OtherView, with_view
from data_pipeline.shards.sources import is_url
from data_pipeline.tokenization.alignment import differing_text

PASS_SHIFT = 20  # the epochs of pass n over the corpora begin at n << 20: each has its own order


@dataclass(frozen=True)
class _Source:
    lanes: Lanes
    at: NDArray[np.int64]  # the rows of the rank's batch that it fills


@dataclass(frozen=True)
class _Phase:
    """Consecutive steps between changes of sequences, masks and batch size."""

    phase_start: int  # the step from which its lanes count steps
    rules: PackingRules
    sources: list[_Source]
    rows: int  # in the rank's batch
    masker: Masker
    is_causal: bool


class BatchStream:
    """Batches of the rows that `rank` owns: [rank * R, (rank + 1) * R) of the global batch.

    `splits` is one split, or one for each name in `config.mixture`. `batch_sizes` is the global
    batch size, constant or by step. With `masks` false the rows are not masked, and
    `Batch.to_mask` says how many positions of each row `TorchMasker` will choose. `views` are for
    learners of other tokenizers, by name; they need masks.

    Raises DataError if the world size does not divide every global batch. Also if a split has fewer
    samples than ranks, or less than one full sequence. Also if the corpora of a mixture have
    different vocabularies.
    """

    def __init__(
        self,
        splits: CorpusSplit | Mapping[str, CorpusSplit],
        config: DataConfig,
        seed: int,
        batch_sizes: BatchSizes | int,
        rank: int = 0,
        world_size: int = 1,
        masks: bool = True,
        views: Mapping[str, OtherView] | None = None,
    ) -> None:
        self._views = views or {}
        self.splits = [splits] if isinstance(splits, CorpusSplit) else list(splits.values())
        self.config, self.seed = config, seed
        self.vocabulary = self.splits[0].vocabulary
        _require_one_tokenizer(self.splits)
        self._rank, self._world_size, self._masks = rank, world_size, masks
        self._sizes = (
            BatchSizes.constant(batch_sizes) if isinstance(batch_sizes, int) else batch_sizes
        )
        _require_divisible(self._sizes, world_size)
        self._names = None if isinstance(splits, CorpusSplit) else list(splits)
        phases = config.phases
        self._phase_starts = [0, *(phase.from_step for phase in phases if phase.begins_pass)]
        changes = {0, *(phase.from_step for phase in phases), *self._sizes.starts}
        self._starts = sorted(changes)
        # All phases are opened once, so that faults show at the start; only the current one stays.
        opened = [self._phase(start) for start in self._starts]
        self._at, self._open = 0, opened[0]
        self.samples_per_epoch = sum(source.lanes.counts.total for source in self._open.sources)

    @classmethod
    def open(
        cls,
        config: DataConfig,
        split: str,
        seed: int,
        batch_sizes: BatchSizes | int,
        rank: int = 0,
        world_size: int = 1,
        masks: bool = True,
        staged: Path | None = None,
        corpora: Mapping[str, Corpus] | None = None,
        views: Mapping[str, OtherView] | None = None,
    ) -> BatchStream:
        """The stream over the split "train" or "val" of the corpora that `config` names.

        `staged` is the folder in which this node's `Stager` keeps copies of blocks. `corpora` are
        the corpora of `config` if they are open already.
        """
        splits = open_splits(config, split, staged, corpora)
        return cls(splits, config, seed, batch_sizes, rank, world_size, masks, views)

    def batch(self, step: int) -> Batch:
        """The rank's batch at global step `step` (from 0)."""
        phase = self._phase_of(step)
        length = phase.rules.length
        rows = Sequences.empty(phase.rows, length, self.vocabulary, self._views)
        for source in phase.sources:
            source.lanes.fill(step - phase.phase_start, rows, source.at)
        masked = (
            phase.masker(rows.input_ids, rows.epochs, rows.sample_ids, step)
            if self._masks
            else phase.masker.defer(rows.input_ids, step)
        )
        pairs = {PAIRS: Target(rows.pair_labels)} if phase.rules.is_pair else {}
        batch = Batch(
            input_ids=masked.input_ids,
            segment_ids=rows.segment_ids,
            attention_mask=(np.arange(length) < rows.lengths[:, None]).astype(np.int64),
            targets={MASKED: Target(masked.labels, masked.positions), **pairs},
            sample_ids=rows.sample_ids,
            epochs=rows.epochs,
            to_mask=masked.to_mask,
            readable=rows.readable,
            document_ids=rows.document_ids if phase.rules.packing.separates_documents else None,
            is_causal=phase.is_causal,
        )
        for name, view in self._views.items():
            keys = phase.masker.keys(rows.epochs, rows.sample_ids)
            read = rows.others[name]
            batch = with_view(batch, name, view, read, self.vocabulary.mask, keys)
        return batch

    def samples(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs [R], sample ids [R]) of the rank's batch at a step; reads no token data."""
        phase = self._phase_of(step)
        epochs, sample_ids = np.zeros((2, phase.rows), np.int64)
        for source in phase.sources:
            epochs[source.at], sample_ids[source.at] = source.lanes.samples(
                step - phase.phase_start
            )
        return epochs, sample_ids

    def blocks_entered(self, step: int) -> Iterator[list[tuple[CorpusSplit, int]]]:
        """Yield the blocks that the rank's rows begin to read at each step from `step` on.

        Does not read token data. May run in another thread than `batch`.
        """
        for first, end in zip(self._starts, [*self._starts[1:], None], strict=True):
            begin = max(step, first)
            if end is None or begin < end:
                steps = itertools.count(begin) if end is None else range(begin, end)
                yield from _entered(self._phase(first), steps)

    def _phase_of(self, step: int) -> _Phase:
        start = self._starts[bisect_right(self._starts, step) - 1]
        if start != self._at:
            self._at, self._open = start, self._phase(start)
        return self._open

    def _phase(self, start: int) -> _Phase:
        """The phase that begins at a step."""
        number = bisect_right(self._phase_starts, start) - 1
        length, kind = self.config.length_and_packing_at(start)
        rules = PackingRules(kind, length, self.config.short_sequence_probability)
        following = [*self._phase_starts[number + 1 :], None][0]
        phase_start = self._phase_starts[number]
        sizes = self._sizes.between(phase_start, following)
        return _Phase(
            phase_start,
            rules,
            self._sources(rules, sizes, phase_start, start, number << PASS_SHIFT),
            self._sizes.at(start) // self._world_size,
            self._masker(length, start),
            self.config.masking_at(start).is_causal,
        )

    def _sources(
        self,
        rules: PackingRules,
        sizes: BatchSizes,
        phase_start: int,
        start: int,
        first_epoch: int,
    ) -> list[_Source]:
        """The lanes of the rank in each split that is read, for the batch size at step `start`.

        `sizes` are by the steps from `phase_start` on, where `first_epoch` begins.
        """
        step, weights = start - phase_start, self._weights_at(phase_start)
        owners = {size: rows_of_sources(weights, size) for size in sizes.sizes}
        rows = sizes.at(step) // self._world_size
        mine = np.arange(self._rank * rows, (self._rank + 1) * rows)
        sources = []
        for number, split in enumerate(self.splits):
            if not weights[number]:
                continue
            at = np.flatnonzero(owners[sizes.at(step)][mine] == number)  # in the rank's batch
            of_source = np.flatnonzero(owners[sizes.at(step)] == number)  # in the global batch
            split_sizes = [int((owners[size] == number).sum()) for size in sizes.sizes]
            lanes = Lanes(
                split,
                rules,
                self.seed,
                BatchSizes(sizes.starts, tuple(split_sizes)),
                rows=np.searchsorted(of_source, mine[at]),
                source=number,
                skip_bad_shards=self.config.on_bad_shard == "skip",
                copies=self.config.masking.copies,
                views=self._views,
                first_epoch=first_epoch,
            )
            _require_samples(split, rules, lanes.counts.total, self._world_size)
            sources.append(_Source(lanes, at))
        return sources

    def _weights_at(self, step: int) -> list[float]:
        """The weight of each split in the phase of a step."""
        weights = self.config.weights_at(step)
        return [1.0] if self._names is None else [weights[name] for name in self._names]

    def _masker(self, length: int, step: int) -> Masker:
        counts = sum(split.index.token_counts for split in self.splits)
        return Masker(
            self.seed,
            self.config.masking_at(step),
            self.vocabulary,
            length,
            token_counts=np.asarray(counts),
            word_starts=self.splits[0].word_starts,
        )


def _entered(phase: _Phase, steps: Iterable[int]) -> Iterator[list[tuple[CorpusSplit, int]]]:
    counts = itertools.tee((step - phase.phase_start for step in steps), len(phase.sources))
    walks = [
        source.lanes.blocks_entered(mine)
        for source, mine in zip(phase.sources, counts, strict=True)
    ]
    for entered in zip(*walks, strict=True):
        yield [
            (source.lanes.split, block)
            for source, blocks in zip(phase.sources, entered, strict=True)
            for block in blocks
        ]


def open_corpora(config: DataConfig, urls: bool = True) -> dict[str, Corpus]:
    """The corpora by name: those of the mixture or of the tasks, or the one at `path`.

    The last is named after its folder. With `urls` false, corpora behind URLs are left out.
    """
    sources = {name: source.path for name, source in config.mixture.items()}
    sources |= {name: task.path for name, task in config.tasks.items()}
    if not sources:
        if not config.path:
            raise DataError("data.path: must be set to a corpus made by `tandem data build`")
        sources = {config.path.rstrip("/").rpartition("/")[2]: config.path}
    cache_gb = config.cache_gb / len(sources)
    return {
        name: Corpus.open(path, config.cache_dir, cache_gb)
        for name, path in sources.items()
        if urls or not is_url(path)
    }


def contents(config: DataConfig, corpora: Mapping[str, Corpus] | None = None) -> dict[str, str]:
    """`Corpus.content` of each corpus, by the job key that holds its path.

    `corpora` is as in `open_splits`.
    """
    keys = [f"data.mixture.{name}.path" for name in config.mixture]
    keys += [f"data.tasks.{name}.path" for name in config.tasks]
    opened = corpora or open_corpora(config)
    return {
        key: corpus.content
        for key, corpus in zip(keys or ["data.path"], opened.values(), strict=True)
    }


def open_splits(
    config: DataConfig,
    split: str,
    staged: Path | None = None,
    corpora: Mapping[str, Corpus] | None = None,
) -> CorpusSplit | dict[str, CorpusSplit]:
    """The split "train" or "val" of the corpus, or of each corpus of the mixture.

    With `staged`, blocks that have a copy in that folder are read from it. `corpora` are the
    corpora of `config` if they are open already.
    """
    opened = corpora or open_corpora(config)
    splits = {name: corpus.split(split) for name, corpus in opened.items()}
    if staged:
        splits = {
            name: corpus_split.staged_in(staged / str(number))
            for number, (name, corpus_split) in enumerate(splits.items())
        }
    return splits if config.mixture else next(iter(splits.values()))


def _require_one_tokenizer(splits: list[CorpusSplit]) -> None:
    first = splits[0]
    remedy = "build the corpora of a mixture with one tokenizer"
    for split in splits[1:]:
        if split.vocabulary.fingerprint != first.vocabulary.fingerprint:
            why = f"was built with another vocabulary than {first.name}"
            raise DataError(f"{split.name}: {why}; {remedy}")
        if (text := differing_text(first.tokenizer_dir, split.tokenizer_dir)) is not None:
            why = f"was built with other rules of its tokenizer than {first.name}"
            raise DataError(f"{split.name}: {why}, as {text!r} shows; {remedy}")


def _require_divisible(sizes: BatchSizes, world_size: int) -> None:
    for size in sizes.sizes:
        if size % world_size:
            raise DataError(
                f"batch: a global batch of {size} rows cannot be split among {world_size} ranks; "
                "choose a multiple"
            )


def _require_samples(split: CorpusSplit, rules: PackingRules, total: int, world_size: int) -> None:
    tokens = split.index.tokens + rules.length - rules.capacity
    if tokens < rules.length:
        is_held_out = split.name.endswith("/val")
        more = "build again with a larger --val-fraction" if is_held_out else "more text"
        raise DataError(
            f"{split.name}: {tokens} tokens are less than one full sequence of sequence_length "
            f"{rules.length}; use a shorter length or {more}"
        )
    if total < world_size:
        raise DataError(
            f"{split.name}: {total} samples are too few for {world_size} ranks; "
            "use fewer ranks or more text"
        )
