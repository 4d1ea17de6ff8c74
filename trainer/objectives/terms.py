"""The terms an objective is made of: each joins a loss to what it reads, its unit and its weight.

To add one: a loss in `losses.py`, a config dataclass and its Term here, and a field in
`ObjectiveConfig`, whose name is the term's name in YAML and in the metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from model import Capture, EncoderConfig, Features
from model.vocabulary_loss import chunked_cross_entropy, chunked_kl_divergence
from trainer.batches import MicroBatch
from trainer.knowledge import Decoder, Knowledge
from trainer.layer_maps import map_layers
from trainer.objectives.losses import attention_mse, cosine_distance, hidden_mse


@dataclass(frozen=True)
class Lesson:
    """Everything a term may read of one micro-batch; `knowledge` is None for a teacher."""

    batch: MicroBatch
    features: Features
    decoder: Decoder
    knowledge: Knowledge | None


class Term(nn.Module, ABC):
    """One weighted loss. `unit` names the field of `Counts` that divides its sum."""

    unit: ClassVar[str]
    weight: float
    student_capture = Capture()
    teacher_capture = Capture()
    needs_teacher_logits: ClassVar[bool] = False

    @abstractmethod
    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """The loss of this micro-batch as (sum, count in `unit`), scalars."""


class TermConfig(Protocol):
    """The YAML section of a term."""

    weight: float
    from_teacher: ClassVar[bool]

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> Term:
        """The term for this pair of models; ValueError, beginning with its name, if none fits."""


@dataclass
class MaskedLanguageModelling:
    """Cross-entropy at masked positions (BERT, arXiv 1810.04805)."""

    from_teacher: ClassVar[bool] = False
    weight: float = 1.0

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> Term:
        """See `TermConfig.build`."""
        return MaskedLanguageModellingTerm(self)


class MaskedLanguageModellingTerm(Term):
    """See `MaskedLanguageModelling`."""

    unit = "masked"

    def __init__(self, config: MaskedLanguageModelling) -> None:
        super().__init__()
        self.weight = config.weight

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """See `Term.forward`."""
        return chunked_cross_entropy(
            lesson.features.vocabulary_input,
            lesson.decoder.weight,
            lesson.decoder.bias,
            lesson.batch.masked_labels,
        )


@dataclass
class SoftTargets:
    """T^2 KL(teacher || student) over the vocabulary at masked positions (DistilBERT; Hinton).

    TinyBERT's soft cross-entropy has the same gradient, without the T^2: divide the weight by it.
    """

    from_teacher: ClassVar[bool] = True
    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Refuse temperatures that mean nothing."""
        if self.temperature <= 0:
            raise ValueError("temperature must be positive")

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> Term:
        """See `TermConfig.build`."""
        return SoftTargetsTerm(self, student, teacher)


class SoftTargetsTerm(Term):
    """See `SoftTargets`."""

    unit = "masked"
    needs_teacher_logits = True

    def __init__(self, config: SoftTargets, student: EncoderConfig, teacher: EncoderConfig) -> None:
        super().__init__()
        if student.vocab_size != teacher.vocab_size:
            raise ValueError("soft: student and teacher must share a vocabulary")
        self.weight = config.weight
        self.temperature = config.temperature

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """See `Term.forward`."""
        assert lesson.knowledge is not None
        assert lesson.knowledge.decoder is not None
        teacher = lesson.knowledge.decoder
        divergence, positions = chunked_kl_divergence(
            lesson.features.vocabulary_input,
            (lesson.decoder.weight, lesson.decoder.bias),
            lesson.knowledge.vocabulary_input,
            (teacher.weight, teacher.bias),
            temperature=self.temperature,
            weights=(lesson.batch.masked_labels >= 0).float(),
        )
        return divergence * self.temperature**2, positions


@dataclass
class Cosine:
    """1 - cos between last hidden states at attended positions (DistilBERT)."""

    from_teacher: ClassVar[bool] = True
    weight: float = 1.0

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> Term:
        """See `TermConfig.build`."""
        return CosineTerm(self, student, teacher)


class CosineTerm(Term):
    """See `Cosine`."""

    unit = "attended"

    def __init__(self, config: Cosine, student: EncoderConfig, teacher: EncoderConfig) -> None:
        super().__init__()
        if student.hidden_size != teacher.hidden_size:
            raise ValueError("cosine: student and teacher must have the same hidden_size")
        self.weight = config.weight

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """See `Term.forward`."""
        assert lesson.knowledge is not None
        return cosine_distance(
            lesson.features.last_hidden_state,
            lesson.knowledge.last_hidden_state,
            lesson.batch.attention_mask,
        )


@dataclass
class Hidden:
    """Mean squared error of hidden states, embedding output included, after one projection.

    TinyBERT, arXiv 1909.10351: state 0 against the teacher's state 0, state i against that of the
    mapped layer; one learnable H_s -> H_t projection serves all of them. Summed over layers.
    """

    from_teacher: ClassVar[bool] = True
    weight: float = 1.0
    layers: Any = "uniform"  # uniform, top, bottom, or a teacher layer for each of ours

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> Term:
        """See `TermConfig.build`."""
        return HiddenTerm(self, student, teacher)


class HiddenTerm(Term):
    """See `Hidden`."""

    unit = "attended"

    def __init__(self, config: Hidden, student: EncoderConfig, teacher: EncoderConfig) -> None:
        super().__init__()
        self.weight = config.weight
        mapped = map_layers(config.layers, student.layers, teacher.layers)
        self.pairs = list(enumerate([0, *mapped]))
        self.student_capture = Capture(hidden_states=tuple(range(student.layers + 1)))
        self.teacher_capture = Capture(hidden_states=tuple(sorted({0, *mapped})))
        self.projection = nn.Linear(student.hidden_size, teacher.hidden_size)

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """See `Term.forward`."""
        assert lesson.knowledge is not None
        mask = lesson.batch.attention_mask
        ours, theirs = lesson.features.hidden_states, lesson.knowledge.hidden_states
        # One call of the projection for all layers: [M + 1, B, L, H_s] -> [M + 1, B, L, H_t].
        projected = self.projection(torch.stack([ours[layer] for layer, _ in self.pairs]))
        losses = [
            hidden_mse(projected[layer], theirs[target], mask)[0] for layer, target in self.pairs
        ]
        return torch.stack(losses).sum(), mask.sum()


@dataclass
class Attention:
    """Mean squared error of pre-softmax attention scores of mapped layers (TinyBERT). Summed."""

    from_teacher: ClassVar[bool] = True
    weight: float = 1.0
    layers: Any = "uniform"  # uniform, top, bottom, or a teacher layer for each of ours

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> Term:
        """See `TermConfig.build`."""
        return AttentionTerm(self, student, teacher)


class AttentionTerm(Term):
    """See `Attention`."""

    unit = "attended_pairs"

    def __init__(self, config: Attention, student: EncoderConfig, teacher: EncoderConfig) -> None:
        super().__init__()
        if student.heads != teacher.heads:
            raise ValueError("attention: student and teacher must have the same number of heads")
        self.weight = config.weight
        mapped = map_layers(config.layers, student.layers, teacher.layers)
        self.pairs = list(enumerate(mapped, start=1))
        self.student_capture = Capture(attention=tuple(range(1, student.layers + 1)))
        self.teacher_capture = Capture(attention=tuple(sorted(set(mapped))))

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """See `Term.forward`."""
        assert lesson.knowledge is not None
        mask = lesson.batch.attention_mask
        ours, theirs = lesson.features.attention, lesson.knowledge.attention
        losses = [attention_mse(ours[layer], theirs[target], mask) for layer, target in self.pairs]
        return torch.stack([loss for loss, _ in losses]).sum(), losses[0][1]
