"""The final scores of a run: quality on held-out text, size and speed of every learner."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from data_pipeline import Batch, Corpus
from model import MaskedLanguageModel
from trainer.batches import MicroBatch, to_device
from trainer.finished import SavedLearners
from trainer.held_out import ValidationSet, evaluate
from trainer.knowledge import Decoder
from trainer.learner import TEACHER
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
    corpus = Corpus.open(saved.job.data.path)
    validation = ValidationSet(corpus, saved.job)
    names = saved.names if only is None else [saved.resolve(only)]
    batches = list(validation.batches())
    learners = {name: _measure(saved, name, batches) for name in names}
    reference = learners.get(TEACHER, {}).get("accuracy")
    if reference:
        for facts in learners.values():
            facts["retention"] = facts["accuracy"] / reference
    return {
        "step": saved.checkpoint.step,
        "corpus": {
            "path": saved.job.data.path,
            "documents": corpus.split("train").index.documents,
            "tokens": corpus.split("train").index.tokens,
            "validation_tokens": corpus.split("val").index.tokens,
        },
        "unigram": dataclasses.asdict(validation.unigram()),
        "learners": learners,
    }


@torch.inference_mode()
def _measure(saved: SavedLearners, name: str, batches: list[Batch]) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = saved.load(name).to(device)

    def score(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        features = model.features(
            batch.input_ids, batch.segment_ids, batch.attention_mask, batch.masked_positions
        )
        decoder = Decoder(*model.decoder())
        return masked_lm_scores(features.vocabulary_input, decoder, batch.masked_labels)

    held_out = evaluate(score, batches, saved.job.batch.micro_batch, device)
    return {
        "parameters": _parameters(model),
        **dataclasses.asdict(held_out),
        "retention": None,
        "tokens_per_second": _tokens_per_second(model, to_device(batches[0], device)),
        "started_at": saved.started_at(name),
    }


def _tokens_per_second(model: MaskedLanguageModel, batch: MicroBatch) -> float:
    """Attended tokens encoded per second, without the vocabulary projection; the median pass."""
    tokens = int(batch.attention_mask.sum())
    seconds: list[float] = []
    while sum(seconds) < SPEED_SECONDS or len(seconds) < 3:
        began = time.perf_counter()
        model.encode(batch.input_ids, batch.segment_ids, batch.attention_mask)
        if batch.input_ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return tokens / float(np.median(seconds[1:]))


def _parameters(model: MaskedLanguageModel) -> int:
    """Embeddings, encoder and pooler; not the heads."""
    parts = [part for part in (model.embeddings, model.encoder, model.pooler) if part is not None]
    return sum(parameter.numel() for part in parts for parameter in part.parameters())
