"""The `model` of a learner whose config names only a folder of weights (init.pretrained)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs import ConfigError
from model import ModelError, read_config

# Keys of heads, which the objective adds again where it trains them.
_HEADS = ("pair_head", "task_heads")


def fill_in_models(tree: Mapping[str, Any]) -> None:
    """In a job's YAML tree, give each learner without a `model` that of its ``init.pretrained``.

    A learner that is trained gets the model without the heads of earlier tasks. A folder that does
    not exist on this machine is skipped; the start of the job reports it. Raises ConfigError,
    naming the key, for a damaged folder.
    """
    for section, learner in _learners(tree):
        init = learner.get("init")
        folder = init.get("pretrained") if isinstance(init, dict) else None
        if isinstance(folder, str) and "model" not in learner and _holds_model(folder):
            try:
                config = read_config(folder)
            except ModelError as error:
                raise ConfigError(f"{section}.init.pretrained: {error}") from error
            model = dataclasses.asdict(config)
            kept = learner.get("frozen") in ("true", True)
            learner["model"] = {
                key: value for key, value in model.items() if kept or key not in _HEADS
            }


def _holds_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()


def _learners(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    found = [("teacher", tree.get("teacher"))]
    for role in ("teachers", "students"):
        named = tree.get(role)
        items = named.items() if isinstance(named, dict) else ()
        found += [(f"{role}.{name}", one) for name, one in items]
    yield from ((section, one) for section, one in found if isinstance(one, dict))
