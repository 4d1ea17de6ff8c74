"""Setbacks: which students are named, from which measurements, and where a user sees them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from data_pipeline import DataConfig
from model import EncoderConfig
from tests.conftest import TINY_JOB, tandem
from trainer.config import JobConfig
from trainer.evaluation.setbacks import BEHIND, FALLING_BACK, WORSE, setbacks
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig, StartConfig
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.predictions import SoftKL
from trainer.schedules import schedule_config
from trainer.tasks.pretraining import MaskedLanguageModelling

UNIGRAM = 7.0955
WARM_UP = 50
STEPS = [50, 100, 150, 200, 250, 300, 350]
# Held-out losses of one job of 600 steps with 50 of warm-up: demo_teacher, and demo_tinybert alone,
# with the teacher's soft targets from the first step.
TEACHER = [7.396, 7.291, 7.067, 6.957, 6.849, 6.747, 6.650]
ALONE = [7.437, 7.279, 7.072, 6.950, 6.837, 6.730, 6.611]
LISTENING = [7.445, 7.345, 7.271, 7.200, 7.130, 7.035, 6.931]


def job(teacher: LearnerConfig | None = None, **student: object) -> JobConfig:
    mlm = MaskedLanguageModelling()
    warm = schedule_config(warmup_steps=WARM_UP)
    alone = LearnerConfig(EncoderConfig(), ObjectiveConfig(mlm=mlm), schedule=warm)
    listens = dataclasses.replace(alone, objective=ObjectiveConfig(mlm=mlm, soft_kl=SoftKL()))
    return JobConfig(
        name="job",
        steps=600,
        data=DataConfig(path="none"),
        teacher=teacher or alone,
        students={"alone": alone, "listens": dataclasses.replace(listens, **student)},
    )


def named(
    config: JobConfig, warm_up: float = WARM_UP, **losses: list[float]
) -> dict[str, tuple[str, str]]:
    """Student -> kind and message, given `losses` measured every 50 of a learner's own steps."""
    curves = {
        "teacher" if name == "teacher" else f"students/{name}": [
            [own, loss] for own, loss in zip(STEPS, found, strict=False)
        ]
        for name, found in losses.items()
    }
    found = setbacks(config, 350, curves, dict.fromkeys(curves, warm_up), UNIGRAM)
    return {one.learner.removeprefix("students/"): (one.kind, one.says) for one in found}


def kinds_over_time(config: JobConfig) -> dict[int, dict[str, str]]:
    found = {}
    for count in range(1, len(STEPS) + 1):
        curves = {"teacher": TEACHER, "alone": ALONE, "listens": LISTENING}
        short = {name: curve[:count] for name, curve in curves.items()}
        kinds = {name: kind for name, (kind, _) in named(config, **short).items()}
        if kinds:
            found[STEPS[count - 1]] = kinds
    return found


def test_a_student_that_listens_too_early_is_named_and_one_that_learns_alone_is_not():
    """As measured: alone the student keeps up with its teacher; learning from it, it does not."""
    assert kinds_over_time(job()) == {
        250: {"listens": WORSE},
        300: {"listens": BEHIND},
        350: {"listens": BEHIND},
    }


def test_the_line_has_the_numbers_and_what_to_do():
    kind, says = named(job(), teacher=TEACHER, listens=LISTENING)["listens"]
    assert kind == BEHIND
    assert "after 350 steps its loss is 0.165 below guessing by frequency" in says
    assert "its teacher's was 0.446 below" in says
    assert "students.listens.start: {step: 300}" in says
    late = named(job(start=StartConfig(step=300)), teacher=TEACHER, listens=LISTENING)
    assert "weigh its terms" in late["listens"][1]


def test_one_bad_evaluation_or_one_within_the_warm_up_is_not_enough():
    dip = [*ALONE[:-1], 7.2]
    assert named(job(), teacher=TEACHER, listens=dip) == {}
    assert named(job(), warm_up=300, teacher=TEACHER, listens=LISTENING) == {}


def test_as_slow_as_a_teacher_that_has_not_learnt_anything_yet_is_no_setback():
    guessing = [7.2] * len(STEPS)
    assert named(job(), teacher=guessing, alone=guessing, listens=guessing) == {}


def test_beside_a_teacher_that_was_not_measured_as_early_nobody_is_worse_than_guessing():
    """An ELECTRA predicts no masked tokens, so its curve is empty; or the student is younger."""
    guessing = [7.2] * len(STEPS)
    assert named(job(), alone=guessing, listens=guessing) == {}
    late = {"teacher": [[400, 5.0]], "students/alone": [[60, 7.2], [70, 7.2]]}
    assert setbacks(job(), 400, late, {"students/alone": WARM_UP}, UNIGRAM) == []


def test_only_a_student_with_terms_about_its_teacher_is_told_to_weigh_them_less():
    found = named(job(), teacher=TEACHER, alone=[7.2] * len(STEPS))
    assert found["alone"][1].endswith("steps; lower its learning rate")


def test_a_student_whose_loss_rises_while_its_teacher_s_falls():
    rises = [*ALONE[:5], 6.88, 6.90]  # its lead was 0.259
    found = named(job(), teacher=TEACHER, listens=rises)
    assert found["listens"][0] == FALLING_BACK
    assert "has risen by 0.063" in found["listens"][1]
    also_worse = [*TEACHER[:5], 6.9, 6.95]  # the teacher's as well: that is not the terms' doing
    assert named(job(), teacher=also_worse, listens=rises) == {}


def test_a_finished_teacher_is_no_measure_of_how_fast_a_model_learns():
    init = InitConfig(pretrained="finished")
    frozen = LearnerConfig(EncoderConfig(), ObjectiveConfig(), init=init, frozen=True)
    finished = [5.0] * len(STEPS)
    assert named(job(frozen), teacher=finished, listens=LISTENING) == {}
    found = named(job(frozen), teacher=finished, listens=LISTENING[:5])
    assert found["listens"][0] == WORSE
    assert "lower its learning rate" in found["listens"][1]


def test_a_job_in_which_nothing_predicts_words_names_nobody():
    assert setbacks(job(), 1, {"students/alone": [[60, 9.0], [70, 9.0]]}, {}, None) == []


@pytest.fixture(scope="module")
def struggling(corpus, finished, tmp_path_factory):
    """The folder and output of a run whose students take a few steps after a finished teacher."""
    runs = tmp_path_factory.mktemp("struggling")
    teacher = finished[0] / "exports" / "teacher"
    keys = [
        "name=short", "steps=5", f"data.path={corpus}", f"output_dir={runs}",
        f"teacher.init.pretrained={teacher}", "teacher.frozen=true", "teacher.objective=null",
        "teacher.optimizer=null", "teacher.schedule=null", "teacher.zero_stage=0",
        "students.tinybert.schedule.warmup_steps=0",
        "students.tinybert.optimizer.learning_rate=1e-9",
    ]  # fmt: skip
    done = tandem("train", TINY_JOB, *keys)
    assert done.returncode == 0, done.stderr
    return runs / "short", done.stdout


def test_a_user_reads_it_in_the_display_the_status_and_the_report(struggling):
    run, printed = struggling
    (named,) = json.loads((run / "setbacks.json").read_text())
    assert (named["learner"], named["kind"]) == ("students/tinybert", WORSE)
    assert printed.count(named["says"]) == 1
    assert named["says"] in " ".join(tandem("status", run).stdout.split())
    assert json.loads(tandem("status", run, "--json").stdout)[0]["setbacks"] == [named["says"]]
    report = (run / "report.html").read_text()
    assert named["says"] in report
    assert "students/tinybert ends worse" not in report  # named already
