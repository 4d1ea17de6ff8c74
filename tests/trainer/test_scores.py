"""What is summed over held-out text, against plain torch on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from data_pipeline import MASKED, NO_LABEL
from model import build
from tests.trainer import tiny
from trainer.batches import to_device
from trainer.scoring import scores
from trainer.teacher_outputs import OutputProjection


@pytest.mark.parametrize("pair_head", [True, False])
def test_sums_are_those_of_the_whole_logits(monkeypatch, pair_head):
    monkeypatch.setattr(scores, "CHUNK", 5)
    labels = torch.tensor([0, 1, 1, NO_LABEL, 0, 0, 1, 0])
    batch = tiny.with_pairs(tiny.random_batch(2), labels.numpy())
    micro = to_device(batch, torch.device("cpu"))
    model = build(tiny.encoder(pair_head=pair_head), seed=3).eval()
    features = model.features(
        micro.input_ids,
        micro.segment_ids,
        micro.lengths,
        micro.masked_positions,
        scores.capture_for(model),
    )
    sums = scores.score(features, OutputProjection(*model.output_projection()), micro)
    logits = F.linear(features.vocabulary_input, *model.output_projection())
    masked = micro.targets[MASKED].labels != NO_LABEL
    right = logits.argmax(-1)[masked] == micro.targets[MASKED].labels[masked]
    loss = F.cross_entropy(logits[masked], micro.targets[MASKED].labels[masked], reduction="sum")
    expected = [loss.item(), right.sum().item(), masked.sum().item(), 0, 0]
    if pair_head:
        paired = labels != NO_LABEL
        told = model(micro.input_ids, micro.segment_ids, micro.attention_mask).heads["pairs"]
        expected[3] = (told.argmax(-1)[paired] == labels[paired]).sum().item()
        expected[4] = 7
    assert sums.tolist() == pytest.approx(expected, rel=1e-5)
