"""Examples for an analysis: text with fixed masks, or the validation examples of a task."""

import string
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from configs.errors import OptionError
from data_pipeline import MASKED, Batch, DataError, ExampleSplit, MaskingConfig, Target, Vocabulary
from data_pipeline.masking.masker import Masker
from data_pipeline.reading.batches import filled
from data_pipeline.task_files.contents import source_name
from data_pipeline.text.documents import Problem, location_of, read_documents
from data_pipeline.tokenization.tokenizer import load
from model import Model, ModelError
from trainer.batches import MicroBatch, to_micro_batches
from trainer.config import JobConfig
from trainer.evaluation.held_out import SEED
from trainer.evaluation.labelled_files import LabelledExamples
from trainer.job_data.examples import tasks_of, views_of
from trainer.job_tree import heads_by_kind
from trainer.learners.module import score
from trainer.scoring.columns import LOSS, Column
from trainer.scoring.metric import Tally
from trainer.scoring.scores import MaskedTokens
from trainer.task_facts import FILE, require_own_tokenizer

ROWS = 16  # sequences of text in a forward pass
LENGTH = 128  # of a sequence of text, in tokens, where the model reads that many


class Examples(ABC):
    """The examples that a model reads while it is analysed.

    column: the score by which heads are ranked. columns: all scores. scored: what they are of, in
    words.
    """

    column: Column
    columns: Sequence[Column]
    scored: str

    @abstractmethod
    def maps(self) -> Iterator[MicroBatch]:
        """The sequences whose attention is looked at, without masks."""

    @abstractmethod
    def score(self, model: Model) -> dict[str, float]:
        """The model's scores by column; one that is undefined is left out."""


class TextExamples(Examples):
    """The first sequences of a text: [CLS], a part of a document, [SEP].

    The scores are those of masked language modelling. The masks are the same for every model that
    has the same tokenizer, by the seed of all held-out text.
    """

    def __init__(
        self, model: Model, folder: Path, path: str, length: int | None, limit: int
    ) -> None:
        """`path` is a file of text, as `tandem data build` reads it, or ``-``; `length` in tokens.

        Raises DataError for one without text, ModelError for a model without a masked-LM head,
        OptionError for one with too few positions.
        """
        if model.head is None:
            raise ModelError(f"{folder}: has no masked-LM head; name a task instead of a text")
        longest = model.config.longest_sequence
        length = length or min(LENGTH, longest or LENGTH)
        if longest is not None and length > longest:
            raise OptionError(f"--length {length}: {folder} reads {longest} tokens at most")
        tokenizer, vocabulary = load(folder)
        self._plain = _text_batch(tokenizer, vocabulary, path, length, limit)
        self._masked = _with_masks(self._plain, vocabulary)
        if not self._masked.targets[MASKED].is_labelled.any():
            raise DataError(f"{source_name(path)}: too short to mask any token; name a longer text")
        self._device = next(model.parameters()).device
        metric = MaskedTokens()
        self._metrics, self.columns, self.column = (metric,), metric.columns, LOSS
        self.scored = f"{len(self._plain.input_ids):,} sequences, 15% of their tokens masked"

    def maps(self) -> Iterator[MicroBatch]:
        yield from to_micro_batches(self._plain, ROWS, self._device)

    @torch.inference_mode()
    def score(self, model: Model) -> dict[str, float]:
        tally = Tally(self._metrics, self._device)
        for batch in to_micro_batches(self._masked, ROWS, self._device):
            tally.add(score(model, batch, self._metrics))
        return tally.finish()


class TaskExamples(Examples):
    """The validation examples of a task, for a model that was fine-tuned on it."""

    def __init__(self, model: Model, folder: Path, job: JobConfig, limit: int) -> None:
        """`job` is about one task; its examples are encoded with the tokenizer that it names.

        Raises ModelError for a model whose head is not the task's, DataError and TrainingError for
        examples that cannot be read.
        """
        task = tasks_of(job)[0].task
        if task.head not in job.teacher.architecture.task_heads:
            raise ModelError(f"{task.name}: has no head of its own whose scores compare")
        self._scored = LabelledExamples(model, folder, _about_head_of(model, folder, job))
        self._job, self._device = self._scored.job, next(model.parameters()).device
        metrics = self._scored.metrics
        self.columns = [column for metric in metrics for column in metric.columns]
        self.column = metrics[0].primary
        views = views_of(self._job, self._scored.corpus.name, SEED)
        self._split = ExampleSplit(self._scored.corpus, "val", views=views)
        chosen = np.linspace(0, self._split.total - 1, min(limit, self._split.total))
        self._looked_at = chosen.round().astype(np.int64)
        self.scored = f"{self._split.total:,} validation examples"

    def maps(self) -> Iterator[MicroBatch]:
        for first in range(0, len(self._looked_at), self._job.batch.micro_batch):
            numbers = self._looked_at[first : first + self._job.batch.micro_batch]
            batch = self._split.batch(numbers, np.zeros_like(numbers))
            for micro in to_micro_batches(batch, len(numbers), self._device):
                yield micro.view(self._job.teacher.form)

    def score(self, model: Model) -> dict[str, float]:
        return self._scored.score(model, self._scored.metrics)


def _about_head_of(model: Model, folder: Path, job: JobConfig) -> JobConfig:
    """The job with its task's head under the name that the model in `folder` has for it."""
    (task,) = tasks_of(job)
    needed = job.teacher.architecture.task_heads[task.task.head].kind
    kinds = {name: head.kind for name, head in model.config.task_heads.items()}
    names = {} if (folder / FILE).exists() else heads_by_kind(kinds, {task.task.head: needed})
    for name in names:
        named = replace(task.task, head_name=name)
        objective = job.teacher.objective.with_task(task.name, named)
        return replace(job, teacher=replace(job.teacher, objective=objective))
    return job


def delimiters(folder: Path, model: Model) -> NDArray[np.bool_]:
    """Which tokens are [CLS], [SEP] or punctuation: [vocabulary].

    Raises DataError where the folder has no tokenizer, or not the model's.
    """
    tokenizer, vocabulary = load(folder)
    require_own_tokenizer(folder, vocabulary, model.config)
    table = np.zeros(vocabulary.vocab_size, bool)
    table[[vocabulary.cls, vocabulary.sep]] = True
    for number in vocabulary.ordinary.tolist():
        table[number] = _is_punctuation(tokenizer.decode([number]).removeprefix("##").strip())
    return table


def _is_punctuation(text: str) -> bool:
    """Whether a token has nothing but punctuation, ASCII's symbols included, as BERT's words."""
    return bool(text) and all(
        character in string.punctuation or unicodedata.category(character).startswith("P")
        for character in text
    )


def _pieces(tokenizer: tokenizers.Tokenizer, path: str, room: int) -> Iterator[list[int]]:
    """The token ids of the documents in a file, cut into what fits into a sequence."""
    for document in read_documents([path], on_problem=_refuse):
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        for first in range(0, len(ids), room):
            yield ids[first : first + room]


def _refuse(problem: Problem) -> None:
    raise DataError(f"{location_of(problem)}: {problem.reason}")


def _text_batch(
    tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, path: str, length: int, limit: int
) -> Batch:
    """The first sequences of a text, padded to a common length."""
    pieces = list(islice(_pieces(tokenizer, path, length - 2), limit))
    if not pieces:
        raise DataError(f"{source_name(path)}: holds no text")
    rows = [[vocabulary.cls, *piece, vocabulary.sep] for piece in pieces]
    ids = filled(rows, vocabulary.pad, length)
    mask = filled([[1] * len(row) for row in rows], least=length)
    numbers = np.arange(len(pieces))
    return Batch(ids, np.zeros_like(ids), mask, {}, numbers, np.zeros_like(numbers))


def _with_masks(batch: Batch, vocabulary: Vocabulary) -> Batch:
    unused = np.zeros(vocabulary.vocab_size, np.int64)
    length = batch.input_ids.shape[1]
    masker = Masker(SEED, MaskingConfig(), vocabulary, length, unused, unused.astype(bool))
    masked = masker(batch.input_ids, batch.epochs, batch.sample_ids)
    targets = {MASKED: Target(masked.labels, masked.positions)}
    return replace(batch, input_ids=masked.input_ids, targets=targets)
