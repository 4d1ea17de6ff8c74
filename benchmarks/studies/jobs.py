"""The jobs of a study: one for each arm and seed, in the order in which they run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Any

import click
import yaml

import configs
from configs import assignment
from configs.studies import StudyConfig
from data_pipeline import Corpus, DataError
from trainer.config import JobConfig
from trainer.job_data.encoding import digest_of, files_of
from trainer.job_data.examples import tasks_of

SHARED = "shared"  # the file of what jobs have in common, before the name of their task
_NEEDED = re.compile(r"\$runs/([\w.-]+)-\$seed")  # the arm whose run another one begins with
_PRETRAINED = re.compile(r"\$models/([\w./-]+)")
_FILE = re.compile(r"\$runs/([\w.-]+\.[\w.]+)")


@dataclass(frozen=True)
class Sources:
    """The inputs of studies that are not of their own making; `data` and `models` are for tasks."""

    corpus: Path
    data: Path | None = None
    models: Path | None = None


HERE = Sources(Path("corpus"))


@dataclass(frozen=True)
class StudyJob:
    """One arm of a study with one seed; `folder` holds the study's runs."""

    study: StudyConfig
    name: str  # of the study
    arm: str
    seed: int
    folder: Path
    overrides: tuple[str, ...] = ()  # of the user, for every job
    sources: Sources = HERE

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

    @property
    def words(self) -> list[str]:
        """The overrides of its job: where its data are, and the user's.

        Raises ClickException where a task's data are not named.
        """
        if not task_of(self.study, self.arm):
            return [assignment("data.path", self.sources.corpus.absolute()), *self.overrides]
        if self.sources.data is None:
            raise click.ClickException(f"{self.name}: reads tasks; name their folder by --data")
        return [assignment("data.root", self.sources.data.absolute()), *self.overrides]

    def sources_digest(self) -> str:
        """The digest of the corpus, or of what the job's task and the jobs it begins with read.

        That of the pre-trained models is in it. Raises ClickException where one is not there.
        """
        jobs = [*self.needed(), self]
        folders = {folder for job in jobs for folder in job._pretrained()}
        try:
            if task_of(self.study, self.arm):
                files = {path for job in jobs for path in job._files()}
                digests = [digest_of(path) for path in sorted(files | folders)]
            else:
                corpus = Corpus.open(str(self.sources.corpus))
                digests = [corpus.content, *map(digest_of, sorted(folders))]
        except (configs.ConfigError, DataError) as error:
            raise click.ClickException(f"{self.name}: {error}") from None
        return hashlib.blake2b("".join(digests).encode(), digest_size=6).hexdigest()

    def _pretrained(self) -> set[Path]:
        if self.sources.models is None:
            return set()
        text = json.dumps([self.study.job, self.study.arms[self.arm].job])
        text = text.replace("$seed", str(self.seed))
        return {self.sources.models / name for name in _PRETRAINED.findall(text)}

    def _files(self) -> set[Path]:
        """The files of its examples, but for those that the study makes."""
        job = configs.load(str(self.write()), JobConfig, "job", self.words)
        paths = [path for task in tasks_of(job) for path in files_of(task, task.data.task_files)]
        return {path for path in paths if not path.is_relative_to(self.folder)}

    def needed(self) -> list[StudyJob]:
        """The jobs whose runs it begins with, each after those that it needs itself."""
        arms = _needed_arms(self.study, self.arm)
        direct = [replace(self, arm=arm) for arm in arms]
        return [needed for job in direct for needed in (*job.needed(), job)]

    def missing_files(self) -> list[list[str]]:
        """The words of `tandem` that make the study's files which it reads and are not there."""
        files = _needed_files(self.study, self.arm)
        return [
            [*map(self._filled, words), *self.words, "--out", str(path)]
            for name, words in files.items()
            if not (path := self.folder / name).exists()
        ]

    def write(self) -> Path:
        """Write its YAML beside its run, and return it. Raises as `has_finished` does."""
        self._require_same()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._shared_file.write_text(yaml.safe_dump(self._shared), encoding="utf-8")
        self._file.write_text(self._yaml, encoding="utf-8")
        return self._file

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.run.name}.yaml"

    @property
    def _shared_file(self) -> Path:
        task = task_of(self.study, self.arm)
        return self.folder / (f"{SHARED}-{task}.yaml" if task else f"{SHARED}.yaml")

    @property
    def _shared(self) -> dict[str, Any]:
        task = task_of(self.study, self.arm)
        return {"base": f"configs/task/{task}.yaml", **self.study.job} if task else self.study.job

    @property
    def _yaml(self) -> str:
        job = {
            "base": str(self._shared_file),
            **self.study.arms[self.arm].job,
            "name": self.run.name,
            "seed": self.seed,
            "output_dir": str(self.folder),
        }
        return f"# {self.name}, {self.arm}: {self.digest}\n{self._filled(yaml.safe_dump(job))}"

    def _filled(self, text: str) -> str:
        known: dict[str, object] = {"runs": self.folder, "seed": self.seed}
        if self.sources.models is not None:
            known["models"] = self.sources.models.absolute()
        try:
            return Template(text).substitute(known)
        except KeyError:
            why = "begins with pre-trained models; name their folder by --models"
            raise click.ClickException(f"{self.name}: {why}") from None

    def _require_same(self) -> None:
        if not (self.run.exists() and self._file.exists()):
            return
        if self._file.read_text(encoding="utf-8") != self._yaml:
            raise click.ClickException(
                f"{self.run}: was made by an earlier {self.arm} of {self.name}; delete it"
            )


def task_of(study: StudyConfig, arm: str) -> str:
    """The task that an arm's job begins with; empty: none, it reads text."""
    return study.arms[arm].task or study.task


def digest(study: StudyConfig, arm: str, overrides: Sequence[str] = ()) -> str:
    """The digest of what the study says of an arm: 12 hexadecimal digits."""
    of_tasks = {
        "task": task_of(study, arm),
        "files": _needed_files(study, arm),
        "speeds": study.arms[arm].speeds,
    }
    told = {
        "job": study.job,
        "arm": study.arms[arm].job,
        "needed": [digest(study, needed) for needed in _needed_arms(study, arm)],
        "overrides": [*overrides],
        **{key: value for key, value in of_tasks.items() if value},
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


def _needed_files(study: StudyConfig, arm: str) -> dict[str, list[str]]:
    text = json.dumps(study.arms[arm].job)
    return {name: study.files[name] for name in sorted({*_FILE.findall(text)} & study.files.keys())}
