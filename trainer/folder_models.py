"""The `model` of a learner whose config names only a folder of weights (init.pretrained)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import ConfigError
from model import Ability, ModelError, read_config
from trainer.job_tree import is_frozen, learners_of

# Keys of heads, which the objective adds again where it trains them.
_HEADS = ("pair_head", "task_heads")


def fill_in_models(tree: Mapping[str, Any]) -> None:
    """Give each learner of a job's YAML tree without a `model` that of its ``init.pretrained``.

    It has as many layers as ``init.layers`` lists. A learner that is trained gets the model without
    the heads of earlier tasks. A folder that does not exist on this machine is skipped; the start
    of the job reports it. Raises ConfigError, naming the key, for a damaged folder.
    """
    for section, learner in learners_of(tree):
        init = learner.get("init")
        folder = init.get("pretrained") if isinstance(init, dict) else None
        if isinstance(folder, str) and "model" not in learner and _holds_model(folder):
            try:
                config = read_config(folder)
            except ModelError as error:
                raise ConfigError(f"{section}.init.pretrained: {error}") from error
            layers = init.get("layers") if isinstance(init, dict) else None
            if isinstance(layers, list) and layers and not config.cannot(Ability.GROW):
                config = config.with_layers(len(layers))
            model = dataclasses.asdict(config)
            kept = is_frozen(learner)
            learner["model"] = {
                key: value for key, value in model.items() if kept or key not in _HEADS
            }


def _holds_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()
