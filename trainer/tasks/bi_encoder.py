"""How alike two texts are: the cosine of their vectors, each made by the encoder apart."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.rules import INDEX, OneOf, positive
from data_pipeline import DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.contents import Dropped
from data_pipeline.task_files.tables import as_number
from model import VECTOR, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.objectives.labels import squared_error
from trainer.objectives.task import LABEL, TaskConfig, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import CosineMetric
from trainer.scoring.task_scores import NUMBER_SCORES

POOLINGS = {"mean": "mean", "cls": "first"}


@register("bi_encoder")
@dataclass
class BiEncoder(TaskConfig):
    """The similarity of two texts, by the cosine of their vectors; reads text_a, text_b and label.

    One encoder reads each text separately (Sentence-BERT, arXiv 1908.10084). The loss is the
    squared difference of the cosine from the label, which is a number.
    """

    pooling: Annotated[
        str, OneOf(*POOLINGS), "A text's vector: the mean of the last states, or the first."
    ] = "mean"
    dense: Annotated[bool, "Put the pooled state through a dense layer with tanh."] = False
    size: Annotated[int, INDEX, "Width to which vectors are projected; 0: no projection."] = 0
    highest: Annotated[
        float,
        positive(1e9),
        "The label of two texts with the same meaning (STS-B: 5); labels are divided by it.",
    ] = 1.0
    metrics: Annotated[
        list[str],
        OneOf(*NUMBER_SCORES),
        "The scores, the primary one first; empty: spearman and pearson.",
    ] = field(default_factory=list)

    name: ClassVar[str] = "bi_encoder"
    any_tokenizer: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = ("text_a", "text_b", LABEL)
    not_encoded: ClassVar[tuple[str, ...]] = (*TaskConfig.not_encoded, "pooling", "dense", "size")

    def equip(self, model: ModelConfig) -> ModelConfig:
        head = TaskHeadConfig(
            VECTOR,
            pooling=POOLINGS[self.pooling],
            transform="tanh" if self.dense else "none",
            size=self.size,
            normalise=True,
        )
        return self.with_head(model, head)

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        dropped = Dropped()
        rows = self.rows(file, *self.fields, dropped=dropped)
        for place, row in file.first(rows):
            sequences = [encoder.sequence([row[name]], place) for name in self.texts]
            label = as_number(place, LABEL, row[LABEL]) / self.highest
            if abs(label) > 1:
                why = f"is more than highest: {self.highest:g}"
                remedy = f"set objective.{self.name}.highest of every learner"
                raise DataError(f"{place}: {LABEL}: {row[LABEL]} {why}; {remedy}")
            yield EncodedExample(sequences, {self.head: label})
        dropped.tell(file.path)

    @property
    def predicts_a_number(self) -> bool:
        return True

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        is_labelled = batch.row_labels(self.head) >= -1  # not of NaN, nor of -100
        return CosineMetric.cosines(logits)[:, None], is_labelled.float()

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        return (CosineMetric(self.head, self.metrics or ["spearman", "pearson"]),)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return BiEncoderTerm(self)


class BiEncoderTerm(TaskTerm):
    """Squared difference of the cosine from the label."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        cosines = CosineMetric.cosines(inputs.features.heads[self.head])
        return squared_error(cosines[:, None], inputs.batch.row_labels(self.head))
