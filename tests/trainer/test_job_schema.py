"""A job's YAML: absurd values are refused by key before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import configs
from model import EncoderConfig
from tests.conftest import TINY_JOB
from trainer.config import JobConfig
from trainer.lifecycle.continuity import unreached_warning


def load(*overrides: str) -> JobConfig:
    return configs.load(str(TINY_JOB), JobConfig, "job", ["data.path=corpus", *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(configs.ConfigError) as refused:
        load(*overrides)
    return str(refused.value).removeprefix(f"{TINY_JOB}: ")


def test_reading_a_job_builds_nothing_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a module is built")

    monkeypatch.setattr(nn.Module, "__init__", refuse)
    text = (
        "name: x\nsteps: 5\ndata: {path: corpus, packing: segment_pair}\n"
        "teacher: {model: bert_tiny, objective: {mlm: {}, nsp: {}}}\n"
        "students: {a: {model: bert_tiny, objective: {mlm: {}, hidden_mse: {}}}}\n"
    )
    job = configs.load_text(text, JobConfig, "job", [], "a file")
    assert (job.batch.size, job.batch.at(0).sequences) == (None, 64)
    assert (job.teacher.model.pair_head, job.teacher.architecture.pair_head) == (False, True)
    assert job.teacher.model == configs.load("bert_tiny", EncoderConfig, "model")


def test_a_batch_may_be_stated_in_tokens():
    job = load("batch={tokens: 4096, growth: [{step: 5, tokens: 8192}]}", "batch.size=null")
    assert (job.batch.size, job.batch.tokens, job.batch.growth[0].size) == (None, 4096, None)
    text = "name: x\nsteps: 5\ndata: {path: c}\nteacher: {objective: {mlm: {}}}\nbatch: {tokens: 9}"
    job = configs.load_text(text, JobConfig, "job", [], "a file")
    assert (job.batch.size, job.batch.tokens) == (None, 9)
    assert configs.load_text(configs.dump(job), JobConfig, "job", [], "a file") == job
    assert refusal("batch={size: 4, tokens: 4096}").startswith("batch.tokens: ")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("students.tinybert.start.step=-1", "students.tinybert.start.step: must be at least 0"),
        ("rollback=[{checkpoint: -5}]", "rollback[0].checkpoint: must be at least 0, not -5"),
        (
            "teacher.model.norm_eps=-1",
            "teacher.model.norm_eps: must be positive, and at most 1,",
        ),
        ("teacher.model.local_window=-1", "teacher.model.local_window: must be 0 to"),
        ("teacher.model.initializer_range=-1", "teacher.model.initializer_range: must be positive"),
        ("teacher.model.max_positions=100000000000000000000", "does not fit into 64 bits"),
        ("teacher.model.max_positions=100000000000000000", "max_positions: must be 1 to 16777216"),
        ("teacher.model.layers=1000000", "teacher.model.layers: must be 1 to 4096"),
        ('name="a\\nb"', "name: must be a plain folder name of at most 200 bytes, not 'a\\nb'"),
        (f"name={'a' * 201}", "name: must be a plain folder name of at most 200 bytes, not 'aaa"),
        (f"name={'ü' * 101}", "name: must be a plain folder name of at most 200 bytes, not 'ü"),
        ("name=", "name: must not be null"),
        ("output_dir=''", "output_dir: must not be empty"),
        ("data.mixture={a: DIR}", "data.mixture.a: expected keys and values (path, weight) or a"),
        ("data.mixture={a: {path: ''}}", "data.mixture.a.path: must not be empty"),
        ("teacher.init.pretrained=''", "teacher.init.pretrained: must not be empty"),
        ("teacher.init.random=true", "teacher.init.random: is for pretrained"),
        ("teacher.objective.mlm.weight=-1", "teacher.objective.mlm.weight: must be 0 to 1000000"),
        (
            "teacher.objective.mlm.weight={0: 1, 00: 2}",
            "teacher.objective.mlm.weight: 0 appears twice",
        ),
        (
            "students.tinybert.objective.hidden_mse.layer_weights=[1, 1, 1, 1, -1]",
            "students.tinybert.objective.hidden_mse.layer_weights[4]: must be 0 to 1000000, not -1",
        ),
        (
            "students.tinybert.objective.hidden_mse.layer_weights=[1]",
            "students.tinybert.objective.hidden_mse.layer_weights: lists 1 weights for 5 layers",
        ),
        (
            "students.distilbert.objective.cosine.positions=nowhere",
            "students.distilbert.objective.cosine.positions: must be one of masked, attended, not",
        ),
        (
            "students.tinybert.objective.blended.teacher_fraction=2",
            "teacher_fraction: must be 0 to 1",
        ),
        (
            "students.tinybert.init={teacher_embeddings: true, teacher_layers: [0]}",
            "students.tinybert.init.pretrained: set one of this, tile, teacher_layers, ",
        ),
        (
            "teacher.schedule={kind: constant, min_lr_ratio: 0.1}",
            "teacher.schedule.min_lr_ratio: is for kind: linear, cosine, wsd, noam, points; remove",
        ),
        (
            "teacher.schedule.decay_fraction=0.2",
            "teacher.schedule.decay_fraction: is for kind: wsd; remove it",
        ),
        ("batch.multiple=4", "batch.multiple: is for sizes in tokens; remove it"),
        ("data.max_trained=5", "data.max_trained: is for a task's examples; set train too, or"),
        ("epochs=1", "epochs: are for examples: name data.train, or tasks; for text, set steps"),
        ("teacher.objective.soft_kl={}", "teacher.objective.soft_kl: is for students, as no te"),
        (
            "teacher.optimizer.learning_rate=9e18",
            "learning_rate: must be positive, and at most",
        ),
        (
            "teacher.model.initializer_range=9e18",
            "initializer_range: must be positive, and at",
        ),
        (
            "students.tinybert.schedule={kind: points, points: {0: 9e18}}",
            "schedule.points.0: must be 0 to 1, not 9e+",
        ),
        (
            "students.distilbert.objective.soft_kl.temperature={0: 9e18}",
            "temperature.0: must be positive",
        ),
        (
            "students.tinybert.model.vocab_size=640",  # 600, padded to a multiple of 64
            "the student's model.vocab_size is 640, the "
            "teacher's 600; set both alike, padding rows included",
        ),
        ("seed=9223372036854775808", "seed: 9223372036854775808 does not fit into 64 bits"),
        ("watch.hang_timeout_s=1e300", "watch.hang_timeout_s: must be positive, and at most 1e+09"),
        ("batch.micro_batch=1e3", "batch.micro_batch: must be a whole number, not 1e3"),
        ("data.phases={from_step: 3}", "data.phases: expected a list, not {from_step: 3}"),
    ],
)
def test_what_cannot_be_meant_is_refused(override, words):
    assert refusal(override).startswith(words) or words in refusal(override)


def test_what_the_steps_do_not_reach_is_said_in_one_line_and_never_refused():
    learners = ("teacher", "students.distilbert", "students.tinybert")
    short = [f"{learner}.schedule.warmup_steps=2" for learner in learners]
    assert unreached_warning(load(*short)) == ""
    long_job = [
        *short,
        "teacher.schedule.warmup_steps=8",
        "students.tinybert.schedule.warmup_steps=3",
        "students.tinybert.budget.steps=3",
        "students.tinybert.intermediate.fraction=0.5",
        "students.distilbert.start.step=9",
        "batch.growth=[{step: 2, size: 16}, {step: 8, size: 32}]",
        "data.phases=[{from_step: 1000, sequence_length: 16}]",
        "profile.steps=20:22",
    ]
    assert unreached_warning(load(*long_job)) == (
        "steps: 8 end before teacher.schedule.warmup_steps (8), students.distilbert.start.step (9),"
        " students.tinybert.schedule.warmup_steps (3), "
        "the end of students.tinybert.intermediate (4), batch.growth (8), data.phases (1000), "
        "profile.steps (20); fine for a trial run"
    )
    layer_by_layer = [*short, "students.tinybert.intermediate=null"]
    per_layer = "students.tinybert.progressive.steps_per_layer"  # of four layers
    assert unreached_warning(load(*layer_by_layer, f"{per_layer}=1")) == ""
    assert unreached_warning(load(*layer_by_layer, f"{per_layer}=2")) == (
        "steps: 8 end before the end of students.tinybert.progressive (8); fine for a trial run"
    )
