"""Losses against values worked out by other means, layer maps, and objectives as wholes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from model import QKV
from tests.trainer.tiny import encoder, learner_configs
from trainer.layer_maps import map_layers
from trainer.objectives import Objective, ObjectiveConfig, losses
from trainer.objectives.terms import Attention, Cosine, Hidden, MaskedLanguageModelling, SoftTargets

MASK = torch.tensor([[True, True, True], [True, True, False]])  # B = 2, L = 3


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_cosine_distance_by_hand():
    student = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, 1.0], [9, 9]]])
    teacher = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [-3.0, 0]], [[0.0, 1.0], [1.0, 0.0], [0, 1]]])
    total, count = losses.cosine_distance(student, teacher, MASK)
    # Angles of 0, 90, 180, 0 and 45 degrees; the last position is padding.
    assert total.item() == pytest.approx(0 + 1 + 2 + 0 + 1 - 0.5**0.5)
    assert count.item() == 5


def test_hidden_mse_equals_torch_over_attended_positions():
    student, teacher = random(2, 3, 4), random(2, 3, 4, seed=1)
    total, count = losses.hidden_mse(student, teacher, MASK)
    assert (total / count).item() == pytest.approx(F.mse_loss(student[MASK], teacher[MASK]).item())


def attention_of(head_width, seed):
    return QKV(*(random(2, 2, 3, head_width, seed=seed + n) for n in range(3)))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_attention_mse_row_by_row(monkeypatch, chunk_bytes):
    """Against a loop over rows without their padding; different head widths, any chunk size."""
    monkeypatch.setattr(losses, "SCORE_BYTES", chunk_bytes)
    student, teacher = attention_of(4, 0), attention_of(8, 10)
    expected = 0.0
    for row, length in enumerate([3, 2]):
        ours, theirs = (
            qkv.q[row, :, :length] @ qkv.k[row, :, :length].mT / qkv.q.shape[-1] ** 0.5
            for qkv in (student, teacher)
        )
        expected += F.mse_loss(ours, theirs, reduction="sum").item() / 2  # heads
    total, count = losses.attention_mse(student, teacher, MASK)
    assert total.item() == pytest.approx(expected)
    assert count.item() == 3 * 3 + 2 * 2


@pytest.mark.parametrize(
    ("layers", "student", "teacher", "expected"),
    [
        ("uniform", 4, 12, [3, 6, 9, 12]),
        ("top", 4, 12, [9, 10, 11, 12]),
        ("bottom", 4, 12, [1, 2, 3, 4]),
        ([1, 1, 7], 3, 12, [1, 1, 7]),
    ],
)
def test_layer_maps(layers, student, teacher, expected):
    assert map_layers(layers, student, teacher) == expected


@pytest.mark.parametrize("layers", ["uniform", "middle", [1, 2], [0, 1, 2, 3, 4], [1, 2, 3, 4, 13]])
def test_maps_that_do_not_exist(layers):
    with pytest.raises(ValueError, match="layers"):
        map_layers(layers, 5, 12)


WIDER = {"hidden_size": 64, "heads": 4}


@pytest.mark.parametrize(
    ("config", "student", "complaint"),
    [
        (ObjectiveConfig(), {}, "at least one term"),
        (ObjectiveConfig(cosine=Cosine()), WIDER, "cosine"),
        (ObjectiveConfig(attention=Attention()), {"heads": 2}, "attention"),
        (ObjectiveConfig(soft=SoftTargets()), {"vocab_size": 98}, "vocabulary"),
        (ObjectiveConfig(hidden=Hidden(layers="middle")), {}, "layers"),
    ],
)
def test_objectives_that_do_not_fit_say_which_term(config, student, complaint):
    with pytest.raises(ValueError, match=complaint):
        Objective(config, encoder(**student), encoder(), seed=0)


def test_counts_of_terms_are_those_the_step_divides_by():
    """Every term's own count is the field of Counts that its unit names."""
    from tests.trainer.tiny import random_batch
    from trainer.batches import Counts, count, to_device
    from trainer.knowledge import Decoder, detach
    from trainer.learner import build_module
    from trainer.objectives import Lesson

    configs = learner_configs((0, 0, 0))
    teacher_config = configs["teacher"].model
    batch = random_batch(5)
    micro, totals = to_device(batch, torch.device("cpu")), Counts(*torch.tensor(count(batch)))
    teacher = build_module("teacher", configs["teacher"], teacher_config, 0)
    for name in ("students/distilbert", "students/tinybert"):
        student = build_module(name, configs[name], teacher_config, 0)
        views = [
            module.model.features(
                micro.input_ids, micro.segment_ids, micro.padding_mask, micro.masked_positions, what
            )
            for module, what in (
                (teacher, student.objective.teacher_capture(0)),
                (student, student.objective.student_capture(0)),
            )
        ]
        knowledge = detach(views[0], Decoder(*teacher.model.decoder()))
        lesson = Lesson(micro, views[1], Decoder(*student.model.decoder()), knowledge)
        for term in student.objective.by_name.values():
            assert term(lesson)[1].item() == getattr(totals, term.unit).item(), name


def test_projections_are_a_function_of_the_seed():
    config = ObjectiveConfig(mlm=MaskedLanguageModelling(), hidden=Hidden())
    same = [Objective(config, encoder(hidden_size=16), encoder(), seed=7) for _ in range(2)]
    other = Objective(config, encoder(hidden_size=16), encoder(), seed=8)
    weights = [one.terms["hidden"].projection.weight for one in [*same, other]]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_student_takes_what_it_has_of_its_teachers_layers():
    """A DistilBERT out of a BERT: no pooler, no segments. Nothing may be missing, though."""
    from model import build, select_layers
    from trainer.errors import TrainingError
    from trainer.learner import build_module

    config = learner_configs((0, 0, 0))["students/distilbert"]
    teacher = build(encoder(), seed=1)
    weights = select_layers(teacher.state_dict(), [0, 3])
    narrow = dataclasses.replace(config, model=encoder(layers=2, pooler="none", segment_types=0))
    module = build_module("students/a", narrow, encoder(), 0, weights)
    word = "embeddings.word.weight"
    assert torch.equal(module.model.state_dict()[word], teacher.state_dict()[word])
    deeper = dataclasses.replace(config, model=encoder(layers=3))
    with pytest.raises(TrainingError, match="no weights for encoder"):
        build_module("students/a", deeper, encoder(), 0, weights)
