"""The base of tasks on a collection: documents, queries, and judgements of which belong together.

``data.train`` and the other splits name judgements; ``data.files`` the documents and the queries.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from configs.rules import COUNT, INDEX, OneOf, Unit
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.collection import (
    Collection,
    Ranking,
    Relevance,
    TrainingGroup,
    best_first,
    is_relevant,
    training_groups,
    triples,
)
from trainer.objectives.labels import label_cross_entropy
from trainer.objectives.task import Part, ScoredByReferences, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs
from trainer.scoring.metric import Metric
from trainer.scoring.ranking_metric import RANKING_SCORES, USUAL, RankingMetric

NEGATIVES = (
    "How many irrelevant documents each example has. Documents judged irrelevant come first, "
    "then documents of data.files.candidates by score, then any others."
)


@dataclass
class CollectionTask(ScoredByReferences):
    """A task on judgements of documents and queries. An example is a relevant document."""

    negatives: Annotated[int, INDEX, NEGATIVES] = 0
    numbered_by_order: Annotated[
        bool, "The judgements count the queries 1, 2, 3, ..., whatever their file says."
    ] = False
    depth: Annotated[
        int,
        COUNT,
        Unit("documents"),
        "How many of a query's data.files.candidates are used, the best first.",
    ] = 100
    metrics: Annotated[
        list[str],
        OneOf(*RANKING_SCORES),
        f"The scores, the primary first; none: {', '.join(USUAL)}.",
    ] = field(default_factory=list)

    reads: ClassVar[tuple[str, ...]] = ("documents", "queries")
    can_read_some: ClassVar[bool] = False
    ranks_by: ClassVar[type[RankingMetric]]

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        return (self.ranks_by(self.head, self.metrics or USUAL, self.stored_references),)

    def references(self, file: TaskFile, part: Part) -> Any:
        """The judgements of the queries of a part, and which of these queries have no text."""
        collection = self.collection(file)
        relevance = self._relevance(collection, file, part)
        without_text = [query for query in relevance if not collection.queries[query].text]
        return {"relevance": triples(relevance), "without_text": without_text}

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        return self.encode_part(file, encoder, Part(is_held_out=False))

    def encode_part(
        self, file: TaskFile, encoder: TextEncoder, part: Part
    ) -> Iterator[EncodedExample]:
        """The examples of the queries of a part: queries are held out with all their judgements."""
        collection = self.collection(file)
        relevance = self._relevance(collection, file, part)
        if not any(
            is_relevant(judgement)
            for of_query in relevance.values()
            for judgement in of_query.values()
        ):
            raise DataError(
                f"{file.path}: has too few queries to hold out some with relevant documents; "
                "set data.validation, or raise data.validation_fraction"
            )
        candidates = self._candidates(collection, file)
        if part.is_held_out:
            yield from self.scored_examples(collection, relevance, candidates, encoder)
            return
        for group in training_groups(collection, relevance, candidates, self.negatives):
            yield self.training_example(collection, group, encoder)

    def _relevance(self, collection: Collection, file: TaskFile, part: Part) -> Relevance:
        """The judgements of the queries of a part."""
        judged = sorted(collection.relevance(str(file.path)).items())
        return {query: ones for number, (query, ones) in enumerate(judged) if part.has(number)}

    def collection(self, file: TaskFile) -> Collection:
        """The documents and queries."""
        documents, queries = str(file.others["documents"]), str(file.others["queries"])
        return Collection.read(documents, queries, self.numbered_by_order, file.encoding)

    def _candidates(self, collection: Collection, file: TaskFile) -> Ranking:
        """The first of each query's candidates; none where there is no file of them."""
        if "candidates" not in file.others:
            for key in self.changed("depth"):
                raise DataError(
                    f"{self.name}.{key}: is for data.files.candidates; set that too, or remove it"
                )
            return {}
        rankings = collection.ranking(str(file.others["candidates"]))
        return {query: best_first(ones, self.depth) for query, ones in rankings.items()}

    @abstractmethod
    def training_example(
        self, collection: Collection, group: TrainingGroup, encoder: TextEncoder
    ) -> EncodedExample:
        """A query with a relevant document and others."""

    @abstractmethod
    def scored_examples(
        self,
        collection: Collection,
        relevance: Relevance,
        candidates: Ranking,
        encoder: TextEncoder,
    ) -> Iterator[EncodedExample]:
        """The examples that must be read to score the queries of these judgements."""


class CandidatesTerm(TaskTerm):
    """Cross-entropy among an example's own documents, of which the first is relevant."""

    def __init__(self, config: CollectionTask, temperature: float | None = None) -> None:
        super().__init__(config)
        self.temperature, self.choices = temperature, config.choices

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        scores, weights = self.choices(inputs.features.heads[self.head], inputs.batch)
        scores = scores if self.temperature is None else scores / self.temperature
        return label_cross_entropy(scores, torch.where(weights > 0, 0, NO_LABEL))
