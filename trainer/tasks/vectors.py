"""Vectors of plain text, learnt from those of a teacher: no labels are needed."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from configs.rules import INDEX, OneOf, positive
from configs.section import Refusal
from data_pipeline import NO_LABEL, EmptyText, EncodedExample, TextEncoder
from data_pipeline.task_files.contents import Dropped, place, read_lines
from data_pipeline.task_files.tables import Row, is_table
from data_pipeline.text.sentences import sentence_ends
from model import VECTOR, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.learner_names import TEACHER
from trainer.objectives.stages import STATES
from trainer.objectives.task import (
    HeadTermConfig,
    Part,
    TaskConfig,
    TaskFile,
    TaskTerm,
    WholeBatchTerm,
    against_all,
    over_ranks,
)
from trainer.objectives.term import (
    ExampleLosses,
    LossInputs,
    TeacherTermConfig,
    Term,
    TermConfig,
    register,
)
from trainer.scoring.columns import NUMBER, Column
from trainer.scoring.metric import GatheredMetric, Metric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import NUMBER_SCORES, require_packages
from trainer.tasks.bi_encoder import POOLINGS

KL, MSE = "kl", "mse"
SPEARMAN = "spearman"
MOST = 1000  # texts, the first ones, of which every pair is compared
TEXT, SENTENCE = "text", "sentence"
Distance = Callable[[Tensor, Tensor], Tensor]  # of vectors [N, D] and a teacher's: [N]


def cosine_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """1 - cos(s, t), for each text."""
    return 1 - F.cosine_similarity(ours.float(), theirs.float(), dim=1)


def squared_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """|s - t|^2, for each text; 2 (1 - cos) where both have length 1."""
    return (ours.float() - theirs.float()).square().sum(dim=1)


@register("vectors")
@dataclass
class Vectors(TaskConfig, TeacherTermConfig):
    """1 - cos of a text's vector and the teacher's, of texts without labels.

    It reads a file with a text on each line, or a table with the column text. If the widths differ,
    a linear projection maps the student's vector to the teacher's width; it is not exported. If the
    teacher has no head for vectors, and no modules.json that says how it pools, it pools as this
    task says.
    """

    pooling: Annotated[
        str, OneOf(*POOLINGS), "A text's vector: the mean of the last states, or the first."
    ] = "mean"
    normalise: Annotated[bool, "Scale a text's vector to length 1."] = True
    size: Annotated[int, INDEX, "Width to which vectors are projected; 0: no projection."] = 0
    unit: Annotated[
        str, OneOf(TEXT, SENTENCE), "An example is a text, or each of its sentences."
    ] = TEXT
    prefix: Annotated[str, "Text before every text, such as 'query: '."] = ""

    name: ClassVar[str] = "vectors"
    fields: ClassVar[tuple[str, ...]] = ("text",)
    compares: ClassVar[str] = STATES
    not_encoded: ClassVar[tuple[str, ...]] = (
        *TaskConfig.not_encoded,
        *("teacher", "pooling", "normalise", "size"),
    )

    def conflicts(self) -> Iterator[Refusal]:
        yield from TaskConfig.conflicts(self)
        yield from self.conflicts_with_mean()

    def equip(self, model: ModelConfig) -> ModelConfig:
        return self.with_head(model, dataclasses.replace(self.teacher_head, size=self.size))

    @property
    def teacher_head(self) -> TaskHeadConfig:
        pooling = POOLINGS[self.pooling]
        return TaskHeadConfig(VECTOR, [], pooling, transform="none", normalise=self.normalise)

    def rows(self, file: TaskFile, *fields: str, dropped: Dropped) -> Iterator[Row]:
        path = str(file.path)
        if is_table(path):
            yield from super().rows(file, *fields, dropped=dropped)
            return
        lines = read_lines(path, file.encoding)
        yield from dropped.present(Row(place(path, n), {TEXT: line.strip()}) for n, line in lines)

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        dropped = Dropped()
        for where, row in file.first(self.rows(file, *self.fields, dropped=dropped)):
            for text in self._units(row[TEXT]):
                try:
                    sequence = encoder.sequence([self.prefix + text], where)
                except EmptyText:
                    dropped.add("text without a token", where)
                    continue
                yield EncodedExample([sequence], {self.head: 0})
        dropped.tell(file.path)

    def encode_part(
        self, file: TaskFile, encoder: TextEncoder, part: Part
    ) -> Iterator[EncodedExample]:
        for number, example in enumerate(super().encode_part(file, encoder, part)):
            yield dataclasses.replace(example, targets={self.head: number})

    def _units(self, text: str) -> Iterator[str]:
        ends = sentence_ends(text) if self.unit == SENTENCE else [len(text)]
        for first, end in zip([0, *ends], ends, strict=False):
            if sentence := text[first:end].strip():
                yield sentence

    @property
    def predicts_a_number(self) -> bool:
        return True

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The numbers of each vector, which all count."""
        return logits.flatten()[:, None], logits.new_ones(logits.numel())

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        return (VectorAgreement(self.head, self.source or TEACHER),)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return DistanceTerm(self, student, teacher, cosine_distance)


@dataclass
class VectorTermConfig(HeadTermConfig, TeacherTermConfig):
    """The section of a term about the vectors of the task beside it."""

    compares: ClassVar[str] = STATES

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        head = model.task_heads.get(self.head)
        if head is not None and head.kind != VECTOR:
            yield f"is about vectors, and {self.head} has none; put vectors or retrieval beside it"


@register("vector_mse")
@dataclass
class VectorMSE(VectorTermConfig):
    """|s - t|^2 of a text's vector and the teacher's, in the teacher's width as for `vectors`.

    The objective must contain the task too: vectors, retrieval or bi_encoder.
    """

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return DistanceTerm(self, student, teacher, squared_distance)


@register("vector_similarities")
@dataclass
class VectorSimilarities(VectorTermConfig):
    """How similar each text of the global batch is to the others, by the student and the teacher.

    Similarities are cosines, so the widths may differ. The objective must also contain the
    task: vectors, retrieval or bi_encoder. The loss is computed over the whole global batch, on any
    number of ranks and in any micro-batches.
    """

    loss: Annotated[
        str,
        OneOf(KL, MSE),
        "kl: of the softmax over the other texts (SEED, arXiv 2101.04731). mse: the mean over "
        "them of the squared difference (as arXiv 1907.09682).",
    ] = KL
    temperature: Annotated[float, positive(1e3), "Divides the similarities of kl."] = 0.05

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.loss == MSE and [*self.changed("temperature")]:
            yield "temperature", "has no part in mse; remove it"

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return SimilaritiesTerm(self)


class DistanceTerm(TaskTerm):
    """The distance of each vector from the teacher's, the mean over the texts of an example."""

    def __init__(
        self, config: TermConfig, student: ModelShape, teacher: ModelShape, distance: Distance
    ) -> None:
        super().__init__(config)
        self.models, self.distance = (student, teacher), distance
        self.projection: nn.Linear | None = None

    def stand_beside(self, terms: Mapping[str, TermConfig]) -> None:
        tasks = (term for term in terms.values() if isinstance(term, TaskConfig))
        task = next(task for task in tasks if task.head == self.head)
        ours, theirs = (_width(model, task) for model in self.models)
        if ours != theirs:
            self.projection = nn.Linear(ours, theirs)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        ours, (theirs,) = inputs.features.heads[self.head], self.outputs(inputs).heads[self.head]
        if self.projection is not None:
            ours = self.projection(ours)
        distances = self.distance(ours, theirs).unflatten(0, (-1, inputs.batch.sequences))
        is_labelled = _is_labelled(inputs.batch, self.head)
        return (distances.mean(dim=1) * is_labelled).sum(), is_labelled.sum()


class SimilaritiesTerm(WholeBatchTerm):
    """See `VectorSimilarities`; the mean over the texts of an example."""

    def __init__(self, config: VectorSimilarities) -> None:
        super().__init__(config)
        self.temperature = config.temperature if config.loss == KL else None

    def over_batch(
        self, outputs: Sequence[Tensor], batches: Sequence[MicroBatch], theirs: Sequence[Tensor]
    ) -> list[ExampleLosses]:
        ours = torch.cat([*outputs]).float()
        teacher = F.normalize(torch.cat([*theirs]).float(), dim=1)
        sequences, sizes = batches[0].sequences, [len(output) for output in outputs]
        is_labelled = torch.cat([_is_labelled(batch, self.head) for batch in batches])
        is_text = is_labelled.repeat_interleave(sequences)
        texts = torch.arange(len(ours), device=ours.device)
        is_other = over_ranks(is_text)[None].repeat(len(ours), 1)
        is_other[texts, dist.get_rank() * len(ours) + texts] = False
        teachers = over_ranks(teacher)

        def loss(rows: Tensor, everyone: Tensor) -> Tensor:
            cosines = F.normalize(rows, dim=1) @ F.normalize(everyone, dim=1).t()
            target = teacher @ teachers.t()  # here, where nothing autocasts
            losses = similarity_losses(cosines, target, is_other, self.temperature)
            return losses * is_text / sequences

        losses, of_rows, of_others = against_all(ours, ours, loss)
        of_examples = losses.unflatten(0, (-1, sequences)).sum(dim=1)
        rows = [size // sequences for size in sizes]
        return [
            ExampleLosses(of_batch, gradient)
            for of_batch, gradient in zip(
                of_examples.split(rows), (of_rows + of_others).split(sizes), strict=True
            )
        ]


def similarity_losses(
    ours: Tensor, theirs: Tensor, is_other: Tensor, temperature: float | None
) -> Tensor:
    """The loss of each text, by its cosines with the others [r, N]: [r]; 0 without another text.

    KL(softmax(theirs / T) || softmax(ours / T)), or with T None the mean of (ours - theirs)^2.
    is_other: bool [r, N].
    """
    if temperature is None:
        squares = (ours - theirs).square() * is_other
        return squares.sum(dim=1) / is_other.sum(dim=1).clamp(min=1)
    lowest = torch.finfo(ours.dtype).min
    logs = [
        F.log_softmax((cosines / temperature).masked_fill(~is_other, lowest), dim=1)
        for cosines in (ours, theirs)
    ]
    terms = logs[1].exp() * (logs[1] - logs[0])
    return terms.masked_fill(~is_other, 0.0).sum(dim=1)


def _is_labelled(batch: MicroBatch, head: str) -> Tensor:
    """Whether an example counts, bool [examples]: it could be read."""
    labels = batch.row_labels(head)
    return labels >= -1 if labels.is_floating_point() else labels != NO_LABEL


def _width(model: ModelShape, task: TaskConfig) -> int:
    """The width of the vectors that a model makes for a task."""
    assert isinstance(model, ModelConfig)
    equipped = model if task.has_head(model) else task.equip(model)
    head = equipped.task_heads[task.head]
    return head.outputs or model.hidden_size * max(1, len(head.layers))


class VectorAgreement(GatheredMetric[ScoreInputs]):
    """Spearman's correlation of the cosines between texts with those by the vectors of a teacher.

    The target of the head numbers the texts from 0. Without the teacher's vectors there is no
    score.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, head: str, compares: str) -> None:
        require_packages([SPEARMAN])
        self.head, self.compares = head, compares
        self.columns = (Column(f"{head}_{SPEARMAN}", SPEARMAN, NUMBER),)

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[texts, 2 + D + D']: number, D, the model's vector and the teacher's, of length 1."""
        theirs = outputs.teachers.get(self.compares or "", {}).get(self.head)
        if theirs is None:
            return self.empty(outputs.batch.input_ids.device)
        numbers, ours = outputs.batch.row_labels(self.head), outputs.features.heads[self.head]
        vectors = [F.normalize(rows.double(), dim=1) for rows in (ours, theirs)]
        widths = torch.full_like(numbers, ours.shape[1])
        rows = torch.cat([torch.stack([numbers, widths], dim=1), *vectors], dim=1)
        return rows[(numbers != NO_LABEL) & (numbers < MOST)]

    def finish(self, total: Tensor) -> dict[str, float]:
        if len(total) < 3:
            return {}
        rows = total[total[:, 0].argsort()]
        width = 2 + int(rows[0, 1])
        above = np.triu_indices(len(rows), k=1)
        ours, theirs = (
            (vectors @ vectors.t()).cpu().numpy()[above]
            for vectors in (rows[:, 2:width], rows[:, width:])
        )
        score = NUMBER_SCORES[SPEARMAN](ours, theirs)
        return {self.columns[0].name: score} if np.isfinite(score) else {}
