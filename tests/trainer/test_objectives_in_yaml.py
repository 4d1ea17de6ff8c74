"""Objectives in a job's YAML: what they need from the data and from the other learners."""

from __future__ import annotations

import contextlib

import pytest

import configs
from trainer.config import JobConfig
from trainer.objectives.term import StepSchedule


@pytest.mark.parametrize(
    ("term", "data", "complaint"),
    [
        (
            "nsp",
            "packing: sop",
            "data.packing sop has no such pairs; it takes segment_pair or sentence_pair",
        ),
        (
            "sop",
            "packing: segment_pair",
            "data.packing segment_pair has no such pairs; it takes sop",
        ),
        ("nsp", "packing: full_sentences", "data.packing full_sentences has no such pairs"),
        ("soft_kl", "masking: {rate: 0.0}", "reads masked positions, but data.masking.rate is 0"),
    ],
)
def test_terms_need_data_with_what_they_are_about(tmp_path, term, data, complaint):
    path = tmp_path / "job.yaml"
    path.write_text(
        f"{{name: a, steps: 1, data: {{path: b, {data}}}, teacher: {{frozen: true, "
        f"init: {{pretrained: c}}}}, students: {{s: {{objective: {{{term}: {{}}}}}}}}}}"
    )
    with pytest.raises(
        configs.ConfigError, match=rf"students\.s\.objective\.{term}: .*{complaint}"
    ):
        configs.load(str(path), JobConfig, "job")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("objective.hidden_mse.layers=[1]", "objective.hidden_mse.layers: lists 1 teacher layers"),
        ("objective.cosine={}", "objective.cosine: student and teacher must have the same hidden"),
        ("init.teacher_layers=[0, 9, 1, 1]", "init.teacher_layers: the teacher's layers are 0 to"),
        ("init.teacher_layers=[0]", "init.teacher_layers: lists 1 for the student's 4"),
        ("init.teacher_layers=[0, 1, 2, 3]", "init.teacher_layers: model.hidden_size is 64, and"),
        ("init.teacher_embeddings=true", "init.teacher_embeddings: model.hidden_size is 64, and"),
    ],
)
def test_what_does_not_fit_a_late_student_is_refused_before_the_job_begins(override, complaint):
    late = ["students.tinybert.start.step=400", f"students.tinybert.{override}"]
    with pytest.raises(configs.ConfigError) as refused:
        configs.load("demo", JobConfig, "job", late)
    assert f"students.tinybert.{complaint}" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),  # the teacher has no such weights
        ("embedding_norm", False),  # the teacher has more
        ("heads", 8),  # the weights would fit
        ("activation", "relu"),
        ("sharing", "all"),
        ("norm_placement", "post"),
        ("positions", "learned"),
    ],
)
def test_a_copy_of_layers_computes_what_they_do(key, value):
    late = [f"students.distilbert.model.{key}={value}", "students.distilbert.start={step: 400}"]
    with pytest.raises(configs.ConfigError) as refused:
        configs.load("demo", JobConfig, "job", late)
    complaint = f"students.distilbert.init.teacher_layers: model.{key} is {value}, and the teacher'"
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    "override",
    ["global_every=1", "local_window=8", "max_positions=256", "pooler=tanh", "norm_eps=1e-9"],
)
def test_what_is_a_copys_own_need_not_be_the_teachers(override):
    configs.load("demo", JobConfig, "job", [f"students.distilbert.model.{override}"])


@pytest.mark.parametrize("layers", ["[3, 0]", "[1, 3]", "[0, 0]"])
def test_a_copy_of_pre_norm_layers_begins_with_the_first(layers):
    """Which has no norm before its attention, and so no weights for one in another place."""
    late = [f"students.distilbert.init.teacher_layers={layers}"]
    with pytest.raises(configs.ConfigError) as refused:
        configs.load("demo", JobConfig, "job", late)
    complaint = f"must begin with layer 0 and have it once, not {layers}: it alone has no norm"
    assert f"students.distilbert.init.teacher_layers: {complaint}" in str(refused.value)
    post_norm = [f"{one}.model.norm_placement=post" for one in ("teacher", "students.distilbert")]
    configs.load("demo", JobConfig, "job", [*late, *post_norm])


@pytest.mark.parametrize(
    ("start", "may_start"),
    [
        ("{step: 10, teacher: null}", True),
        ("{step: 9, teacher: null}", False),
        ("{step: 10}", True),  # or later, with the demo's threshold
        ("{}", False),
    ],
)
def test_a_copy_of_a_growing_teacher_is_judged_by_its_layers_when_it_starts(start, may_start):
    growing = [
        "teacher.stacking.steps=[10]",
        "students.distilbert.init.teacher_layers=[0, 1]",  # at half of the depth: 0 and 0
        f"students.distilbert.start={start}",
    ]
    refused = pytest.raises(configs.ConfigError, match=r"have it once, not \[0, 0\]")
    with contextlib.nullcontext() if may_start else refused:
        configs.load("demo", JobConfig, "job", growing)


def test_a_teacher_that_has_one_layer_when_a_student_starts_gives_it_once():
    growing = [
        "teacher.stacking.steps=[3, 10]",
        "students.distilbert.start={step: 2, teacher: null}",
    ]
    with pytest.raises(configs.ConfigError, match=r"have it once, not \[0, 0\]"):
        configs.load("demo", JobConfig, "job", growing)


def test_layers_that_share_weights_in_groups_are_not_copied():
    grouped = "{base: demo_teacher, layers: %d, sharing: all, groups: 2, norm_placement: post}"
    refused = [
        f"teacher.model={grouped % 8}",
        f"students.distilbert.model={grouped % 4}",
        "students.distilbert.init.teacher_layers=[0, 2, 4, 6]",
    ]
    with pytest.raises(configs.ConfigError, match="teacher_layers: is for models without groups"):
        configs.load("demo", JobConfig, "job", refused)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_positions", 128),
        ("norm_bias", False),
        ("head_bias", False),
        ("decoder_bias", False),
    ],
)
def test_a_copy_of_embeddings_and_head_computes_what_they_do(key, value):
    late = [f"students.mobilebert.model.{key}={value}"]
    with pytest.raises(configs.ConfigError) as refused:
        configs.load("mobilebert", JobConfig, "job", late)
    complaint = f"students.mobilebert.init.teacher_embeddings: model.{key} is {value}, and the t"
    assert complaint in str(refused.value)


@pytest.mark.parametrize("learner", ["teacher", "students.tinybert", "students.distilbert"])
def test_a_term_about_tokens_needs_a_model_that_predicts_them(learner):
    with pytest.raises(configs.ConfigError) as refused:
        configs.load("demo", JobConfig, "job", [f"{learner}.model.mlm_head=false"])
    assert f"{learner}.objective." in str(refused.value)
    assert "for which the learner's model.mlm_head must be true" in str(refused.value)


def test_settings_are_read_from_yaml_and_the_command_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "{name: a, steps: 1, data: {path: b}, teacher: {objective: {mlm: {}}}, students: {s: "
        "{objective: {soft_kl: {weight: {0: 1.0, 100: 0.5}}, hidden_mse: {layers: {1: 2}}}}}}"
    )
    override = "students.s.objective.soft_kl.temperature={0: 4, 50: 1}"
    job = configs.load(str(path), JobConfig, "job", [override])
    soft = job.students["s"].objective.soft_kl
    assert StepSchedule.read(soft.weight).at(50) == 0.75
    assert StepSchedule.read(soft.temperature).at(25) == 2.5
    assert job.students["s"].objective.hidden_mse.layers == {1: 2}
    written = tmp_path / "written.yaml"
    written.write_text(configs.dump(job))
    assert configs.load(str(written), JobConfig, "job") == job


NUMBERS = "first_choice: a number has no labels"


@pytest.mark.parametrize(
    ("task", "key", "message"),
    [
        ("span: {}", "mean_over_labels: true", "mean_over_labels: a span has no labels"),
        ("single_sentence: {target: number}", "first_choice: 1.0", NUMBERS),
        ("bi_encoder: {}", "first_choice: 1.0", NUMBERS),
        ("reranking: {}", "first_choice: 1.0", ""),  # the document that the teacher puts first
    ],
)
def test_soft_labels_have_no_key_that_means_nothing_for_their_task(task, key, message):
    files = ["data.root=.", "data.train=a.json", "data.validation=b.json"]
    objective = f"students.s.objective={{{task}, soft_labels: {{{key}}}}}"
    teacher = [f"teacher.objective={{{task}}}", "teacher.model=demo_teacher"]
    words = [*files, *teacher, "students.s.model=demo_tinybert", objective]
    refused = (
        pytest.raises(configs.ConfigError, match=message) if message else contextlib.nullcontext()
    )
    with refused:
        configs.load_text("name: a\nsteps: 1\n", JobConfig, "job", words, "a")
