"""One of the two sides of a comparison: runs trials in a checkout and reads their results."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.revisions import results, tiny_jobs
from benchmarks.revisions.checkout import Checkout
from benchmarks.revisions.names import Names
from benchmarks.revisions.results import Results
from benchmarks.revisions.tiny_jobs import Section


@dataclass(frozen=True)
class Trial:
    """One job on that many ranks, every learner at a ZeRO stage."""

    job: str
    ranks: int
    stage: int

    def __str__(self) -> str:
        return f"{self.job}, {self.ranks} rank{'s' * (self.ranks > 1)}, stage {self.stage}"


@dataclass
class Side:
    """A checkout and what was made with it; a corpus and teachers are made when first needed."""

    checkout: Checkout
    tokenizer: Path
    names: Names
    steps: int
    learners: list[str]  # KEY=VALUE of every learner that is trained

    @cached_property
    def jobs(self) -> dict[str, Section]:
        """The shipped jobs by name."""
        code = self.checkout.code
        return {name: tiny_jobs.load(code, name) for name in tiny_jobs.names(code)}

    @cached_property
    def corpus(self) -> Path:
        """Built of the reference text that Python comes with."""
        folder, text = self.checkout.made / "corpus", _text_file(self.checkout)
        options = ["--tokenizer", self.tokenizer, "--val-fraction", 0.1]
        self.checkout.tandem("data", "build", text, *options, "--out", folder)
        return folder

    def run(self, trial: Trial) -> Results:
        """Everything that a trial makes; its files stay until the next one.

        Raises:
            CommandFailed: the job ended with an error.
        """
        runs = self.checkout.made / "runs"
        shutil.rmtree(runs, ignore_errors=True)
        self._train(trial, runs)
        run = runs / self.jobs[trial.job]["name"]
        return results.read(run, self._batches(trial), self.steps, self.names)

    def _train(self, trial: Trial, runs: Path) -> None:
        self.checkout.tandem(
            "train", tiny_jobs.shipped(trial.job), *self._overrides(trial, runs), ranks=trial.ranks
        )

    def _batches(self, trial: Trial) -> list[Path]:
        """What each rank of the trial reads, the same at every stage."""
        folder = self.checkout.made / "batches" / f"{trial.job}-{trial.ranks}"
        files = [folder / f"{rank}.npz" for rank in range(trial.ranks)]
        words = ["data", "dump", tiny_jobs.shipped(trial.job), *self._overrides(trial, folder)]
        words += ["--steps", f"0:{self.steps}", "--world-size", str(trial.ranks)]
        for rank, file in enumerate(files):
            if not file.exists():
                folder.mkdir(parents=True, exist_ok=True)
                self.checkout.tandem(*words, "--rank", rank, "--out", file)
        return files

    def _overrides(self, trial: Trial, runs: Path) -> list[str]:
        job = self.jobs[trial.job]
        tiny = tiny_jobs.overrides(job, self.corpus, runs, self.steps)
        tiny |= {f"{place}.zero_stage": trial.stage for place in tiny_jobs.learners(job)}
        if tiny_jobs.is_frozen(job):
            tiny["teacher.zero_stage"] = trial.stage if trial.stage == 3 else 0  # it has no others
            tiny["teacher.init.pretrained"] = str(self._teacher(trial.job))
        frozen = "teacher" if tiny_jobs.is_frozen(job) else None
        more = [
            f"{place}.{one}"
            for place in tiny_jobs.learners(job)
            for one in self.learners
            if place != frozen
        ]
        as_text = [tiny_jobs.as_override(key, value) for key, value in tiny.items()]
        return [self._spoken(trial.job, override) for override in (*as_text, *more)]

    def _spoken(self, job: str, override: str) -> str:
        return self.names.spoken(
            override, lambda one: self.checkout.accepts(tiny_jobs.shipped(job), one)
        )

    def _teacher(self, job: str) -> Path:
        """The export of another job's teacher, which is trained when it is first asked for."""
        name = tiny_jobs.trainer_of(job, self.jobs)
        runs = self.checkout.made / "teachers"
        export = runs / self.jobs[name]["name"] / "exports" / "teacher"
        if not export.exists():
            self._train(Trial(name, ranks=1, stage=0), runs)
        return export


def make_tokenizer(checkout: Checkout) -> Path:
    """Train a tokenizer, which both sides then use: they may differ in how it is trained."""
    folder = checkout.made / "tokenizer"
    size = ["--kind", "wordpiece", "--vocab-size", tiny_jobs.VOCABULARY]
    checkout.tandem("tokenizer", "train", _text_file(checkout), *size, "--out", folder)
    return folder


def _text_file(checkout: Checkout) -> Path:
    path = checkout.made / "text.txt"
    path.write_text(tiny_jobs.text(), encoding="utf-8")
    return path
