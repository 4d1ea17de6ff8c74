"""A study of two arms, and results of it."""

from __future__ import annotations

from benchmarks.studies.jobs import digest
from benchmarks.studies.results import Result
from configs.studies import ArmConfig, StudyConfig


def two_arms(**job: object) -> StudyConfig:
    arms = {"first": ArmConfig(), "second": ArmConfig({"init": "$runs/first-$seed"}, ["pupil"])}
    return StudyConfig("Why?", {"steps": 1, **job}, arms, seeds=[1, 2], scores=["accuracy"])


def result(config: StudyConfig, arm: str, seed: int, **accuracies: float) -> Result:
    scores = {name: {"accuracy": one} for name, one in accuracies.items()}
    return Result(arm, seed, digest(config, arm), "abc", 1.0, {}, 100, scores)
