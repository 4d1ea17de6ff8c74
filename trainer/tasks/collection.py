"""What tasks on a collection share: documents and queries, and judgements of which belong together.

``data.train`` and the other splits name judgements; ``data.files`` the documents and the queries.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from configs.rules import COUNT, FRACTION, INDEX, Doc, OneOf, Unit
from data_pipeline import DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.collection import (
    Collection,
    Ranking,
    Relevance,
    TrainingGroup,
    best_first,
    is_relevant,
    training_groups,
)
from trainer.objectives.task import Part, TaskConfig, TaskFile
from trainer.scoring.ranking_metric import RANKING_SCORES, USUAL, ScoredQueries

NEGATIVES = Doc(
    "Documents that are not relevant, in each example: those judged so, then those of "
    "data.files.candidates by score, in turn; where these do not suffice, any others."
)


@dataclass
class CollectionTask(TaskConfig):
    """A task on judgements of documents and queries. An example is a relevant document."""

    negatives: Annotated[int, INDEX, NEGATIVES] = 0
    numbered_by_order: Annotated[
        bool, Doc("The judgements count the queries 1, 2, 3, ..., whatever their file says.")
    ] = False
    depth: Annotated[
        int,
        COUNT,
        Unit("documents"),
        Doc("How many of a query's data.files.candidates are used, the best first."),
    ] = 100
    metrics: Annotated[
        list[str],
        OneOf(*RANKING_SCORES),
        Doc(f"The scores, the primary first; none: {', '.join(USUAL)}."),
    ] = field(default_factory=list)
    scored: Annotated[dict[str, str], Doc("The files to score on; filled in by the job.")] = field(
        default_factory=dict
    )
    scored_fraction: Annotated[
        float | None,
        FRACTION,
        Doc("How many of the judged queries are scored; null: all; filled in by the job."),
    ] = None

    reads: ClassVar[tuple[str, ...]] = ("documents", "queries")
    can_read_some: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    not_encoded: ClassVar[tuple[str, ...]] = (*TaskConfig.not_encoded, "scored", "scored_fraction")

    def scored_on(self, file: TaskFile, tokenizer: Path) -> TaskConfig:
        others = {name: str(path) for name, path in file.others.items()}
        scored = {**others, "judgements": str(file.path)}
        return dataclasses.replace(self, scored=scored, scored_fraction=file.held_out)

    @property
    def scored_queries(self) -> ScoredQueries:
        """Which queries are scored, and where they and their documents are."""
        part = Part(is_held_out=True, fraction=self.scored_fraction)
        return ScoredQueries(self.scored, self.numbered_by_order, part.has)

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        return self.encode_part(file, encoder, Part(is_held_out=False))

    def encode_part(
        self, file: TaskFile, encoder: TextEncoder, part: Part
    ) -> Iterator[EncodedExample]:
        """The examples of the queries of a part: queries are held out with all their judgements."""
        collection = self.collection(file)
        judged = sorted(collection.relevance(str(file.path)).items())
        relevance = {query: ones for number, (query, ones) in enumerate(judged) if part.has(number)}
        if not any(is_relevant(one) for ones in relevance.values() for one in ones.values()):
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

    def collection(self, file: TaskFile) -> Collection:
        """The documents and queries."""
        documents, queries = str(file.others["documents"]), str(file.others["queries"])
        return Collection.read(documents, queries, self.numbered_by_order)

    def _candidates(self, collection: Collection, file: TaskFile) -> Ranking:
        """The first of each query's candidates; none where there is no file of them."""
        if "candidates" not in file.others:
            for key in self.changed("depth"):
                raise DataError(
                    f"{self.name}.{key}: is for data.files.candidates; set that too, or remove it"
                )
            return {}
        found = collection.ranking(str(file.others["candidates"]))
        return {query: best_first(ones, self.depth) for query, ones in found.items()}

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
        """What must be read to score the queries of these judgements."""
