"""The predictions of an exported model for a file of examples, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from data_pipeline import TextEncoder
from data_pipeline.text.text_files import STDIN
from model import (
    CHOICE,
    CLASSIFICATION,
    REGRESSION,
    SPAN,
    TAGGING,
    ModelError,
    Transitions,
    from_pretrained,
)
from model.heads import TaskHead
from trainer.prediction.choices import ChoicePredictor
from trainer.prediction.passes import head_outputs
from trainer.prediction.predictor import Predictor
from trainer.prediction.spans import SpanPredictor
from trainer.prediction.tags import TagPredictor
from trainer.prediction.texts import TextPredictor
from trainer.task_facts import TaskFacts

AT_ONCE = 4096  # examples that are sorted by length together
PREDICTORS: dict[str, type[Predictor]] = {
    CLASSIFICATION: TextPredictor,
    REGRESSION: TextPredictor,
    CHOICE: ChoicePredictor,
    TAGGING: TagPredictor,
    SPAN: SpanPredictor,
}


def predictions(
    folder: Path, path: str, device: torch.device, columns: Mapping[str, str] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """The predictions of the model in `folder` for each example of a file, in order.

    `columns` maps fields to the table's columns where they differ from those in training. Raises
    ModelError for a model without a task head, DataError for a file that cannot be read.
    """
    model = from_pretrained(folder).to(device)
    if not model.task_heads:
        raise ModelError(f"{folder}: has no head of a task; fine-tune it with `tandem finetune`")
    name, head = next(iter(model.config.task_heads.items()))
    if head.kind not in PREDICTORS:
        raise ModelError(f"{folder}: predicts a {head.kind}, which `tandem predict` does not write")
    facts = TaskFacts.read(folder)
    if path == STDIN:  # it has no header, even if the training file had one
        facts = replace(facts, columns={})
    facts = facts.with_columns(columns)
    longest = model.config.longest_sequence or facts.sequence_length
    encoder = TextEncoder(folder, min(facts.sequence_length, longest))
    predictor = PREDICTORS[head.kind](head, facts, encoder, _transitions(model.task_heads[name]))
    queries = predictor.queries(path)
    while some := list(islice(queries, AT_ONCE)):
        sequences = [sequence for query in some for sequence in query.sequences]
        outputs = iter(head_outputs(model, name, encoder.vocabulary, sequences))
        for query in some:
            yield predictor.answer(query, list(islice(outputs, len(query.sequences))))


@torch.inference_mode()
def _transitions(head: nn.Module) -> Transitions | None:
    """The weights of a head's CRF, on the CPU, where tags are decoded."""
    assert isinstance(head, TaskHead)
    return None if head.crf is None else Transitions(*(one.cpu() for one in head.crf()))
