"""The terms there are: for each a config, its section in YAML, and the Term that it builds.

To add one: a loss (in `trainer.losses`), and in a module here a config and its Term, with the
term's name in YAML and in the metrics (`trainer.objectives.term.register`). Every module here is
found by itself. Terms that train a head of their own are tasks (`trainer.tasks`).
"""

from trainer.objectives.terms.attention import (
    AttentionMSE,
    AttentionRelation,
    AttentionTransfer,
    ValueRelation,
)
from trainer.objectives.terms.exits import EarlyExits
from trainer.objectives.terms.pairs import PairConfig
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
    "EarlyExits",
    "Embedding",
    "FeatureMaps",
    "FromStudent",
    "HiddenMSE",
    "MeanTransfer",
    "PairConfig",
    "SoftCrossEntropy",
    "SoftKL",
    "ValueRelation",
    "VarianceTransfer",
]
