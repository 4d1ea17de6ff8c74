"""The final scores of a run: quality on held-out text, size and speed of every learner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.progress import Work, work
from data_pipeline import DEFAULT_VIEW, MASKED, Corpus
from model import Model, describe
from model.protocol import NOTHING
from trainer.batches import MicroBatch, to_device
from trainer.config import JobConfig
from trainer.device import own_device
from trainer.evaluation.breakdown import Breakdown, score_examples
from trainer.evaluation.finished import SavedLearners
from trainer.evaluation.held_out import SEED, Scores, ValidationSet
from trainer.job_data.examples import aligns, scored_on_test, tasks_of
from trainer.learner_names import TEACHER, plain_name
from trainer.learners.module import features_of, own_projection
from trainer.measure import describe_machine
from trainer.objectives.vocabulary import chunked_kl_divergence
from trainer.replaced_tokens import replaced
from trainer.scoring.columns import OF_AVERAGE, ON_TEST, Column
from trainer.scoring.metric import Metric
from trainer.scoring.scores import Metrics, columns_of, predictions
from trainer.scoring.task_metrics import BranchMetric
from trainer.teacher_outputs import OutputProjection, detach
from trainer.watch.ranks import SendHeartbeat


@dataclass(frozen=True)
class Agreement:
    """Means over masked positions."""

    top_1: float  # fraction of positions at which both rank the same token first
    kl: float  # KL(teacher || student) over the vocabulary, nats


@torch.inference_mode()
def agreement(
    student: Model,
    teacher: Model,
    validation: ValidationSet,
    device: torch.device,
    views: tuple[str, str] = (DEFAULT_VIEW, DEFAULT_VIEW),
) -> Agreement | None:
    """Compare two models, each on its own of the `views`, on all of `validation`, in this process.

    Returns None where their padded vocabularies differ in size, or no token of `validation` is
    to be predicted: labelled examples have none, whatever the heads of the models.
    """
    if student.config.vocab_size != teacher.config.vocab_size:
        return None
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for corpus in validation.corpora.values():
        for batch in corpus.batches():
            for micro in validation.micro_batches(batch, device):
                student_batch, teacher_batch = map(micro.view, views)
                if MASKED in student_batch.targets:
                    sums += _compare(student, teacher, student_batch, teacher_batch)
    same, divergence, positions = sums.tolist()
    return Agreement(same / positions, divergence / positions) if positions else None


def _compare(
    student: Model, teacher: Model, student_batch: MicroBatch, teacher_batch: MicroBatch
) -> Tensor:
    """[3] float64: positions with the same first choice, summed KL divergence, all positions.

    Each model reads the same examples in its own form.
    """
    labelled = student_batch.targets[MASKED].labels >= 0  # [P]
    ours = features_of(student, student_batch, NOTHING).vocabulary_input
    theirs = features_of(teacher, teacher_batch, NOTHING).vocabulary_input
    assert ours is not None
    assert theirs is not None
    projection, other = student.output_projection(), teacher.output_projection()
    weight, bias = projection
    assert weight is not None, "the projection of a model that is trained"
    divergence, positions = chunked_kl_divergence(
        ours, (weight, bias), theirs, other, weights=labelled.float()
    )
    choices = predictions(ours, OutputProjection(*projection))
    same = (choices == predictions(theirs, OutputProjection(*other))) & labelled
    return torch.stack([same.sum().double(), divergence.double(), positions.double()])


SPEED_SECONDS = 1.0  # the shortest time over which a speed is measured


def evaluate_run(
    saved: SavedLearners, only: str | None = None, heartbeat: SendHeartbeat = lambda: None
) -> dict[str, Any]:
    """Evaluate every learner (or `only` one) as `saved` has it, in this process.

    Returns facts about the corpus, the unigram baseline, the teacher's primary metric, and for each
    learner: its parameters (embeddings, encoder, pooler) and their bytes, its FLOPs per token, the
    step of its checkpoint, its scores by column (those on a task's test file begin with ``test_``,
    those of its averaged weights with ``average_``), its agreement with the teacher, its retention
    of the teacher's primary metric, its speed, and the step at which it started. The score of an
    untrained head is None.
    `heartbeat` is called for every batch that is scored. Raises OptionError when there is no such
    learner.
    """
    names = saved.names if only is None else [saved.resolve(only)]
    with work("scoring", "batches") as told:
        return _evaluate(saved, names, told, heartbeat)


def _evaluate(
    saved: SavedLearners, names: Sequence[str], told: Work, heartbeat: SendHeartbeat
) -> dict[str, Any]:
    def next_batch() -> None:
        heartbeat()
        told.advance()

    measurement = _Measurement(saved, told, next_batch)
    return {
        "step": saved.checkpoint.step,
        "seconds": saved.state.seconds,
        "all_done": saved.are_done,
        "machine": describe_machine(),
        "corpus": _describe(saved.corpora),
        "test": measurement.test.contents if measurement.test else {},
        "metric": saved.job.primary_column.name,
        "teacher_score": measurement.teacher_score,
        "columns": [dataclasses.asdict(column) for column in measurement.columns.values()],
        "unigram": measurement.validation.unigram(),
        "learners": {name: measurement.of(name) for name in names},
    }


@dataclass(frozen=True)
class _TestFile:
    """The tasks' test files: their examples, the job that scores them, and the tasks' heads.

    contents: what identifies each task's examples (`test_contents`).
    """

    job: JobConfig
    examples: ValidationSet
    heads: frozenset[str]
    contents: Mapping[str, str]

    @classmethod
    def open(cls, job: JobConfig, heartbeat: SendHeartbeat) -> _TestFile | None:
        scored = scored_on_test(job)
        if scored is None:
            return None
        tested = [job_task for job_task in tasks_of(scored) if job_task.data.test]
        corpora = {job_task.name: Corpus.open(job_task.data.path) for job_task in tested}
        heads = frozenset(job_task.task.head for job_task in tested)
        contents = {name: corpus.content for name, corpus in corpora.items()}
        return cls(scored, ValidationSet(scored, corpora, heartbeat), heads, contents)


class _Measurement:
    """Measures each learner, and compares it with the teacher."""

    def __init__(self, saved: SavedLearners, told: Work, heartbeat: SendHeartbeat) -> None:
        self.saved, self.told = saved, told
        self.validation = ValidationSet(saved.job, saved.corpora, heartbeat)
        self.test = _TestFile.open(saved.job, heartbeat)
        self.device = own_device()
        self.teacher = saved.load(TEACHER).to(self.device)
        self._teachers = {TEACHER: self.teacher}
        self.breakdowns: dict[str, dict[str, Any]] = {}  # by learner
        self.teacher_scores = self._score(TEACHER, self.teacher)
        scored = [metric for name in saved.names for metric in self._metrics(name)]
        self.columns = self._columns(scored)
        if self.test is not None:
            self._add(ON_TEST, [metric for metric in scored if metric.head in self.test.heads])
        averages = [name for name in saved.names if saved.has_average(name)]
        self._add(OF_AVERAGE, [metric for name in averages for metric in self._metrics(name)])

    @property
    def teacher_score(self) -> float | None:
        """The teacher's primary metric; None where it has no such score."""
        primary = self.saved.job.primary_column.name
        return self._told(TEACHER, self.teacher_scores).overall.get(primary)

    def _add(self, prefix: str, metrics: Sequence[Metric[Any]]) -> None:
        """Add the columns of some of the metrics once more, with a prefix and the same headings."""
        prefixed = [self.columns[name].prefixed(prefix) for name in self._columns(metrics)]
        self.columns |= {column.name: column for column in prefixed}

    @torch.inference_mode()
    def of(self, name: str) -> dict[str, Any]:
        """The results of the learner with this full name."""
        is_teacher = name == TEACHER
        model = self.teacher if is_teacher else self.saved.load(name).to(self.device)
        scores = self.teacher_scores if is_teacher else self._score(name, model)
        told = self._told(name, scores)
        if self.saved.has_average(name):
            told = told.beside(self._of_average(name))
        both_predict = all(
            MASKED in self.saved.trained_heads(learner) for learner in (name, TEACHER)
        )
        data = self.saved.job.data
        size = describe(model.config, data.longest, data.highest_masking_rate)
        config = self.saved.config(TEACHER)
        return {
            "parameters": size.parameters,
            "bytes": size.bytes,
            "flops_per_token": size.flops_per_token,
            "step": self.saved.checkpoint_of(name).step,
            **told.overall,
            "corpora": told.by_corpus,
            **self._scores_on_test(name, model, scores),
            "retention": self._retention(name, told),
            "agreement": self._agreement(name, model) if both_predict and not is_teacher else None,
            **self._speed(name, model),
            **self._steps(name),
            "breakdown": self.breakdowns[name],
            "listens_to": sorted(self.saved.config(name).objective.sources),
            "same_tokens": self.saved.config(name).predicts_tokens_of(config),
            "started_at": self.saved.state.learners[name].started_at,
            "finished_at": self.saved.state.learners[name].finished_at,
        }

    def _steps(self, name: str) -> dict[str, int]:
        """The steps that a trained learner took up to its checkpoint, and those it skipped."""
        state = self.saved.state_of(name)
        if self.saved.config(name).frozen:
            return {}
        counters = state.learners[name]
        taken, skipped = counters.steps_taken(state.step), counters.skipped_steps
        return {"steps_taken": taken, "steps_skipped": skipped}

    def _columns(self, metrics: Sequence[Metric[Any]]) -> dict[str, Column]:
        """The columns of these metrics, by name; of several tasks, their mean first."""
        return columns_of(metrics, self.saved.job.data.tasks)

    def _metrics(self, name: str) -> Metrics:
        return self.saved.job.metrics_of(self.saved.config(name))

    def _score(self, name: str, model: Model) -> Scores:
        """The scores on the validation split, with their breakdown."""
        heads = model.config.task_heads.items()
        branches = [BranchMetric(name) for name, head in heads if head.branches]
        metrics, corpus = self._metrics(name), next(iter(self.saved.corpora.values()))
        metrics = (*metrics, *branches)
        read = self.saved.job.read_by(self.saved.config(name), corpus)
        breakdown = Breakdown(metrics, model.config, read.tokenizer_dir)
        scores = self._scores(name, model, self.validation, metrics, breakdown)
        trained = self.saved.trained_heads(name)
        by_head = breakdown.finish()
        self.breakdowns[name] = {head: part for head, part in by_head.items() if head in trained}
        return scores

    def _of_average(self, name: str) -> Scores:
        """The scores of a learner's averaged weights on the validation split."""
        model = self.saved.averages().load(name).to(self.device)
        return self._told(name, self._scores(name, model, self.validation, self._metrics(name)))

    def _scores(
        self,
        name: str,
        model: Model,
        examples: ValidationSet,
        metrics: Metrics,
        breakdown: Breakdown | None = None,
    ) -> Scores:
        self.told.begin(f"scoring {plain_name(name)}")
        read = self._reader(name)
        return score_examples(model, examples, metrics, read, breakdown, self._teacher_of)

    def _teacher_of(self, name: str) -> Model:
        """The model of a teacher, with which metrics compare."""
        if name not in self._teachers:
            self._teachers[name] = self.saved.load(name).to(self.device)
        return self._teachers[name]

    def _reader(self, name: str) -> Callable[[MicroBatch], MicroBatch]:
        """A function that gives the learner its view of a batch, or its generator's samples."""
        config = self.saved.config(name)
        if config.generator_name is None:
            return methodcaller("view", config.form)
        generator = self.saved.beside(name).load(config.generator_name).to(self.device)

        def read(batch: MicroBatch) -> MicroBatch:
            features = features_of(generator, batch, NOTHING)
            told = detach(features, own_projection(generator, features))
            return replaced(batch, told.distributions[MASKED], SEED)

        return read

    def _scores_on_test(
        self, name: str, model: Model, on_validation: Scores
    ) -> Mapping[str, float | None]:
        """The scores on a task's test file, by column; empty where the job has no such file."""
        if self.test is None:
            return {}
        untuned = self.test.job.metrics_of(self.saved.config(name))
        metrics = tuple(metric.tuned_on(on_validation.overall) for metric in untuned)
        scores = self._scores(name, model, self.test.examples, metrics)
        return self._told(name, scores).prefixed(ON_TEST).overall

    def _told(self, name: str, scores: Scores) -> Scores:
        """A learner's scores, with None for untrained heads; of several tasks, their mean too."""
        trained, tasks = self.saved.trained_heads(name), self.saved.job.data.tasks
        return scores.of_trained_heads(self._metrics(name), trained, tasks)

    def _retention(self, name: str, scores: Scores) -> float | None:
        """The retention of the teacher's primary metric.

        None where either score is missing, or they are of different tokens.
        """
        primary = self.saved.job.primary_column.name
        ours, theirs = scores.overall.get(primary), self.teacher_score
        comparable = self.saved.config(name).predicts_tokens_of(self.saved.config(TEACHER))
        if ours is None or theirs is None or not comparable:
            return None
        return self.columns[primary].retention(ours, theirs)

    def _agreement(self, name: str, model: Model) -> dict[str, float] | None:
        job, config, teacher = self.saved.job, self.saved.config(name), self.saved.config(TEACHER)
        views = config.view, teacher.view
        if not (aligns(job, *views) and config.predicts_tokens_of(teacher)):
            return None
        self.told.begin(f"comparing {plain_name(name)} with the teacher")
        comparison = agreement(model, self.teacher, self.validation, self.device, views)
        return None if comparison is None else dataclasses.asdict(comparison)

    def _speed(self, name: str, model: Model) -> dict[str, float]:
        sample = self.validation.sample().view(self.saved.config(name).form)
        self.told.begin(f"measuring the speed of {plain_name(name)}")
        many, single = to_device(sample, self.device), to_device(sample.rows(0, 1), self.device)
        seconds = _encoding_seconds(model, many, self.told)
        return {
            "tokens_per_second": int(many.attention_mask.sum()) / seconds,
            "sequences_per_second": len(many.input_ids) / seconds,
            "examples_per_second": len(sample.input_ids) / seconds,
            "seconds_per_sequence": _encoding_seconds(model, single, self.told)
            / len(single.input_ids),
        }


def _encoding_seconds(model: Model, batch: MicroBatch, told: Work) -> float:
    """The median time of encoding `batch` once, without the vocabulary projection."""
    seconds: list[float] = []
    while sum(seconds) < SPEED_SECONDS or len(seconds) < 3:
        began = time.perf_counter()
        model.encode(batch.input_ids, batch.segment_ids, model.readable(batch.visible))
        if batch.input_ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        told.tick()
    return float(np.median(seconds[1:]))


def _describe(corpora: Mapping[str, Corpus]) -> dict[str, Any]:
    """The sizes of all corpora together."""
    train = [corpus.split("train").index for corpus in corpora.values()]
    held_out = [corpus.split("val").index for corpus in corpora.values()]
    return {
        "path": ", ".join(corpus.name for corpus in corpora.values()),
        "documents": sum(index.documents for index in train),
        "tokens": sum(index.tokens for index in train),
        "validation_tokens": sum(index.tokens for index in held_out),
    }
