"""Early exits: the loss by hand, a whole job, and refused configs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from configs import ConfigError
from model import Capture, build
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.tiny import encoder, random_batch, totals_of
from trainer.batches import to_device
from trainer.learner_config import LearnerConfig
from trainer.learners.module import Train, build_module
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.own_predictions import EarlyExits
from trainer.run_folder.folder import RunFolder
from trainer.tasks.pretraining import MaskedLanguageModelling

TEMPERATURE = 2.0


def test_the_loss_is_the_divergence_of_earlier_exits_from_the_detached_last_head() -> None:
    objective = ObjectiveConfig(
        mlm=MaskedLanguageModelling(),
        early_exits=EarlyExits(0.5, layers=[1, 3], temperature=TEMPERATURE),
    )
    module = build_module(
        "teacher", LearnerConfig(model=encoder(), objective=objective), encoder(), 0
    )
    batch = random_batch(3)
    micro = to_device(batch, torch.device("cpu"))
    program = Train(totals_of(batch), {}, module.objective.student_capture(0))
    loss, shares, _ = module(program, micro)
    loss.backward()
    found = {n: one.grad for n, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()

    model, target = module.model, micro.targets["masked"]
    said = model(
        micro.input_ids, micro.segment_ids, micro.attention_mask, output_hidden_states=True
    )
    weight, bias = model.output_projection()
    labelled = target.labels >= 0
    at = target.positions[labelled]
    logits = said.logits.flatten(0, 1)[at]
    own = F.softmax(logits.detach() / TEMPERATURE, dim=-1)
    exits = sum(
        F.kl_div(
            F.log_softmax(
                F.linear(model.head(said.hidden_states[layer].flatten(0, 1)[at]), weight, bias)
                / TEMPERATURE,
                dim=-1,
            ),
            own,
            reduction="sum",
        )
        for layer in (1, 3)
    ) * (TEMPERATURE**2 / len(at))
    expected = F.cross_entropy(logits, target.labels[labelled]) + 0.5 * exits
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(shares[1], exits.detach())
    assert "model.encoder.feed_forward.0.stack.0.input.weight" in found
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert name not in found
            continue
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


EXITS = "students.distilbert.objective.early_exits={layers: [1]}"


def trained(corpus: Path, runs: Path) -> list[str]:
    """An uninterrupted run, and the same run stopped and resumed. Collective."""
    stage = "students.distilbert.zero_stage=3"
    whole = jobs.run(jobs.tiny_job(corpus, runs, "name=whole", EXITS, stage))
    resumed = jobs.tiny_job(corpus, runs, "name=resumed", EXITS, stage)
    jobs.run(resumed, stop_after=5)
    return [str(folder.path) for folder in (whole, jobs.run(resumed))]


@pytest.mark.slow
def test_a_job_with_exits_resumes_to_the_same_bits(corpus, tmp_path) -> None:
    whole, resumed = (
        jobs.curve(RunFolder(Path(path)), "students/distilbert")
        for path in run_distributed(trained, 2, corpus, tmp_path)[0]
    )
    values = [value for _, key, value in whole if key == "students/distilbert/early_exits"]
    assert values
    assert all(value > 0 for value in values)
    assert resumed == whole


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.objective.early_exits={}"], "early_exits.layers: name at least one"),
        (["teacher.objective.early_exits={layers: [2, 2]}"], "early_exits.layers"),
        (["teacher.objective.early_exits={layers: [4]}"], "early_exits.layers: must be below 4"),
        (
            ["teacher.objective={early_exits: {layers: [1]}, mlm: null}"],
            "teacher.objective.early_exits: needs a term beside it that trains the last head",
        ),
    ],
)
def test_exits_without_a_last_layer_or_head_to_learn_from(corpus, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        jobs.tiny_job(corpus, tmp_path, *overrides)


def test_a_teacher_may_learn_from_itself(corpus, tmp_path) -> None:
    job = jobs.tiny_job(corpus, tmp_path, "teacher.objective.early_exits={layers: [1]}")
    assert dataclasses.asdict(job.teacher.objective)["early_exits"]["layers"] == [1]


def test_an_exit_of_a_pre_norm_model_is_that_of_the_model_without_the_layers_above() -> None:
    config = encoder(norm_placement="pre")
    module = build(config, seed=1).eval()
    ids = torch.randint(5, 20, (2, 8))
    found = module.features(ids, None, None, None, Capture(exits=(1,)))
    below = build(dataclasses.replace(config, layers=1), seed=2).eval()
    below.load_state_dict({key: module.state_dict()[key] for key in below.state_dict()})
    expected = below.features(ids, None, None, None, Capture()).vocabulary_input
    torch.testing.assert_close(found.exits[1], expected)
