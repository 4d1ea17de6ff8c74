"""The `model` of a learner whose config names only a folder of weights (init.pretrained)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import ConfigError
from model import ModelConfig, ModelError, read_config
from trainer.job_tree import is_frozen, learners_of

# Keys of heads, which the objective adds again where it trains them.
_HEADS = ("pair_head", "task_heads")


def fill_in_models(tree: Mapping[str, Any]) -> None:
    """Give each learner of a job's YAML tree without a `model` that of its ``init.pretrained``.

    A learner that is trained gets the model without the heads of earlier tasks. Raises ConfigError,
    naming the key, for a folder without a model. Where `model` is given, the folder may be made
    later, and be gone when a run is resumed.
    """
    for section, learner in learners_of(tree):
        init = learner.get("init")
        folder = init.get("pretrained") if isinstance(init, dict) else None
        if not isinstance(folder, str) or "model" in learner:
            continue
        model = dataclasses.asdict(_model_in(folder, section))
        kept = is_frozen(learner)
        learner["model"] = {key: value for key, value in model.items() if kept or key not in _HEADS}


def _model_in(folder: str, section: str) -> ModelConfig:
    key = f"{section}.init.pretrained"
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{key}: {folder}: no such folder; put it there, or set {section}.model too (the "
            "config.yaml of a run has it)"
        )
    try:
        return read_config(folder)
    except ModelError as error:
        raise ConfigError(f"{key}: {error}") from error
