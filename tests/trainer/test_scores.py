"""Metrics: their readings of a batch against plain torch, and their sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import MASKED, NO_LABEL
from model import TaskHeadConfig, build, with_task_head
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batches import to_device
from trainer.learners.module import score
from trainer.scoring import scores
from trainer.scoring.columns import NUMBER, Column
from trainer.scoring.metric import PairedMetric, SummedMetric, Tally, joined, share_over_ranks
from trainer.scoring.scores import metrics_of


@pytest.mark.parametrize("pair_head", [True, False])
def test_sums_are_those_of_the_whole_logits(monkeypatch, pair_head):
    monkeypatch.setattr(scores, "CHUNK", 5)
    labels = torch.tensor([0, 1, 1, NO_LABEL, 0, 0, 1, 0])
    batch = tiny.with_pairs(tiny.random_batch(2), labels.numpy())
    micro = to_device(batch, torch.device("cpu"))
    model = build(tiny.encoder(pair_head=pair_head), seed=3).eval()
    metrics = metrics_of(model.config)
    readings = score(model, micro, metrics)
    sums = torch.cat([reading.double() for reading in readings])
    features = model.features(
        micro.input_ids, micro.segment_ids, micro.visible, micro.masked_positions
    )
    logits = F.linear(features.vocabulary_input, *model.output_projection())
    masked = micro.targets[MASKED].labels != NO_LABEL
    right = logits.argmax(-1)[masked] == micro.targets[MASKED].labels[masked]
    loss = F.cross_entropy(logits[masked], micro.targets[MASKED].labels[masked], reduction="sum")
    expected = [loss.item(), right.sum().item(), masked.sum().item()]
    if pair_head:
        paired = labels != NO_LABEL
        told = model(micro.input_ids, micro.segment_ids, micro.attention_mask).heads["pairs"]
        expected += [(told.argmax(-1)[paired] == labels[paired]).sum().item(), 7]
    assert sums.tolist() == pytest.approx(expected, rel=1e-5)


class Correlation(PairedMetric[Tensor]):
    """A correlation of predictions and labels [examples, 2], which is not a mean over examples."""

    head, columns = "head", (Column("pearson", "pearson", NUMBER),)

    def of_batch(self, outputs):
        return outputs

    def scores(self, predictions, labels):
        return {"pearson": np.corrcoef(predictions, labels)[0, 1]}


class Mean(SummedMetric[Tensor]):
    head, columns, size = "mean", (Column("mean", "mean"),), 2

    def of_batch(self, outputs):
        return torch.stack([outputs[:, 0].double().sum(), torch.tensor(len(outputs))])

    def finish(self, total):
        return {"mean": (total[0] / total[1]).item()} if total[1] else {}


METRICS = Mean(), Correlation()
EXAMPLES = torch.randn(2, 40, 2, generator=torch.Generator().manual_seed(0)).cumsum(1)  # corpora


def tallied(rank: int, ranks: int) -> list[Tally]:
    """One tally for each corpus, of this rank's examples in batches of 3."""
    tallies = []
    for corpus in EXAMPLES:
        tally = Tally(METRICS, torch.device("cpu"))
        for batch in corpus[rank::ranks].split(3):
            tally.add([metric.of_batch(batch) for metric in METRICS])
        tallies.append(tally)
    return tallies


def finished(tallies: list[Tally]) -> list[dict[str, float]]:
    whole = joined(tallies, torch.device("cpu"))
    return [tally.finish() for tally in [*tallies, whole]]


def on_ranks() -> list[dict[str, float]]:
    tallies = tallied(dist.get_rank(), dist.get_world_size())
    share_over_ranks(tallies)
    return finished(tallies)


def test_a_metric_finishes_the_same_on_any_number_of_ranks():
    found = finished(tallied(0, 1))
    for finals, examples in zip(found, [*EXAMPLES, EXAMPLES.flatten(0, 1)], strict=True):
        assert finals["pearson"] == pytest.approx(np.corrcoef(examples.T.numpy())[0, 1])
        assert finals["mean"] == pytest.approx(examples[:, 0].double().mean().item())
    for rank in run_distributed(on_ranks, 2):
        for finals, alone in zip(rank, found, strict=True):
            assert finals == pytest.approx(alone, rel=1e-12)


def test_rows_are_joined_once_and_not_with_every_batch(monkeypatch):
    """With each batch all rows before it were copied: minutes for the vectors of 64,000 texts."""
    joins, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda *rows: joins.append(rows) or cat(*rows))
    tally, _ = tallied(0, 1)
    assert not joins
    assert "pearson" in tally.finish()
    assert len(joins) == 1


def test_what_no_example_defines_is_no_score():
    nothing = Tally(METRICS, torch.device("cpu"))
    assert nothing.finish() == {}
    nothing.add([torch.tensor([2.0, 4.0]), torch.ones(4, 2)])  # a constant correlates with nothing
    with np.errstate(invalid="ignore", divide="ignore"):
        assert nothing.finish() == {"mean": 0.5}


def test_a_head_of_its_own_has_its_accuracy():
    config = tiny.encoder(pair_head=True)
    config = with_task_head(config, "topic", TaskHeadConfig(labels=["a", "b", "c"]))
    config = with_task_head(config, "answer", TaskHeadConfig("span"))  # has none of its own
    columns = scores.columns_of(metrics_of(config))
    assert [*columns] == ["loss", "accuracy", "pair_accuracy", "topic_accuracy"]
