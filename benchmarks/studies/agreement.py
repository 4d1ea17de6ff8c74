"""Whether two scores agree about the models of studies: rank correlations, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.results import Result
from benchmarks.studies.svg import MARGIN, WIDTH, document, label_left_of, tick_below
from benchmarks.studies.tables import current, markdown
from configs.studies import StudyConfig
from trainer.report.elements import Scale, nice_ticks, padded

HEIGHT, FEWEST = 420, 3  # FEWEST: models of a study of which a correlation says anything
ALL = "all, each less its study's mean"


@dataclass(frozen=True)
class Scored:
    """A model of a study with both scores: a row of its table, with one seed."""

    model: str
    x: float
    y: float


def scored(study: StudyConfig, results: Sequence[Result], x: str, y: str) -> list[Scored]:
    """The models of a study's table that have both scores, each as it was asked last."""
    again = _asked_again(study)
    return [
        Scored(f"{name}.{row}, seed {run.seed}", run.scores[row][x], run.scores[row][y])
        for name, arm in study.arms.items()
        if name not in again
        for run in current(study, name, results)
        for row in arm.rows
        if {x, y} <= run.scores.get(row, {}).keys()
    ]


def _asked_again(study: StudyConfig) -> set[str]:
    """The arms whose model another scores on other text, after a step that changes nothing."""
    asked = [arm.job for arm in study.arms.values() if arm.job.get("steps") == 1]
    begun = [str(job["teacher"]["init"]["pretrained"]) for job in asked]
    return {name for name in study.arms if any(f"$runs/{name}-$seed/" in path for path in begun)}


def table(studies: Mapping[str, Sequence[Scored]]) -> str:
    """Spearman's correlation of the two scores in each study, and within all of them together.

    Together each score is taken less the mean of its study, since studies differ in what they read.
    """
    known = {name: _columns(models) for name, models in studies.items() if len(models) >= FEWEST}
    rows = [[name, columns.shape[1], _spearman(columns)] for name, columns in known.items()]
    if len(known) > 1:
        centred = [columns - columns.mean(axis=1, keepdims=True) for columns in known.values()]
        together = np.concatenate(centred, axis=1)
        rows.append([ALL, together.shape[1], _spearman(together)])
    return markdown(["study", "models", "Spearman's correlation"], rows)


def drawn(studies: Mapping[str, Sequence[Scored]], x: str, y: str) -> str:
    """The SVG: a dot for each of at least one model, `x` to the right and `y` upwards."""
    models = [(name, model) for name, scored in studies.items() for model in scored]
    columns = _columns([model for _, model in models])
    (left, right), (low, high) = padded(columns[0]), padded(columns[1])
    across, up = Scale(left, right), Scale(low, high)
    edge, bottom = 4 * MARGIN, HEIGHT - 3 * MARGIN

    def place(a: float, b: float) -> tuple[float, float]:
        width, height = WIDTH - MARGIN - edge, bottom - 2 * MARGIN
        return round(edge + width * across(a), 1), round(bottom - height * up(b), 1)

    parts = [
        tick_below(place(tick, low)[0], 2 * MARGIN, bottom, tick)
        for tick in nice_ticks(left, right)
    ]
    for tick in nice_ticks(low, high):
        _, at = place(left, tick)
        parts.append(f'<path class="tick" d="M{edge} {at}H{WIDTH - MARGIN}"/>')
        parts.append(label_left_of(edge, at, f"{tick:g}"))
    for name, model in models:
        cx, cy = place(model.x, model.y)
        title = f"<title>{escape(f'{name}: {model.model}')}</title>"
        parts.append(f'<circle class="dot" cx="{cx}" cy="{cy}" r="4.5">{title}</circle>')
    parts.append(f'<text x="{edge}" y="{MARGIN}">{escape(y)}</text>')
    parts.append(
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 6}" text-anchor="end">{escape(x)}</text>'
    )
    return document(f"{y} by {x}", HEIGHT, parts)


def _columns(models: Sequence[Scored]) -> NDArray[Any]:
    """Both scores, float64 [2, models]."""
    return np.array([(model.x, model.y) for model in models]).T


def _spearman(columns: NDArray[Any]) -> str:
    from scipy.stats import spearmanr

    return f"{spearmanr(*columns).statistic:.2f}"
