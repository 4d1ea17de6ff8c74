"""One of the two sides of a comparison: runs trials in a checkout and reads their results."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.revisions import results, tiny_jobs, tiny_tasks
from benchmarks.revisions.checkout import Checkout
from benchmarks.revisions.names import Names
from benchmarks.revisions.results import Results
from benchmarks.revisions.tiny_jobs import Shipped

BASE = "bert"  # the job whose teacher is what tasks fine-tune


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
    def jobs(self) -> dict[str, Shipped]:
        """The shipped jobs by name."""
        return tiny_jobs.load_all(self.checkout.code)

    @cached_property
    def corpus(self) -> Path:
        """Built of the reference text that Python comes with."""
        folder, text = self.checkout.made / "corpus", _text_file(self.checkout)
        options = ["--tokenizer", self.tokenizer, "--val-fraction", 0.1]
        self.checkout.tandem("data", "build", text, *options, "--out", folder)
        return folder

    def examples(self, name: str) -> Path:
        """The files of examples of a task, or of several."""
        job, folder = self.jobs[name], self.checkout.made / "examples" / name.replace("/", "-")
        if not folder.exists():
            texts = tiny_tasks.sentences(tiny_jobs.text())
            tasks = [self.jobs[f"task/{name}"] for name in tiny_tasks.parts(job.section).values()]
            for task in tasks or [job]:
                tiny_tasks.write(folder, task.section, texts)
        return folder

    def run(self, trial: Trial) -> Results:
        """Everything that a trial makes; its files stay until the next one.

        Raises:
            CommandFailed: the job ended with an error.
        """
        runs = self.checkout.made / "runs"
        shutil.rmtree(runs, ignore_errors=True)
        self._train(trial, runs)
        run = runs / self.jobs[trial.job].section["name"]
        return results.read(run, self._batches(trial), self.steps, self.names)

    def _train(self, trial: Trial, runs: Path) -> None:
        words = ["train", self.jobs[trial.job].config, *self._overrides(trial, runs)]
        self.checkout.tandem(*words, ranks=trial.ranks)

    def _batches(self, trial: Trial) -> list[Path]:
        """The batches that each rank of the trial reads, the same at every stage."""
        folder = self.checkout.made / "batches" / f"{trial.job.replace('/', '-')}-{trial.ranks}"
        files = [folder / f"{rank}.npz" for rank in range(trial.ranks)]
        words = ["data", "dump", self.jobs[trial.job].config, *self._overrides(trial, folder)]
        words += ["--steps", f"0:{self.steps}", "--world-size", str(trial.ranks)]
        job = self.jobs[trial.job].section
        if any("view" in learner for learner in tiny_jobs.learners(job).values()):
            words += ["--learner", next(iter(job.get("students", {"teacher": None})))]
        for rank, file in enumerate(files):
            if not file.exists():
                folder.mkdir(parents=True, exist_ok=True)
                self.checkout.tandem(*words, "--rank", rank, "--out", file)
        return files

    def _overrides(self, trial: Trial, runs: Path) -> list[str]:
        job = self.jobs[trial.job]
        learners = tiny_jobs.learners(job.section)
        data = self.examples(trial.job) if job.is_task else self.corpus
        tiny = tiny_jobs.overrides(job, data, runs, self.steps)
        for place, learner in learners.items():
            if tiny_jobs.is_frozen(learner):
                tiny[f"{place}.zero_stage"] = trial.stage if trial.stage == 3 else 0  # no others
                tiny[f"{place}.init.pretrained"] = str(self._teacher(trial.job))
            else:
                tiny[f"{place}.zero_stage"] = trial.stage
                if learner.get("init", {}).get("pretrained") == "???":
                    tiny[f"{place}.init.pretrained"] = str(self._export(BASE))
        if job.is_task and "model" in learners["teacher"]:
            tiny["data.tokenizer"] = str(self.tokenizer)
        trained = [place for place, x in learners.items() if not tiny_jobs.is_frozen(x)]
        more = [f"{place}.{setting}" for place in trained for setting in self.learners]
        as_text = [tiny_jobs.as_override(key, value) for key, value in tiny.items()]
        return [self._spoken(job.config, override) for override in (*as_text, *more)]

    def _spoken(self, config: str, override: str) -> str:
        return self.names.spoken(override, lambda name: self.checkout.accepts(config, name))

    def _teacher(self, job: str) -> Path:
        """The export of a job's frozen teacher."""
        return self._export(tiny_jobs.trainer_of(job, self.jobs))

    def _export(self, job: str) -> Path:
        """The export of another job's teacher, which is trained when it is first asked for."""
        runs = self.checkout.made / "teachers"
        export = runs / self.jobs[job].section["name"] / "exports" / "teacher"
        if not export.exists():
            self._train(Trial(job, ranks=1, stage=0), runs)
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
