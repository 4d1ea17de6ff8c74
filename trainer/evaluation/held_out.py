"""Held-out evaluation on the same masked sequences for all learners, and the unigram baseline.

The evaluated sequences are the first rows of the validation split's own stream. Their masks are
fixed: the same at every evaluation, for every learner and on any number of ranks. Scores of a
learner's heads that are not trained are meaningless (`trained_heads`). Where a job predicts next
tokens before it masks, scores of next tokens have columns of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline import (
    MASKED,
    Batch,
    BatchStream,
    Corpus,
    CorpusSplit,
    DataConfig,
    ExampleSplit,
    MaskingConfig,
    all_batches,
)
from data_pipeline.examples.stream import equal_share
from data_pipeline.masking.config import NEXT_TOKEN
from data_pipeline.reading.other_tokens import OtherView
from trainer.batches import MicroBatch, to_micro_batches
from trainer.config import JobConfig
from trainer.job_data.examples import views_of
from trainer.job_data.other_tokenizers import other_views
from trainer.learner_config import LearnerConfig
from trainer.learners.state import LearnerState
from trainer.objectives.term import StepSchedule
from trainer.scoring.columns import OF_AVERAGE
from trainer.scoring.metric import Metric, Tally, joined, share_over_ranks
from trainer.scoring.scores import shown, task_mean
from trainer.watch.ranks import SendHeartbeat

# The masks of held-out text do not depend on the job's seed, so that jobs can be compared.
SEED = 0
# Rows that are read at once, on all ranks together.
ROWS = 64

Scorer = Callable[[MicroBatch], Sequence[Tensor]]  # -> the readings of each metric


@dataclass(frozen=True)
class Scores:
    """A learner's scores by column, on all held-out sequences together and on each corpus."""

    overall: Mapping[str, float | None]
    by_corpus: Mapping[str, Mapping[str, float | None]]

    def of_trained_heads(
        self, metrics: Sequence[Metric[Any]], trained: Iterable[str], tasks: Collection[str]
    ) -> Scores:
        """These scores, with None for heads that are not in `trained`.

        Where the job has several `tasks`, the overall scores get their mean.
        """
        heads = [*trained]
        by_corpus = {name: shown(scores, metrics, heads) for name, scores in self.by_corpus.items()}
        overall = shown(self.overall, metrics, heads)
        return Scores({**task_mean(overall, metrics, tasks), **overall}, by_corpus)

    def beside(self, averages: Scores) -> Scores:
        """These scores, and those of the averaged weights in columns of their own."""
        averages = averages.prefixed(OF_AVERAGE)
        by_corpus = {
            name: {**scores, **averages.by_corpus[name]} for name, scores in self.by_corpus.items()
        }
        return Scores({**self.overall, **averages.overall}, by_corpus)

    def prefixed(self, prefix: str) -> Scores:
        """These scores in columns whose names begin with `prefix`."""

        def renamed(scores: Mapping[str, float | None]) -> dict[str, float | None]:
            return {f"{prefix}{column}": score for column, score in scores.items()}

        by_corpus = {name: renamed(scores) for name, scores in self.by_corpus.items()}
        return Scores(renamed(self.overall), by_corpus)


class ValidationSet:
    """The held-out sequences or examples of a job, shared among any number of ranks."""

    def __init__(
        self,
        config: JobConfig,
        corpora: Mapping[str, Corpus],
        heartbeat: SendHeartbeat = lambda: None,
    ) -> None:
        """`corpora` are the job's. `heartbeat` is called before every batch that is read.

        Raises DataError when one of them has no validation split.
        """
        self._config, self._opened, self._heartbeat = config, corpora, heartbeat
        self.corpora = self._open(config.data.held_out_masking)

    def _open(self, masking: MaskingConfig) -> dict[str, _HeldOutCorpus | _HeldOutExamples]:
        # So that held-out scores can be compared over time, there is one length, one packing and
        # one masking rate, also for learners that train on unmasked text.
        config, heartbeat = self._config, self._heartbeat
        still = masking.for_held_out()
        data = dataclasses.replace(config.data, phases=[], mixture={}, masking=still)
        wanted = config.evaluation.sequences
        return {
            name: _HeldOutExamples(
                ExampleSplit(corpus, "val", views=views_of(config, name, SEED)), heartbeat
            )
            if config.data.has_examples
            else _HeldOutCorpus.open(
                corpus.split("val"), data, wanted, heartbeat, other_views(config, {name: corpus})
            )
            for name, corpus in self._opened.items()
        }

    @cached_property
    def _with_next_tokens(self) -> dict[str, _HeldOutCorpus | _HeldOutExamples]:
        return self._open(MaskingConfig(unit=NEXT_TOKEN))

    @torch.no_grad()
    def evaluate(
        self,
        score: Scorer,
        metrics: Sequence[Metric[Any]],
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        next_tokens: bool = False,
    ) -> Scores:
        """Score every sequence once, shared among the ranks. Collective if there are several.

        `next_tokens`: score the predictions of next tokens, not those of masked ones.
        """
        corpora = self._with_next_tokens if next_tokens else self.corpora
        tallies = {name: Tally(metrics, device) for name in corpora}
        for name, corpus in corpora.items():
            for batch in corpus.batches(rank, world_size):
                for micro in self.micro_batches(batch, device):
                    tallies[name].add(score(micro))
        if world_size > 1:
            share_over_ranks([*tallies.values()])
        by_corpus = {name: tally.finish() for name, tally in tallies.items()}
        if len(by_corpus) == 1:  # not computed twice: a metric may read files
            (scores,) = by_corpus.values()
            return Scores(scores, by_corpus)
        return Scores(joined([*tallies.values()], device).finish(), by_corpus)

    def micro_batches(self, batch: Batch, device: torch.device) -> Iterator[MicroBatch]:
        """Cut a batch into what the job has on one rank at a time."""
        data, limits = self._config.data, self._config.batch
        return to_micro_batches(batch, limits.micro_rows(data.sequence_length), device)

    def sample(self) -> Batch:
        """Some sequences for measuring speed."""
        return next(next(iter(self.corpora.values())).batches())

    def unigram(self) -> dict[str, float]:
        """The scores of guessing masked tokens by their training frequency; empty without masks.

        Every count is increased by one, so that no loss is infinite.
        """
        if self._config.data.has_examples:
            return {}
        token_counts = np.asarray(sum(corpus.token_counts for corpus in self._opened.values()))
        batches = [batch for corpus in self.corpora.values() for batch in corpus.batches()]
        labels = np.concatenate([batch.targets[MASKED].labels.ravel() for batch in batches])
        labels = labels[labels >= 0]
        smoothed = token_counts.astype(np.float64) + 1
        nats = -np.log(smoothed / smoothed.sum())  # [V]
        return {
            "loss": float(nats[labels].mean()),
            "accuracy": float((labels == token_counts.argmax()).mean()),
        }


@dataclass(frozen=True)
class _HeldOutCorpus:
    stream: BatchStream
    count: int  # sequences
    heartbeat: SendHeartbeat

    @classmethod
    def open(
        cls,
        split: CorpusSplit,
        data: DataConfig,
        wanted: int,
        heartbeat: SendHeartbeat,
        views: Mapping[str, OtherView],
    ) -> _HeldOutCorpus:
        count = min(wanted, BatchStream(split, data, SEED, 1).samples_per_epoch)
        stream = BatchStream(split, data, SEED, min(ROWS, count), views=views)
        return cls(stream, count, heartbeat)

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share. Over all ranks each sequence is scored once.

        All ranks get the same number of rows, since their forward passes are collective.
        """
        for step, first in enumerate(range(0, self.count, ROWS)):
            self.heartbeat()
            batch = self.stream.batch(step)
            yield _share(batch.take(np.arange(min(ROWS, self.count - first))), rank, world_size)


@dataclass(frozen=True)
class _HeldOutExamples:
    examples: ExampleSplit
    heartbeat: SendHeartbeat

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """See `_HeldOutCorpus.batches`."""
        for batch in all_batches(self.examples, ROWS, rank, world_size):
            self.heartbeat()
            yield batch


def _share(batch: Batch, rank: int, world_size: int) -> Batch:
    """An equal share of the rows for each rank; missing rows repeat others, without labels."""
    rows, is_repeated = equal_share(len(batch.input_ids), rank, world_size)
    return batch.take(rows).without_labels(is_repeated)


def trained_heads(config: LearnerConfig, counters: LearnerState, step: int) -> frozenset[str]:
    """The heads that are trained at the job's `step`.

    Either a term of the objective has trained the head, in a stage in which the term is on, or it
    came with the initial weights.
    """
    stages, made = config.stages, counters.steps_made(step)
    trained = set(counters.given_heads)
    for term in config.objective.terms().values():
        weight = StepSchedule.read(term.weight)
        spans = stages.spans(term.compares, made)
        if term.head is not None and any(weight.weighs_between(*span) for span in spans):
            trained.add(term.head)
    return frozenset(trained)
