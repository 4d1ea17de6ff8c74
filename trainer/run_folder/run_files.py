"""Reading a run folder for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

import configs
from configs import ConfigError
from configs.rules import COUNT, INDEX, Filled
from configs.runs import remarks_in
from configs.section import Refusal, Section
from configs.strict_json import finite, from_json, read_json
from configs.typed import convert
from trainer.run_folder import metrics
from trainer.scoring.columns import NUMBER, TASK_MEAN, Column

Floats = NDArray[np.float64]


def read_evaluation(file: Path) -> dict[str, Any] | None:
    """A run's final results; None if there are none, or the file is damaged."""
    try:
        results = finite(read_json(file))
        evaluation = from_json(results, _Evaluation, file)
    except (FileNotFoundError, ConfigError):
        return None
    return {**results, "unigram": evaluation.unigram}  # which may be null in the file


@dataclass
class _Corpus(Section):
    documents: Annotated[int, INDEX]
    tokens: Annotated[int, COUNT]
    validation_tokens: Annotated[int, INDEX]
    path: str = ""


@dataclass
class _Agreement(Section):
    top_1: float
    kl: float


@dataclass
class _ClassScores(Section):
    precision: float
    recall: float
    f1: float
    count: Annotated[int, INDEX]


@dataclass
class _WrongExample(Section):
    text: str
    label: str
    predicted: str


@dataclass
class _Exit(Section):
    accuracy: float
    layers: float


@dataclass
class _Breakdown(Section):
    """The parts of a head's breakdown that its metrics give (`trainer.evaluation.mistakes`)."""

    labels: list[str] = field(default_factory=list)
    confusion: list[list[int]] = field(default_factory=list)
    by_class: dict[str, _ClassScores] = field(default_factory=dict)
    by_exit: dict[str, _Exit] = field(default_factory=dict)
    points: list[list[float]] = field(default_factory=list)
    wrong: list[_WrongExample] = field(default_factory=list)
    wrong_examples: Annotated[int, INDEX] = 0
    order: str = ""

    def conflicts(self) -> Iterator[Refusal]:
        if any(len(point) != 2 for point in self.points):
            yield "points", "must be pairs: the right number and the predicted one"
        size = len(self.labels)
        if [len(row) for row in self.confusion] != [size] * size:
            yield "confusion", "must have a row and a column for each label"


@dataclass
class _Learner(Section):
    """A learner's results; its scores stand beside them, by column."""

    parameters: int
    tokens_per_second: float
    sequences_per_second: float
    seconds_per_sequence: float
    started_at: Annotated[int, INDEX]
    corpora: dict[str, dict[str, float | None]]
    retention: float | None
    agreement: _Agreement | None
    finished_at: int | None = None
    examples_per_second: float | None = None
    flops_per_token: float | None = None
    bytes: int | None = None
    export: str = ""
    export_of_average: str = ""
    export_format: str = ""
    breakdown: dict[str, _Breakdown] = field(default_factory=dict)
    listens_to: list[str] = field(default_factory=list)


@dataclass
class _Evaluation(Section):
    """The part of ``evaluation.json`` that is read back."""

    step: Annotated[int, INDEX]
    metric: str
    columns: list[Column]
    learners: Annotated[dict[str, dict[str, Any]], Filled()]
    unigram: dict[str, float | None]
    corpus: _Corpus
    machine: str = ""
    seconds: float = 0.0
    teacher_score: float | None = None  # by the primary metric
    test: dict[str, str] = field(default_factory=dict)

    def conflicts(self) -> Iterator[Refusal]:
        names = [column.name for column in self.columns]
        if self.metric not in names:
            yield "metric", f"must be one of {', '.join(names)}"
        if "teacher" not in self.learners:
            yield "learners.teacher", "must be set"
        for learner, facts in self.learners.items():
            from_json(facts, _Learner, f"learners.{learner}")
            for name in facts.keys() & {*names}:
                convert(facts[name], float | None, f"learners.{learner}.{name}")


def columns_of(evaluation: Mapping[str, Any]) -> list[Column]:
    """The scores in a run's final results."""
    return [Column(**column) for column in evaluation["columns"]]


def primary_of(evaluation: Mapping[str, Any]) -> Column:
    """The run's primary metric among them."""
    return next(column for column in columns_of(evaluation) if column.name == evaluation["metric"])


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder; `evaluation` is None unless the run is finished."""

    name: str
    config: dict[str, Any]
    config_text: str
    rows: list[metrics.Row]
    evaluation: dict[str, Any] | None
    setbacks: Sequence[str] = ()  # a line for each student with one

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read `folder`, which must have a ``config.yaml``."""
        path = folder / "config.yaml"
        text = path.read_text(encoding="utf-8")
        config = configs.plain(text, str(path))
        evaluation = read_evaluation(folder / "evaluation.json")
        rows = metrics.read(folder / "metrics.jsonl")
        if evaluation and any(row["step"] > evaluation["step"] for row in rows[-1:]):
            evaluation = None  # the run has been extended since
        named = remarks_in(folder / "setbacks.json")
        return cls(folder.resolve().name, config, text, rows, evaluation, named)

    @property
    def learners(self) -> list[str]:
        """All learners of the config, the teachers first."""
        others = (f"teachers/{name}" for name in self.config.get("teachers", ()))
        return ["teacher", *others, *(f"students/{name}" for name in self.config["students"])]

    @cached_property
    def last(self) -> metrics.Row:
        """The newest value of every column, in file order."""
        newest: metrics.Row = {"step": 0, "tokens": 0, "seconds": 0}
        for row in self.rows:
            newest.update(row)
        return newest

    def curve(self, column: str) -> tuple[Floats, Floats]:
        """The steps [N] and values [N] of a column, from the rows that have it."""
        steps, values = metrics.series(self.rows, column)
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def held_out(self, learner: str, column: str) -> tuple[Floats, Floats]:
        """The steps [N] and values [N] of a held-out score, the mean over the corpora."""
        keys = [
            key
            for key in self.last
            if (parts := metrics.split_held_out(key)) and parts[1:] == (learner, column)
        ]
        scores = [(row["step"], [row[key] for key in keys if key in row]) for row in self.rows]
        points = np.array([(step, sum(values) / len(values)) for step, values in scores if values])
        return points.reshape(-1, 2)[:, 0], points.reshape(-1, 2)[:, 1]

    def held_out_columns(self) -> list[str]:
        """The names of the held-out scores that any learner has, the run's primary one first."""
        keys = map(metrics.split_held_out, self.last)
        names = dict.fromkeys(parts[2] for parts in keys if parts)
        first = self.evaluation["metric"] if self.evaluation else TASK_MEAN.name
        return sorted(names, key=lambda name: name != first)

    @property
    def example_files(self) -> list[str]:
        """The training file of each task; none where the run reads text."""
        data = self.config["data"]
        tasks = data.get("tasks") or {}
        if tasks:
            return [f"{name}: {task['train']}" for name, task in tasks.items()]
        return [data["train"]] if data.get("train") else []

    @property
    def masks_tokens(self) -> bool:
        """Whether it reads text with masks, at least in one phase; else it predicts next tokens."""
        data = self.config["data"]
        sections = [data, *(data.get("phases") or [])]
        units = [(section.get("masking") or {}).get("unit") for section in sections]
        return {unit for unit in units if unit} != {"next_token"}

    def scores_in_charts(self) -> list[Column]:
        """The held-out scores that any learner has, with their headings.

        Before there are results, a heading is the part of the name by which scores differ.
        """
        known = {column.name: column for column in columns_of(self.evaluation or {"columns": []})}
        names = [name for name in self.held_out_columns() if name not in known]
        heads = {
            name: head for name in names for head in self._heads if name.startswith(f"{head}_")
        }
        for name in names:
            score = name.removeprefix(f"{heads.get(name, '')}_")
            several = len({*heads.values()}) > 1 and name in heads
            known[name] = Column(name, f"{heads[name]} {score}" if several else score, NUMBER)
        return [known[name] for name in self.held_out_columns()]

    @property
    def _heads(self) -> list[str]:
        """The names that a task's head may have: those of terms and of several tasks."""
        learners = [self.config["teacher"], *self.config["students"].values()]
        terms = [name for learner in learners for name in (learner or {}).get("objective") or {}]
        return sorted({*terms, *(self.config["data"].get("tasks") or {})}, key=len)

    def columns_of(self, learner: str) -> list[str]:
        """The columns of a learner, without its name, in file order."""
        prefix = f"{learner}/"
        return [key.removeprefix(prefix) for key in self.last if key.startswith(prefix)]

    def clock(self, column: str) -> tuple[Floats, Floats]:
        """The `curve` of a cumulative column (tokens, seconds), starting at step 0 with value 0."""
        steps, values = self.curve(column)
        return np.concatenate([[0.0], steps]), np.concatenate([[0.0], values])

    def checkpoints(self) -> list[float]:
        """The first logged step after each checkpoint."""
        steps, stalls = self.curve("checkpoint_stall")
        return [float(step) for step, stall in zip(steps, stalls, strict=True) if stall > 0]

    def restarts(self) -> list[tuple[int, float]]:
        """The number of each restart, and the first logged step after it."""
        steps, counts = self.curve("restarts")
        before = np.concatenate([counts[:1] * 0, counts[:-1]])
        changes = zip(counts, steps, before, strict=True)
        return [(int(count), float(step)) for count, step, earlier in changes if count > earlier]

    def joined(self) -> dict[str, float]:
        """The learners that started after the others, with the first logged step of each."""
        starts = {name: self.curve(f"{name}/loss")[0] for name in self.learners}
        began = {name: float(steps[0]) for name, steps in starts.items() if len(steps)}
        first = min(began.values(), default=0.0)
        return {name: step for name, step in began.items() if step > first}
