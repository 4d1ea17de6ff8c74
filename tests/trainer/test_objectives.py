"""Scheduled settings, and whole objectives."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import configs
from data_pipeline import DEFAULT_VIEW, MASKED
from model import QKV, Capture, build
from tests.trainer.tiny import LENGTH, encoder, random_batch, totals_of
from trainer.batches import to_device
from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.module import build_module
from trainer.objectives import LossInputs, Objective, ObjectiveConfig
from trainer.objectives.term import StepSchedule, registered_terms
from trainer.objectives.terms import attention as relations
from trainer.objectives.terms.attention import (
    AttentionMSE,
    AttentionRelation,
    AttentionTransfer,
    KeyRelation,
    QueryRelation,
    ValueRelation,
)
from trainer.objectives.terms.divergences import (
    AlphaBeta,
    DecoupledKD,
    JensenShannon,
    ReverseKL,
    UniversalLogitDistillation,
)
from trainer.objectives.terms.own_predictions import ZLoss
from trainer.objectives.terms.predictions import Blended, SoftCrossEntropy, SoftKL
from trainer.objectives.terms.states import (
    PKD,
    Cosine,
    Embedding,
    FeatureMaps,
    HiddenMSE,
    MeanTransfer,
    PKDTerm,
    VarianceTransfer,
)
from trainer.tasks.pretraining import MaskedLanguageModelling, NextSentence, SentenceOrder
from trainer.teacher_outputs import OutputProjection, detach


def test_settings_over_steps():
    assert StepSchedule.read(0.5).at(10**6) == 0.5
    setting = StepSchedule.read({100: 1.0, 300: 0.0})
    assert [setting.at(step) for step in (0, 100, 150, 300, 400)] == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert [setting.segment(step) for step in (0, 99, 100, 299, 300)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "setting",
    [
        *("high", "{}", "{soon: 1}", "{1.5: 1}", "{-1: 1}", "nan", "[1]", "true", "'1'"),
        *("{1: 1, 01: 2}", "-1", "0", "{0: 0, 5: 0}", "{0: 1, 5: -1}", "{0: true}"),
    ],
)
def test_settings_that_are_no_schedules_are_refused(setting):
    with pytest.raises(configs.ConfigError, match=r"the file: weight(\.\d)?: "):
        configs.load_text(f"weight: {setting}", MaskedLanguageModelling, "job", [], "the file")


WIDER = {"hidden_size": 64, "heads": 4}


@pytest.mark.parametrize(
    ("config", "student", "complaint"),
    [
        (ObjectiveConfig(cosine=Cosine()), WIDER, "cosine"),
        (ObjectiveConfig(attention_mse=AttentionMSE()), {"heads": 2}, "attention_mse"),
        (
            ObjectiveConfig(key_relation=KeyRelation()),
            {"heads": 2},
            "key_relation: .* same number of heads, or relation_heads be set",
        ),
        (
            ObjectiveConfig(key_relation=KeyRelation(relation_heads=5)),
            {"heads": 2},
            "key_relation.relation_heads: 5 does not divide the student's",
        ),
        (ObjectiveConfig(reverse_kl=ReverseKL(top_k=2)), {}, "reverse_kl.top_k: must be null"),
        (
            ObjectiveConfig(decoupled_kd=DecoupledKD(top_k=1)),
            {},
            "decoupled_kd.top_k: must be 2 or more",
        ),
        (ObjectiveConfig(hidden_mse=HiddenMSE(layers=[1])), {}, "hidden_mse.layers: lists 1"),
        (ObjectiveConfig(pkd=PKD()), WIDER, "pkd"),
        (ObjectiveConfig(feature_maps=FeatureMaps()), WIDER, "feature_maps"),
        (ObjectiveConfig(hidden_mse=HiddenMSE(layer_weights=[1.0])), {}, "mse.layer_weights: "),
        (ObjectiveConfig(hidden_mse=HiddenMSE(layer_weights=[0.0] * 5)), {}, "must not be 0"),
    ],
)
def test_objectives_that_do_not_fit_say_which_term(config, student, complaint):
    with pytest.raises(ValueError, match=complaint):
        Objective(config, encoder(**student), encoder(), seed=0)


EVERYTHING = ObjectiveConfig(
    mlm=MaskedLanguageModelling(2.0),
    nsp=NextSentence(),
    sop=SentenceOrder(),
    soft_kl=SoftKL(5.0, 2.0),
    soft_cross_entropy=SoftCrossEntropy(),
    blended=Blended(),
    reverse_kl=ReverseKL(),
    jensen_shannon=JensenShannon(),
    decoupled_kd=DecoupledKD(),
    alpha_beta=AlphaBeta(),
    uld=UniversalLogitDistillation(),
    cosine=Cosine(),
    embedding=Embedding(),
    hidden_mse=HiddenMSE(),
    attention_mse=AttentionMSE(),
    pkd=PKD(),
    feature_maps=FeatureMaps(),
    attention_transfer=AttentionTransfer(),
    mean_transfer=MeanTransfer(),
    variance_transfer=VarianceTransfer(),
    attention_relation=AttentionRelation(),
    value_relation=ValueRelation(),
    query_relation=QueryRelation(),
    key_relation=KeyRelation(relation_heads=8),
    z_loss=ZLoss(),
)


def loss_inputs_of(config, seed=5, step=0, **student):
    """A student's loss inputs on a random batch, its objective, and the totals."""
    config = LearnerConfig(model=encoder(layers=2, **student), objective=config)
    batch = random_batch(seed)
    micro, totals = to_device(batch, torch.device("cpu")), totals_of(batch)
    teacher = build(encoder(), seed=1).eval()  # without dropout
    module = build_module("students/a", config, encoder(), 0)
    views = [
        model.features(
            micro.input_ids, micro.segment_ids, micro.visible, micro.masked_positions, what
        )
        for model, what in (
            (teacher, module.objective.source_capture(step)),
            (module.model, module.objective.student_capture(step)),
        )
    ]
    sources = {TEACHER: detach(views[0], OutputProjection(*teacher.output_projection()))}
    inputs = LossInputs(
        micro, views[1], OutputProjection(*module.model.output_projection()), sources, step
    )
    return inputs, module.objective, totals


def teacher_logits(inputs):
    """The teacher's logits at every position, [B * L, V]."""
    batch = inputs.batch
    states = batch.input_ids, batch.segment_ids, batch.attention_mask
    return build(encoder(), seed=1).eval()(*states).logits.flatten(0, 1)


@pytest.mark.parametrize(
    ("teacher", "windows"),
    [
        ({"local_window": 6, "global_every": 4}, [0, 6, 0, 6]),
        ({"local_window": 2, "global_every": 4}, [0, 4, 0, 4]),
        ({}, [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize(
    ("term", "loss", "factors", "divisor"),
    [
        (AttentionMSE(), relations.attention_mse, (0, 1), 1),
        (AttentionTransfer(), relations.attention_cross_entropy, (0, 1), 4),
        (AttentionRelation(layers="uniform"), relations.relation_kl, (0, 1), 1),
        (ValueRelation(layers="uniform"), relations.relation_kl, (2, 2), 1),
    ],
)
def test_what_neither_layer_attends_to_is_not_compared(
    term, loss, factors, divisor, teacher, windows
):
    """The student's layers 2 and 4 are local; of the teacher's, all but the first, or none."""
    ours, theirs = (
        {layer: QKV(*torch.randn(3, 2, 4, LENGTH, 8)) for layer in range(1, 5)} for _ in range(2)
    )
    batch = to_device(random_batch(1, rows=2), torch.device("cpu"))
    inputs = SimpleNamespace(
        batch=batch,
        features=SimpleNamespace(attention=ours),
        sources={TEACHER: SimpleNamespace(attention=theirs)},
        step=0,
    )
    student = encoder(local_window=4, global_every=2)
    total, _ = term.build(student, encoder(**teacher))(inputs)
    expected = sum(
        loss(
            *(tuple(qkv[layer][factor] for factor in factors) for qkv in (ours, theirs)),
            batch.attention_mask,
            window,
        )[0]
        for layer, window in enumerate(windows, start=1)
    )
    torch.testing.assert_close(total, expected / divisor)


@pytest.mark.parametrize(
    ("term", "name"), [(QueryRelation, "q"), (KeyRelation, "k"), (ValueRelation, "v")]
)
def test_relations_of_any_heads_are_those_of_minilm_v2(term, name):
    """Of a student with 2 heads and half the width of its teacher, which has 4."""
    batch = to_device(random_batch(1, rows=2), torch.device("cpu"))
    ours, theirs = QKV(*torch.randn(3, 2, 2, LENGTH, 8)), QKV(*torch.randn(3, 2, 4, LENGTH, 8))
    inputs = SimpleNamespace(
        batch=batch,
        features=SimpleNamespace(attention={2: ours}),
        sources={TEACHER: SimpleNamespace(attention={4: theirs})},
        step=0,
    )
    student = encoder(hidden_size=16, heads=2, layers=2)
    total, _ = term(relation_heads=8).build(student, encoder(hidden_size=32, heads=4))(inputs)
    expected = 0.0
    for row, length in enumerate(batch.attention_mask.sum(dim=1).tolist()):
        relations = []
        for qkv in (theirs, ours):
            vectors = torch.cat([*getattr(qkv, name)[row, :, :length]], dim=-1)  # [L, width]
            parts = vectors.split(vectors.shape[1] // 8, dim=1)
            relations.append([(x @ x.T / x.shape[1] ** 0.5).softmax(dim=-1) for x in parts])
        for taught, said in zip(*relations, strict=True):
            expected += (taught * (taught / said).log()).sum() / 8
    torch.testing.assert_close(total, expected)


def test_every_registered_term_has_a_case_here():
    """Tasks with their own data, and terms with another source, have their own tests."""
    names = [
        name
        for name, section in registered_terms().items()
        if section.__module__.startswith("trainer.objectives.")
    ]
    assert {*names} <= {*EVERYTHING.terms(), "from_student", "early_exits"}
    assert [*EVERYTHING.terms()] == [
        name for name in registered_terms() if name in EVERYTHING.terms()
    ]


@pytest.mark.parametrize("positions", ["masked", "attended"])
def test_counts_of_terms_are_those_the_step_divides_by(positions):
    """The count that each term returns equals its denominator."""
    config = dataclasses.replace(
        EVERYTHING,
        soft_kl=SoftKL(positions=positions),
        cosine=Cosine(positions=positions),
    )
    inputs, objective, totals = loss_inputs_of(config)
    for name, term in objective.by_name.items():
        assert term(inputs)[1].item() == totals[DEFAULT_VIEW, term.denominator].item(), name
    assert {objective.by_name[name].denominator for name in ("soft_kl", "cosine")} == {positions}


def test_the_objective_is_the_weighted_sum_of_its_terms():
    """Terms that share a projection give the same values and gradients as separate ones."""
    config = dataclasses.replace(EVERYTHING, soft_kl=SoftKL(3.0, 2.0, positions="attended"))
    inputs, objective, totals = loss_inputs_of(config)
    states = [
        inputs.features.vocabulary_input,
        inputs.features.all_positions,
        inputs.projection.weight,
    ]
    loss, shares = objective(inputs, totals)
    fused = torch.autograd.grad(loss, states, retain_graph=True)
    separate = {
        name: term(inputs)[0] / totals[DEFAULT_VIEW, term.denominator]
        for name, term in objective.by_name.items()
    }
    weights = objective.weights(0)
    expected = sum(weights[name] * value for name, value in separate.items())
    for share, (name, value) in zip(shares, separate.items(), strict=True):
        torch.testing.assert_close(share, value.detach(), msg=name)
    torch.testing.assert_close(loss, expected)
    for ours, plain in zip(fused, torch.autograd.grad(expected, states), strict=True):
        assert (ours - plain).norm() < 1e-6 * plain.norm()


def test_soft_targets_at_all_attended_positions_equal_the_plain_formula():
    """DistilBERT's loss: T^2 KL, batchmean over the attended positions."""
    inputs, objective, totals = loss_inputs_of(
        ObjectiveConfig(soft_kl=SoftKL(1.0, 2.0, positions="attended"))
    )
    loss, _ = objective(inputs, totals)
    attended = inputs.batch.attention_mask.flatten()
    ours = F.linear(inputs.features.all_positions, inputs.projection.weight, inputs.projection.bias)
    ours, theirs = ours[attended], teacher_logits(inputs)[attended]
    expected = F.kl_div(
        F.log_softmax(ours / 2, -1), F.softmax(theirs / 2, -1), reduction="batchmean"
    )
    torch.testing.assert_close(loss, expected * 2**2)
    masked = inputs.features.all_positions[inputs.batch.masked_positions]
    torch.testing.assert_close(masked, inputs.features.vocabulary_input)


def test_the_other_divergences_equal_the_plain_formulas():
    """Each times T^2, at the masked positions, divided by their number."""
    config = ObjectiveConfig(
        reverse_kl=ReverseKL(1.0, 2.0),
        jensen_shannon=JensenShannon(1.0, 2.0, 0.25),
        decoupled_kd=DecoupledKD(1.0, 2.0, 3.0, 4.0),
        alpha_beta=AlphaBeta(1.0, 2.0, 0.5, 0.25),
    )
    inputs, objective, totals = loss_inputs_of(config)
    _, shares = objective(inputs, totals)
    labels = inputs.batch.targets[MASKED].labels
    states = inputs.features.vocabulary_input[labels >= 0]
    ours = F.linear(states, inputs.projection.weight, inputs.projection.bias) / 2
    theirs = teacher_logits(inputs)[inputs.batch.masked_positions[labels >= 0]] / 2
    q, p = (F.softmax(one, -1) for one in (ours, theirs))
    m = 0.25 * p + 0.75 * q
    of_label = F.one_hot(labels[labels >= 0], p.shape[1]).bool()
    pairs = [torch.stack([one[of_label], 1 - one[of_label]], -1) for one in (p, q)]
    rest = [one[~of_label].view(len(one), -1) for one in (p, q)]
    rest = [one / one.sum(-1, keepdim=True) for one in rest]
    inner = p**0.5 * q**0.25 - 2 / 3 * p**0.75 - 1 / 3 * q**0.75
    expected = [
        divergence(q, p),
        0.25 * divergence(p, m) + 0.75 * divergence(q, m),
        3 * divergence(*pairs) + 4 * divergence(*rest),
        -inner.sum(-1).mean() / 0.125,
    ]
    torch.testing.assert_close(shares, 4 * torch.stack(expected).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "method", "returned", "said"),
    [
        ("cosine", "forward", torch.ones(()), r"CosineTerm\.forward: must return \(sum, count\), "),
        ("cosine", "forward", (torch.ones(2), 2), r"CosineTerm\.forward: .*, not \[2\]$"),
        ("cosine", "forward", None, r"CosineTerm\.forward: .*, not None$"),
        ("hidden_mse", "compare", [], r"HiddenMSETerm\.compare: must return 3 results, not 0$"),
        ("hidden_mse", "compare", [1.0] * 3, r"HiddenMSETerm\.compare: .*, not 1\.0$"),
    ],
)
def test_what_a_term_returns_in_another_form_is_refused(monkeypatch, name, method, returned, said):
    inputs, objective, totals = loss_inputs_of(
        ObjectiveConfig(cosine=Cosine(), hidden_mse=HiddenMSE())
    )
    monkeypatch.setattr(type(objective.by_name[name]), method, lambda *_: returned)
    with pytest.raises(configs.ConfigError, match=said):
        objective(inputs, totals)


def test_a_section_that_builds_no_term_or_one_without_a_denominator_is_refused(monkeypatch):
    def refused(said):
        with pytest.raises(configs.ConfigError, match=said):
            Objective(ObjectiveConfig(pkd=PKD()), encoder(), encoder(), seed=0)

    monkeypatch.setattr(PKDTerm, "denominator", "row")  # would count no labels, and divide by 1
    refused(r"^PKDTerm\.denominator: must be one of attended, .*, masked, not 'row'$")
    monkeypatch.delattr(PKDTerm, "denominator")
    refused(r"^PKDTerm\.denominator: .*, not ''$")
    monkeypatch.setattr(PKD, "build", lambda *_: None)
    refused(r"^PKD\.build: must return Term, not NoneType$")


def test_a_loss_that_is_detached_is_refused(monkeypatch):
    monkeypatch.setattr(ReverseKL, "loss", lambda self, log_q, *_: log_q.detach().sum(-1))
    inputs, objective, totals = loss_inputs_of(ObjectiveConfig(reverse_kl=ReverseKL(min_lead=None)))
    with pytest.raises(TrainingError, match=r"^ReverseKL\.loss: .* a gradient by log_q; do not"):
        objective(inputs, totals)


def test_a_loss_of_no_single_position_is_refused(monkeypatch):
    monkeypatch.setattr(ReverseKL, "loss", lambda self, log_q, log_p, labels: log_q.mean())
    said = r"ReverseKL\.loss: must return the loss of each position, \[2\], not \[\]"
    with pytest.raises(TrainingError, match=said):
        loss_inputs_of(ObjectiveConfig(reverse_kl=ReverseKL()))


def test_the_z_loss_is_its_formula_beside_the_cross_entropy():
    """And both gradients are autograd's of the plain formulas."""
    config = ObjectiveConfig(mlm=MaskedLanguageModelling(2.0), z_loss=ZLoss(0.1))
    inputs, objective, totals = loss_inputs_of(config)
    loss, shares = objective(inputs, totals)
    labels = inputs.batch.targets[MASKED].labels
    states = inputs.features.vocabulary_input
    (ours,) = torch.autograd.grad(loss, states, retain_graph=True)
    logits = F.linear(states, inputs.projection.weight, inputs.projection.bias)[labels >= 0]
    squares = logits.logsumexp(-1).square().mean()
    entropy = F.cross_entropy(logits, labels[labels >= 0])
    torch.testing.assert_close(shares, torch.stack([entropy, squares]).detach())
    (theirs,) = torch.autograd.grad(2 * entropy + 0.1 * squares, states)
    torch.testing.assert_close(ours, theirs)
    assert objective.label_terms == ["mlm"]


def divergence(p, q):
    """KL(p || q), mean over rows."""
    return (p * (p / q).log()).sum(-1).mean()


def test_prediction_and_patience_are_the_original_codes_means():
    """TinyBERT's mean is over positions and labels, PKD's over rows, layers and width."""
    config = ObjectiveConfig(
        soft_cross_entropy=SoftCrossEntropy(1.0, 2.0), pkd=PKD(layers={1: 1, 2: 4})
    )
    inputs, objective, totals = loss_inputs_of(config)
    _, shares = objective(inputs, totals)
    labelled = inputs.batch.targets[MASKED].labels >= 0
    states = inputs.features.vocabulary_input[labelled]
    ours = F.linear(states, inputs.projection.weight, inputs.projection.bias) / 2
    theirs = teacher_logits(inputs)[inputs.batch.masked_positions[labelled]] / 2
    tinybert = (-F.softmax(theirs, -1) * F.log_softmax(ours, -1)).mean()
    student, teacher = (
        torch.stack([F.normalize(states[layer][:, 0], dim=-1) for layer in layers], dim=1)
        for states, layers in (
            (inputs.features.hidden_states, (1, 2)),
            (inputs.sources[TEACHER].hidden_states, (1, 4)),
        )
    )
    torch.testing.assert_close(shares[0], tinybert.detach())
    torch.testing.assert_close(shares[1], F.mse_loss(student, teacher).detach())


def test_layers_that_weigh_nothing_cost_nothing():
    weights = [1.0, 0.0, 0.5]  # embedding output, layer 1, layer 2
    inputs, objective, totals = loss_inputs_of(
        ObjectiveConfig(hidden_mse=HiddenMSE(layer_weights=weights))
    )
    assert objective.source_capture(0).hidden_states == (0, 4)
    assert list(inputs.features.hidden_states) == [0, 2]
    projection = objective.terms["hidden_mse"].projection
    mask = inputs.batch.attention_mask
    expected = sum(
        weight
        * F.mse_loss(
            projection(inputs.features.hidden_states[ours][mask]),
            inputs.sources[TEACHER].hidden_states[theirs][mask],
        )
        for weight, ours, theirs in ((1.0, 0, 0), (0.5, 2, 4))
    )
    torch.testing.assert_close(objective(inputs, totals)[0], expected)


def test_terms_are_on_while_they_weigh_something():
    config = ObjectiveConfig(
        mlm=MaskedLanguageModelling({0: 0.0, 10: 1.0}), soft_kl=SoftKL({0: 1.0, 10: 0.0}, 2.0)
    )
    for step, names in ((0, {"soft_kl"}), (5, {"mlm", "soft_kl"}), (10, {"mlm"})):
        inputs, objective, totals = loss_inputs_of(config, step=step)
        loss, shares = objective(inputs, totals)
        assert objective.weights(step) == {"mlm": step / 10, "soft_kl": 1 - step / 10}
        assert bool(objective.reading(TEACHER, step)) == ("soft_kl" in names)
        assert {name for name, share in zip(objective.terms, shares, strict=True) if share} == names
        weights = torch.tensor(list(objective.weights(step).values()))
        torch.testing.assert_close(loss.detach(), shares @ weights)


def test_an_objective_that_weighs_nothing_for_a_while_still_runs():
    config = ObjectiveConfig(mlm=MaskedLanguageModelling({0: 0.0, 10: 0.0, 20: 1.0}))
    inputs, objective, totals = loss_inputs_of(config)
    loss, shares = objective(inputs, totals)
    loss.backward()
    assert loss.item() == 0 < shares.item()


def test_temperatures_follow_the_step():
    config = ObjectiveConfig(soft_kl=SoftKL(1.0, {0: 4.0, 10: 1.0}))
    for step, temperature in ((0, 4.0), (10, 1.0)):
        fixed = ObjectiveConfig(soft_kl=SoftKL(1.0, temperature))
        ours, theirs = (
            objective(inputs, totals)[0]
            for inputs, objective, totals in (
                loss_inputs_of(config, step=step),
                loss_inputs_of(fixed),
            )
        )
        torch.testing.assert_close(ours, theirs)


def test_maps_follow_a_teacher_that_grows():
    """While half the teacher exists, the same projection learns from the same relative depths."""
    config = ObjectiveConfig(hidden_mse=HiddenMSE(), attention_mse=AttentionMSE())
    objective = Objective(config, encoder(layers=2), encoder(), seed=0)
    before = objective.terms["hidden_mse"].projection.weight.clone()
    assert objective.source_capture(0) == Capture((0, 2, 4), (2, 4))
    objective.set_teacher_layers(2)
    assert objective.source_capture(0) == Capture((0, 1, 2), (1, 2))
    assert objective.student_capture(0) == Capture((0, 1, 2), (1, 2))
    assert torch.equal(objective.terms["hidden_mse"].projection.weight, before)
    objective.set_teacher_layers(4)
    assert objective.source_capture(0) == Capture((0, 2, 4), (2, 4))


def test_the_objective_decides_whether_there_is_a_pair_head():
    assert LearnerConfig(encoder(), ObjectiveConfig(nsp=NextSentence())).architecture.pair_head
    assert not LearnerConfig(
        encoder(), ObjectiveConfig(mlm=MaskedLanguageModelling())
    ).architecture.pair_head
    with pytest.raises(ValueError, match=r"^objective.sop: .*model.pooler"):
        LearnerConfig(encoder(pooler="none"), ObjectiveConfig(sop=SentenceOrder()))


def test_projections_are_a_function_of_the_seed():
    config = ObjectiveConfig(mlm=MaskedLanguageModelling(), hidden_mse=HiddenMSE())
    same = [Objective(config, encoder(hidden_size=16), encoder(), seed=7) for _ in range(2)]
    other = Objective(config, encoder(hidden_size=16), encoder(), seed=8)
    weights = [one.terms["hidden_mse"].projection.weight for one in [*same, other]]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_student_takes_what_it_has_of_its_teachers_layers():
    """A DistilBERT from a BERT lacks pooler and segments, but nothing else may be missing."""
    from model import select_layers

    mlm = ObjectiveConfig(mlm=MaskedLanguageModelling())
    config = LearnerConfig(model=encoder(layers=2), objective=mlm)
    teacher = build(encoder(), seed=1)
    weights = select_layers(teacher.state_dict(), [0, 3])
    narrow = dataclasses.replace(config, model=encoder(layers=2, pooler="none", segment_types=0))
    module = build_module("students/a", narrow, encoder(), 0, weights)
    word = "embeddings.word.weight"
    assert torch.equal(module.model.state_dict()[word], teacher.state_dict()[word])
    deeper = dataclasses.replace(config, model=encoder(layers=3))
    with pytest.raises(TrainingError, match="no weights for encoder"):
        build_module("students/a", deeper, encoder(), 0, weights)
