"""Run studies: each arm with each seed through the command line; then print their tables.

    python benchmarks/study.py online two_way --corpus runs/enwiki
    python benchmarks/study.py online --table       # of the results there are
    python benchmarks/study.py online --cost 30     # time 30 steps of each arm
    python benchmarks/study.py tinybert --data FOLDER --models FOLDER    # one on tasks

A study is a YAML in ``configs/study/``. An arm is a job: the sections that all arms share, and its
own over them, or a task of ``configs/task/`` under both. In an arm, ``$seed`` and ``$runs`` stand
for the seed and the folder of the study's runs, so that an arm can begin with what an earlier one
left (``$runs/ARM-$seed/exports/teacher``); ``$models`` is the folder of pre-trained models that the
user names, such as the ``exports`` of a run.

One seed of every arm comes first, in the order of the command line and of the files, then the next
seed. What a finished run came to is appended to ``docs/studies/results/STUDY.jsonl``, with a digest
of its task's files and pre-trained models. A job whose result is there is not run again; one with
other files or models is refused. An interrupted run is resumed. So the command can be stopped at
any time and given again. ``key=value`` overrides change every job, and so their results.

Where a study names ``minimal_pairs``, a file in the folder of the corpus, the models of its table
are scored by these too. After every run a picture of the first score is drawn beside the results,
and the table is renewed in the pages of ``docs/studies`` that have marks for it. Results
with overrides are only printed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configs
from benchmarks.studies import page, pictures, results, tables
from benchmarks.studies.jobs import HERE, Sources, StudyJob, in_order
from commands.errors import one_line
from commands.job_configs import load_job
from commands.job_configs import prepare as prepared
from configs import assignment
from configs.runs import STOPPED
from configs.studies import StudyConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_life import BudgetConfig

AT_ONCE = "start={step: 0, fraction: null, teacher: null}"
# Of a teacher that finishes first, time steps that train it and steps that do not.
HALF = "teacher.budget={fraction: 0.5, steps: null, tokens: null, hours: null}"
SHORT = ["log.every=1", "evaluation.every=100000", "evaluation.sequences=8"]
RESULTS = Path(__file__).resolve().parents[1] / "docs/studies/results"


@click.command()
@click.argument("told", nargs=-1, metavar="[STUDY]... [KEY=VALUE]...")
@click.option("--corpus", default="corpus", help="Made by `tandem data build`.")
@click.option("--data", type=Path, help="The folder of the tasks' files, as data.root.")
@click.option("--models", type=Path, help="The folder of pre-trained models of studies of tasks.")
@click.option("--runs", default="runs/studies", show_default=True, help="Where the runs go.")
@click.option("--results", "kept", default=str(RESULTS), help="Where their results are kept.")
@click.option("--arm", "arms", multiple=True, help="Only this one; may be repeated.")
@click.option("--seed", "seeds", type=int, multiple=True, help="Instead of the study's.")
@click.option("--table", "only_table", is_flag=True, help="Run nothing.")
@click.option("--cost", "timed_steps", type=click.IntRange(min=2), metavar="STEPS",
              help="Say what the arms cost instead, timing so many steps of each.")  # fmt: skip
def main(
    told: tuple[str, ...],
    corpus: str,
    data: Path | None,
    models: Path | None,
    runs: str,
    kept: str,
    arms: tuple[str, ...],
    seeds: tuple[int, ...],
    only_table: bool,
    timed_steps: int | None,
) -> None:
    """Run what is missing of each STUDY (a name or file of configs/study), and print its table.

    Without STUDY, say which there are.
    """
    overrides = tuple(word for word in told if "=" in word)
    studies = {Path(word).stem: load(word) for word in told if "=" not in word}
    if not studies:
        for path in sorted(Path(configs.__file__).parent.glob("study/*.yaml")):
            click.echo(f"{path.stem}: {load(path.stem).question}")
    sources = Sources(Path(corpus), data, models)
    by_study = [
        jobs_of(name, study, Path(runs), arms, seeds, overrides, sources)
        for name, study in studies.items()
    ]
    if timed_steps:
        for jobs in by_study:
            click.echo(costs([job for job in jobs if job.seed == jobs[0].seed], timed_steps))
        return
    before = {name: len(results.read(Path(kept, f"{name}.jsonl"))) for name in studies}
    failed = [] if only_table else run_missing(in_order(by_study), Path(kept))
    for name, study in studies.items():
        file = Path(kept, f"{name}.jsonl")
        if Path(kept).resolve() == RESULTS and len(results.read(file)) == before[name]:
            click.echo(f"The results shipped in {file}; nothing was run:")
        click.echo(f"{study.question}\n\n{render(name, study, Path(kept), overrides)}\n")
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


def load(name: str) -> StudyConfig:
    """The study; a click error of one line where there is none, or a mistake in it."""
    try:
        return configs.load(name, StudyConfig, "study")
    except configs.ConfigError as error:
        raise click.ClickException(str(error)) from error


def jobs_of(
    name: str,
    study: StudyConfig,
    runs: Path,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: tuple[str, ...] = (),
    sources: Sources = HERE,
) -> list[StudyJob]:
    """The jobs of a study, or of the arms and seeds that are named."""
    for arm in set(arms) - study.arms.keys():
        raise click.BadParameter(f"{name} has no arm {arm!r}; there are: {', '.join(study.arms)}")
    folder = Path(runs, name).absolute()
    return [
        StudyJob(study, name, arm, seed, folder, overrides, sources)
        for seed in seeds or study.seeds
        for arm in arms or study.arms
    ]


def all_at_once(students: Mapping[str, LearnerConfig]) -> list[str]:
    """Overrides of a job, so that its students learn from the first step on."""
    gates = [
        f"students.{name}.objective.{term}.min_lead=null"
        for name, student in students.items()
        for term, section in student.objective.terms().items()
        if section.min_lead_over_student is not None
    ]
    return [*(f"students.{name}.{AT_ONCE}" for name in students), *gates]


def run_missing(jobs: Iterable[StudyJob], kept: Path) -> list[str]:
    """Run the jobs that have no result yet, and record theirs; returns the runs that failed.

    Runs that a job begins with come before it where they are not there, and so do files.
    """
    failed: list[str] = []
    for job in jobs:
        file = kept / f"{job.name}.jsonl"
        if results.is_recorded(job, file):
            continue
        pairs = minimal_pairs(job)
        unfinished = [run for run in (*job.needed(), job) if not run.has_finished]
        if all(prepare(run) and train(run.write(), run.words) for run in unfinished):
            results.append(file, results.of_run(job, pairs))
            render(job.name, job.study, kept, job.overrides)
        else:
            failed.append(str(job.run))
    return failed


def render(name: str, study: StudyConfig, kept: Path, overrides: Sequence[str]) -> str:
    """Return the table of a study; without overrides draw it, and renew it in its page, too."""
    rows = results.read(kept / f"{name}.jsonl")
    table = tables.of_scores(study, rows, overrides)
    if not overrides:
        pictures.write(kept / f"{name}.svg", study, rows)
        page.renew(kept, name, table)
    return table


def prepare(job: StudyJob) -> bool:
    """Make the files that the job reads and that are not there; returns whether all are."""
    job.folder.mkdir(parents=True, exist_ok=True)
    return all(tandem(words) for words in job.missing_files())


def minimal_pairs(job: StudyJob) -> Path | None:
    """The file of minimal pairs that the job's study names; a click error where it is missing."""
    if job.study.minimal_pairs is None:
        return None
    path = job.sources.corpus / job.study.minimal_pairs
    if not path.exists():
        raise click.ClickException(
            f"{job.name}: minimal_pairs: {path} does not exist; "
            "python -m data_pipeline.task_files.prose_tasks makes pairs from prose"
        )
    return path


def train(job: Path, overrides: Sequence[str]) -> bool:
    """Run a job, or resume it; returns whether it finished. Exits where it was stopped."""
    click.echo(f"== {job.stem}", err=True)
    return tandem(["train", str(job), *overrides])


def tandem(words: Sequence[str]) -> bool:
    """Run the command; returns whether it ended well. Exits where it was stopped."""
    command = [sys.executable, "-m", "tandem", *words]
    code = subprocess.run(command, stdout=sys.stderr).returncode
    if code == STOPPED:
        sys.exit(code)
    return code == 0


def costs(jobs: Sequence[StudyJob], steps: int) -> str:
    """The table of what each arm takes, with the seconds of a step from a short run of it.

    A run is timed with everyone in it from the first step on. Only an idle machine gives seconds
    that mean anything.
    """
    flops: dict[str, dict[str, float]] = {}
    seconds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            try:
                config = prepared(load_job(str(job.write()), tuple(job.words)))
            except Exception as error:
                if (told := one_line(error)) is None:
                    raise
                raise click.ClickException(told) from None
            flops[job.arm] = results.flops(config)
            short = [f"steps={steps}", "epochs=null", assignment("output_dir", folder), *SHORT]
            if config.teacher.budget != BudgetConfig():
                short.append(HALF)
            if train(job.write(), [*job.words, *short, *all_at_once(config.students)]):
                a_step = results.seconds_per_step(Path(folder, job.run.name))
                seconds[job.arm] = results.seconds(config, a_step)
    return tables.of_costs(flops, seconds)


if __name__ == "__main__":
    main()
