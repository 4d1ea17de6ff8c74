"""A teacher that doubles its layers in a real job: 1, from step 2 on 2, from step 5 on 4."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from configs.errors import ConfigError
from model import EncoderConfig, from_pretrained
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, finish, run, tiny_job
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.reader import Checkpoint
from trainer.learner_config import LearnerConfig
from trainer.learner_life import StackingConfig, layers_of_the_moment
from trainer.learners.learners import Learners
from trainer.run_folder.folder import RunFolder

GROWTH = "teacher.stacking.steps=[2,5]"


def growths():
    """Every growth from here on, as (teacher before, teacher after, optimizer states after)."""
    seen, grow = [], Learners.grow_teacher

    def recording(learners, step):
        before = full_state_dict(learners.teacher.engine)
        grew = grow(learners, step)
        if grew:
            states = sum(map(len, learners.teacher.engine.optimizer.optimizer.state.values()))
            seen.append((before, full_state_dict(learners.teacher.engine), states))
        return grew

    Learners.grow_teacher = recording
    return seen


def jobs(corpus, runs, name):
    """Uninterrupted, and interrupted at a growth and between two."""
    job = tiny_job(corpus, runs, f"name={name}", GROWTH, "students.distilbert.start.step=3")
    seen = growths()
    folder = run(job)
    if name == "two":
        finish(folder)
        parts = dataclasses.replace(job, name="parts")
        run(parts, stop_after=2)
        finish(run(parts, stop_after=4))
        run(parts)
    return seen


def parts_of_zero(corpus, runs):
    seen = jobs(corpus, runs, "two")
    job = tiny_job(corpus, runs, "name=partitioned", GROWTH, "teacher.zero_stage=3",
                   "students.distilbert.start.step=3")  # fmt: skip
    run(job)
    return seen[:2]


@pytest.fixture(scope="module")
def launched(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("stacking")
    return runs, run_distributed(parts_of_zero, 2, corpus, runs)[0]


@pytest.mark.slow
def test_a_growth_copies_the_layers_and_begins_the_optimizer_anew(launched):
    for layers, (before, after, states) in zip((1, 2), launched[1], strict=True):
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
            if of_a_layer := re.fullmatch(r"(.+\.(?:attention|feed_forward)\.)(\d+)(\..+)", name):
                before_number, number, after_number = of_a_layer.groups()
                copy = f"{before_number}{int(number) + layers}{after_number}"
                assert torch.equal(after[copy], tensor), name
        assert states == 0


@pytest.mark.slow
def test_depths_and_losses_follow_the_steps(launched):
    runs, _ = launched
    folder = RunFolder(runs / "two")
    depth = {step: Checkpoint(folder.checkpoints, step).trainer_state["teacher_layers"]
             for step in (6, 8)}  # fmt: skip
    assert depth == {6: 4, 8: 4}
    assert from_pretrained(folder.exports / "teacher").config.layers == 4


@pytest.mark.slow
@pytest.mark.parametrize("other", ["partitioned", pytest.param("one", marks=pytest.mark.slow)])
def test_ranks_and_stages_do_not_matter(launched, corpus, other):
    runs, _ = launched
    if other == "one":
        run_distributed(jobs, 1, corpus, runs, "one")
    ours, theirs = (
        {(step, key): value for step, key, value in curve(RunFolder(runs / name))
         if key.endswith("/loss") and not key.startswith("val")}
        for name in ("two", other)
    )  # fmt: skip
    assert len(ours) == 8 + 8 + 5
    assert theirs == pytest.approx(ours, rel=1e-5)


@pytest.mark.slow
def test_interrupted_at_a_growth_and_between_two(launched):
    """If it is scored and exported between two growths, it has the layers of that time."""
    runs, _ = launched
    parts = RunFolder(runs / "parts")
    assert curve(parts) == curve(RunFolder(runs / "two"))
    assert Checkpoint(parts.checkpoints, 4).trainer_state["teacher_layers"] == 2
    assert from_pretrained(parts.exports / "teacher").config.layers == 2
    results = json.loads(parts.evaluation.read_text())
    assert results["learners"]["teacher"]["loss"] > 0


def test_layers_are_counted_on_the_final_teacher():
    stacking = StackingConfig([2, 5])
    assert [stacking.layers_at(step, 12) for step in (0, 1, 2, 4, 5, 99)] == [3, 3, 6, 6, 12, 12]
    assert layers_of_the_moment([0, 2, 4, 6, 8, 10], 12, 6) == [0, 1, 2, 3, 4, 5]
    assert layers_of_the_moment([3, 11], 12, 3) == [0, 2]


@pytest.mark.parametrize(
    ("layers", "steps", "reason"),
    [(6, [2, 5], "stacking.steps: 6 layers are not 4 times"), (4, [5, 2], "steps: must be")],
)
def test_what_cannot_double_is_refused(layers, steps, reason):
    with pytest.raises(ValueError, match=reason):
        LearnerConfig(model=EncoderConfig(layers=layers), stacking=StackingConfig(steps))


EXITS = "teacher.objective.early_exits={layers: [%d]}"
TASK = ("data={train: x.tsv, tokenizer: x}", "students=null",
        "teacher.objective.mlm=null")  # fmt: skip
BRANCHES = (*TASK, "teacher.objective={single_sentence: {}, branches: {}}")


def reads(layer):
    return (*TASK, f"teacher.objective={{single_sentence: {{layers: [{layer}]}}}}")


@pytest.mark.parametrize(
    ("overrides", "depth", "refusal"),
    [
        ([EXITS % 3], 2, r"early_exits\.layers: must be below 2, .*"),
        ([EXITS % 1, "students=null"], 1, r"early_exits\.layers: must be below 1, .*"),
        (BRANCHES, 1, "branches: needs a model of two layers or more"),
        (reads(3), 2, "single_sentence: layers: there is no hidden state 3 of 2 layers"),
        (reads(-3), 1, "single_sentence: layers: there is no hidden state -3 of 1 layers"),
        ([EXITS % 1], 2, None),
        (BRANCHES, 2, None),
        (reads(-3), 2, None),
    ],
)
def test_what_the_teacher_reads_is_there_from_the_start(overrides, depth, refusal):
    growth = "teacher.stacking.steps=[2]" if depth == 2 else GROWTH
    reason = rf"teacher\.objective\.{refusal}; by stacking\.steps the depth .* is {depth}$"
    with pytest.raises(ConfigError, match=reason) if refusal else nullcontext():
        tiny_job(Path("corpus"), Path("runs"), "teacher.model.layers=4", growth, *overrides)
