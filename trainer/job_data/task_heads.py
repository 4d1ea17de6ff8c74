"""The heads that a task's examples need, and those that students need of frozen teachers."""

import dataclasses

from data_pipeline import MASKED
from data_pipeline.examples.example import WHOLE, Layout
from model import CLASSIFICATION, MULTI_LABEL, OTHER, ModelConfig
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_names import MEAN, TEACHER, section_of
from trainer.objectives.task import HeadTermConfig, TaskConfig


def require_same_labels(job: JobConfig, task: TaskConfig) -> None:
    """Raise TrainingError where a frozen teacher lacks a head that is read, or has other labels.

    In a mean, one teacher with the head is enough, but each needs the head of some task. The job's
    own teacher also needs that of its only task.
    """
    read = _readers_of(job, task.head) | (set() if job.data.tasks else {TEACHER})
    if task.head == MASKED:
        return  # of the vocabulary, which learners share
    frozen = {name: teacher for name, teacher in job.learners.items() if teacher.frozen}
    for name, teacher in frozen.items():
        if name in read or MEAN in read:
            _require_head(job, task, name, teacher.model)
    has_head = [task.head in teacher.model.task_heads for teacher in frozen.values()]
    if MEAN in read and not any([not job.teacher.frozen, *has_head]):
        raise TrainingError(
            f"{task.head}: no teacher has a head for it; fine-tune one, or list the other tasks in "
            "soft_labels.tasks"
        )


def with_labels(teacher: ModelConfig, task: TaskConfig) -> ModelConfig:
    """A frozen teacher's model with the task's labels, in the task's order, in its head for it."""
    head = teacher.task_heads.get(task.head)
    if head is None or not head.labels:
        return teacher
    labels = task.equip(teacher).task_heads[task.head].labels
    heads = {**teacher.task_heads, task.head: dataclasses.replace(head, labels=labels)}
    return dataclasses.replace(teacher, task_heads=heads)


def require_labels_of_kind(job: JobConfig, task: TaskConfig, layout: Layout) -> None:
    """Raise TrainingError where a head that tells one label learns from several of an example.

    `tandem predict` and the export would tell one label too.
    """
    models = (learner.architecture.task_heads for learner in job.learners.values())
    kinds = {heads[task.head].kind for heads in models if task.head in heads}
    if CLASSIFICATION in kinds and layout.targets.get(task.head, WHOLE) != WHOLE:
        raise TrainingError(
            f"{task.head}: its examples have several labels each, but its head is of kind "
            f"{CLASSIFICATION}, which predicts one; {task.name} has to make one of kind "
            f"{MULTI_LABEL} or {OTHER}"
        )


def _require_head(job: JobConfig, task: TaskConfig, name: str, teacher: ModelConfig) -> None:
    where = f"{section_of(name)}.init.pretrained"
    ours, theirs = task.equip(teacher).task_heads[task.head], teacher.task_heads.get(task.head)
    if theirs is None:
        averaged = {head for head in _heads_in(job) if MEAN in _readers_of(job, head)}
        if name in _readers_of(job, task.head) or averaged.isdisjoint(teacher.task_heads):
            others = ", ".join(teacher.task_heads)
            but = f", but for {others}" if others else ""
            raise TrainingError(f"{where}: it has no head for {task.head}{but}; fine-tune it first")
    elif theirs.numbers and theirs.numbers != ours.numbers:
        columns = ", ".join(theirs.numbers)
        raise TrainingError(
            f"{where}: its head reads the numbers {columns} beside the text; set "
            f"{task.head}.numbers=[{columns}] of every learner"
        )
    elif not theirs.tells_labels_of(ours):
        key = f"{section_of(name)}.init.labels"
        raise TrainingError(
            f"{where}: its head predicts {', '.join(theirs.labels)}, but the labels of the "
            f"examples are {', '.join(ours.labels)}; list these in the order of the head's: "
            f"{key}=[...]"
        )


def _heads_in(job: JobConfig) -> set[str]:
    """The heads of the job's tasks."""
    learners = job.learners.values()
    return {task.head for learner in learners for task in learner.objective.task_terms().values()}


def _readers_of(job: JobConfig, head: str) -> set[str | None]:
    """The sources with whose predictions students compare this head's."""
    return {
        term.source
        for student in job.students.values()
        for term in student.objective.terms().values()
        if isinstance(term, HeadTermConfig | TaskConfig) and term.head == head
    }
