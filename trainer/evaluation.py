"""The final scores of a run: quality on held-out text, size and speed of every learner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from data_pipeline import Corpus, open_corpora
from model import MaskedLanguageModel, describe
from trainer.batches import MicroBatch, to_device
from trainer.finished import SavedLearners
from trainer.held_out import ValidationSet
from trainer.knowledge import Decoder
from trainer.learner import TEACHER
from trainer.machine import describe as describe_machine
from trainer.run_folder import RunFolder
from trainer.scores import masked_lm_scores

SPEED_SECONDS = 2.0  # how long each learner's speed is measured


def evaluate_run(folder: RunFolder, only: str | None = None) -> dict[str, Any]:
    """Evaluate every learner of the newest checkpoint (or `only` one), in this process.

    Returns the facts of the corpus, the unigram baseline, and for each learner its parameters
    (embeddings, encoder, pooler), masked-LM loss and accuracy, share of the teacher's accuracy,
    tokens per second of its encoder, and the step it started at. Raises TrainingError when there
    is no checkpoint or no such learner.
    """
    saved = SavedLearners(folder)
    validation = ValidationSet(saved.job)
    names = saved.names if only is None else [saved.resolve(only)]
    learners = {name: _measure(saved, name, validation) for name in names}
    reference = learners.get(TEACHER, {}).get("accuracy")
    if reference:
        for facts in learners.values():
            facts["retention"] = facts["accuracy"] / reference
    return {
        "step": saved.checkpoint.step,
        "machine": describe_machine(),
        "corpus": _describe(open_corpora(saved.job.data)),
        "unigram": dataclasses.asdict(validation.unigram()),
        "learners": learners,
    }


@torch.inference_mode()
def _measure(saved: SavedLearners, name: str, validation: ValidationSet) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = saved.load(name).to(device)

    def score(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        features = model.features(
            batch.input_ids, batch.segment_ids, batch.padding_mask, batch.masked_positions
        )
        decoder = Decoder(*model.decoder())
        return masked_lm_scores(features.vocabulary_input, decoder, batch.masked_labels)

    scores = validation.evaluate(score, saved.job.batch.micro_batch, device)
    return {
        "parameters": describe(model.config).parameters,
        **dataclasses.asdict(scores.overall),
        "corpora": {name: dataclasses.asdict(one) for name, one in scores.by_corpus.items()},
        "retention": None,
        "tokens_per_second": _tokens_per_second(model, to_device(validation.sample(), device)),
        "started_at": saved.state.learners[name].started_at,
    }


def _tokens_per_second(model: MaskedLanguageModel, batch: MicroBatch) -> float:
    """Attended tokens encoded per second, without the vocabulary projection; the median pass."""
    tokens = int(batch.attention_mask.sum())
    seconds: list[float] = []
    while sum(seconds) < SPEED_SECONDS or len(seconds) < 3:
        began = time.perf_counter()
        model.encode(batch.input_ids, batch.segment_ids, batch.padding_mask)
        if batch.input_ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return tokens / float(np.median(seconds[1:]))


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
