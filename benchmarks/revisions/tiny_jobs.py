"""The shipped jobs of a checkout, those of its tasks and suites too, at tiny sizes.

A step takes a fraction of a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import yaml

from benchmarks.revisions import tiny_tasks

VOCABULARY, LENGTH = 600, 32
BATCH: dict[str, Any] = {"size": 4, "tokens": None, "growth": [], "micro_batch": 1}
Section = dict[str, Any]
# The task that fine-tunes the teacher of one that is not about the task in its name.
FINE_TUNED = {
    "tinybert_task": "sentence_pair",
    "pkd_task": "sentence_pair",
    "tang_task": "single_sentence",
    "c_mlm_student": "c_mlm",
    "c_mlm_student_multi30k": "c_mlm_multi30k",
    "mt_dnn_kd": "mt_dnn",
    "distil_vectors": "bi_encoder",
}


@dataclass(frozen=True)
class Shipped:
    """A job that a checkout ships: what a command is told, with which keys, and what it says.

    A job of `configs/job` is told by its place, as other configs may have its name.
    """

    config: str
    section: Section
    changes: Section = field(default_factory=dict)
    is_task: bool = False


def load_all(code: Path) -> dict[str, Shipped]:
    """The jobs by name: ``demo``, ``task/cola`` and ``suite/glue_mini/cola``."""
    jobs = {
        name: Shipped(f"configs/job/{name}.yaml", _with_models(code, "job", name))
        for name in _names(code, "job")
    }
    tasks = {
        name: Shipped(name, _with_models(code, "task", name), is_task=True)
        for name in _names(code, "task")
    }
    jobs |= {f"task/{name}": job for name, job in tasks.items()}
    for suite in _names(code, "suite"):
        section = _resolved(code, "suite", suite)
        for name, part in section["tasks"].items():
            task = tasks[part.get("task", name)]
            changes = _merged(section.get("job", {}), part.get("job", {}))
            merged = _merged(task.section, changes)
            shipped = Shipped(task.config, merged, flat(changes), is_task=True)
            jobs[f"suite/{suite}/{name}"] = shipped
    return jobs


def _names(code: Path, kind: str) -> list[str]:
    return sorted(path.stem for path in (code / "configs" / kind).glob("*.yaml"))


def _with_models(code: Path, kind: str, name: str) -> Section:
    """A shipped job with what it is based on, and what its models are based on."""
    job = _resolved(code, kind, name)
    for section in learners(job).values():
        if "model" in section:
            section["model"] = _resolved(code, "model", section["model"])
    return job


def flat(tree: Section, path: str = "") -> Section:
    """The leaves of a tree by dotted key."""
    leaves: Section = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return leaves


def learners(job: Section) -> dict[str, Section]:
    """The sections of the learners, by their place in the job."""
    students = job.get("students", {})
    teachers = job.get("teachers", {})
    return {
        "teacher": job["teacher"],
        **{f"teachers.{key}": section for key, section in teachers.items()},
        **{f"students.{key}": section for key, section in students.items()},
    }


def is_frozen(learner: Section) -> bool:
    """Whether another job has trained it."""
    return bool(learner.get("frozen"))


def trainer_of(name: str, jobs: Mapping[str, Shipped]) -> str:
    """The job that trains a teacher most like the frozen one of the job `name`.

    That of a task has fine-tuned one on the same task.
    """
    if jobs[name].is_task:
        stem = name.removeprefix("task/")
        return f"task/{FINE_TUNED.get(stem, stem.partition('_')[2])}"
    model = jobs[name].section["teacher"]["model"]

    def unlike(other: str) -> int:
        its = jobs[other].section["teacher"]["model"]
        return sum(model.get(key) != its.get(key) for key in {*model, *its})

    texts = {name: job.section["teacher"] for name, job in jobs.items() if not job.is_task}
    pretrained = (
        name for name, teacher in texts.items() if "model" in teacher and not is_frozen(teacher)
    )
    return min(pretrained, key=unlike)


def text() -> str:
    """Documents of paragraphs, a document a block of lines."""
    documents = [topics[name] for name in sorted(topics)][:60]
    return "\n\n".join(document.replace("\n\n", "\n") for document in documents)


def overrides(job: Shipped, data: Path, runs: Path, steps: int) -> Section:
    """The keys that make a job tiny: narrow models, short sequences, few steps.

    Everybody takes part from the first step on, and what changes later in a job changes in these
    few steps. There is a checkpoint of each step. The keys are the newest names. `data` is the
    corpus, or the folder of a task's files.
    """
    reads: Section = {"data.path": str(data), "data.phases": [], "evaluation.sequences": 4}
    if job.is_task:
        places = tiny_tasks.overrides(job.section)
        reads = {**job.changes, **places, "data.root": str(data), "epochs": None}
    elif "mixture" in job.section["data"]:
        reads["data.mixture"] = None
    tiny: Section = {
        **reads,
        "output_dir": str(runs),
        "steps": steps,
        "data.sequence_length": LENGTH,
        "log.every": 1,
        "log.wandb": "disabled",
        "evaluation.every": 2,
        "checkpoint.every": 1,
        "checkpoint.keep": steps,
        "batch": BATCH,
    }
    for place, section in learners(job.section).items():
        tiny |= {f"{place}.{key}": value for key, value in _tiny(section, steps)}
    return tiny


def as_override(key: str, value: Any) -> str:
    """``key=value``, the value as YAML in one line."""
    return f"{key}={json.dumps(value) if not isinstance(value, str) else value}"


def _tiny(section: Section, steps: int) -> Iterator[tuple[str, Any]]:
    if "model" in section:
        yield from _narrow(section["model"])
    if section.get("init", {}).get("tile"):  # there is no smaller model of its shape
        yield "init.tile", None
    for key in section.get("start", {}):
        yield f"start.{key}", 0 if key == "step" else None
    if section.get("schedule", {}).get("warmup_steps"):
        yield "schedule.warmup_steps", 1
    if section.get("stacking"):
        yield "stacking.steps", list(range(1, min(steps, 1 + len(section["stacking"]["steps"]))))
    if section.get("progressive"):
        yield "progressive.steps_per_layer", 1


def _narrow(model: Section) -> Iterator[tuple[str, Any]]:
    """A model as narrow as its heads allow."""
    yield "model.vocab_size", VOCABULARY
    if "heads" not in model:  # it is no transformer
        return
    width = 2 * model["heads"]
    yield "model.hidden_size", width
    yield "model.ffn_size", 16
    yield "model.pad_token_id", min(model.get("pad_token_id", 0), 1)
    if model.get("embedding_size", model["hidden_size"]) not in (0, model["hidden_size"]):
        yield "model.embedding_size", 8
    if model.get("bottleneck_size"):
        yield "model.bottleneck_size", width


def _resolved(code: Path, kind: str, section: str | Section) -> Section:
    if isinstance(section, str):
        text = (code / "configs" / kind / f"{section}.yaml").read_text(encoding="utf-8")
        section = yaml.safe_load(text)
    assert isinstance(section, dict)
    changes = {key: value for key, value in section.items() if key != "base"}
    if "base" not in section:
        return changes
    return _merged(_resolved(code, kind, section["base"]), changes)


def _merged(base: Section, changes: Section) -> Section:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merged(below, value)
        merged[key] = value
    return merged
