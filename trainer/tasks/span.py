"""Spans: where in a passage the answer to a question begins and ends (SQuAD 1.1 and 2.0)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from configs.rules import COUNT, OneOf, Unit
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.examples.example import Windows
from data_pipeline.task_files.contents import Dropped, present
from data_pipeline.task_files.questions import SpanQuestion, read_squad
from model import SPAN, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.objectives.labels import label_cross_entropy
from trainer.objectives.task import Part, ScoredByReferences, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.span_metric import ANSWER_SCORES, SpanMetric

NAME = "span"


@dataclass(frozen=True)
class ReadQuestion:
    """The tokens of a question and of its passage.

    begins, ends: where each token of the passage begins and ends, in characters. size: passage
    tokens in a window. step: tokens from the beginning of one window to that of the next.
    first_column: the column of a window's first passage token, after question and special tokens.
    """

    asked: Sequence[int]
    ids: list[int]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    size: int
    step: int
    first_column: int

    @cached_property
    def windows(self) -> Windows:
        """The passage tokens that each window holds."""
        return Windows(len(self.ids), self.size, self.step)

    def begins_in(self, window: slice) -> NDArray[np.int64]:
        """Where tokens of a window begin; -1 where another window shows more of their context.

        An answer begins in the window with the most context, as in BERT's code for SQuAD.
        """
        is_best = self.windows.best_starts[window] == window.start
        return np.where(is_best, self.begins[window], -1)


@register(NAME)
@dataclass
class Span(ScoredByReferences):
    """The span of a passage that answers a question (BERT, arXiv 1810.04805, section 4.2).

    A passage that does not fit is read in overlapping windows. In a window without the answer the
    target is [CLS], which also stands for "no answer".
    """

    stride: Annotated[
        int,
        COUNT,
        Unit("tokens"),
        "Distance from the beginning of one window to the beginning of the next.",
    ] = 128
    longest_question: Annotated[
        int, COUNT, Unit("tokens"), "Longer questions are truncated to this length."
    ] = 64
    longest_answer: Annotated[
        int, COUNT, Unit("tokens"), "The length of the longest span that may be predicted."
    ] = 30
    unanswerable: Annotated[
        bool, "Some questions have no answer (SQuAD 2.0); the model's score decides when."
    ] = False
    metrics: Annotated[
        list[str],
        OneOf(*ANSWER_SCORES),
        "The scores, the primary one first; empty: answer_f1 and exact_match.",
    ] = field(default_factory=list)

    name: ClassVar[str] = NAME
    needs_validation: ClassVar[bool] = True
    not_encoded: ClassVar[tuple[str, ...]] = (*ScoredByReferences.not_encoded, "longest_answer")

    def equip(self, model: ModelConfig) -> ModelConfig:
        return self.with_head(model, TaskHeadConfig(SPAN))

    def references(self, file: TaskFile, part: Part) -> Any:
        """Of each question: its id, its passage, and the right answers."""
        questions = file.first(present(read_squad(str(file.path), encoding=file.encoding)))
        return [
            (question.id, question.context, [answer.text for answer in question.answers])
            for question in questions
        ]

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        return self.encode_part(file, encoder, Part(is_held_out=False))

    def encode_part(
        self, file: TaskFile, encoder: TextEncoder, part: Part
    ) -> Iterator[EncodedExample]:
        """The windows of each question; one with a misplaced answer is scored, and not learnt."""
        dropped = Dropped()
        questions = dropped.present(read_squad(str(file.path), encoding=file.encoding))
        for number, question in enumerate(file.first(questions)):
            if not question.answers and not self.unanswerable:
                why = "has no answer; set unanswerable: true for SQuAD 2.0"
                raise DataError(f"{question.where}: {why}")
            if question.misplaced and not part.is_held_out:
                dropped.add("misplaced answer", question.misplaced)
                continue
            yield from self._windows(number, question, encoder)
        dropped.tell(file.path)

    def _windows(
        self, number: int, question: SpanQuestion, encoder: TextEncoder
    ) -> Iterator[EncodedExample]:
        read = self.read(question, encoder)
        first, last = -1, -1
        if question.answers and not question.misplaced:
            first, last = _tokens_of_answer(question, read.begins, read.ends)
        none = np.full(len(read.asked), NO_LABEL)
        for window in read.windows:
            holds = first >= 0 and window.start <= first and last < min(window.stop, len(read.ids))
            shift = read.first_column - window.start  # from a passage token's number to its column
            yield EncodedExample(
                [[encoder.array(read.asked), encoder.array(read.ids[window])]],
                {
                    self.head: first + shift if holds else 0,
                    last_token(self.head): last + shift if holds else 0,
                    SpanMetric.question(self.head): number,
                    SpanMetric.begins(self.head): np.concatenate([none, read.begins_in(window)]),
                    SpanMetric.ends(self.head): np.concatenate([none, read.ends[window]]),
                },
            )

    def read(self, question: SpanQuestion, encoder: TextEncoder) -> ReadQuestion:
        """The tokens of a question and its passage.

        Raises DataError where the question leaves no room for the passage.
        """
        ids = encoder.encode(question.question, question.where).ids
        asked = encoder.first(ids, self.longest_question, question.where)
        passage = encoder.encode(question.context, question.where)
        begins, ends = np.array(passage.offsets, np.int64).T
        size = encoder.capacity(2) - len(asked)
        if size < 1:
            why = f"a question of {len(asked)} tokens leaves no room for its passage"
            raise DataError(f"{question.where}: {why}; raise data.sequence_length")
        first_column = len(asked) + encoder.vocabulary.special_in(2) - 1  # the last is at the end
        step = min(self.stride, size)
        return ReadQuestion(asked, passage.ids, begins, ends, size, step, first_column)

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        both = _over_tokens(logits, batch).transpose(1, 2).flatten(0, 1)  # [B * 2, L]
        is_labelled = batch.row_labels(self.head) != NO_LABEL
        return both, is_labelled.repeat_interleave(2).float() / 2

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        names = self.metrics or ["answer_f1", "exact_match"]
        settings = self.longest_answer, self.unanswerable
        return (SpanMetric(self.head, names, self.stored_references, *settings),)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return SpanTerm(self)


def last_token(head: str) -> str:
    """The target that holds the column of an answer's last token; its first has the head's name."""
    return f"{head}_last"


def _over_tokens(logits: Tensor, batch: MicroBatch) -> Tensor:
    """The logits [B, L, 2] in float32, with padding ruled out.

    Padding gets -1e4 rather than -inf, so that the KL divergence stays finite.
    """
    return logits.float().masked_fill(~batch.attention_mask[..., None], -1e4)


def _tokens_of_answer(
    question: SpanQuestion, begins: NDArray[Any], ends: NDArray[Any]
) -> tuple[int, int]:
    """The first and the last token of the first answer."""
    answer = question.answers[0]
    inside = np.flatnonzero((ends > answer.start) & (begins < answer.end))
    if not len(inside):
        raise DataError(f"{question.where}: no token holds the answer {answer.text!r}")
    return int(inside[0]), int(inside[-1])


class SpanTerm(TaskTerm):
    """The mean of the cross-entropies of the answer's first and last token, over all attended ones.

    BERT, arXiv 1810.04805, section 4.2.
    """

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        logits = _over_tokens(inputs.features.heads[self.head], inputs.batch)
        first, count = label_cross_entropy(logits[..., 0], inputs.batch.row_labels(self.head))
        last, _ = label_cross_entropy(
            logits[..., 1], inputs.batch.row_labels(last_token(self.head))
        )
        return (first + last) / 2, count
