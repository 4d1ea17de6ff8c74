"""The shipped jobs of a checkout at sizes at which a step takes a fraction of a second."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import yaml

VOCABULARY, LENGTH = 600, 32
BATCH: dict[str, Any] = {"size": 4, "tokens": None, "growth": [], "micro_batch": 1}
Section = dict[str, Any]


def names(code: Path) -> list[str]:
    """The shipped jobs."""
    return sorted(path.stem for path in (code / "configs" / "job").glob("*.yaml"))


def shipped(name: str) -> str:
    """How a command is told a shipped job: by its place, as other configs may have its name."""
    return f"configs/job/{name}.yaml"


def load(code: Path, name: str) -> Section:
    """A shipped job with what it is based on, and what its models are based on."""
    job = _resolved(code, "job", name)
    for section in learners(job).values():
        section["model"] = _resolved(code, "model", section["model"])
    return job


def learners(job: Section) -> dict[str, Section]:
    """The sections of the learners, by their place in the job."""
    students = job.get("students", {})
    return {"teacher": job["teacher"], **{f"students.{key}": one for key, one in students.items()}}


def is_frozen(job: Section) -> bool:
    """Whether it begins with a teacher that another job has trained."""
    return bool(job["teacher"].get("frozen"))


def trainer_of(name: str, jobs: Mapping[str, Section]) -> str:
    """The job that trains a teacher most like the frozen one of the job `name`."""
    model = jobs[name]["teacher"]["model"]

    def unlike(other: str) -> int:
        its = jobs[other]["teacher"]["model"]
        return sum(model.get(key) != its.get(key) for key in {*model, *its})

    return min((other for other, job in jobs.items() if not is_frozen(job)), key=unlike)


def text() -> str:
    """Documents of paragraphs, a document a block of lines."""
    documents = [topics[name] for name in sorted(topics)][:60]
    return "\n\n".join(document.replace("\n\n", "\n") for document in documents)


def overrides(job: Section, corpus: Path, runs: Path, steps: int) -> dict[str, Any]:
    """The keys that make a job tiny: narrow models, short sequences, few steps.

    Everybody takes part from the first step on, and what changes later in a job changes in these
    few steps. There is a checkpoint of each step. The keys are the newest names.
    """
    tiny: dict[str, Any] = {
        "output_dir": str(runs),
        "steps": steps,
        "data.path": str(corpus),
        "data.sequence_length": LENGTH,
        "data.phases": [],
        "log.every": 1,
        "log.wandb": "disabled",
        "evaluation.every": 2,
        "evaluation.sequences": 4,
        "checkpoint.every": 1,
        "checkpoint.keep": steps,
        "batch": BATCH,
    }
    for place, section in learners(job).items():
        tiny |= {f"{place}.{key}": value for key, value in _tiny(section, steps)}
    return tiny


def as_override(key: str, value: Any) -> str:
    """``key=value``, the value as YAML in one line."""
    return f"{key}={json.dumps(value) if not isinstance(value, str) else value}"


def _tiny(section: Section, steps: int) -> Iterator[tuple[str, Any]]:
    model = section["model"]
    width = 2 * model["heads"]  # as narrow as its heads allow
    yield "model.vocab_size", VOCABULARY
    yield "model.hidden_size", width
    yield "model.ffn_size", 16
    yield "model.pad_token_id", min(model.get("pad_token_id", 0), 1)
    if model.get("embedding_size", model["hidden_size"]) not in (0, model["hidden_size"]):
        yield "model.embedding_size", 8
    if model.get("bottleneck_size"):
        yield "model.bottleneck_size", width
    for key in section.get("start", {}):
        yield f"start.{key}", 0 if key == "step" else None
    if section.get("schedule", {}).get("warmup_steps"):
        yield "schedule.warmup_steps", 1
    if section.get("stacking"):
        yield "stacking.steps", list(range(1, min(steps, 1 + len(section["stacking"]["steps"]))))
    if section.get("progressive"):
        yield "progressive.steps_per_layer", 1


def _resolved(code: Path, kind: str, section: str | Section) -> Section:
    if isinstance(section, str):
        text = (code / "configs" / kind / f"{section}.yaml").read_text(encoding="utf-8")
        section = yaml.safe_load(text)
    assert isinstance(section, dict)
    own = {key: value for key, value in section.items() if key != "base"}
    if "base" not in section:
        return own
    return _merged(_resolved(code, kind, section["base"]), own)


def _merged(base: Section, own: Section) -> Section:
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merged(below, value)
        merged[key] = value
    return merged
