"""The terms there are: for each a config, its section in YAML, and the Term that it builds.

To add one: a loss (in `trainer.losses.states`, `relations` or `trainer.losses.vocabulary`), a
config and its Term in a module here, and a field in `ObjectiveConfig`, whose name is the term's
name in YAML and in the metrics.
"""

from trainer.objectives.terms.attention import (
    AttentionMSE,
    AttentionRelation,
    AttentionTransfer,
    ValueRelation,
)
from trainer.objectives.terms.pairs import NextSentence, PairConfig, SentenceOrder
from trainer.objectives.terms.states import (
    PKD,
    Cosine,
    Embedding,
    FeatureMaps,
    HiddenMSE,
    MeanTransfer,
    VarianceTransfer,
)
from trainer.objectives.terms.two_way import FromStudent
from trainer.objectives.terms.vocabulary import (
    Blended,
    MaskedLanguageModelling,
    SoftCrossEntropy,
    SoftKL,
)

__all__ = [
    "PKD",
    "AttentionMSE",
    "AttentionRelation",
    "AttentionTransfer",
    "Blended",
    "Cosine",
    "Embedding",
    "FeatureMaps",
    "FromStudent",
    "HiddenMSE",
    "MaskedLanguageModelling",
    "MeanTransfer",
    "NextSentence",
    "PairConfig",
    "SentenceOrder",
    "SoftCrossEntropy",
    "SoftKL",
    "ValueRelation",
    "VarianceTransfer",
]
