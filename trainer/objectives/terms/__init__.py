"""The terms of objectives. Each has a config, which is its YAML section, and builds a `Term`.

To add a term, write its loss in `trainer.losses`. Then write a module here with its config and
its `Term`, registered under its name in YAML and metrics (`trainer.objectives.term.register`).
Modules here are imported automatically. A term that trains a head of its own is a task and
belongs in `trainer.tasks`.
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
