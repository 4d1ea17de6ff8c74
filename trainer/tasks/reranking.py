"""Re-ranking with a cross-encoder: how well a document answers a query, read together."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.rules import COUNT
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.collection import (
    Collection,
    Ranking,
    Relevance,
    TrainingGroup,
    by_query,
    triples,
)
from model import REGRESSION, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.objectives.task import Part, TaskFile
from trainer.objectives.term import Term, register
from trainer.scoring.ranking_metric import PairRanking, RankingMetric
from trainer.tasks.collection import NEGATIVES, CandidatesTerm, CollectionTask

NAME = "reranking"


@register(NAME)
@dataclass
class Reranking(CollectionTask):
    """The score of a query and a document in one sequence (arXiv 1901.04085).

    The first `depth` of data.files.candidates, the ranking of a first stage, are put in the order
    of their scores. The loss is the cross-entropy of the relevant document among the documents of
    its example (arXiv 2101.08751).
    """

    negatives: Annotated[int, COUNT, NEGATIVES] = 4

    name: ClassVar[str] = NAME
    fields: ClassVar[tuple[str, ...]] = ("text_a", "text_b")  # of a table for `tandem predict`
    reads: ClassVar[tuple[str, ...]] = (*CollectionTask.reads, "candidates")
    ranks_by: ClassVar[type[RankingMetric]] = PairRanking

    def equip(self, model: ModelConfig) -> ModelConfig:
        return self.with_head(model, TaskHeadConfig(REGRESSION))

    def training_example(
        self, collection: Collection, group: TrainingGroup, encoder: TextEncoder
    ) -> EncodedExample:
        query = collection.queries[group.query]
        texts = [collection.documents[document] for document in (group.positive, *group.negatives)]
        sequences = [
            encoder.sequence([query.text, document.text], document.where) for document in texts
        ]
        return EncodedExample(sequences, {self.head: group.query})

    def scored_examples(
        self,
        collection: Collection,
        relevance: Relevance,
        candidates: Ranking,
        encoder: TextEncoder,
    ) -> Iterator[EncodedExample]:
        """A pair of texts for each candidate of each query."""
        readable = set(collection.readable)
        for number in relevance:
            query = collection.queries[number]
            listed = [document for document in candidates.get(number, {}) if document in readable]
            if query.text and not listed:
                why = f"data.files.candidates: has no document for the query {query.id!r}"
                raise DataError(f"{why} of {query.where}")
            for document in listed if query.text else ():
                text = collection.documents[document]
                yield EncodedExample(
                    [encoder.sequence([query.text, text.text], text.where)],
                    {
                        RankingMetric.query(self.head): number,
                        RankingMetric.document(self.head): document,
                    },
                )

    def references(self, file: TaskFile, part: Part) -> Any:
        """The judgements, and all candidates of the queries, also those that are not read."""
        references = super().references(file, part)
        judged = by_query(references["relevance"])
        ranking = self.collection(file).ranking(str(file.others["candidates"]))
        candidates = {query: ranking[query] for query in judged if query in ranking}
        return {**references, "candidates": triples(candidates)}

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return logits.view(-1, batch.sequences), (batch.row_labels(self.head) != NO_LABEL).float()

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return CandidatesTerm(self)
