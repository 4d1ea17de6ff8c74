"""The terms there are: for each a config, its section in YAML, and the Term that it builds.

To add one: a loss (in `trainer.losses.states`, `relations` or `trainer.losses.vocabulary`), a
config and its Term in a module here, and a field in `ObjectiveConfig`, whose name is the term's
name in YAML and in the metrics.
"""

from trainer.objectives.terms.attention import (
    Attention,
    AttentionRelation,
    AttentionTransfer,
    ValueRelation,
)
from trainer.objectives.terms.pairs import NextSentence, PairConfig, SentenceOrder
from trainer.objectives.terms.states import (
    Cosine,
    Embedding,
    FeatureMaps,
    Hidden,
    MeanTransfer,
    Patient,
    VarianceTransfer,
)
from trainer.objectives.terms.two_way import FromStudent
from trainer.objectives.terms.vocabulary import (
    Blended,
    MaskedLanguageModelling,
    Prediction,
    SoftTargets,
)

__all__ = [
    "Attention",
    "AttentionRelation",
    "AttentionTransfer",
    "Blended",
    "Cosine",
    "Embedding",
    "FeatureMaps",
    "FromStudent",
    "Hidden",
    "MaskedLanguageModelling",
    "MeanTransfer",
    "NextSentence",
    "PairConfig",
    "Patient",
    "Prediction",
    "SentenceOrder",
    "SoftTargets",
    "ValueRelation",
    "VarianceTransfer",
]
