"""The jobs of a study: one for each arm and seed, in the order in which they run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from string import Template

import click
import yaml

from configs.studies import StudyConfig

SHARED = "shared.yaml"  # what all jobs of a study have in common
_NEEDED = re.compile(r"\$runs/([\w-]+)-\$seed")  # the arm whose run another one begins with


@dataclass(frozen=True)
class StudyJob:
    """One arm of a study with one seed; `folder` holds the study's runs."""

    study: StudyConfig
    name: str  # of the study
    arm: str
    seed: int
    folder: Path
    overrides: tuple[str, ...] = ()  # of the user, for every job

    @property
    def run(self) -> Path:
        """The folder of its run."""
        return self.folder / f"{self.arm}-{self.seed}"

    @property
    def has_finished(self) -> bool:
        """Whether its run is there, with its final scores.

        Raises ClickException where the run was made by an arm that has changed since.
        """
        self._require_same()
        return (self.run / "evaluation.json").exists()

    @property
    def digest(self) -> str:
        """Changes with what the study says of the arm, and of those that it begins with."""
        return digest(self.study, self.arm, self.overrides)

    def needed(self) -> list[StudyJob]:
        """The jobs whose runs it begins with, each after those that it needs itself."""
        direct = [
            StudyJob(self.study, self.name, arm, self.seed, self.folder, self.overrides)
            for arm in _needed_arms(self.study, self.arm)
        ]
        return [one for job in direct for one in (*job.needed(), job)]

    def write(self) -> Path:
        """Write its YAML beside its run, and return it. Raises as `has_finished` does."""
        self._require_same()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SHARED).write_text(yaml.safe_dump(self.study.job), encoding="utf-8")
        self._file.write_text(self._yaml, encoding="utf-8")
        return self._file

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.run.name}.yaml"

    @property
    def _yaml(self) -> str:
        job = {
            "base": str(self.folder / SHARED),
            **self.study.arms[self.arm].job,
            "name": self.run.name,
            "seed": self.seed,
            "output_dir": str(self.folder),
        }
        filled = Template(yaml.safe_dump(job)).substitute(runs=self.folder, seed=self.seed)
        return f"# {self.name}, {self.arm}: {self.digest}\n{filled}"

    def _require_same(self) -> None:
        if not (self.run.exists() and self._file.exists()):
            return
        if self._file.read_text(encoding="utf-8") != self._yaml:
            raise click.ClickException(
                f"{self.run}: was made by an earlier {self.arm} of {self.name}; delete it"
            )


def digest(study: StudyConfig, arm: str, overrides: Sequence[str] = ()) -> str:
    """Of what the study says of an arm: 12 hexadecimal digits."""
    told = {
        "job": study.job,
        "arm": study.arms[arm].job,
        "needed": [digest(study, one) for one in _needed_arms(study, arm)],
        "overrides": [*overrides],
    }
    text = json.dumps(told, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def in_order(by_study: Sequence[Sequence[StudyJob]]) -> Iterator[StudyJob]:
    """Every job of every study, one seed of all of them before the next seed."""
    rounds = [_by_seed(jobs) for jobs in by_study]
    for same_round in zip_longest(*rounds, fillvalue=[]):
        for jobs in same_round:
            yield from jobs


def _by_seed(jobs: Sequence[StudyJob]) -> list[list[StudyJob]]:
    seeds = dict.fromkeys(job.seed for job in jobs)
    return [[job for job in jobs if job.seed == seed] for seed in seeds]


def _needed_arms(study: StudyConfig, arm: str) -> list[str]:
    text = json.dumps(study.arms[arm].job)
    return sorted(set(_NEEDED.findall(text)))
