"""Keys by the names that other libraries have for them: a message names ours."""

from __future__ import annotations

import pytest

import configs
from configs import ConfigError
from configs.typed import _KEYS
from trainer.config import JobConfig


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("teacher.model.intermediate_size", "ffn_size"),
        ("teacher.model.num_hidden_layers", "layers"),
        ("teacher.optimizer.lr", "learning_rate"),
        ("teacher.lr_scheduler_type", "schedule.kind"),
        ("data.mlm_probability", "masking.rate"),
        ("per_device_train_batch_size", "batch.micro_batch"),
        ("max_steps", "steps"),
    ],
)
def test_a_key_of_another_library_is_told_by_our_name(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"{theirs}: unknown key; here it is {ours}$"):
        configs.load("bert", JobConfig, "job", [f"{theirs}=3"])


def test_a_section_without_our_key_names_its_own() -> None:
    with pytest.raises(ConfigError, match=r"batch.intermediate_size: unknown key; there are: "):
        configs.load("bert", JobConfig, "job", ["batch.intermediate_size=3"])


@pytest.mark.parametrize("ours", sorted(set(_KEYS.values())))
def test_every_key_that_is_named_is_in_the_schema(ours: str) -> None:
    schema = (configs.SHIPPED / "schema" / "job.json").read_text(encoding="utf-8")
    for name in ours.split("."):
        assert f'"{name}": {{' in schema
