"""The scores of a finished model on a labelled file: of an export, or an imported model."""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import configs
from configs import ConfigError, assignment
from configs.typed import convert
from data_pipeline import DEFAULT_VIEW, MASKED, Corpus, DataConfig, DataError
from data_pipeline.task_files.tables import column_names
from model import (
    CHOICE,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SPAN,
    TAGGING,
    Ability,
    Model,
    ModelConfig,
    ModelError,
    TaskHeadConfig,
    describe,
    from_pretrained,
)
from trainer.config import JobConfig
from trainer.evaluation.breakdown import Breakdown, score_examples
from trainer.evaluation.held_out import ValidationSet
from trainer.job_data.encoding import TaskOfJob
from trainer.job_data.examples import tasks_of, with_validation
from trainer.job_data.fit import require_fit
from trainer.objectives.task import STATISTICS, TaskConfig
from trainer.objectives.term import registered_terms
from trainer.scoring.scores import Metrics, columns_of
from trainer.scoring.task_metrics import BranchMetric
from trainer.task_facts import TaskFacts, chosen_head
from trainer.tasks import load_plugins
from trainer.tasks.multiple_choice import MultipleChoice
from trainer.tasks.sentences import LABELS, NUMBER, SentencePair, SingleSentence
from trainer.tasks.span import Span
from trainer.tasks.tagging import Tagging
from trainer.tasks.translation import Translation

_log = logging.getLogger(__name__)

FILE = "data.validation"
# The job keys that decide how a file is read and scored; the others are about training.
_READ = re.compile(
    r"(data|teacher\.objective|teacher\.init\.labels|batch\.micro_batch|plugins)(\.|$)"
)
_NOT_READ = ("train", "test", "validation_fraction", "max_trained")  # of data
_TASKS = {
    **dict.fromkeys((CLASSIFICATION, MULTI_LABEL, REGRESSION), SingleSentence.name),
    CHOICE: MultipleChoice.name,
    TAGGING: Tagging.name,
    SPAN: Span.name,
}  # of heads whose folder has no task.json
_TARGETS = {MULTI_LABEL: LABELS, REGRESSION: NUMBER}


class LabelledExamples:
    """The validation examples of a task's job, which a finished model is scored on.

    job: completed from its examples. metrics: those of the task's head.
    """

    def __init__(self, model: Model, folder: Path, job: JobConfig) -> None:
        """`model` is the one in `folder`.

        The task's labels are the model's, in its order, or what the teacher's ``init.labels`` calls
        them. Raises ModelError for a model whose head is not the task's, DataError and
        TrainingError for examples that cannot be read.
        """
        self.job = with_validation(_with_labels(model, folder, job))
        self.head = tasks_of(self.job)[0].task.head
        _require_head(model, folder, self.job, self.head)
        metrics = self.job.metrics_of(self.job.teacher)
        self.metrics: Metrics = tuple(metric for metric in metrics if metric.head == self.head)
        self.corpus = Corpus.open(self.job.data.path)
        corpora = {self.corpus.name: self.corpus}
        require_fit(self.job, corpora)
        self._validation = ValidationSet(self.job, corpora)

    def score(
        self, model: Model, metrics: Metrics, breakdown: Breakdown | None = None
    ) -> dict[str, float]:
        """The model's scores by column, without undefined ones."""
        read = methodcaller("view", self.job.teacher.form)
        scores = score_examples(model, self._validation, metrics, read, breakdown)
        return {name: value for name, value in scores.overall.items() if value is not None}


def evaluate_model(
    folder: Path, overrides: Sequence[str], device: torch.device, head: str | None
) -> dict[str, Any]:
    """Score the model in a folder on the file that the job keys name as ``data.validation``.

    The task, its columns and its lengths are those of the model's ``task.json``; without one the
    kind of its head decides. `head` names the one to score of several. What was chosen on the
    validation file in training, such as the threshold for no answer, stays as it is.

    Returns the columns and the scores by column (None: undefined), and the head's breakdown. Raises
    ConfigError for keys that say nothing about scores, ModelError for a model that cannot be scored
    so, DataError and TrainingError for a file that cannot be read.
    """
    given = _given_keys(overrides)
    load_plugins(convert(given.get("plugins", []), list[str], "plugins"))
    model = from_pretrained(folder).to(device)
    translates = Ability.GENERATE in model.config.abilities
    head = MASKED if translates else chosen_head(folder, list(model.config.task_heads), head)
    if not given["data"].get("validation"):
        raise ConfigError(f"{FILE}: must be set: the labelled file to score {folder} on")
    facts = TaskFacts.read(folder, head)
    with TemporaryDirectory(prefix="tandem-evaluate-") as scratch:
        words = [*overrides, assignment("output_dir", scratch)]
        job = _job(folder, model.config, head, facts, given, words)
        examples = LabelledExamples(model, folder, job)
        metrics = tuple(metric.tuned_on(facts.scores) for metric in examples.metrics)
        architecture = examples.job.teacher.architecture  # whose labels are as in the file
        heads = model.config.task_heads.items()
        branches = [
            BranchMetric(name) for name, task_head in heads if name == head and task_head.branches
        ]
        read = (*metrics, *branches)
        breakdown = Breakdown(read, architecture, examples.corpus.tokenizer_dir)
        scores = examples.score(model, read, breakdown)
    columns = columns_of(metrics)
    return {
        "model": str(folder),
        "file": str(job.data.task_files["validation"]),
        "head": head,
        "parameters": describe(model.config).parameters,
        "metric": metrics[0].primary.name,
        "columns": [dataclasses.asdict(column) for column in columns.values()],
        "scores": {name: scores.get(name) for name in columns},
        "breakdown": breakdown.finish().get(head),
    }


def _given_keys(overrides: Sequence[str]) -> dict[str, Any]:
    """The job keys as sections, ``data`` among them. Raises ConfigError for one without effect."""
    given = configs.assigned(overrides)
    for word in overrides:
        key = word.partition("=")[0]
        if not _READ.match(key) or key == "teacher.objective":
            raise ConfigError(f"{key}: does not change how a finished model is scored; remove it")
    data = given.get("data") or {}
    if not isinstance(data, dict):
        raise ConfigError(f"data: must be a section; name the labelled file by {FILE}")
    if unread := [key for key in _NOT_READ if key in data]:
        raise ConfigError(f"data.{unread[0]}: only {FILE} is scored; remove it")
    return {**given, "data": data}


def _job(
    folder: Path,
    model: ModelConfig,
    head: str,
    facts: TaskFacts,
    given: Mapping[str, Any],
    overrides: Sequence[str],
) -> JobConfig:
    """A job about the model's task whose validation file is the one that is given."""
    longest = model.longest_sequence or facts.sequence_length
    data = {
        "train": given["data"]["validation"],  # no example is read from it
        "columns": dict(facts.columns),
        "encoding": facts.encoding,
        "sequence_length": min(facts.sequence_length, longest),
    }
    task = _task_of(folder, model, head, facts, configs.merge({"data": data}, given))
    teacher: dict[str, Any] = {
        "init": {"pretrained": str(folder)},
        "objective": {task: _settings(task, head, model.task_heads.get(head), facts)},
    }
    if not model.is_trainable:  # a job that trains it is refused, so another stands for its sizes
        positions = model.longest_sequence or data["sequence_length"]
        teacher["model"] = {"vocab_size": model.vocab_size, "max_positions": positions}
    batch = {"size": 32, "micro_batch": 32}
    tree = {"name": "evaluation", "steps": 1, "data": data, "teacher": teacher, "batch": batch}
    words = [*(assignment(key, value) for key, value in tree.items()), *overrides]
    job = configs.load_text("", JobConfig, "job", words, str(folder))
    views = {
        tuple(job_task.task.texts_of(view)): view
        for job_task in tasks_of(job)
        for view in (*job_task.task.views, DEFAULT_VIEW)
    }
    view = views.get(tuple(facts.fields), DEFAULT_VIEW)
    return dataclasses.replace(job, teacher=dataclasses.replace(job.teacher, view=view))


def _task_of(
    folder: Path, model: ModelConfig, head: str, facts: TaskFacts, given: Mapping[str, Any]
) -> str:
    """The name of the task: as `given`, as the model was trained on, or by the kind of its head.

    Raises ModelError where none of these says it.
    """
    if chosen := [*given.get("teacher", {}).get("objective", {})]:
        return str(chosen[0])
    if named := facts.settings.get("task"):
        return str(named)
    if head == MASKED:
        return Translation.name
    if _section_of(head) is not None:  # as an export that was imported again is called
        return head
    kind = model.task_heads[head].kind
    if kind not in _TASKS:
        raise ModelError(
            f"{folder}: nothing says what its head {head}, of kind {kind}, was trained on; name "
            "its task, such as teacher.objective.bi_encoder={}"
        )
    if _TASKS[kind] == SingleSentence.name and _holds_pairs(folder, facts, given["data"]):
        return SentencePair.name
    return _TASKS[kind]


def _holds_pairs(folder: Path, facts: TaskFacts, data: Mapping[str, Any]) -> bool:
    """Whether a table has pairs of texts, by its columns or by those that are named."""
    config = configs.validate(data, DataConfig, str(folder))
    pair = {*SentencePair().texts}
    if pair <= {*facts.fields, *config.columns}:
        return True
    file = config.task_files["validation"]
    return file.exists() and pair <= {*column_names(str(file), config.encoding)}


def _section_of(task: str) -> type[TaskConfig] | None:
    """The section of a registered task; None where there is none of this name."""
    section = registered_terms().get(task)
    return section if section is not None and issubclass(section, TaskConfig) else None


def _settings(
    task: str, head_name: str, head: TaskHeadConfig | None, facts: TaskFacts
) -> dict[str, Any]:
    """The task's section: as the model was trained with it, with the name of its head.

    Raises ModelError where ``task.json`` has another section.
    """
    section = _section_of(task)
    if section is None:
        return {}  # the keys are refused where they are read
    settings = dataclasses.asdict(facts.section(section)) if facts.settings else {}
    if head is None:
        return settings
    settings.pop("labels", None)  # the model's, see `LabelledExamples`
    of_head = {"target": _TARGETS.get(head.kind)}
    of_head |= {key: getattr(head, key) for key in ("numbers", *STATISTICS)}
    keys = {field.name for field in dataclasses.fields(section)}
    settings |= {key: value for key, value in of_head.items() if key in keys and value}
    return {**settings, "head_name": None if head_name == task else head_name}


def _with_labels(model: Model, folder: Path, job: JobConfig) -> JobConfig:
    """The job whose task has the labels of the model's head, in its order, unless it names them.

    Raises ModelError for labels that the task cannot have, or as many as the head does not have.
    """
    job_task, given = tasks_of(job)[0], job.teacher.init.labels
    head = model.config.task_heads.get(job_task.task.head)
    if head is None or not head.labels or getattr(job_task.task, "labels", None) != []:
        return job
    if given and len(given) != len(head.labels):
        counts = f"lists {len(given)} for the {len(head.labels)} labels of the head in {folder}"
        raise ModelError(f"teacher.init.labels: {counts}")
    labels = given or (_in_order(job_task, folder, head) if head.is_unnamed else head.labels)
    changes: dict[str, Any] = {"labels": labels}  # not every task has them
    task = dataclasses.replace(job_task.task, **changes)
    for key, why in task.conflicts():
        term = job.teacher.objective.key_of(job_task.name)
        raise ModelError(f"teacher.objective.{term}.{key}: {why}")
    objective = job.teacher.objective.with_task(job_task.name, task)
    return dataclasses.replace(job, teacher=dataclasses.replace(job.teacher, objective=objective))


def _in_order(job_task: TaskOfJob, folder: Path, head: TaskHeadConfig) -> list[str]:
    """The examples' names for the labels of a head that has none: sorted, or numbers from 0.

    They are numbers where the examples have another count of labels, as a file with some of them.
    """
    labels = [str(number) for number in range(len(head.labels))]
    try:
        theirs: list[str] = getattr(
            job_task.task.with_labels_of(job_task.file("train")), "labels", []
        )
    except DataError:  # such as a file with one label; others are raised where it is read
        theirs = []
    if len(theirs) == len(labels):
        labels = theirs
    _log.warning(
        "%s: the labels of its head have no names: %s are %s; teacher.init.labels names others",
        *(folder, ", ".join(head.labels), ", ".join(labels)),
    )
    return labels


def _require_head(model: Model, folder: Path, job: JobConfig, name: str) -> None:
    """Raise ModelError where the model has no head for the task, or one with other labels."""
    if name == MASKED:
        return
    expected, head = job.teacher.architecture.task_heads[name], model.config.task_heads.get(name)
    if head is None:
        raise ModelError(f"{folder}: has no head for {name}; fine-tune it with `tandem finetune`")
    labels = job.teacher.init.labels or head.labels
    fits = expected.labels == labels or (head.is_unnamed and head.tells_labels_of(expected))
    if head.kind != expected.kind or not fits:
        ours, theirs = (", ".join(config.labels) or config.kind for config in (head, expected))
        raise ModelError(f"{folder}: its head predicts {ours}, but the examples have {theirs}")
    if head.numbers != expected.numbers:
        ours, theirs = (", ".join(config.numbers) or "none" for config in (head, expected))
        raise ModelError(f"{folder}: its head reads the numbers {ours}, and not {theirs}")
