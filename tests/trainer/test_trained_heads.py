"""Whether something has trained a learner's masked-LM head."""

from __future__ import annotations

import pytest

from tests.trainer import tiny
from trainer.evaluation.trained_heads import head_is_trained, shown
from trainer.learner_config import InitConfig, LearnerConfig
from trainer.learners.state import HeldOut
from trainer.objectives import ObjectiveConfig
from trainer.objectives.progressive import ProgressiveConfig
from trainer.objectives.terms import (
    AttentionMSE,
    Blended,
    FeatureMaps,
    HiddenMSE,
    SoftKL,
)
from trainer.tasks.masked_language_modelling import MaskedLanguageModelling
from trainer.tasks.next_sentence import NextSentence

STATES = ObjectiveConfig(hidden_mse=HiddenMSE(), attention_mse=AttentionMSE())
MLM = MaskedLanguageModelling()


def learner(objective: ObjectiveConfig, **settings: object) -> LearnerConfig:
    return LearnerConfig(model=tiny.encoder(layers=2), objective=objective, **settings)


LATE, PASSING = SoftKL({5: 0.0, 10: 1.0}), SoftKL({0: 0.0, 4: 1.0, 8: 0.0})


@pytest.mark.parametrize(
    ("config", "steps", "is_trained"),
    [
        (learner(STATES), 100, False),  # TinyBERT's general distillation
        (learner(ObjectiveConfig(mlm=MLM)), 1, True),
        (learner(ObjectiveConfig(mlm=MLM)), 0, False),
        (learner(ObjectiveConfig(hidden_mse=HiddenMSE(), nsp=NextSentence())), 1, False),
        (learner(ObjectiveConfig(soft_kl=LATE)), 6, False),
        (learner(ObjectiveConfig(soft_kl=LATE)), 7, True),
        (learner(ObjectiveConfig(soft_kl=PASSING)), 100, True),
        (learner(STATES, init=InitConfig(teacher_layers=[0, 1])), 0, True),
        (learner(STATES, init=InitConfig(pretrained="folder")), 0, True),
        (learner(STATES, init=InitConfig(teacher_embeddings=True)), 100, False),
    ],
)
def test_a_head_is_trained_by_a_term_or_came_with_its_layers(config, steps, is_trained):
    assert head_is_trained(config, steps) == is_trained


def test_a_transfer_between_layers_trains_no_head():
    objective = ObjectiveConfig(feature_maps=FeatureMaps(), blended=Blended(), nsp=NextSentence())
    config = learner(objective, progressive=ProgressiveConfig(5))
    assert [head_is_trained(config, steps) for steps in (1, 10, 11)] == [False, False, True]


def test_no_score_of_an_untrained_head_is_shown():
    scores = HeldOut(loss=6.0, accuracy=0.1, pair_accuracy=0.5)
    assert shown(scores, True) == {"loss": 6.0, "accuracy": 0.1, "pair_accuracy": 0.5}
    assert shown(scores, False) == {"loss": None, "accuracy": None, "pair_accuracy": 0.5}
