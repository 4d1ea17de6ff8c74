"""A fine-tuned model as it was exported, its outputs in batches, and the base of predictors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import TextEncoder, Vocabulary
from data_pipeline.reading.batches import filled
from data_pipeline.task_files.contents import source_name
from data_pipeline.text.text_files import awaits_writer
from model import Capture, Model, ModelError, Padded, TaskHeadConfig, Transitions, from_pretrained
from model.heads import TaskHead
from trainer.batches import rows_by_length
from trainer.evaluation.text_vectors import CLS, STATIC
from trainer.task_facts import TaskFacts, chosen_head, open_encoder

# Tokens in one forward pass, padding included. A CPU is as fast with 1,024 per thread as with more,
# and small passes waste less on padding.
TOKENS_ON_GPU, TOKENS_PER_THREAD = 1 << 13, 1 << 10
AT_ONCE = 4096  # sequences that are sorted by length together
Segments = Sequence[NDArray[np.integer]]  # token ids of one sequence, without special tokens
# Token ids of one sequence, with special tokens, and the column where each segment begins.
_Sequence = tuple[NDArray[np.integer], list[int]]
# Token ids [B, L], segment ids [B, L], and the padding where lengths differ.
_Inputs = tuple[Tensor, Tensor, Padded | None]

T = TypeVar("T")


def sorted_together(items: Iterable[T], most: int = AT_ONCE, path: str = "") -> Iterator[list[T]]:
    """The items in order, in lists of `most`: what is sorted by length, and held, at a time.

    Where they are read from a pipe, its `path`, a list ends as soon as its writer waits.
    """
    rest = iter(items)
    while some := list(islice(rest, 1)):
        while len(some) < most and not awaits_writer(path):
            following = list(islice(rest, 1))
            if not following:
                break
            some += following
        yield some


@torch.inference_mode()
def head_outputs(
    model: Model,
    head: str,
    vocabulary: Vocabulary,
    sequences: Sequence[Segments],
    numbers: Sequence[Sequence[float]] | None = None,
) -> list[Tensor]:
    """The head's output for each sequence, in the order given; float32 on the CPU.

    `numbers` of each sequence are for a head that reads such.

    The shape is [outputs], or [L, outputs] for a head with an output per token, where L is the
    length of the sequence with its special tokens. The longest sequences run first.
    """
    outputs: list[Tensor] = [torch.empty(0)] * len(sequences)
    per_token = model.config.task_heads[head].per_token
    for rows, lengths, inputs in _passes(model, vocabulary, sequences):
        beside = None
        if numbers is not None:
            values = [numbers[row] for row in rows]
            beside = torch.tensor(values, dtype=torch.float64, device=inputs[0].device)
        capture = Capture(heads=(head,))
        of_pass = model.features(*inputs, capture=capture, numbers=beside).heads[head]
        for row, length, output in zip(rows, lengths, of_pass.float().cpu(), strict=True):
            outputs[row] = output[:length] if per_token else output
    return outputs


@torch.inference_mode()
def text_vectors(
    model: Model, vocabulary: Vocabulary, sequences: Sequence[Segments], pooling: str
) -> list[Tensor]:
    """The vector of each sequence, in the order given; float32 [H] on the CPU.

    By `pooling`, the last hidden state of its first token, the mean of all last hidden states, or
    the mean of the word embeddings of its tokens without special ones.
    """
    vectors: list[Tensor] = [torch.empty(0)] * len(sequences)
    for rows, lengths, (ids, segments, padded) in _passes(model, vocabulary, sequences):
        if pooling == STATIC:
            states = model.word_vectors(ids)
        else:
            states = model.encode(ids, segments, model.readable(padded)).last_hidden_state
        pooled = [
            _pooled(tokens[:length], pooling)
            for length, tokens in zip(lengths, states.float(), strict=True)
        ]
        for row, vector in zip(rows, torch.stack(pooled).cpu(), strict=True):  # one wait for all
            vectors[row] = vector
    return vectors


def _pooled(states: Tensor, pooling: str) -> Tensor:
    """The vector [H] of a text's states [T, H], of which the ends are its special tokens."""
    if pooling == CLS:
        return states[0]
    return (states[1:-1] if pooling == STATIC else states).mean(0)


@torch.inference_mode()
def early_outputs(
    model: Model, head: str, vocabulary: Vocabulary, sequences: Sequence[Segments], speed: float
) -> list[tuple[Tensor, int]]:
    """The logits [labels] of each sequence, in the order given, and the layer that it left at.

    See `Model.leave_early`. Logits are float32 on the CPU; layers count from 1.
    """
    outputs: list[tuple[Tensor, int]] = [(torch.empty(0), 0)] * len(sequences)
    for rows, _, (ids, segments, padded) in _passes(model, vocabulary, sequences):
        mask = None if padded is None else padded.lengths
        of_pass = model.leave_early(head, speed, ids, segments, mask)
        logits, layers = of_pass.logits.float().cpu(), of_pass.layers.tolist()
        for row, of_row, layer in zip(rows, logits, layers, strict=True):
            outputs[row] = of_row, layer
    return outputs


def _passes(
    model: Model, vocabulary: Vocabulary, sequences: Sequence[Segments]
) -> Iterator[tuple[list[int], list[int], _Inputs]]:
    """The rows of each pass, their lengths and inputs; the longest sequences come first."""
    read = [vocabulary.with_special(segments) for segments in sequences]
    lengths = [len(ids) for ids, _ in read]
    for rows in rows_by_length(lengths, tokens_per_pass(next(model.parameters()).device)):
        inputs = _inputs(model, vocabulary, [read[row] for row in rows])
        yield rows, [lengths[row] for row in rows], inputs


def tokens_per_pass(device: torch.device) -> int:
    """The most tokens that one forward pass should hold on this device."""
    if device.type != "cpu":
        return TOKENS_ON_GPU
    return min(TOKENS_ON_GPU, TOKENS_PER_THREAD * torch.get_num_threads())


def _inputs(model: Model, vocabulary: Vocabulary, sequences: list[_Sequence]) -> _Inputs:
    lengths = np.array([len(sequence) for sequence, _ in sequences])
    ids = filled([sequence for sequence, _ in sequences], vocabulary.pad)
    second = np.zeros_like(ids)  # 1 in the second segment
    for row, (_, columns) in enumerate(sequences):
        for column in columns[1:]:
            second[row, column : lengths[row]] = 1
    device = next(model.parameters()).device
    tensors = [torch.from_numpy(array).to(device) for array in (ids, second, lengths)]
    padded = Padded(tensors[2], int(lengths.sum())) if lengths.min() < lengths.max() else None
    return tensors[0], tensors[1], padded


@dataclass(frozen=True)
class FineTuned:
    """A model with the head of a task. `name` is that of the head."""

    folder: Path
    model: Model
    name: str
    facts: TaskFacts
    encoder: TextEncoder

    @classmethod
    def open(
        cls,
        folder: Path,
        device: torch.device,
        head: str | None = None,
        encoding: str | None = None,
    ) -> FineTuned:
        """`head` names the one to use of several; `encoding` is that of its input, if another.

        Raises ModelError for a model without that head, DataError without its tokenizer.
        """
        return cls.of(folder, from_pretrained(folder).to(device), head, encoding)

    @classmethod
    def of(
        cls, folder: Path, model: Model, head: str | None = None, encoding: str | None = None
    ) -> FineTuned:
        """The fine-tuned `model` that is in the folder, with what `open` reads beside it."""
        name = chosen_head(folder, list(model.config.task_heads), head)
        facts = TaskFacts.read(folder, name).in_encoding(encoding)
        encoder = open_encoder(folder, model.config, facts.sequence_length)
        return cls(folder, model, name, facts, encoder)

    @property
    def head(self) -> TaskHeadConfig:
        """The declaration of the head."""
        return self.model.config.task_heads[self.name]

    def outputs(
        self, sequences: Sequence[Segments], numbers: Sequence[Sequence[float]] | None = None
    ) -> list[Tensor]:
        """The outputs of the head (`head_outputs`); `numbers` are left out if it reads none."""
        read = numbers if self.head.numbers else None
        return head_outputs(self.model, self.name, self.encoder.vocabulary, sequences, read)

    def early_outputs(
        self, sequences: Sequence[Segments], speed: float
    ) -> list[tuple[Tensor, int]]:
        """The outputs of branches (`early_outputs`). Raises ModelError without any."""
        if not self.head.branches:
            why = "--speed: the model has no branches; `tandem finetune fastbert` trains them"
            raise ModelError(f"{self.folder}: {why}")
        return early_outputs(self.model, self.name, self.encoder.vocabulary, sequences, speed)

    @torch.inference_mode()
    def transitions(self) -> Transitions | None:
        """The weights of the head's CRF, on the CPU, where its answers are made."""
        head = self.model.task_heads[self.name]
        if not isinstance(head, TaskHead) or head.crf is None:
            return None
        return Transitions(*(part.cpu() for part in head.crf()))


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """One example: the input as read, and what the model reads for it, numbers beside texts."""

    sequences: Sequence[Segments]
    source: Any = None
    numbers: Sequence[float] = ()


class Predictor(ABC):
    """Reads the input of one model's task and decodes its head's output.

    `transitions` belong to a head with a CRF. `columns`: those that the user names. placed_fields:
    the fields besides texts that have columns.
    """

    placed_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        head: TaskHeadConfig,
        facts: TaskFacts,
        encoder: TextEncoder,
        transitions: Transitions | None,
        columns: Mapping[str, str],
    ) -> None:
        self.head, self.facts, self.encoder = head, facts, encoder
        self.transitions, self.columns = transitions, columns
        self.unanswered = 0  # the queries so far that have no text

    @abstractmethod
    def queries(self, path: str) -> Iterator[Query]:
        """The examples of a file, in order. Raises DataError, naming the line, for a bad one."""

    @abstractmethod
    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        """The prediction, in JSON values, from the outputs for each of the query's sequences."""


def tell_incomplete(
    path: str, unanswered: int, encoder: TextEncoder, needed: str = "a text"
) -> None:
    """Log how many rows of a file lack what is `needed`, and how many were cut, if any."""
    if unanswered:
        why = f"rows without {needed}, whose answers are null"
        _log.warning("%s: %s: %s", source_name(path), why, unanswered)
    tell_cut(path, encoder)


def tell_cut(path: str, encoder: TextEncoder) -> None:
    """Log how many texts of a file were cut, and forget them."""
    if encoder.cut:
        why = f"texts too long for {encoder.length} tokens, whose ends are not read"
        _log.warning("%s: %s: %s", source_name(path), why, len(encoder.cut))
        encoder.cut.clear()
