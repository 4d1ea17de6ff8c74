"""The terms of objectives. Each has a config, which is its YAML section, and builds a `Term`.

To add a term, write a module here with its loss, its config and its `Term`, registered under its
name in YAML and metrics (`trainer.objectives.term.register`). Modules here are imported
automatically. A term that trains a head of its own is a task and belongs in `trainer.tasks`.
"""

from trainer.objectives.labels import PairConfig
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
from trainer.objectives.terms.own_predictions import EarlyExits, ZLoss
from trainer.objectives.terms.predictions import Blended, FromStudent, SoftCrossEntropy, SoftKL
from trainer.objectives.terms.states import (
    PKD,
    Cosine,
    Embedding,
    FeatureMaps,
    HiddenMSE,
    MeanTransfer,
    VarianceTransfer,
)

__all__ = [
    "PKD",
    "AlphaBeta",
    "AttentionMSE",
    "AttentionRelation",
    "AttentionTransfer",
    "Blended",
    "Cosine",
    "DecoupledKD",
    "EarlyExits",
    "Embedding",
    "FeatureMaps",
    "FromStudent",
    "HiddenMSE",
    "JensenShannon",
    "KeyRelation",
    "MeanTransfer",
    "PairConfig",
    "QueryRelation",
    "ReverseKL",
    "SoftCrossEntropy",
    "SoftKL",
    "UniversalLogitDistillation",
    "ValueRelation",
    "VarianceTransfer",
    "ZLoss",
]
