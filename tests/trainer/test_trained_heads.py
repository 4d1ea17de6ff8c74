"""Which heads of a learner are trained."""

from __future__ import annotations

import pytest

from model import build
from tests.trainer import tiny
from trainer.evaluation.held_out import trained_heads
from trainer.learner_config import LearnerConfig
from trainer.learners.first_weights import heads_in
from trainer.learners.state import LearnerState
from trainer.objectives import ObjectiveConfig
from trainer.objectives.stages import ProgressiveConfig
from trainer.objectives.terms.attention import AttentionMSE
from trainer.objectives.terms.predictions import Blended, SoftKL
from trainer.objectives.terms.states import FeatureMaps, HiddenMSE
from trainer.scoring.scores import metrics_of, shown
from trainer.tasks.pretraining import MaskedLanguageModelling, NextSentence

STATES = ObjectiveConfig(hidden_mse=HiddenMSE(), attention_mse=AttentionMSE())
MLM = MaskedLanguageModelling()


def learner(objective: ObjectiveConfig, **settings: object) -> LearnerConfig:
    return LearnerConfig(model=tiny.encoder(layers=2), objective=objective, **settings)


LATE, PASSING = SoftKL({5: 0.0, 10: 1.0}), SoftKL({0: 0.0, 4: 1.0, 8: 0.0})


@pytest.mark.parametrize(
    ("config", "steps", "heads"),
    [
        (learner(STATES), 100, set()),  # TinyBERT's general distillation
        (learner(ObjectiveConfig(mlm=MLM)), 1, {"masked"}),
        (learner(ObjectiveConfig(mlm=MLM)), 0, set()),
        (learner(ObjectiveConfig(hidden_mse=HiddenMSE(), nsp=NextSentence())), 1, {"pairs"}),
        (learner(ObjectiveConfig(mlm=MLM, nsp=NextSentence())), 1, {"masked", "pairs"}),
        (learner(ObjectiveConfig(soft_kl=LATE)), 6, set()),
        (learner(ObjectiveConfig(soft_kl=LATE)), 7, {"masked"}),
        (learner(ObjectiveConfig(soft_kl=PASSING)), 100, {"masked"}),
    ],
)
def test_a_head_is_trained_by_a_term(config, steps, heads):
    assert trained_heads(config, LearnerState(5), 5 + steps) == heads


def test_a_head_that_came_with_the_first_weights_is_trained():
    """A head that the folder lacks is not: it starts from random weights."""
    config = tiny.encoder(pair_head=True)
    weights = build(config, seed=0).state_dict()
    assert heads_in(weights) == ["masked", "pairs"]
    words = {name: one for name, one in weights.items() if not name.startswith("pair_head.")}
    counters = LearnerState(0, given_heads=heads_in(words))
    assert trained_heads(learner(STATES), counters, 0) == {"masked"}
    part = {name: one for name, one in weights.items() if name != "pair_head.bias"}
    assert heads_in(part, weights) == ["masked"]


def test_a_transfer_between_layers_trains_no_head():
    objective = ObjectiveConfig(feature_maps=FeatureMaps(), blended=Blended(), nsp=NextSentence())
    config = learner(objective, progressive=ProgressiveConfig(5))
    found = [trained_heads(config, LearnerState(0), steps) for steps in (1, 10, 11)]
    assert found == [set(), set(), {"masked", "pairs"}]


def test_no_score_of_an_untrained_head_is_shown():
    metrics, scores = metrics_of(tiny.encoder(pair_head=True)), {"loss": 6.0, "accuracy": 0.1}
    pairs = {"pair_accuracy": 0.5}
    unknown = dict.fromkeys(scores)
    assert shown(scores | pairs, metrics, ["masked", "pairs"]) == scores | pairs
    assert shown(scores | pairs, metrics, ["pairs"]) == unknown | pairs
    assert shown(scores | pairs, metrics, ["masked"]) == scores | {"pair_accuracy": None}
    assert shown(scores, metrics_of(tiny.encoder()), []) == unknown
