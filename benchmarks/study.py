"""Run a study: each arm with each seed through the command line; then print its table.

    python benchmarks/study.py online --corpus runs/enwiki
    python benchmarks/study.py online --table       # of the runs there are

A study is a YAML in ``configs/study/``. An arm is a job: the sections that all arms share, and its
own over them. In an arm, ``$seed`` and ``$runs`` stand for the seed and the folder of the study's
runs, so that an arm can begin with what an earlier one left (``$runs/ARM-$seed/exports/teacher``).
What has finished is not run again; ``key=value`` overrides change every job.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import click
import yaml

import configs
from configs.studies import StudyConfig

Facts = Mapping[str, Any]  # of one learner, from `evaluation.json`


@click.command()
@click.argument("name", metavar="[STUDY]", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--corpus", default="corpus", help="Made by `tandem data build`.")
@click.option("--runs", default="runs/studies", show_default=True, help="Where the runs go.")
@click.option("--arm", "arms", multiple=True, help="Only this one; may be repeated.")
@click.option("--seed", "seeds", type=int, multiple=True, help="Instead of the study's.")
@click.option("--table", "only_table", is_flag=True, help="Run nothing.")
def main(
    name: str | None,
    overrides: tuple[str, ...],
    corpus: str,
    runs: str,
    arms: tuple[str, ...],
    seeds: tuple[int, ...],
    only_table: bool,
) -> None:
    """Run what is missing of STUDY (a name or file of configs/study), and print the table.

    Without STUDY, say which there are.
    """
    if name is None:
        for path in sorted(Path(configs.__file__).parent.glob("study/*.yaml")):
            click.echo(f"{path.stem}: {load(path.stem).question}")
        return
    study = load(name)
    for arm in set(arms) - study.arms.keys():
        raise click.BadParameter(f"{name} has no arm {arm!r}; there are: {', '.join(study.arms)}")
    folder = Path(runs, Path(name).stem).absolute()
    if not only_table:
        for job in job_files(study, folder, seeds or study.seeds, arms):
            train(job, [f"data.path={Path(corpus).absolute()}", *overrides])
    click.echo(f"{study.question}\n\n{table(study, folder)}")


def load(name: str) -> StudyConfig:
    """The study; a click error of one line where there is none, or a mistake in it."""
    try:
        return configs.load(name, StudyConfig, "study")
    except configs.ConfigError as error:
        raise click.ClickException(str(error)) from error


def job_files(
    study: StudyConfig, folder: Path, seeds: Sequence[int], arms: Sequence[str] = ()
) -> Iterator[Path]:
    """Write the job of every seed of every arm (or of those named), and return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = folder / "shared.yaml"
    shared.write_text(yaml.safe_dump(study.job), encoding="utf-8")
    for seed in seeds:
        for name in arms or study.arms:
            own = {**study.arms[name].job, "name": f"{name}-{seed}", "seed": seed}
            job = {"base": str(shared), **own, "output_dir": str(folder)}
            text = Template(yaml.safe_dump(job)).substitute(runs=folder, seed=seed)
            path = folder / f"{name}-{seed}.yaml"
            path.write_text(text, encoding="utf-8")
            yield path


def train(job: Path, overrides: Sequence[str]) -> None:
    """Run the job, or resume it; one that has finished only says so."""
    print(f"== {job.stem}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "tandem", "train", str(job), *overrides]
    code = subprocess.run(command, stdout=sys.stderr).returncode
    if code:
        sys.exit(code)


def table(study: StudyConfig, folder: Path) -> str:
    """A row for each learner of each arm: mean and standard deviation of its scores over seeds.

    The last column is the first score's difference to the first row's, seed by seed: what two rows
    share by their seed (order of the data, masks) does not blur it. Runs with seeds that the study
    does not name count too. A head that nothing has trained has no score.
    """
    reference: dict[int, float] | None = None
    lines = []
    for name, arm in study.arms.items():
        for learner in arm.learners:
            found = _results(folder, name, learner)
            columns = [_by_seed(found, score) for score in study.scores]
            first = columns[0]
            reference = first if reference is None else reference
            differences = {
                seed: first[seed] - reference[seed] for seed in first.keys() & reference.keys()
            }
            spreads = [spread(list(column.values())) for column in [*columns, differences]]
            cells = [name, learner, len(found), *spreads]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    titles = ["arm", "learner", "seeds", *study.scores, "difference"]
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines])


def spread(values: Sequence[float]) -> str:
    """Mean and, of several values, sample standard deviation: ``0.2345 ± 0.0012``."""
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else ""
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def _by_seed(found: Mapping[int, Facts], score: str) -> dict[int, float]:
    return {seed: facts[score] for seed, facts in found.items() if facts[score] is not None}


def _results(folder: Path, arm: str, learner: str) -> dict[int, Facts]:
    """The learner's final scores by seed, where its run has finished and has trained its head."""
    key = learner if learner == "teacher" else f"students/{learner}"
    found = {}
    for path in folder.glob(f"{arm}-*/evaluation.json"):
        learners = json.loads(path.read_text(encoding="utf-8"))["learners"]
        if key in learners and learners[key]["accuracy"] is not None:
            found[int(path.parent.name.rpartition("-")[2])] = learners[key]
    return found


if __name__ == "__main__":
    main()
