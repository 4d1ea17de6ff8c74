"""A small schema of jobs, with shipped files of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import configs
from configs import ConfigError

FILES = {
    "job/demo": "name: demo\nsteps: 100\nteacher: {model: small}\n"
    "students:\n  tiny: {model: {base: small, layers: 1}}\n  half:\n",
    "job/long": "base: demo\nsteps: 1000\nteacher: {optimizer: {learning_rate: 1e-4}}\n",
    "job/other_teacher": "base: demo\nteacher:\n  model: {base: large, dropout: 0.5}\n",
    "model/small": "layers: 4\ndropout: 0.2\n",
    "model/large": "layers: 24\n",
    "model/deeper": "base: large\nlayers: 48\n",
    "model/loop": "base: loop_back\n",
    "model/loop_back": "base: loop\n",
}


@dataclass
class Model:
    layers: int = 2
    dropout: float = 0.1
    kind: str = "bert"

    def __post_init__(self):
        if self.layers < 1:
            raise ValueError("layers must be at least 1")


@dataclass
class Optimizer:
    learning_rate: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    fused: bool = False


@dataclass
class Learner:
    is_trained: ClassVar[bool] = True  # no key
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: list[int] | None = None
    swap: Model | None = None
    ensemble: list[Model] = field(default_factory=list)
    weight: float | dict[int, float] = 1.0


@dataclass
class Job:
    name: str
    steps: int
    teacher: Learner
    students: dict[str, Learner] = field(default_factory=dict)
    note: str | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


@dataclass
class Anything:
    job: dict[str, Any]


def ship(folder: Path) -> None:
    """Write the shipped files into a folder."""
    for name, text in FILES.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def load(name="demo", *overrides):
    return configs.load(name, Job, "job", overrides)


def message(name, *overrides, schema=Job, kind="job"):
    with pytest.raises(ConfigError) as caught:
        configs.load(name, schema, kind, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(text, name="mine.yaml"):
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
    return name
