"""The predictions of an exported model for a file of examples, in the order of the file."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from configs.errors import OptionError
from data_pipeline import EmptyText
from data_pipeline.task_files.questions import read_multiple_choice
from model import (
    CHOICE,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    Ability,
    ModelError,
    from_pretrained,
)
from trainer.prediction import fine_tuned
from trainer.prediction.embedding import VectorPredictor
from trainer.prediction.fine_tuned import FineTuned, Predictor, Query, Segments
from trainer.prediction.parts_of_texts import SpanPredictor, TagPredictor, translations
from trainer.prediction.texts import (
    SimilarityPredictor,
    TextPredictor,
    TextVectorPredictor,
    with_pairs,
    with_places,
)
from trainer.tasks.bi_encoder import BiEncoder
from trainer.tasks.retrieval import Retrieval


class ChoicePredictor(Predictor):
    """Answers each question with ``{"id", "choice", "answer", "probabilities"}``.

    All but the id is null where a text is missing.
    """

    def queries(self, path: str) -> Iterator[Query]:
        for question in read_multiple_choice(path, False, self.facts.encoding):
            texts = [question.texts_with(choice) for choice in question.choices]
            sequences: list[Segments] = []
            with suppress(EmptyText):
                sequences = [self.encoder.sequence(read, question.where) for read in texts]
            self.unanswered += not sequences
            yield Query(sequences, question)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        question = query.source
        if not outputs:
            return {"id": question.id, "choice": None, "answer": None, "probabilities": None}
        scores = torch.cat(list(outputs))
        best = int(scores.argmax())
        return {
            "id": question.id,
            "choice": best,
            "answer": question.choices[best],
            "probabilities": scores.softmax(dim=0).tolist(),
        }


PREDICTORS: dict[str, type[Predictor]] = {
    CLASSIFICATION: TextPredictor,
    MULTI_LABEL: TextPredictor,
    REGRESSION: TextPredictor,
    CHOICE: ChoicePredictor,
    TAGGING: TagPredictor,
    SPAN: SpanPredictor,
}
VECTOR_PREDICTORS: dict[str, type[Predictor]] = {  # by the task that a head of vectors is for
    BiEncoder.name: SimilarityPredictor,
    Retrieval.name: VectorPredictor,
}


def predictions(
    folder: Path,
    path: str,
    device: torch.device,
    columns: Mapping[str, str] = MappingProxyType({}),
    head: str | None = None,
    speed: float | None = None,
    encoding: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The predictions of the model in `folder` for each example of a file, in order.

    `columns` maps fields to the table's columns where they differ from those in training. `head`
    names the one to use of several, `encoding` that of the file where it is not that of training.
    With a `speed`, examples leave at the first layer that is certain, which each prediction tells.
    Raises ModelError for a model without a task head, for a head of a kind without a predictor, or
    without branches for a `speed`; OptionError for either where it translates; DataError for a file
    that cannot be read.
    """
    model = from_pretrained(folder).to(device)
    if Ability.GENERATE in model.config.abilities:
        _require_none(folder, {"--head": head, "--speed": speed})
        yield from translations(folder, model, path, device, columns, encoding)
        return
    tuned = FineTuned.of(folder, model, head, encoding)
    kind = _predictor_of(tuned)
    numbers = tuned.head.numbers
    others = (*kind.placed_fields, *numbers)
    facts = tuned.facts
    if kind is TextPredictor:
        facts = with_pairs(facts, path, columns)
    facts = with_places(facts, path, numbers).with_columns(columns, others)
    predictor = kind(tuned.head, facts, tuned.encoder, tuned.transitions(), columns)
    queries = predictor.queries(path)
    for some in fine_tuned.sorted_together(queries, path=path):
        yield from _answers(tuned, predictor, some, speed)
    needed = "a text or a number" if numbers else "a text"
    fine_tuned.tell_incomplete(path, predictor.unanswered, tuned.encoder, needed)


def _predictor_of(tuned: FineTuned) -> type[Predictor]:
    kind = tuned.head.kind
    if kind == VECTOR:
        return VECTOR_PREDICTORS.get(tuned.facts.settings.get("task", ""), TextVectorPredictor)
    if kind not in PREDICTORS:
        why = f"is of kind {kind}, whose output only its task can read"
        raise ModelError(f"{tuned.folder}: its head {tuned.name} {why}; call the model from Python")
    return PREDICTORS[kind]


def _require_none(folder: Path, options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            why = f"is for heads of tasks, and {folder} translates; remove it"
            raise OptionError(f"{option}: {why}")


def _answers(
    tuned: FineTuned, predictor: Predictor, queries: Sequence[Query], speed: float | None
) -> Iterator[dict[str, Any]]:
    sequences = [sequence for query in queries for sequence in query.sequences]
    if speed is not None:  # a classifier: a query has one sequence
        early = iter(tuned.early_outputs(sequences, speed))
        for query in queries:
            logits, layer = next(early) if query.sequences else (None, None)
            answer = predictor.answer(query, [] if logits is None else [logits])
            yield {**answer, "layer": layer}
        return
    numbers = [query.numbers for query in queries for _ in query.sequences]
    outputs = iter(tuned.outputs(sequences, numbers))
    for query in queries:
        yield predictor.answer(query, list(islice(outputs, len(query.sequences))))
