"""An objective: its terms by name, what they read from learner and teacher, and their sum."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from torch import Tensor, nn

from configs.rules import Doc
from configs.section import Refusal, Section, declare_fields, within
from data_pipeline import MASKED, TASK_NAME
from model import Capture, ModelConfig, ModelShape
from trainer.denominators import Totals
from trainer.learner_names import MEAN, OWN, TEACHER, is_teacher, section_of
from trainer.losses.vocabulary import project_and_sum
from trainer.objectives import terms
from trainer.objectives.task import TaskConfig, TaskTerm
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

TASKS = "tasks"


@dataclass
class KindOfTask(Section):
    """One of several tasks: the section of its kind, such as single_sentence, and no other.

    Its fields are the tasks that are registered, as in `ObjectiveConfig`.
    """

    def sections(self) -> list[TaskConfig]:
        """Those that are on."""
        found = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [section for section in found if section is not None]


@dataclass
class ObjectiveConfig(Section):
    """The terms of a learner's objective; a term that is not named is off.

    It has one field for each registered term, and `tasks`, added by `declare_terms`.
    """

    if TYPE_CHECKING:
        tasks: dict[str, KindOfTask] | None

        def __init__(self, **terms: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def terms(self) -> dict[str, TermConfig]:
        """The sections that are on, by name: each of the `tasks` by its own."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        several: dict[str, KindOfTask] = fields.pop(TASKS) or {}
        sections: dict[str, TermConfig] = {
            name: section for name, section in fields.items() if section is not None
        }
        for name, kind in several.items():
            sections[name] = dataclasses.replace(kind.sections()[0], head_name=name)
        tasks = [one.head for one in sections.values() if isinstance(one, TaskConfig)]
        return {
            term: one
            for name, section in sections.items()
            for term, one in section.beside(name, tasks).items()
        }

    def with_task(self, name: str, task: TaskConfig) -> ObjectiveConfig:
        """The same with this section for a task that it has."""
        if self.tasks and name in self.tasks:
            kind = KindOfTask(**{task.name: task})
            return dataclasses.replace(self, tasks={**self.tasks, name: kind})
        own: dict[str, Any] = {name: task}
        return dataclasses.replace(self, **own)

    def conflicts(self) -> Iterator[Refusal]:
        yield from self._conflicts_of_tasks()
        on = self.terms()
        trains_words = any(one.head == MASKED and one.source != OWN for one in on.values())
        for name, section in on.items():
            if section.source == OWN and not trains_words:
                yield name, "needs a term beside it that trains the last head, such as mlm"

    def _conflicts_of_tasks(self) -> Iterator[Refusal]:
        names = list(self.tasks or {})
        for name, kind in (self.tasks or {}).items():
            if len(kind.sections()) != 1:
                kinds = ", ".join(field.name for field in dataclasses.fields(kind))
                yield f"tasks.{name}", f"must have one of {kinds}"
            if getattr(self, name, None) is not None or hasattr(nn.ModuleDict, name):
                yield f"tasks.{name}", "that name is taken; choose another"
            if any(name.startswith(f"{other}_") for other in names):
                yield f"tasks.{name}", "begins with another task's name and _; choose another"

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


_TASKS = Annotated[
    dict[Annotated[str, TASK_NAME], KindOfTask] | None,
    Doc(
        "Several tasks that share the model, each with a head of its own; `data.tasks` has their "
        "examples."
    ),
]


def declare_terms() -> None:
    """Make every registered term a key of `ObjectiveConfig`. Call it again after registering."""
    sections = {name: section | None for name, section in registered_terms().items()}
    kinds = {
        name: section | None
        for name, section in registered_terms().items()
        if issubclass(section, TaskConfig) and section.joins
    }
    declare_fields(KindOfTask, kinds)
    declare_fields(ObjectiveConfig, {**sections, TASKS: _TASKS})


for _module in pkgutil.iter_modules(terms.__path__):
    importlib.import_module(f"{terms.__name__}.{_module.name}")
declare_terms()

HEARD = (TEACHER, MEAN)  # the sources in which the job's own teacher has a part
Targets = Collection[str] | None  # of a batch, by name; None: whatever they are
TERMS = "objective.terms."  # prefix of the terms' parameters in a learner's module


class Objective(nn.Module):
    """The terms and their learnable parts (projections), which train with the learner.

    What the terms read and weigh may change with the learner's own step, which starts at 0. When
    the teacher grows, `follow` changes the layer maps; the learnable parts stay.

    The objective also implements its learner's `trainer.optimizers.Rates`. They are the rates of
    the transfer, if there is one. The learnable parts of a term that is off at some steps neither
    learn nor decay while it is off, and nor does the head of a task at the steps of other tasks.
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
        # Prefixes of the parameters that only some of several heads read, and these heads.
        self.read_by: Mapping[str, frozenset[str]] = {}
        self.terms = nn.ModuleDict(_build(config, learner, teachers, transfer))
        self._initialise(learner.initializer_range, seed)

    @property
    def by_name(self) -> dict[str, Term]:
        """The terms by name, in their proper type."""
        return {name: cast(Term, term) for name, term in self.terms.items()}

    def task_among(self, targets: Collection[str]) -> str:
        """Which of several tasks a batch with these targets is of; empty where there is one."""
        tasks = [term.head for term in self.by_name.values() if isinstance(term, TaskTerm)]
        return next((head for head in tasks if head in targets), "") if len(tasks) > 1 else ""

    def about(self, targets: Targets) -> dict[str, Term]:
        """The terms about a batch with these targets."""
        return {
            name: term
            for name, term in self.by_name.items()
            if targets is None or term.concerns(targets)
        }

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
        for part in self.read_by:
            if parameter.startswith(part):
                return part
        prefix, _, rest = parameter.partition(TERMS)
        term = rest.partition(".")[0]
        if not prefix and term in self._passing():
            return TERMS + term
        return self.transfer.group(parameter) if self.transfer else "all"

    def factor(self, group: str, step: int, targets: Targets = None) -> float:
        readers = self.read_by.get(group)
        if readers is not None and targets is not None and readers.isdisjoint(targets):
            return 0.0
        is_a_term = group.startswith(TERMS)
        if is_a_term and group.removeprefix(TERMS) not in self._on(step):
            return 0.0
        if self.transfer is None:
            return 1.0
        if readers is not None:
            return self.transfer.factor(self.transfer.group(group), step)
        current = str(self.transfer.layer(step))
        return self.transfer.factor(current if is_a_term else group, step)

    def student_capture(self, step: int, targets: Targets = None) -> Capture:
        """What the learner's own forward must return at its `step`.

        `targets` are those of the batch, about which a term may ask for nothing; None: any batch.
        """
        return union(term.student_capture(step) for term in self._on(step, targets).values())

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

    def source_capture(self, step: int, targets: Targets = None, source: str = TEACHER) -> Capture:
        """What the forward of `source` must return at the learner's `step`; as above."""
        return union(term.source_capture(step) for term in self._reading(source, step, targets))

    def over_whole_batch(self, step: int) -> dict[str, WholeBatchTerm]:
        """The terms over the whole global batch that are on at the learner's `step`, by head."""
        on = self._on(step).values()
        return {term.head: term for term in on if isinstance(term, WholeBatchTerm)}

    def reads_logits(self, step: int, source: str = TEACHER) -> bool:
        """Whether any term reads the logits of `source` at the learner's `step`."""
        return any(term.reads_logits for term in self._reading(source, step))

    def reads(self, step: int, source: str, targets: Targets = None) -> bool:
        """Whether any term reads this source at the learner's `step`, of such a batch."""
        return bool(self._reading(source, step, targets))

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
        """(denominator, weighted sum in the graph, each term's sum) of jointly computed terms."""
        weights = self.weights(inputs.step)
        on = self._on(inputs.step, inputs.batch.targets)
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

    def _reading(self, source: str, step: int, targets: Targets = None) -> list[Term]:
        return [term for term in self._on(step, targets).values() if term.source == source]

    def _on(self, step: int, targets: Targets = None) -> dict[str, Term]:
        """The terms about a batch that weigh anything at a step; all of them where none does.

        A transfer turns on only the terms of its `first` while it lasts, and only the others
        afterwards.
        """
        weights, terms = self.weights(step), self.about(targets)
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
    terms, sections = {}, config.terms()
    for name, section in sections.items():
        terms[name] = term = section.build(learner, _about(section, teachers))
        term.stand_beside(sections)
        if isinstance(term, LayerTerm) and transfer is not None:
            term.transfer_by(transfer)
    return terms
