"""The final scores of a run: quality on held-out text, size and speed of every learner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline import Corpus, open_corpora
from model import MaskedLanguageModel, describe
from trainer.batches import MicroBatch, to_device
from trainer.evaluation.agreement import agreement
from trainer.evaluation.finished import SavedLearners
from trainer.evaluation.held_out import Scores, ValidationSet
from trainer.evaluation.trained_heads import shown
from trainer.learner_names import TEACHER
from trainer.measure.machine import describe as describe_machine
from trainer.scoring.scores import capture_for, score
from trainer.teacher_outputs import OutputProjection
from trainer.watch.rank_zero import SendHeartbeat

SPEED_SECONDS = 1.0  # how long each speed of each learner is measured, at least


def evaluate_run(
    saved: SavedLearners, only: str | None = None, heartbeat: SendHeartbeat = lambda: None
) -> dict[str, Any]:
    """Evaluate every learner of the newest checkpoint (or `only` one), in this process.

    Returns the facts of the corpus, the unigram baseline, and for each learner its parameters
    (embeddings, encoder, pooler) and their bytes, masked-LM loss and accuracy, how far it agrees
    with the teacher, the share of the teacher's accuracy that it kept, its speed, and the step it
    started at. What a head that nothing has trained would score is None. `heartbeat` is called
    for every batch that is scored. Raises TrainingError when there is no such learner.
    """
    names = saved.names if only is None else [saved.resolve(only)]
    measurement = _Measurement(saved, heartbeat)
    return {
        "step": saved.checkpoint.step,
        "machine": describe_machine(),
        "corpus": _describe(open_corpora(saved.job.data)),
        "unigram": dataclasses.asdict(measurement.validation.unigram()),
        "learners": {name: measurement.of(name) for name in names},
    }


class _Measurement:
    """What is measured of each learner, and the teacher that it is compared with."""

    def __init__(self, saved: SavedLearners, heartbeat: SendHeartbeat) -> None:
        self.saved = saved
        self.validation = ValidationSet(saved.job, heartbeat)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.teacher = saved.load(TEACHER).to(self.device)
        self.teacher_scores = self._score(self.teacher)

    @torch.inference_mode()
    def of(self, name: str) -> dict[str, Any]:
        """The row of the learner with this full name."""
        is_teacher = name == TEACHER
        model = self.teacher if is_teacher else self.saved.load(name).to(self.device)
        scores = self.teacher_scores if is_teacher else self._score(model)
        is_trained = self.saved.head_is_trained(name)
        comparable = is_trained and self.saved.head_is_trained(TEACHER)
        size = describe(model.config)
        return {
            "parameters": size.parameters,
            "bytes": size.bytes,
            **shown(scores.overall, is_trained),
            "corpora": {name: shown(one, is_trained) for name, one in scores.by_corpus.items()},
            "retention": self._retention(scores.overall.accuracy) if comparable else None,
            "agreement": self._agreement(model) if comparable and not is_teacher else None,
            **self._speed(model),
            "started_at": self.saved.state.learners[name].started_at,
            "finished_at": self.saved.state.learners[name].finished_at,
        }

    def _score(self, model: MaskedLanguageModel) -> Scores:
        def of_batch(batch: MicroBatch) -> Tensor:
            features = model.features(
                batch.input_ids,
                batch.segment_ids,
                batch.lengths,
                batch.masked_positions,
                capture_for(model),
            )
            return score(features, OutputProjection(*model.output_projection()), batch)

        micro_batch = self.saved.job.batch.micro_batch
        with torch.inference_mode():
            return self.validation.evaluate(of_batch, micro_batch, self.device)

    def _retention(self, accuracy: float) -> float | None:
        """The share of the teacher's accuracy; None while the teacher is never right."""
        reference = self.teacher_scores.overall.accuracy
        return accuracy / reference if reference else None

    def _agreement(self, model: MaskedLanguageModel) -> dict[str, float] | None:
        micro_batch = self.saved.job.batch.micro_batch
        found = agreement(model, self.teacher, self.validation, micro_batch, self.device)
        return None if found is None else dataclasses.asdict(found)

    def _speed(self, model: MaskedLanguageModel) -> dict[str, float]:
        sample = self.validation.sample()
        many, one = to_device(sample, self.device), to_device(sample.rows(0, 1), self.device)
        return {
            "tokens_per_second": int(many.attention_mask.sum()) / _encoding_seconds(model, many),
            "seconds_per_sequence": _encoding_seconds(model, one),
        }


def _encoding_seconds(model: MaskedLanguageModel, batch: MicroBatch) -> float:
    """Of encoding `batch` once, without the vocabulary projection; the median pass."""
    seconds: list[float] = []
    while sum(seconds) < SPEED_SECONDS or len(seconds) < 3:
        began = time.perf_counter()
        model.encode(batch.input_ids, batch.segment_ids, batch.lengths)
        if batch.input_ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def _describe(corpora: Mapping[str, Corpus]) -> dict[str, Any]:
    """The sizes of everything that was read."""
    train = [corpus.split("train").index for corpus in corpora.values()]
    held_out = [corpus.split("val").index for corpus in corpora.values()]
    return {
        "path": ", ".join(corpus.name for corpus in corpora.values()),
        "documents": sum(index.documents for index in train),
        "tokens": sum(index.tokens for index in train),
        "validation_tokens": sum(index.tokens for index in held_out),
    }
