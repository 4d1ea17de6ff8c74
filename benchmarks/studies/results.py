"""The results of the finished runs of a study: a line of JSON for each, in a file that is kept.

Tables are made from these files alone, and a job whose result is in one is not run again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

import configs
from benchmarks.early_leaving import curve, encoded
from benchmarks.studies.jobs import StudyJob, digest, task_of
from configs.studies import at_speed
from data_pipeline import Corpus, DataError
from model import ModelError
from trainer.config import JobConfig
from trainer.device import own_device
from trainer.evaluation.minimal_pairs import score_minimal_pairs
from trainer.footprint.demands import demands
from trainer.objectives.task import TaskFile
from trainer.prediction.fine_tuned import FineTuned

TEACHER = "teacher"
MINIMAL_PAIRS = "minimal_pairs"
SPEED, FLOPS_RATIO = "sequences_per_second", "flops_ratio"
SIZES = ("parameters", "retention", SPEED)  # of a learner, beside its scores
ROUNDS = 3


@dataclass(frozen=True)
class Result:
    """A finished run.

    digest: of the arm as it was then (`jobs.digest`); revision: the code's; seconds: of training,
    on a machine that may have been busy; flops: matrix products of each learner, over its steps;
    held_out_tokens: of the corpus, or the task's text; sources: the digest of the corpus or of a
    task's files, and of the pre-trained models, empty in old results
    (`StudyJob.sources_digest`); scores: of each learner, by name, with its size and speed.
    """

    arm: str
    seed: int
    digest: str
    revision: str
    seconds: float
    flops: Mapping[str, float]
    held_out_tokens: int
    scores: Mapping[str, Mapping[str, float]]
    sources: str = ""


def read(path: Path) -> list[Result]:
    """The results in a file; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def append(path: Path, result: Result) -> None:
    """Write a result after the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def is_of(result: Result, job: StudyJob) -> bool:
    """Whether a result is that of a job as the study now has it."""
    return (result.arm, result.seed, result.digest) == (job.arm, job.seed, job.digest)


def is_recorded(job: StudyJob, file: Path) -> bool:
    """Whether the result of a job is in the file.

    Raises ClickException where results of its study, as it now is, are of another corpus, or of
    other files of its task or other pre-trained models.
    """
    results = read(file)
    current = [result for result in results if _is_current(result, job)]
    check = _require_same_sources if task_of(job.study, job.arm) else _require_same_corpus
    check(job, current, file)
    return any(is_of(result, job) for result in results)


def _is_current(result: Result, job: StudyJob) -> bool:
    """Whether a result is of an arm of the job's study as that now has it."""
    study, arm = job.study, result.arm
    return arm in study.arms and result.digest == digest(study, arm, job.overrides)


def _require_same_sources(job: StudyJob, current: Sequence[Result], file: Path) -> None:
    """Raise ClickException where a table would show results of other data beside this job's.

    Shipped results do not say of which data and models they are. Each seed may have its own models.
    """
    here = functools.cache(lambda seed: dataclasses.replace(job, seed=seed).sources_digest())
    if any(
        not result.sources or (result.arm == job.arm and result.sources != here(result.seed))
        for result in current
    ):
        raise click.ClickException(
            f"{file}: its results are not known to be of your data and models; keep "
            "yours in another folder: --results FOLDER, or print the results there: --table"
        )


def _require_same_corpus(job: StudyJob, current: Sequence[Result], file: Path) -> None:
    here = _held_out_tokens(job.sources.corpus)
    known = {result.sources for result in current if result.sources}
    if here is not None and known - {job.sources_digest()}:
        raise click.ClickException(
            f"{job.sources.corpus}: is not the corpus of the results in {file}; keep yours in "
            "another folder: --results FOLDER"
        )
    others = {result.held_out_tokens for result in current} - {here}
    if here is not None and others:
        raise click.ClickException(
            f"{job.sources.corpus}: has {here:,} held-out tokens, and the corpus of the results in "
            f"{file} had {others.pop():,}; keep yours in another folder: --results FOLDER"
        )


@functools.lru_cache
def _held_out_tokens(corpus: Path) -> int | None:
    """The size of the held-out split; None where there is no corpus."""
    if not corpus.exists():
        return None
    try:
        return Corpus.open(str(corpus)).split("val").index.tokens
    except DataError as error:
        raise click.ClickException(str(error)) from error


def of_run(job: StudyJob, pairs: Path | None = None) -> Result:
    """The result of a job whose run has finished; scored by minimal `pairs` too, if there are."""
    facts = json.loads((job.run / "evaluation.json").read_text(encoding="utf-8"))
    first_line, _, _ = (job.run / "config.yaml").read_text(encoding="utf-8").partition("\n")
    config = configs.load(str(job.run / "config.yaml"), JobConfig, "job")
    columns = [column["name"] for column in facts["columns"]]
    scores = {
        name.removeprefix("students/"): _known(learner, [*columns, *SIZES])
        for name, learner in facts["learners"].items()
    }
    if pairs is not None:
        for name in job.study.arms[job.arm].learners:
            scores[name][MINIMAL_PAIRS] = _minimal_pairs(job.run / "exports" / name, pairs)
    return Result(
        arm=job.arm,
        seed=job.seed,
        digest=job.digest,
        revision=first_line.rpartition(" ")[2],
        seconds=round(_rows(job.run)[-1]["seconds"], 1),
        flops=flops(config),
        held_out_tokens=facts["corpus"]["validation_tokens"],
        sources=job.sources_digest(),
        scores=scores | early_scores(job, config, facts["metric"]),
    )


def early_scores(job: StudyJob, config: JobConfig, metric: str) -> dict[str, dict[str, float]]:
    """The scores of the teacher of a finished run at each speed of the arm, by `at_speed`.

    `metric`, FLOPS_RATIO (how many times fewer they are than those of the whole model) and examples
    per second, as `benchmarks/early_leaving.py` measures them on the validation file.
    """
    speeds = job.study.arms[job.arm].speeds
    if not speeds:
        return {}
    data = config.data
    tuned = FineTuned.open(job.run / "exports/teacher", own_device())
    sequences, labels = encoded(tuned, TaskFile(data.task_files["validation"], data.columns))
    unhurried, *points = curve(tuned, sequences, labels, [None, *speeds], ROUNDS)
    return {
        at_speed(speed): {
            metric: point.accuracy,
            FLOPS_RATIO: unhurried.flops / point.flops,
            SPEED: len(labels) / point.seconds,
        }
        for speed, point in zip(speeds, points, strict=True)
    }


def flops(config: JobConfig) -> dict[str, float]:
    """Matrix products of each learner of a job over its steps, by the job's own accounting."""
    job = demands(config, "cpu")
    rows = job.steps * job.rows
    return {
        learner.name: learner.active * rows * (learner.forward_flops + learner.backward_flops)
        for learner in job.learners
    }


def seconds(config: JobConfig, a_step: Mapping[tuple[str, bool], float]) -> dict[str, float]:
    """The seconds that each learner takes of a job, given those that it takes of a step.

    A teacher whose budget is used up takes what a step takes that does not train it.
    """
    job, by_learner = demands(config, "cpu"), {}
    for learner in job.learners:
        trained, untrained = (a_step.get((learner.name, trains), 0.0) for trains in (True, False))
        share = learner.training if trained else 0.0
        mean = share * trained + (1 - share) * untrained
        by_learner[learner.name] = learner.active * job.steps * mean
    return by_learner


def seconds_per_step(run: Path) -> dict[tuple[str, bool], float]:
    """The median of what each learner takes of a step, by whether the step trains it."""
    by_kind = defaultdict(list)
    for row in _rows(run):
        parts: dict[str, dict[str, float]] = defaultdict(dict)
        for key, taken in row.items():
            learner, _, part = key.rpartition("/seconds_")
            if learner and part in ("forward", "backward", "step"):
                parts[learner.removeprefix("students/")][part] = taken
        for learner, by_part in parts.items():
            by_kind[learner, "backward" in by_part].append(sum(by_part.values()))
    return {key: statistics.median(taken) for key, taken in by_kind.items()}


def _rows(run: Path) -> list[dict[str, Any]]:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if "seconds" in row]


def _minimal_pairs(export: Path, pairs: Path) -> float:
    """The fraction of pairs whose good sentence the exported model finds more probable."""
    try:
        return score_minimal_pairs(export, str(pairs), torch.device("cpu")).accuracy
    except (DataError, ModelError) as error:
        raise click.ClickException(str(error)) from error


def _known(scores: Mapping[str, Any], columns: list[str]) -> dict[str, float]:
    return {name: scores[name] for name in columns if scores.get(name) is not None}


def _parse(line: str, where: str) -> Result:
    try:
        return Result(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise click.ClickException(f"{where}: is no result of a run: {error}") from error
