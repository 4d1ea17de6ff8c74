"""Retrieval with a dual encoder: the documents whose vectors are nearest to that of a query."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from configs.rules import COUNT, INDEX, OneOf, Unit, positive
from configs.section import Refusal
from data_pipeline import NO_LABEL, EmptyText, EncodedExample, TextEncoder
from data_pipeline.task_files.collection import Collection, Ranking, Relevance, TrainingGroup
from data_pipeline.task_files.retrieval import RetrievalText
from model import VECTOR, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.objectives.task import WholeBatchTerm, against_all, over_ranks
from trainer.objectives.term import ExampleLosses, Term, register
from trainer.scoring.ranking_metric import RankingMetric, VectorRanking
from trainer.tasks.bi_encoder import POOLINGS
from trainer.tasks.collection import CandidatesTerm, CollectionTask

NAME = "retrieval"


@register(NAME)
@dataclass
class Retrieval(CollectionTask):
    """One encoder makes a vector of a query and of a document; the nearest is the best.

    The loss is the cross-entropy of the relevant document among the candidates (DPR, arXiv
    2004.04906). With `in_batch` these are the documents of all examples of the step's global batch,
    without other documents that are judged relevant to the query. Otherwise they are the example's
    own documents.
    """

    in_batch: Annotated[
        bool, "The documents of the other examples of a step are negatives too."
    ] = True
    similarity: Annotated[
        str,
        OneOf("cosine", "dot"),
        "The similarity of two vectors; cosine: they are scaled to length 1.",
    ] = "cosine"
    temperature: Annotated[
        float, positive(1e3), "Divides the similarities; 1 is usual for dot."
    ] = 0.05
    pooling: Annotated[
        str, OneOf(*POOLINGS), "A text's vector: the mean of the last states, or the first."
    ] = "mean"
    size: Annotated[int, INDEX, "Width to which vectors are projected; 0: no projection."] = 0
    query_length: Annotated[int, COUNT, Unit("tokens"), "A query is cut after this many."] = 64
    query_prefix: Annotated[str, "Text before every query, such as 'query: '."] = ""
    document_prefix: Annotated[str, "Text before every document."] = ""

    name: ClassVar[str] = NAME
    may_read: ClassVar[tuple[str, ...]] = ("candidates",)
    ranks_by: ClassVar[type[RankingMetric]] = VectorRanking
    not_encoded: ClassVar[tuple[str, ...]] = (
        *CollectionTask.not_encoded,
        *("in_batch", "similarity", "temperature", "pooling", "size"),
    )

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if not self.in_batch and not self.negatives:
            yield "negatives", "must be 1 or more without in_batch: nothing else is a negative"

    def equip(self, model: ModelConfig) -> ModelConfig:
        head = TaskHeadConfig(
            VECTOR,
            pooling=POOLINGS[self.pooling],
            transform="none",
            size=self.size,
            normalise=self.similarity == "cosine",
        )
        return self.with_head(model, head)

    def training_example(
        self, collection: Collection, group: TrainingGroup, encoder: TextEncoder
    ) -> EncodedExample:
        chosen = (group.positive, *group.negatives)
        sequences = [
            self.query_sequence(collection.queries[group.query], encoder),
            *(
                self.document_sequence(collection.documents[document], encoder)
                for document in chosen
            ),
        ]
        targets: dict[str, float | tuple[int, ...] | NDArray[np.int64]] = {
            self.head: group.query,
            documents_of(self.head): chosen,
            relevant_of(self.head): group.relevant,
        }
        return EncodedExample(sequences, targets)

    def scored_examples(
        self,
        collection: Collection,
        relevance: Relevance,
        candidates: Ranking,
        encoder: TextEncoder,
    ) -> Iterator[EncodedExample]:
        """The queries, and every document of the collection; each a text of its own."""
        query, document = RankingMetric.query(self.head), RankingMetric.document(self.head)
        for number in relevance:
            if (text := collection.queries[number]).text:
                sequence = self.query_sequence(text, encoder)
                yield EncodedExample([sequence], {query: number, document: NO_LABEL})
        for number in collection.readable:
            try:
                sequence = self.document_sequence(collection.documents[number], encoder)
            except EmptyText:  # nothing finds it, as one without a text
                continue
            yield EncodedExample([sequence], {query: NO_LABEL, document: number})

    def query_sequence(
        self, query: RetrievalText, encoder: TextEncoder
    ) -> list[NDArray[np.integer]]:
        """The sequence that is read of a query."""
        ids = encoder.encode(self.query_prefix + query.text, query.where).ids
        room = min(self.query_length, encoder.capacity(1))
        return [encoder.array(encoder.first(ids, room, query.where))]

    def document_sequence(
        self, document: RetrievalText, encoder: TextEncoder
    ) -> list[NDArray[np.integer]]:
        """The sequence that is read of a document."""
        return encoder.sequence([self.document_prefix + document.text], document.where)

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Among the example's own documents: their similarities to the query."""
        vectors = by_example(logits, batch)
        scores = (vectors[:, :1] * vectors[:, 1:]).sum(dim=-1)
        return scores, (batch.row_labels(self.head) != NO_LABEL).float()

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return InBatchTerm(self) if self.in_batch else CandidatesTerm(self, self.temperature)


def documents_of(head: str) -> str:
    """The target that holds the numbers of an example's documents."""
    return f"{head}_documents"


def relevant_of(head: str) -> str:
    """The target that holds the numbers of all documents that are relevant to its query."""
    return f"{head}_relevant"


def by_example(vectors: Tensor, batch: MicroBatch) -> Tensor:
    """[B * C, D] as float32 [B, C, D]: of each example the query, the positive, the negatives."""
    return vectors.float().unflatten(0, (-1, batch.sequences))


class InBatchTerm(WholeBatchTerm):
    """Cross-entropy among the documents of the whole global batch."""

    def __init__(self, config: Retrieval) -> None:
        super().__init__(config)
        self.temperature = config.temperature

    def over_batch(
        self, outputs: Sequence[Tensor], batches: Sequence[MicroBatch], theirs: Sequence[Tensor]
    ) -> list[ExampleLosses]:
        vectors = torch.cat(
            [by_example(output, batch) for output, batch in zip(outputs, batches, strict=True)]
        )
        numbers = over_ranks(
            torch.cat([batch.targets[documents_of(self.head)].labels for batch in batches])
        )
        first, count = dist.get_rank() * len(vectors), numbers.shape[1]
        positives = (first + torch.arange(len(vectors), device=vectors.device)) * count
        rows = [len(batch.row_labels(self.head)) for batch in batches]
        hidden = torch.cat(
            [
                hidden_documents(
                    numbers.flatten(), batch.targets[relevant_of(self.head)].labels, places
                )
                for batch, places in zip(batches, positives.split(rows), strict=True)
            ]
        )
        is_labelled = torch.cat([batch.row_labels(self.head) for batch in batches]) != NO_LABEL
        positives = torch.where(is_labelled, positives, NO_LABEL)

        def loss(queries: Tensor, documents: Tensor) -> Tensor:  # [r, D], [R, K, D]
            flat = documents.flatten(0, 1)
            return contrastive(queries, flat, positives, hidden, self.temperature)

        losses, of_queries, of_documents = against_all(vectors[:, 0], vectors[:, 1:], loss)
        gradients = torch.cat([of_queries[:, None], of_documents], dim=1)
        return [
            ExampleLosses(of_batch, gradient.flatten(0, 1))
            for of_batch, gradient in zip(losses.split(rows), gradients.split(rows), strict=True)
        ]


def hidden_documents(documents: Tensor, relevant: Tensor, positives: Tensor) -> Tensor:
    """The documents that are no negatives of a query: bool [B, N].

    They are those that are relevant to it, other than its positive, and those that could not be
    read. documents: numbers [N]; relevant: numbers [B, M]; either is -100 where there is none;
    positives: the column of each query's positive [B].
    """
    hidden = (documents[None, :, None] == relevant[:, None, :]).any(dim=-1)
    hidden |= documents == NO_LABEL
    hidden[torch.arange(len(positives), device=positives.device), positives] = False
    return hidden


def contrastive(
    queries: Tensor, documents: Tensor, positives: Tensor, hidden: Tensor, temperature: float
) -> Tensor:
    """-log softmax of the query's positive among all documents, by dot products over a temperature.

    The loss of dual encoders (DPR, arXiv 2004.04906, section 3.2; InfoNCE, 1807.03748), for each
    query: [B]. queries: [B, D]; documents: [N, D], float32; positives: the column of each query's
    positive [B], -100 for a query that does not count; hidden: bool [B, N].
    """
    scores = queries @ documents.t() / temperature
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return F.cross_entropy(scores, positives, ignore_index=NO_LABEL, reduction="none")
