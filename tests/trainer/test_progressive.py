"""Layer-by-layer transfer: its rules, and a student on two ranks that goes through it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.distributed import run_distributed
from tests.thorough import IS_THOROUGH, zero_stages
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.layout import full_state_dict, torch_optimizer
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.first_weights import from_embeddings, model_state
from trainer.learners.learner import Learner
from trainer.learners.state import LearnerState
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.stages import PREDICTIONS, STATES, ProgressiveConfig, Stage, Stages
from trainer.objectives.terms.attention import AttentionTransfer
from trainer.objectives.terms.predictions import Blended
from trainer.objectives.terms.states import Embedding, FeatureMaps, HiddenMSE, MeanTransfer
from trainer.optimizers.config import optimizer_config
from trainer.schedules import schedule_config
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling, NextSentence

LAYERS, STEPS_PER_LAYER, STEPS = 2, 5, 14
PROGRESSIVE = ProgressiveConfig(STEPS_PER_LAYER)
OBJECTIVE = ObjectiveConfig(
    nsp=NextSentence(),
    blended=Blended(),
    feature_maps=FeatureMaps(),
    attention_transfer=AttentionTransfer(),
    mean_transfer=MeanTransfer(),
)
STAGES = zero_stages(0, 3)
SAVED_AT = (STEPS_PER_LAYER, 7) if IS_THOROUGH else (7,)
BETWEEN = {"feature_maps", "attention_transfer", "mean_transfer"}


def original_rate(layer: int, step: int, steps_per_phase: int) -> float:
    """The original code's rate: layer_wise_learning_rate times its background; layers from 0."""
    in_phase = step % steps_per_phase / steps_per_phase
    background = min(
        (1.0 - 0.9) * math.sqrt(1 - in_phase) + 0.9, (0.0 - 10.0) * (1 - in_phase) + 10
    )
    begin = steps_per_phase * layer
    # At the boundaries themselves the background is 0.
    value = 0.0 if step < begin else 1.0 if step < begin + steps_per_phase else 0.1
    return 3.0 * value * background


def test_stages_follow_one_another_and_the_last_has_the_rest():
    stages = Stages(Stage(3, frozenset([STATES])), Stage(0), Stage(2, layer=1), Stage())
    found = [stages.at(step) for step in range(7)]
    assert [(stage.steps, done) for stage, done in found] == [
        (3, 0), (3, 1), (3, 2), (2, 0), (2, 1), (None, 0), (None, 1)
    ]  # fmt: skip
    assert [step for step in range(8) if stages.begins(step)] == [3, 5]
    assert stages.last_begins == 5
    assert [*stages.spans(STATES, 4)] == [(0, 3), (3, 3), (3, 4), (5, 4)]
    assert [*stages.spans(PREDICTIONS, 9)] == [(3, 3), (3, 5), (5, 9)]
    assert not any(Stages().begins(step) for step in range(3))
    assert Stages().at(4) == (Stage(), 4)


def test_rates_are_the_original_codes():
    stages = ProgressiveConfig(20).build(layers=3)
    for step in range(60):
        for layer in range(3):
            parameter = f"model.encoder.feed_forward.{layer}.0.input.weight"
            ours = stages.factor(stages.group(parameter), step)
            assert ours == pytest.approx(original_rate(layer, step, 20)), (layer, step)
        assert stages.factor(stages.group("model.embeddings.word.weight"), step) == 0
        assert stages.factor(stages.group("model.head.bias"), step) == 0
    groups = {
        stages.group(f"model.{name}") for name in ("head.bias", "encoder.attention.2.key.bias")
    }
    assert {stages.factor(group, 60) for group in groups} == {1.0}


def test_one_layer_at_a_time_and_then_the_other_terms():
    stages = PROGRESSIVE.build(LAYERS)
    objective = Objective(OBJECTIVE, tiny.encoder(layers=LAYERS), tiny.encoder(), 0, stages)
    for step, ours, theirs in ((0, 1, 2), (4, 1, 2), (5, 2, 4), (9, 2, 4)):
        assert objective.student_capture(step).hidden_states == (ours,)
        assert objective.source_capture(step).attention == (theirs,)
        assert not any(term.reads_logits for term in objective.reading(TEACHER, step))
    assert any(term.reads_logits for term in objective.reading(TEACHER, 10))
    assert objective.source_capture(10).hidden_states == ()


@pytest.mark.parametrize(
    ("objective", "complaint"),
    [
        (ObjectiveConfig(blended=Blended()), "terms between layers"),
        (ObjectiveConfig(feature_maps=FeatureMaps()), "others for afterwards"),
    ],
)
def test_progressive_transfer_needs_both_kinds_of_terms(objective, complaint):
    with pytest.raises(ValueError, match=f"^progressive: .*{complaint}"):
        LearnerConfig(tiny.encoder(), objective, progressive=PROGRESSIVE)


def test_progressive_transfer_needs_every_layer():
    some = ObjectiveConfig(blended=Blended(), feature_maps=FeatureMaps(layers="skip"))
    with pytest.raises(ValueError, match=r"feature_maps\.layers: leaves out layer 2"):
        Objective(some, tiny.encoder(layers=2), tiny.encoder(), 0, PROGRESSIVE.build(2))


NAME = student_key("mobilebert")


def teacher_and_student(stage):
    """A teacher after one step, a student with initial weights, and the weights it was given."""
    teacher = tiny.learners((0, 0, 0), 4, 1)[0]
    train_step(teacher, [], tiny.my_rows(tiny.random_batch(99)), 0)
    config = LearnerConfig(
        model=tiny.encoder(layers=LAYERS, norm="no_norm"),
        objective=OBJECTIVE,
        progressive=PROGRESSIVE,
        init=InitConfig(teacher_embeddings=True),
        optimizer=optimizer_config(kind="lamb", learning_rate=1e-2),
        schedule=schedule_config(warmup_steps=2),
        zero_stage=stage,
    )
    weights = from_embeddings(teacher, config.model)
    step_shape = StepShape(STEPS, tiny.SEED, 4, 1)
    student = Learner(NAME, config, teacher.config.model, step_shape, weights=weights)
    return teacher, student, weights


def trained(stage):
    """A progressive student's weights and results at each step, and its teacher's embeddings."""
    teacher, student, weights = teacher_and_student(stage)
    history, terms, rates, ages = [weights_of(student)], [], [], []
    for step in range(STEPS):
        batch = tiny.my_rows(tiny.random_batch(step))
        result = train_step(teacher, [student], batch, step)
        history.append(weights_of(student))
        terms.append(result.terms[NAME])
        rates.append(student.learning_rate(step))
        ages.append((age_of_moments(student), age_of_moments(teacher)))
    assert student.warm_up_ends(STEPS) == PROGRESSIVE.steps_per_layer * LAYERS + 2
    copied = {key: value.clone() for key, value in weights.items()}
    return history, terms, rates, copied, ages


def age_of_moments(learner):
    """The number of gradients in the optimizer's moments, from their values: 0, 1 or more.

    After a single gradient g they are (1 - beta1) g and (1 - beta2) g^2.
    """
    states = [state for state in torch_optimizer(learner.engine).state.values() if state]
    if not any(state["exp_avg_sq"].any() for state in states):
        return 0
    means = torch.cat([state["exp_avg"].view(-1) for state in states]).double()
    squares = torch.cat([state["exp_avg_sq"].view(-1) for state in states]).double()
    once = torch.allclose((means / 0.1) ** 2, squares / 0.001, rtol=1e-4, atol=1e-30)
    return 1 if once else 2


def saved_and_resumed(folder, saved_at):
    """The final weights: uninterrupted, and resumed from a step at each of several stages."""
    teacher, student, _ = teacher_and_student(1)
    go_on(teacher, student, 0, saved_at)
    counters = dataclasses.asdict(student.counters)
    writer = CheckpointWriter(folder, Retention())
    engines = {TEACHER: teacher.engine, NAME: student.engine}
    writer.save(saved_at, engines, counters, wait=True)
    ends = [go_on(teacher, student, saved_at, STEPS)]
    checkpoint = Checkpoint(folder, saved_at)
    for stage in (1, 0, 3) if IS_THOROUGH else (1, 3):
        teacher, student, _ = teacher_and_student(stage)
        checkpoint.load(TEACHER, teacher.engine)
        checkpoint.load(NAME, student.engine)
        student.counters = LearnerState.from_json(checkpoint.trainer_state)
        ends.append(go_on(teacher, student, saved_at, STEPS))
    return ends


def go_on(teacher, student, first, last):
    """Train them over these steps; returns the student's weights."""
    for step in range(first, last):
        train_step(teacher, [student], tiny.my_rows(tiny.random_batch(step)), step)
    return weights_of(student)


def weights_of(student):
    whole = model_state(full_state_dict(student.engine))
    return {name: tensor.clone() for name, tensor in whole.items()}


def passing(stage, offload):
    """Gradient norms and a projection whose term is off at steps 0 and 1, and from step 4 on."""
    teacher = tiny.learners((0, 0, 0), 4, 1)[0]
    weight = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}
    config = LearnerConfig(
        model=tiny.encoder(layers=LAYERS),
        objective=ObjectiveConfig(mlm=MaskedLanguageModelling(), hidden_mse=HiddenMSE(weight)),
        optimizer=optimizer_config(kind="lamb", learning_rate=1e-2),
        zero_stage=stage,
        offload=offload,
    )
    student = Learner(student_key("a"), config, teacher.config.model, StepShape(9, tiny.SEED, 4, 1))
    norms, projections = [], []
    for step in range(6):
        projections.append(projection_of(student))
        train_step(teacher, [student], tiny.my_rows(tiny.random_batch(step)), step)
        norms.append(student.gradient_norm)
    return norms, [*projections, projection_of(student)]


def projection_of(student):
    return full_state_dict(student.engine)["objective.terms.hidden_mse.projection.weight"].clone()


PASSING = ((0, "none"), (3, "none"), *([(1, "optimizer")] if IS_THOROUGH else []))


def all_outcomes(folder):
    passed = [passing(*one) for one in PASSING]
    resumed = [saved_and_resumed(folder / str(step), step) for step in SAVED_AT]
    return [trained(stage) for stage in STAGES], passed, resumed


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return run_distributed(all_outcomes, 2, tmp_path_factory.mktemp("progressive"))[0]


@pytest.fixture(scope="module")
def outcomes(launched):
    return launched[0]


@pytest.mark.slow
def test_a_terms_parameters_rest_while_it_is_off_and_leave_no_gradient_behind(launched):
    """At every stage: no decay, and no earlier gradient in the norm."""
    plain, *partitioned = launched[1]
    moved = [not torch.equal(*pair) for pair in itertools.pairwise(plain[1])]
    assert moved == [False, False, True, True, False, False]
    for norms, projections in partitioned:
        assert norms == pytest.approx(plain[0], rel=1e-5)
        for ours, theirs in zip(projections, plain[1], strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_term_that_comes_or_goes_has_rates_of_its_own():
    config = ObjectiveConfig(
        mlm=MaskedLanguageModelling(),
        hidden_mse=HiddenMSE({0: 0.0, 10: 1.0}),
        embedding=Embedding(),
    )
    model, name = tiny.encoder(layers=LAYERS), "objective.terms.{}.projection.weight"
    objective = Objective(config, model, tiny.encoder(), 0)
    hidden = objective.group(name.format("hidden_mse"))
    assert objective.group(name.format("embedding")) == objective.group("model.head.bias") != hidden
    assert [objective.factor(hidden, step) for step in (0, 1)] == [0.0, 1.0]
    stages = PROGRESSIVE.build(LAYERS)
    objective = Objective(config, model, tiny.encoder(), 0, stages)
    groups = [objective.group(name.format(term)) for term in ("hidden_mse", "embedding")]
    rates = [[objective.factor(group, step) for group in groups] for step in (4, 10)]
    assert rates == [[stages.factor("1", 4), 0.0], [0.0, 1.0]]


@pytest.mark.slow
def test_a_layer_learns_from_its_turn_on(outcomes):
    history = outcomes[0][0]
    moved = [
        {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        for before, after in itertools.pairwise(history)
    ]
    first, second = (
        {name for name in history[0] if f"attention.{layer}." in name} for layer in range(LAYERS)
    )
    matrices = {name for name in first | second if name.endswith("weight")}
    for step in range(STEPS):
        now = moved[step] & matrices
        if step % STEPS_PER_LAYER == 0 and step < 10:  # the wave begins at 0
            assert not moved[step]
        elif step < 10:
            assert now == {name for name in matrices if step >= 5 or name in first}
            assert not any("encoder." not in name for name in moved[step])
    assert "embeddings.word.weight" in moved[10]
    assert "head.dense.weight" in moved[10]


@pytest.mark.slow
def test_everything_but_the_layers_begins_as_the_teachers_and_waits(outcomes):
    history, _, _, copied, _ = outcomes[0]
    # A layer norm before the vocabulary projection is what both have; ours has none elsewhere.
    ours = {name for name in history[0] if not name.startswith("encoder.")}
    assert copied.keys() == ours - {"embeddings.norm.weight", "embeddings.norm.bias"}
    assert not torch.equal(copied["head.norm.weight"], torch.ones(32))
    for state in (history[0], history[10]):
        for name, tensor in copied.items():
            assert torch.equal(state[name], tensor), name
        assert torch.equal(state["embeddings.norm.weight"], torch.ones(32))


@pytest.mark.slow
def test_each_phase_begins_with_fresh_moments_of_the_students_optimizer_alone(outcomes):
    """At every stage, as in the original, a layer's first step finds empty moments."""
    for stage, outcome in zip(STAGES, outcomes, strict=True):
        student, teacher = zip(*outcome[4], strict=True)
        assert student == (0, 1, 2, 2, 2, 0, 1, 2, 2, 2, 1, 2, 2, 2), stage
        assert set(teacher) == {2}


@pytest.mark.slow
def test_a_transfer_that_is_resumed_goes_on_to_the_bit_and_alike_at_other_stages(launched):
    """From the middle of a phase, and from just before one begins."""
    for undisturbed, same_stage, *others in launched[2]:
        assert undisturbed.keys() == same_stage.keys()
        assert all(torch.equal(undisturbed[name], same_stage[name]) for name in undisturbed)
        for other in others:
            torch.testing.assert_close(other, undisturbed, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_terms_and_rates_over_the_steps(outcomes):
    _, terms, rates, _, _ = outcomes[0]
    for step, values in enumerate(terms):
        on = {name for name, value in values.items() if value}
        assert on == (BETWEEN if step < 10 else {"nsp", "blended"})
    assert rates[:10] == [1e-2] * 10  # the peak, until the schedule begins
    assert rates[10:] == pytest.approx([0.5e-2, 1e-2, 1e-2, 0.5e-2])


@pytest.mark.slow
def test_every_stage_goes_through_it_alike(outcomes):
    for _, terms, *_ in outcomes[1:]:
        for plain, partitioned in zip(outcomes[0][1], terms, strict=True):
            assert partitioned == pytest.approx(plain, rel=1e-5, abs=1e-7)


def test_a_layers_loss_is_its_share_of_the_mean_over_layers():
    """As in the original, the sum is divided by the number of layers."""
    stages = PROGRESSIVE.build(LAYERS)
    config = ObjectiveConfig(blended=Blended(), feature_maps=FeatureMaps(100.0))
    objective = Objective(config, tiny.encoder(layers=LAYERS), tiny.encoder(), 0, stages)
    term = objective.by_name["feature_maps"]
    ours, theirs = torch.randn(1, 3, 32), torch.randn(1, 3, 32)

    inputs = SimpleNamespace(
        step=7,
        batch=SimpleNamespace(attention_mask=torch.ones(1, 3, dtype=torch.bool)),
        features=SimpleNamespace(hidden_states={2: ours}),
        sources={TEACHER: SimpleNamespace(hidden_states={4: theirs})},
    )
    total, count = term(inputs)
    normalised = [F.layer_norm(states, (32,), eps=1e-12) for states in (ours, theirs)]
    expected = F.mse_loss(*normalised) / LAYERS
    assert (total / count).item() == pytest.approx(expected.item())
