"""A job scaled down to minutes: what happens in it, and in which order, stays."""

from __future__ import annotations

import numpy as np
import pytest

import configs
from data_pipeline.order import rows_of_sources
from tests.configs.test_shipped_jobs import GAPS, JOBS, OF_THREE_CORPORA
from tests.conftest import tandem
from trainer.config import JobConfig
from trainer.rehearsal import rehearsal
from trainer.run_folder import metrics

STEPS = 200


def job_of(name: str, *changes: str) -> JobConfig:
    text = [] if name in OF_THREE_CORPORA else ["data.path=anything"]
    return configs.load(name, JobConfig, "job", [*text, *GAPS.get(name, []), *changes])


def events(job: JobConfig) -> list[tuple[str, int]]:
    """What happens at which step: phases, batches, points of rates, students that join."""
    named = [
        *((f"phase {number}", phase.from_step) for number, phase in enumerate(job.data.phases)),
        *((f"batch {number}", grown.step) for number, grown in enumerate(job.batch.growth)),
        *((f"{name} joins", one.start.step) for name, one in job.students.items()),
        *(
            (f"{name} rate {number}", step)
            for name, one in job.learners.items()
            for number, step in enumerate(getattr(one.schedule, "points", ()))
        ),
    ]
    return sorted((event for event in named if event[1]), key=lambda event: (event[1], event[0]))


@pytest.mark.parametrize("name", JOBS)
def test_a_rehearsal_keeps_the_order_of_what_happens(name):
    job = job_of(name)
    small = rehearsal(job, STEPS)
    assert (small.steps, small.name) == (STEPS, f"{name}-rehearsal")
    for learner, (whole, narrow) in zip(
        job.learners, zip(job.learners.values(), small.learners.values(), strict=True), strict=True
    ):
        assert narrow.model.layers == whole.model.layers, learner
        assert narrow.objective == whole.objective or learner != "teacher"
        assert (narrow.zero_stage, narrow.precision) == (whole.zero_stage, whole.precision)
    if name in OF_THREE_CORPORA:
        reached = [event for event, step in events(job.in_steps) if "batch" not in event]
        assert [event for event, _ in events(small) if "batch" not in event] == reached
        assert all(step < STEPS for event, step in events(small) if "phase" in event)


def test_lengths_batches_and_phases_keep_their_proportions():
    small = rehearsal(job_of("modernbert_base"), 400)
    assert [length for length, _ in small.data.lengths_and_packings()] == [64, 512, 512]
    assert small.batch_sizes.at(0).sequences == 4
    assert max(grown.size for grown in small.batch.growth) == 16
    first, second = (phase.from_step for phase in small.data.phases)
    assert [small.batch_sizes.at(step).sequences for step in (first - 1, first)] == [16, 4]
    assert min(second - first, small.steps - second) >= 10
    assert small.data.phases[0].rope_theta == 160000
    assert small.teacher.schedule.points[first] == 1.0
    assert small.teacher.schedule.points[400] == 0.0
    assert small.teacher.model.local_window == 8


def test_each_corpus_of_a_mixture_has_a_row_of_every_batch():
    weights = {f"c{number}": weight for number, weight in enumerate([90, 6, 2, 1, 0.5, 0.5])}
    parts = ", ".join(f"{name}: {{path: x, weight: {w}}}" for name, w in weights.items())
    phase = "{from_step: 9000, mixture: {c0: 1, c5: 0}}"
    changes = [f"data.mixture={{{parts}}}", f"data.phases=[{phase}]", "steps=10000"]
    sizes = ["batch.size=64", "batch.growth=[{step: 100, size: 1024}]"]
    small = rehearsal(job_of("demo", "data.path=", *changes, *sizes), STEPS)
    assert [small.batch.size, small.batch.growth[0].size] == [8, 16]
    for step, read in ((0, [0, 1, 2, 3, 4, 5]), (STEPS - 1, [0, 1, 2, 3, 4])):
        shares = [*small.data.weights_at(step).values()]
        for rows in (8, 16):
            assert [*np.unique(rows_of_sources(shares, rows))] == read
    assert np.bincount(rows_of_sources([*small.data.weights_at(0).values()], 16))[0] > 4


def test_layers_that_are_mapped_to_layers_are_not_steps():
    learns = "{mlm: {weight: {0: 1, 10_000: 0}}, hidden_mse: {layers: {1: 1, 2: 2}}}"
    job = job_of("demo", f"students.distilbert.objective={learns}")
    objective = rehearsal(job, STEPS).students["distilbert"].objective
    assert objective.hidden_mse.layers == {1: 1, 2: 2}
    first, last = objective.mlm.weight
    assert (first, last > STEPS) == (0, True)


def test_a_teacher_whose_predictions_are_stored_runs_since_they_are_of_other_batches():
    job = job_of("pkd", "students.pkd.objective.pkd=null", "teacher.stored.path=anywhere")
    assert job.teacher.stored is not None
    assert rehearsal(job, STEPS).teacher.stored is None


def test_a_student_that_waits_for_a_score_joins_halfway():
    small = rehearsal(job_of("demo"), STEPS)
    start = small.students["distilbert"].start
    assert start.teacher is None
    assert 0 < start.step < STEPS


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["ettin_family", "--steps", "9"], "--steps: this job needs"),
        (["single_sentence", "data.train=t.csv", "teacher.init.pretrained=m"], "data: a rehearsal"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_in_one_line(words, why, tmp_path):
    result = tandem("rehearse", *words, f"output_dir={tmp_path}")
    assert result.returncode == (2 if why.startswith("--") else 1)
    assert result.stderr.startswith(f"tandem: {why}")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_whole_recipe_is_rehearsed_through_its_phases(corpus, tmp_path):
    name = "modernbert_base"  # the five models of ettin_family take twelve minutes
    texts = [f"data.mixture.{part}.path={corpus}" for part in ("pretraining", "extension", "decay")]
    result = tandem("rehearse", name, *texts, f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / f"{name}-rehearsal"
    rows = metrics.read(folder / "metrics.jsonl")
    assert rows[-1]["step"] == 60
    job = configs.load(str(folder / "config.yaml"), JobConfig, "job")
    assert {path.name for path in (folder / "exports").iterdir()} == {"teacher", *job.students}
