"""The `model` of a learner whose config names only a folder of weights (init.pretrained)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs import ConfigError
from configs.kinds import KIND, kinds_of
from model import Ability, ModelConfig, ModelError, read_config
from trainer.job_tree import is_frozen, with_learners

# Keys of heads, which the objective adds again where it trains them.
_HEADS = ("pair_head", "task_heads")


def with_models(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A job's YAML tree in which learners without a `model` have that of their ``init.pretrained``.

    It has as many layers as ``init.layers`` lists. A learner that is trained gets the model without
    the heads of earlier tasks. A folder that does not exist on this machine is skipped; the start
    of the job reports it. Raises ConfigError, naming the key, for a damaged folder.
    """
    return with_learners(tree, _with_model)


def _with_model(section: str, learner: dict[str, Any]) -> dict[str, Any]:
    init = learner.get("init")
    folder = init.get("pretrained") if isinstance(init, dict) else None
    given = learner.get("model", {})
    kind = given.get(KIND, "") if isinstance(given, dict) else ""
    is_open = "model" not in learner or (given == {KIND: kind} and _reads_folders(kind))
    if not isinstance(init, dict) or not isinstance(folder, str) or not is_open:
        return learner
    layers = init.get("layers")
    depth = len(layers) if isinstance(layers, list) else 0
    if not _holds_model(folder):
        return {**learner, "model": {"layers": depth}} if depth else learner
    try:
        config = read_config(folder, kind)
    except ModelError as error:
        raise ConfigError(f"{section}.init.pretrained: {error}") from error
    if depth and not config.cannot(Ability.GROW):
        config = config.with_layers(depth)
    left_out = () if is_frozen(learner) else _HEADS
    model = {key: value for key, value in dataclasses.asdict(config).items() if key not in left_out}
    return {**learner, "model": model}


def _reads_folders(kind: object) -> bool:
    """Whether a model section that has only this `kind` is to be read from the folder."""
    kinds = kinds_of(ModelConfig)
    return isinstance(kind, str) and kind in kinds and kinds[kind].reads_folders


def _holds_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()
