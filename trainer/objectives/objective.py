"""An objective: its terms by name, what they read from learner and teacher, and their sum."""

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
from trainer.learner_names import MEAN, OWN, TEACHER, is_teacher, section_of
from trainer.losses.vocabulary import project_and_sum
from trainer.objectives import terms
from trainer.objectives.task import TaskConfig
from trainer.objectives.term import (
    LayerTerm,
    LayerTermConfig,
    LossInputs,
    TeacherTermConfig,
    Term,
    TermConfig,
    VocabularyTerm,
    projected,
    registered_terms,
)
from trainer.objectives.transfer import Transfer
from trainer.objectives.whole_batch import WholeBatchTerm
from trainer.teacher_outputs import union


@dataclass
class ObjectiveConfig(Section):
    """The terms of a learner's objective; a term that is not named is off.

    It has one field for each registered term, added by `declare_terms`.
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

    @property
    def sources(self) -> set[str]:
        """The names of those whose outputs any term reads."""
        return {one.source for one in self.terms().values() if one.source is not None}

    def needs_teacher(self) -> bool:
        """Whether any term reads a teacher's outputs, or the mean of several."""
        return any(source == MEAN or is_teacher(source) for source in self.sources)

    def hears_teacher(self) -> bool:
        """Whether any term reads the job's own teacher, by itself or in the mean."""
        return not self.sources.isdisjoint(HEARD)

    def label_terms(self) -> set[str]:
        """The names of the terms that read no learner's outputs, only labels."""
        return {name for name, section in self.terms().items() if section.source is None}

    def conflicts_with_masked_only(
        self, teacher: str, sources: Collection[str], is_own: bool
    ) -> Iterator[Refusal]:
        """The terms that need states at every position, which a masked-only `teacher` lacks.

        `sources` are the names by which terms read it. A pair term reads the learner's own states,
        so it conflicts only if the learner is that teacher (`is_own`).
        """
        for name, section in self.terms().items():
            reads = section.reads_states and section.source in sources
            if reads or (is_own and section.reads_all_positions):
                yield (
                    name,
                    "needs more than predictions at masked positions, so "
                    f"{section_of(teacher)}.masked_only must be false",
                )

    def equip(self, model: ModelConfig) -> ModelConfig:
        """The model with the heads that the terms train.

        A model that trains task heads only loses its masked-LM head.
        """
        for section in self.terms().values():
            model = section.equip(model)
        trained = {section.head for section in self.terms().values()}
        if MASKED not in trained and not trained.isdisjoint(model.task_heads):
            model = model.without_mlm_head()
        return model

    def unequippable(self, model: ModelConfig) -> Iterator[Refusal]:
        """The terms that train a head which this model cannot have."""
        for name, section in self.terms().items():
            yield from ((name, why) for need in section.needs if (why := model.cannot(need)))

    def conflicts_with_data(self, packings: Collection[str], masked: bool) -> Iterator[Refusal]:
        """The terms that need something which the sequences do not have.

        `packings` are those of the data; `masked` says whether positions are masked.
        """
        for name, section in self.terms().items():
            for reason in section.refusals(packings, masked):
                yield name, reason

    def misfits(
        self, learner: ModelShape, teachers: Mapping[str, ModelShape], each_layer: bool
    ) -> Iterator[Refusal]:
        """Why a term does not fit these models; `teachers` are by name.

        `each_layer`: a progressive transfer needs a teacher's layer for each of ours.
        """
        for name, section in self.terms().items():
            found = list(_misfits(section, learner, teachers))
            yield from within(name, iter(found))
            if each_layer and isinstance(section, LayerTermConfig) and not found:
                for layer in sorted(section.left_out(learner, _about(section, teachers))):
                    yield (
                        f"{name}.layers",
                        f"leaves out layer {layer} of the student; progressive needs all of them",
                    )

    def parts(self, first: Collection[str]) -> tuple[list[str], list[str]]:
        """The names of the terms that compare what `first` lists (`Transfer.first`), and others."""
        terms = self.terms().items()
        return (
            [name for name, one in terms if one.compares in first],
            [name for name, one in terms if one.compares not in first],
        )


def _misfits(
    section: TermConfig, learner: ModelShape, teachers: Mapping[str, ModelShape]
) -> Iterator[Refusal]:
    if not isinstance(section, TeacherTermConfig):
        yield from section.misfits(learner, _about(section, teachers))
        return
    read = {name: one for name, one in teachers.items() if section.source in (name, MEAN)}
    if section.source == MEAN and len(teachers) == 1:
        yield "teacher", "mean is of several; name further teachers in teachers"
    if not read:
        there = ", ".join(name.removeprefix("teachers/") for name in teachers)
        yield "teacher", f"no teacher {section.teacher!r}; there are: {there}"
    for name, teacher in read.items():
        for key, why in section.misfits(learner, teacher):
            yield key, why if name == TEACHER else f"{why} ({section_of(name)})"


def _about(section: TermConfig, teachers: Mapping[str, ModelShape]) -> ModelShape:
    """The model of the teacher that a term reads; the job's own if it reads none, or the mean."""
    return teachers.get(section.source or TEACHER, teachers[TEACHER])


def declare_terms() -> None:
    """Make every registered term a key of `ObjectiveConfig`. Call it again after registering."""
    declare_fields(
        ObjectiveConfig, {name: section | None for name, section in registered_terms().items()}
    )


for _module in pkgutil.iter_modules(terms.__path__):
    importlib.import_module(f"{terms.__name__}.{_module.name}")
declare_terms()

HEARD = (TEACHER, MEAN)  # the sources in which the job's own teacher has a part
TERMS = "objective.terms."  # prefix of the terms' parameters in a learner's module


class Objective(nn.Module):
    """The terms and their learnable parts (projections), which train with the learner.

    What the terms read and weigh may change with the learner's own step, which starts at 0. When
    the teacher grows, `follow` changes the layer maps; the learnable parts stay.

    The objective also implements its learner's `trainer.optimizers.Rates`. They are the rates of
    the transfer, if there is one. The learnable parts of a term that is off at some steps neither
    learn nor decay while it is off.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        learner: ModelShape,
        teacher: ModelShape,
        seed: int,
        transfer: Transfer | None = None,
        others: Mapping[str, ModelShape] | None = None,
    ) -> None:
        """`teacher` is the teacher at its final size; a `transfer` comes before other training.

        `others` are further teachers, by name. Raises ValueError, naming the term, when one does
        not fit these models.
        """
        super().__init__()
        teachers = {TEACHER: teacher, **(others or {})}
        each_layer = transfer is not None and transfer.each_layer
        for key, why in config.misfits(learner, teachers, each_layer):
            raise ValueError(f"{key}: {why}")
        self.transfer = transfer
        self.heard = 1.0  # factor on the weights of terms that read the job's own teacher, 0 to 1
        self.heard_changes = False  # to be set before an optimizer asks for groups
        self.terms = nn.ModuleDict(_build(config, learner, teachers, transfer))
        self._initialise(learner.initializer_range, seed)

    @property
    def by_name(self) -> dict[str, Term]:
        """The terms by name, in their proper type."""
        return {name: cast(Term, term) for name, term in self.terms.items()}

    def follow(self, teacher_layers: int) -> None:
        """Learn from a teacher with this many layers, at the same relative depths as before.

        Only layer maps change, so this may be called at any time, also on resuming.
        """
        for term in self.by_name.values():
            if term.source == TEACHER:
                term.follow(teacher_layers)

    def weights(self, step: int) -> dict[str, float]:
        """Each term's weight at the learner's `step`; `heard` scales what reads the teacher."""
        return {
            name: term.weight.at(step) * (self.heard if term.source in HEARD else 1.0)
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
        """What the learner's own forward must return at its `step`."""
        return union(term.student_capture(step) for term in self._on(step).values())

    @property
    def denominators(self) -> set[str]:
        """The names of the denominators that the terms use."""
        return {term.denominator for term in self.by_name.values()}

    @property
    def sources(self) -> set[str]:
        """The names of the learners whose outputs any term reads."""
        return {term.source for term in self.by_name.values() if term.source is not None}

    @property
    def label_terms(self) -> list[str]:
        """The names of the terms that read no learner's outputs, only labels."""
        return [name for name, term in self.by_name.items() if term.source is None]

    def source_capture(self, step: int, source: str = TEACHER) -> Capture:
        """What the forward of `source` must return at the learner's `step`."""
        return union(term.source_capture(step) for term in self._reading(source, step))

    def over_whole_batch(self, step: int) -> dict[str, WholeBatchTerm]:
        """The terms over the whole global batch that are on at the learner's `step`, by head."""
        on = self._on(step).values()
        return {term.head: term for term in on if isinstance(term, WholeBatchTerm)}

    def reads_logits(self, step: int, source: str = TEACHER) -> bool:
        """Whether any term reads the logits of `source` at the learner's `step`."""
        return any(term.reads_logits for term in self._reading(source, step))

    def reads(self, step: int, source: str) -> bool:
        """Whether any term reads this source at the learner's `step`."""
        return bool(self._reading(source, step))

    def total(self, terms: Mapping[str, float], step: int) -> float:
        """The loss at the learner's `step`, from the global value of every term.

        It is summed in float64, for the record and the guard. `forward` returns the share of one
        micro-batch.
        """
        return sum(weight * terms[name] for name, weight in self.weights(step).items())

    def forward(self, inputs: LossInputs, totals: Totals) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss, and of each unweighted term.

        Summed over micro-batches and ranks, the shares give the global values. Returns a scalar in
        the graph and a detached float32 vector [terms], 0 for terms that are off at this step.
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
        """For each set of terms computed together: denominator, weighted sum, each term's sum.

        The weighted sum is in the graph.
        """
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
        """The terms with a weight other than 0 at a step; all of them where there is none.

        A transfer turns on only the terms of its `first` while it lasts, and only the others
        afterwards.
        """
        weights, terms = self.weights(step), self.by_name
        if self.transfer is not None:
            first, lasts = self.transfer.first, self.transfer.lasts(step)
            terms = {
                name: term for name, term in terms.items() if (term.compares in first) == lasts
            }
        return {name: term for name, term in terms.items() if weights[name]} or terms

    def _passing(self) -> set[str]:
        """The terms that are off at some steps."""
        if self.transfer is not None:
            return set(self.terms)
        return {
            name
            for name, term in self.by_name.items()
            if 0.0 in term.weight.values or (self.heard_changes and term.source in HEARD)
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
    teachers: Mapping[str, ModelShape],
    transfer: Transfer | None,
) -> Mapping[str, Term]:
    terms = {}
    for name, section in config.terms().items():
        terms[name] = term = section.build(learner, _about(section, teachers))
        if isinstance(term, LayerTerm) and transfer is not None:
            term.transfer_by(transfer)
    return terms
