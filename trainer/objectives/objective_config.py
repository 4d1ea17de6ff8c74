"""The YAML of an objective: a section for each registered term, and what they ask of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from configs.section import Refusal, Section, declare_fields, within
from data_pipeline import MASKED, TASK_NAME
from model import ModelConfig, ModelShape, may_name_a_head
from trainer.learner_names import MEAN, OWN, TEACHER, is_teacher, section_of
from trainer.objectives import terms as _terms  # noqa: F401 - registers those shipped
from trainer.objectives.layers import LayerTermConfig
from trainer.objectives.task import HeadTermConfig, TaskConfig
from trainer.objectives.term import TeacherTermConfig, TermConfig, registered_terms
from trainer.stored_logits.format import StoredConfig

TEACHER_SOURCES = (TEACHER, MEAN)  # the sources in which the job's own teacher has a part
TASKS = "tasks"


@dataclass
class KindOfTask(Section):
    """One of several tasks: only the section of its kind, such as single_sentence.

    Its fields are the tasks that are registered, as in `ObjectiveConfig`.
    """

    def sections(self) -> list[TaskConfig]:
        """The sections that are on."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return [section for section in values if section is not None]


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
        """The sections that are on, by name: each of the `tasks` by its own, before the others."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        several: dict[str, KindOfTask] = fields.pop(TASKS) or {}
        sections: dict[str, TermConfig] = {
            name: dataclasses.replace(kind.sections()[0], head_name=name)
            for name, kind in several.items()
        }
        sections |= {name: section for name, section in fields.items() if section is not None}
        tasks = [config.head for config in sections.values() if isinstance(config, TaskConfig)]
        return {
            term: config
            for name, section in sections.items()
            for term, config in section.beside(name, tasks).items()
        }

    def key_of(self, term: str) -> str:
        """The key, in this section, of the section that one of the `terms` comes from."""
        task = (self.tasks or {}).get(term)
        if task is not None:
            return f"{TASKS}.{term}.{task.sections()[0].name}"
        if hasattr(self, term):
            return term
        return next(key for key in vars(self) if term.startswith(f"{key}_"))  # see `beside`

    def task_terms(self) -> dict[str, TaskConfig]:
        """The `terms` that are tasks."""
        return {
            name: config for name, config in self.terms().items() if isinstance(config, TaskConfig)
        }

    def with_task(self, name: str, task: TaskConfig) -> ObjectiveConfig:
        """This objective with the section `task` for a task that it has."""
        if self.tasks and name in self.tasks:
            kind = KindOfTask(**{task.name: task})
            return dataclasses.replace(self, tasks={**self.tasks, name: kind})
        changes: dict[str, Any] = {name: task}
        return dataclasses.replace(self, **changes)

    def conflicts(self) -> Iterator[Refusal]:
        yield from self._conflicts_of_tasks()
        on = self.terms()
        if on and not any(section.is_weighted for section in on.values()):
            why = "must not be 0 at every step, since nothing else is learned"
            yield f"{self.key_of(next(iter(on)))}.weight", why
        trained = {config.head for config in on.values() if config.source != OWN}
        for name, section in on.items():
            needed = MASKED if section.head is None else section.head
            if section.source == OWN and needed not in trained:
                such = "mlm" if section.head is None else "single_sentence"
                yield (
                    self.key_of(name),
                    f"needs a term beside it that trains the last head, such as {such}",
                )
        tasks = {task.head: task for task in self.task_terms().values()}
        for name, section in on.items():
            if isinstance(section, HeadTermConfig) and section.head in tasks:
                refusals = section.conflicts_with_task(tasks[section.head])
                yield from within(self.key_of(name), refusals)

    def _conflicts_of_tasks(self) -> Iterator[Refusal]:
        names = list(self.tasks or {})
        for name, kind in (self.tasks or {}).items():
            if len(kind.sections()) != 1:
                kinds = ", ".join(field.name for field in dataclasses.fields(kind))
                yield f"tasks.{name}", f"must have one of {kinds}"
            if getattr(self, name, None) is not None or not may_name_a_head(name):
                yield f"tasks.{name}", "that name is taken; choose another"
            for term in kind.sections():
                if term.head_name not in (None, name):
                    key = f"tasks.{name}.{term.name}.head_name"
                    yield key, "the head has the name of the task; remove it"
                if term.numeric_fields:
                    key = f"tasks.{name}.{term.name}.numbers"
                    yield key, "are for a job of one task; remove them, or train it alone"
            if any(name.startswith(f"{other}_") for other in names):
                yield f"tasks.{name}", "begins with another task's name and _; choose another"

    @property
    def sources(self) -> set[str]:
        """The names of the learners whose outputs any term reads."""
        return {config.source for config in self.terms().values() if config.source is not None}

    def teacher_terms(self) -> list[str]:
        """The names of the terms that read a teacher's outputs, or the mean of several."""
        return [
            name
            for name, config in self.terms().items()
            if config.source is not None and (config.source == MEAN or is_teacher(config.source))
        ]

    def reads_main_teacher(self) -> bool:
        """Whether any term reads the job's own teacher, by itself or in the mean."""
        return not self.sources.isdisjoint(TEACHER_SOURCES)

    def label_terms(self) -> set[str]:
        """The names of the terms that read no learner's outputs, only labels."""
        return {name for name, section in self.terms().items() if section.learns_labels}

    def waits_for(self, teacher: ObjectiveConfig) -> bool:
        """Whether a term counts only once the job's own teacher is ahead, which can be measured."""
        is_gated = any(config.min_lead_over_student is not None for config in self.terms().values())
        return is_gated and not self.label_terms().isdisjoint(teacher.label_terms())

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

    def conflicts_with_stored(self, teacher: str, stored: StoredConfig) -> Iterator[Refusal]:
        """The terms that read more of `teacher` than what is `stored` at masked positions."""
        key = f"{section_of(teacher)}.stored"
        for name, section in self.terms().items():
            if section.source == teacher:
                yield from within(name, section.misfits_with_stored(key, stored))
            elif section.source == MEAN:
                yield name, f"the mean is of teachers that run; name one teacher, or remove {key}"

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
        """The terms that train or read a head which this model cannot have."""
        terms = self.terms().items()
        # Heads are there before those who read them are asked, whatever their places in the sum.
        for name, section in sorted(terms, key=lambda item: isinstance(item[1], HeadTermConfig)):
            reasons = list(section.unequippable(model))
            yield from ((self.key_of(name), why) for why in reasons)
            try:
                model = model if reasons else section.equip(model)
            except ValueError as error:  # keys of the head, which come from several terms
                yield self.key_of(name), str(error)

    def conflicts_with_data(self, packings: Collection[str], masked: bool) -> Iterator[Refusal]:
        """The terms that need something which the sequences do not have.

        `packings` are those of the data; `masked` says whether positions are masked.
        """
        for name, section in self.terms().items():
            for reason in section.refusals(packings, masked):
                yield self.key_of(name), reason

    def misfits(
        self, learner: ModelShape, teachers: Mapping[str, ModelShape], each_layer: bool
    ) -> Iterator[Refusal]:
        """Why a term does not fit these models; `teachers` are by name.

        `each_layer`: a progressive transfer needs a teacher's layer for each of ours.
        """
        for name, section in self.terms().items():
            refusals = list(_misfits(section, learner, teachers))
            yield from within(self.key_of(name), iter(refusals))
            if each_layer and isinstance(section, LayerTermConfig) and not refusals:
                for layer in sorted(section.left_out(learner, model_read_by(section, teachers))):
                    yield (
                        f"{name}.layers",
                        f"leaves out layer {layer} of the student; progressive needs all of them",
                    )


def _misfits(
    section: TermConfig, learner: ModelShape, teachers: Mapping[str, ModelShape]
) -> Iterator[Refusal]:
    if not isinstance(section, TeacherTermConfig):
        yield from section.misfits(learner, model_read_by(section, teachers))
        return
    read = {name: teacher for name, teacher in teachers.items() if section.source in (name, MEAN)}
    if section.source == MEAN and len(teachers) == 1:
        yield "teacher", "mean is of several; name further teachers in teachers"
    if not read:
        names = ", ".join(name.removeprefix("teachers/") for name in teachers)
        yield "teacher", f"no teacher {section.teacher!r}; there are: {names}"
    for name, teacher in read.items():
        for key, why in section.misfits(learner, teacher):
            yield key, why if name == TEACHER else f"{why} ({section_of(name)})"


def model_read_by(section: TermConfig, teachers: Mapping[str, ModelShape]) -> ModelShape:
    """The model of the teacher that a term reads; of the job's own if it reads none or the mean."""
    return teachers.get(section.source or TEACHER, teachers[TEACHER])


_TASKS = Annotated[
    dict[Annotated[str, TASK_NAME], KindOfTask] | None,
    "Several tasks that share the model; each has its own head. `data.tasks` has their examples.",
]


def declare_terms() -> None:
    """Make every registered term a key of `ObjectiveConfig`. Call it again after registering."""
    terms = registered_terms()
    sections = {name: section | None for name, section in terms.items()}
    kinds = {
        name: section | None
        for name, section in terms.items()
        if issubclass(section, TaskConfig) and section.joins
    }
    declare_fields(KindOfTask, kinds)
    declare_fields(ObjectiveConfig, {**sections, TASKS: _TASKS})


declare_terms()
