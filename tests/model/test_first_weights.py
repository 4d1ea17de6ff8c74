"""What a task's model begins with: what is loaded, and how the rest begins, as in the originals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import model
from model import EncoderConfig, TaskHeadConfig, first_weights, with_task_head
from model.heads import Branch
from model.hugging_face.conversion import to_transformers
from model.hugging_face.family import split_gates
from model.hugging_face.nomic_bert import NOMIC_BERT
from model.hugging_face.task_heads import ENDINGS
from tests.model.test_heads import FAMILIES, FINE_TUNED, LABELS, is_exchanged, their_config

WIDE = {"hidden_size": 128}  # enough values to tell deviations apart
# The code of these models truncates at two deviations; `transformers` does so for ModernBERT only.
TRUNCATED = ("Bert", "Albert", "Electra", "MobileBert")
TRUNCATION = 0.8796
SOURCES = {
    "pre-trained": "ForMaskedLM",
    "without heads": "Model",
    "other labels": "ForSequenceClassification",
}


def sizes_of(family: str) -> dict[str, Any]:
    return {"dim": 128} if family == "DistilBert" else WIDE


def source_of(family: str, source: str, folder: Path) -> model.Model:
    """Write a model of `transformers`, with values that nothing begins with, and read it."""
    labels = {"id2label": {number: f"label {number}" for number in range(5)}}
    config = getattr(transformers, f"{family}Config")(
        **(FAMILIES[family] | sizes_of(family)), **labels, initializer_range=0.05
    )
    theirs = getattr(transformers, f"{family}{SOURCES[source]}")(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.rand_like(parameter))
    theirs.save_pretrained(folder)
    return model.from_pretrained(folder)


def ours_from(source: model.Model, kind: str) -> dict[str, Tensor]:
    """The model with a new head of this kind, in the names of `transformers`."""
    labels = [] if kind in ("regression", "choice", "span") else LABELS
    bare = dataclasses.replace(source.config, task_heads={}, mlm_head=False, pair_head=False)
    config = with_task_head(bare, "task", TaskHeadConfig(kind, labels))
    state = model.build(config, seed=3).state_dict()
    loaded = first_weights(config, source.config, source.state_dict())
    begun = {name: loaded.get(name, tensor) for name, tensor in state.items()}
    theirs, tensors = to_transformers(config, begun)
    # Files of Nomic BERT have other names than the parameters of its class.
    in_files = theirs["model_type"] == "nomic_bert"
    return split_gates(NOMIC_BERT.to_ours(tensors)) if in_files else tensors


def size_of(tensor: Tensor) -> float:
    """The root of the mean square: the standard deviation of values around 0."""
    return float(tensor.detach().square().mean().sqrt())


@pytest.mark.parametrize(
    ("family", "source"),
    [
        pytest.param(
            *(family, source),
            marks=[pytest.mark.slow] * (family != "Bert" and source != "pre-trained"),
        )
        for family in FAMILIES
        for source in SOURCES
    ],
)
def test_every_head_begins_as_in_transformers(tmp_path: Path, family: str, source: str) -> None:
    given = source_of(family, source, tmp_path)
    for kind in FINE_TUNED:
        ending = ENDINGS[kind]
        if not is_exchanged(family, kind):
            continue
        config = their_config(family, kind, **sizes_of(family), initializer_range=0.05)
        theirs, told = getattr(transformers, f"{family}{ending}").from_pretrained(
            tmp_path, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
        begun = {*told["missing_keys"], *(one[0] for one in told["mismatched_keys"])}
        ours, expected = ours_from(given, kind), theirs.state_dict()
        for name, tensor in ours.items():
            if name not in begun:
                assert torch.equal(tensor, expected[name]), (kind, name)
                continue
            factor = TRUNCATION if family in TRUNCATED else 1.0
            wanted = size_of(expected[name]) * factor
            chance = 0.02 + 4 / math.sqrt(tensor.numel())  # four standard errors
            assert size_of(tensor) == pytest.approx(wanted, rel=chance, abs=1e-6), (kind, name)


def test_a_branch_begins_as_in_torch_which_its_original_leaves_alone() -> None:
    head = TaskHeadConfig(labels=LABELS, pooling="first", transform="none", branches=True)
    config = with_task_head(EncoderConfig(layers=2, vocab_size=50, mlm_head=False), "task", head)
    branches = model.build(config, seed=4).get_submodule("task_heads.task")
    for part in branches.modules():
        if not isinstance(part, nn.Linear):
            continue
        plain = nn.Linear(part.in_features, part.out_features)
        bound = 1 / math.sqrt(part.in_features)
        for ours, theirs in ((part.weight, plain.weight), (part.bias, plain.bias)):
            assert ours.abs().max() <= bound
            assert len(ours) < 9 or size_of(ours) == pytest.approx(size_of(theirs), rel=0.3)
        assert part.bias.abs().sum() > 0
    first, *_, last = (one for one in branches.modules() if isinstance(one, Branch))
    assert not torch.equal(first.narrow.weight, last.narrow.weight)


def test_of_several_heads_that_fit_the_first_is_taken() -> None:
    """A hash chose it, and so each rank another one."""
    head = model.TaskHeadConfig("regression", pooling="pooler", transform="none")
    names = [f"score_{number}" for number in range(20)]
    source = model.EncoderConfig(task_heads=dict.fromkeys(names, head))
    config = model.EncoderConfig(task_heads={"mine": head})
    state = {f"task_heads.{name}.linear.weight": torch.zeros(1) + n for n, name in enumerate(names)}
    _, tensors = model.with_fitting_heads(config, source, state, renames=True)
    assert tensors["task_heads.mine.linear.weight"] == 0
