"""An objective: its terms by name, what they read of student and teacher, and their sum."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from configs.section import Refusal, Section, declare_fields, within
from data_pipeline import MASKED
from model import Capture, ModelConfig, ModelShape
from trainer.denominators import Totals
from trainer.learner_names import OWN, TEACHER
from trainer.losses.vocabulary import project_and_sum
from trainer.objectives import terms
from trainer.objectives.progressive import Transfer
from trainer.objectives.task import TaskConfig
from trainer.objectives.term import (
    LayerTerm,
    LayerTermConfig,
    LossInputs,
    Term,
    TermConfig,
    VocabularyTerm,
    projected,
    registered_terms,
)
from trainer.teacher_outputs import union


@dataclass
class ObjectiveConfig(Section):
    """The terms of a learner's objective; a term that is not named is off.

    Its fields are the terms that are registered: `declare_terms` names them.
    """

    if TYPE_CHECKING:

        def __init__(self, **terms: TermConfig | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def terms(self) -> dict[str, TermConfig]:
        """The sections that are on, by name."""
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: section for name, section in sections.items() if section is not None}

    def conflicts(self) -> Iterator[Refusal]:
        on = self.terms()
        trains_words = any(one.head == MASKED and one.source != OWN for one in on.values())
        for name, section in on.items():
            if section.source == OWN and not trains_words:
                yield name, "needs a term beside it that trains the last head, such as mlm"

    @property
    def has_task(self) -> bool:
        """Whether a term is a task on labelled examples."""
        return any(isinstance(section, TaskConfig) for section in self.terms().values())

    def needs_teacher(self) -> bool:
        """Whether any term compares with a teacher."""
        return any(section.source == TEACHER for section in self.terms().values())

    def label_terms(self) -> set[str]:
        """The terms that read nobody's outputs: what is learnt from labels."""
        return {name for name, section in self.terms().items() if section.source is None}

    def conflicts_with_masked_only(self, is_teacher: bool) -> Iterator[Refusal]:
        """The terms that need a teacher's states at every position.

        Pairs are read from the states of the learner itself.
        """
        for name, section in self.terms().items():
            if section.reads_states or (is_teacher and section.reads_all_positions):
                yield (
                    name,
                    "needs more than predictions at masked positions, so teacher.masked_only must "
                    "be false",
                )

    def equip(self, model: ModelConfig) -> ModelConfig:
        """The model with the heads that the terms train.

        A model that only classifies has no masked-LM head.
        """
        for section in self.terms().values():
            model = section.equip(model)
        trained = {section.head for section in self.terms().values()}
        if MASKED not in trained and not trained.isdisjoint(model.task_heads):
            model = model.without_mlm_head()
        return model

    def unequippable(self, model: ModelConfig) -> Iterator[Refusal]:
        """The terms whose head the model cannot have."""
        for name, section in self.terms().items():
            yield from ((name, why) for need in section.needs if (why := model.cannot(need)))

    def conflicts_with_data(self, packings: Collection[str], masked: bool) -> Iterator[Refusal]:
        """The terms that are about what sequences do not have.

        `packings` are those of the data; `masked` is whether positions are masked.
        """
        for name, section in self.terms().items():
            for reason in section.refusals(packings, masked):
                yield name, reason

    def misfits(
        self, learner: ModelShape, teacher: ModelShape, is_transferred: bool
    ) -> Iterator[Refusal]:
        """Why a term does not fit this pair of models, with a progressive transfer or without."""
        for name, section in self.terms().items():
            found = list(section.misfits(learner, teacher))
            yield from within(name, iter(found))
            if is_transferred and isinstance(section, LayerTermConfig) and not found:
                for layer in sorted(section.left_out(learner, teacher)):
                    yield (
                        f"{name}.layers",
                        f"leaves out {layer}, and progressive needs each of ours",
                    )

    def between_layers(self) -> list[str]:
        """The terms that are between layers of student and teacher."""
        return [name for name, one in self.terms().items() if isinstance(one, LayerTermConfig)]

    def beyond_layers(self) -> list[str]:
        """The terms that are not."""
        return [name for name, one in self.terms().items() if not isinstance(one, LayerTermConfig)]


def declare_terms() -> None:
    """Make every registered term a key of `ObjectiveConfig`; again when more are registered."""
    declare_fields(
        ObjectiveConfig, {name: section | None for name, section in registered_terms().items()}
    )


for _module in pkgutil.iter_modules(terms.__path__):
    importlib.import_module(f"{terms.__name__}.{_module.name}")
declare_terms()

TERMS = "objective.terms."  # how the names of their parameters begin in a learner's module


class Objective(nn.Module):
    """The terms with their learnable parts (projections), which train with the learner.

    What they read and weigh may change with the learner's own step, from 0 at its start. A teacher
    that grows is followed by `follow`: layer maps change, the learnable parts stay.

    It is the `trainer.optimizers.Rates` of its learner: those of a transfer; and the learnable
    parts of a term that comes or goes learn while it is on, and do not decay while it is off.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        learner: ModelShape,
        teacher: ModelShape,
        seed: int,
        transfer: Transfer | None = None,
    ) -> None:
        """`teacher` is as it will be at its final size; a `transfer` comes before anything else.

        Raises ValueError, naming the term, when one does not fit this pair of models.
        """
        super().__init__()
        for key, why in config.misfits(learner, teacher, transfer is not None):
            raise ValueError(f"{key}: {why}")
        self.transfer = transfer
        self.heard = 1.0  # what the terms about a teacher count, of their weights
        self.heard_changes = False  # set before an optimizer asks for groups
        self.terms = nn.ModuleDict(_build(config, learner, teacher, transfer))
        self._initialise(learner.initializer_range, seed)

    @property
    def by_name(self) -> dict[str, Term]:
        """The terms, typed."""
        return {name: cast(Term, term) for name, term in self.terms.items()}

    def follow(self, teacher_layers: int) -> None:
        """The teacher now has this many layers: learn from those at the same relative depths.

        Nothing but layer maps changes, so it may be called at any time, and on resuming.
        """
        for term in self.by_name.values():
            term.follow(teacher_layers)

    def weights(self, step: int) -> dict[str, float]:
        """What each term weighs at the learner's `step`, as much as its teacher is heard now."""
        return {
            name: term.weight.at(step) * (self.heard if term.source == TEACHER else 1.0)
            for name, term in self.by_name.items()
        }

    def group(self, parameter: str) -> str:
        prefix, _, rest = parameter.partition(TERMS)
        term = rest.partition(".")[0]
        if not prefix and term in self._passing():
            return TERMS + term
        return self.transfer.group(parameter) if self.transfer else "all"

    def factor(self, group: str, step: int) -> float:
        is_a_term = group.startswith(TERMS)
        if is_a_term and group.removeprefix(TERMS) not in self._on(step):
            return 0.0
        if self.transfer is None:
            return 1.0
        current = str(self.transfer.layer(step))
        return self.transfer.factor(current if is_a_term else group, step)

    def student_capture(self, step: int) -> Capture:
        """What the learner's own forward must hand out at its `step`."""
        return union(term.student_capture(step) for term in self._on(step).values())

    @property
    def denominators(self) -> set[str]:
        """What divides the terms, by name."""
        return {term.denominator for term in self.by_name.values()}

    @property
    def sources(self) -> set[str]:
        """The learners whose outputs any term reads, by name."""
        return {term.source for term in self.by_name.values() if term.source is not None}

    @property
    def label_terms(self) -> list[str]:
        """The terms that read nobody's outputs: what is learnt from labels."""
        return [name for name, term in self.by_name.items() if term.source is None]

    def source_capture(self, step: int, source: str = TEACHER) -> Capture:
        """What the forward of a source must hand out at the learner's `step`."""
        return union(term.source_capture(step) for term in self._reading(source, step))

    def reads_logits(self, step: int, source: str = TEACHER) -> bool:
        """Whether any term compares with a source's distributions at the learner's `step`."""
        return any(term.reads_logits for term in self._reading(source, step))

    def total(self, terms: Mapping[str, float], step: int) -> float:
        """The loss at the learner's `step`, from the global value of every term.

        In Python's float64, for the record and the guard; `forward` has each micro-batch's share.
        """
        return sum(weight * terms[name] for name, weight in self.weights(step).items())

    def forward(self, inputs: LossInputs, totals: Totals) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss, and of each term before its weight.

        Shares add up to the global value over micro-batches and ranks. Returns a scalar in the
        graph and a detached [terms] vector, float32, 0 for terms that are off at this step.
        """
        if not self.terms:  # a frozen teacher's
            return torch.zeros(()), torch.zeros(0)
        parts = list(self._parts(inputs))
        loss = torch.stack([part / totals[denominator] for denominator, part, _ in parts]).sum()
        sums = {
            name: (denominator, own) for denominator, _, owns in parts for name, own in owns.items()
        }
        zero = loss.detach().new_zeros(())
        shares = [
            sums[name][1] / totals[sums[name][0]] if name in sums else zero for name in self.terms
        ]
        return loss, torch.stack(shares).detach()

    def _parts(self, inputs: LossInputs) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
        """(denominator, weighted sum in the graph, each term's sum) of jointly computed terms."""
        weights, on = self.weights(inputs.step), self._on(inputs.step)
        terms = {name: term for name, term in on.items() if term.applies(inputs)}
        shared: dict[str, dict[str, VocabularyTerm]] = {}
        for name, term in terms.items():
            if isinstance(term, VocabularyTerm):
                shared.setdefault(term.denominator, {})[name] = term
            else:
                total, _ = term(inputs)
                yield term.denominator, weights[name] * total, {name: total}
        for positions, group in shared.items():
            losses = [term.row_loss(inputs) for term in group.values()]
            scales = [weights[name] for name in group]
            total, sums = project_and_sum(*projected(inputs, positions), losses, scales)
            yield positions, total, dict(zip(group, sums, strict=True))

    def _reading(self, source: str, step: int) -> list[Term]:
        return [term for term in self._on(step).values() if term.source == source]

    def _on(self, step: int) -> dict[str, Term]:
        """The terms that weigh anything at a step; all of them where none does.

        With a transfer those between layers while it lasts, and the others afterwards.
        """
        weights, terms = self.weights(step), self.by_name
        if self.transfer is not None:
            lasts = self.transfer.layer(step) is not None
            terms = {
                name: term for name, term in terms.items() if isinstance(term, LayerTerm) == lasts
            }
        return {name: term for name, term in terms.items() if weights[name]} or terms

    def _passing(self) -> set[str]:
        """The terms that are off at some steps."""
        if self.transfer is not None:
            return set(self.terms)
        return {
            name
            for name, term in self.by_name.items()
            if 0.0 in term.weight.values or (self.heard_changes and term.source == TEACHER)
        }

    def _initialise(self, standard_deviation: float, seed: int) -> None:
        """Normal weights and zero biases, a pure function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, standard_deviation, generator=generator)
                else:
                    parameter.zero_()


def _build(
    config: ObjectiveConfig,
    learner: ModelShape,
    teacher: ModelShape,
    transfer: Transfer | None,
) -> Mapping[str, Term]:
    terms = {}
    for name, section in config.terms().items():
        terms[name] = term = section.build(learner, teacher)
        if isinstance(term, LayerTerm) and transfer is not None:
            term.transfer_by(transfer)
    return terms
