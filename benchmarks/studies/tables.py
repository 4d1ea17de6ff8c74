"""Tables of a study, in Markdown, from its recorded results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.studies.jobs import digest
from benchmarks.studies.results import SPEED, Result
from configs.studies import StudyConfig
from trainer.report.elements import short

COUNTED = ("parameters", SPEED)


def of_scores(study: StudyConfig, results: Sequence[Result], overrides: Sequence[str] = ()) -> str:
    """A row for each learner of each arm: mean and standard deviation of its scores over seeds.

    The difference is that of the first score that the row has, to the first row or the one that the
    study names, seed by seed: what two rows share by their seed (order of the data, masks) does not
    blur it. That row is named by its arm where the learner is the same. Results with seeds that the
    study does not name count too, those of an arm as it was earlier do not.
    """
    by_arm = {arm: current(study, arm, results, overrides) for arm in study.arms}
    rows = []
    for name, arm in study.arms.items():
        for row in arm.rows:
            seeds = sum(row in run.scores for run in by_arm[name])
            scores = {score: _by_seed(by_arm[name], row, score) for score in study.scores}
            cells = [cell(score, values) for score, values in scores.items()]
            other, its_row = study.reference(name, row)
            score = next((score for score, values in scores.items() if values), study.scores[0])
            values, reference = scores[score], _by_seed(by_arm[other], its_row, score)
            compared = ["", ""]
            if (other, its_row) != (name, row):
                difference = spread(_differences(values, reference))
                compared = [difference, other if its_row == row else f"{other}.{its_row}"]
            rows.append([name, row, seeds, *cells, *compared])
    return markdown(["arm", "learner", "seeds", *study.scores, "difference", "to"], rows)


def of_costs(
    flops: Mapping[str, Mapping[str, float]], seconds: Mapping[str, Mapping[str, float]]
) -> str:
    """A row for each learner of each arm: its matrix products, and its seconds where known."""
    rows = []
    for arm, learners in flops.items():
        for learner, count in learners.items():
            taken = seconds.get(arm, {}).get(learner)
            rows.append(
                [arm, learner, f"{count / 1e12:.2f}", "" if taken is None else f"{taken:.1f}"]
            )
    return markdown(["arm", "learner", "TFLOPs", "seconds"], rows)


def current(
    study: StudyConfig, arm: str, results: Sequence[Result], overrides: Sequence[str] = ()
) -> list[Result]:
    """The results of an arm as the study now has it."""
    now = digest(study, arm, overrides)
    return [result for result in results if (result.arm, result.digest) == (arm, now)]


def cell(score: str, by_seed: Mapping[int, float]) -> str:
    """A cell of the table; of sizes and speeds the median."""
    if score in COUNTED:
        return short(statistics.median(by_seed.values())) if by_seed else ""
    return spread(list(by_seed.values()))


def spread(values: Sequence[float]) -> str:
    """Mean and, of several values, sample standard deviation: ``0.2345 ± 0.0012``."""
    if len(values) < 2:
        return f"{values[0]:.4f}" if values else ""
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def _differences(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    return [values[seed] - reference[seed] for seed in values.keys() & reference.keys()]


def _by_seed(runs: Sequence[Result], learner: str, score: str) -> dict[int, float]:
    scores = {run.seed: run.scores.get(learner, {}).get(score) for run in runs}
    return {seed: value for seed, value in scores.items() if value is not None}


def markdown(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in [titles, *rows]]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])
