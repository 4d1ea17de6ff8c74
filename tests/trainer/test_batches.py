"""Micro-batches that the trainer makes from the pipeline's batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_pipeline import DEFAULT_VIEW, MASKED, NO_LABEL, PAIRS
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer import denominators
from trainer.batch_config import BatchConfig, StepShape
from trainer.batches import to_device, to_micro_batches
from trainer.denominators import StepSums, WeightedLabels
from trainer.evaluation.held_out import _share

CPU = torch.device("cpu")


@pytest.mark.parametrize(("length", "rows"), [(4, 8), (16, 4), (24, 2), (100, 1)])
def test_a_micro_batch_has_at_most_so_many_tokens_and_a_row(length, rows):
    """Of at most 8 rows and 64 tokens."""
    for limits in (BatchConfig(micro_batch=8, micro_tokens=64), StepShape(1, 0, 8, 1, 64)):
        assert limits.micro_rows(length) == rows


def pairs_batch():
    """Eight rows, one of which could not be read."""
    labels = np.array([0, 1, 1, NO_LABEL, 0, 0, 1, 0])
    return tiny.with_pairs(tiny.random_batch(1), labels), labels


def test_pair_labels_follow_their_rows_and_are_counted():
    batch, labels = pairs_batch()
    found = [micro.targets[PAIRS].labels for micro in to_micro_batches(batch, 3, CPU)]
    assert [len(one) for one in found] == [3, 3, 2]
    assert torch.cat(found).tolist() == labels.tolist()
    assert denominators.count(PAIRS, batch) == 7


def sums_of_two_ranks():
    """The totals of a step, and all of its sums; only rank 1 has labels."""
    rank = dist.get_rank()
    batch = tiny.with_pairs(tiny.random_batch(1), np.full(8, 0 if rank else NO_LABEL))
    names = (WeightedLabels.of(PAIRS, [0.05, 2.0]), PAIRS, "absent")
    in_use = {(DEFAULT_VIEW, name) for name in names}
    sums = StepSums.over_ranks(batch, in_use, 10.0 + rank, CPU)
    totals = [sums.totals[DEFAULT_VIEW, name].item() for name in names]
    return totals, dict(zip(sums.keys, sums.values.tolist(), strict=True))


def test_a_step_divides_by_the_sum_over_ranks_also_below_1_and_never_by_0():
    for totals, sums in run_distributed(sums_of_two_ranks, 2):
        assert totals == pytest.approx([0.4, 8, 1])
        assert sums[DEFAULT_VIEW, "absent"] == 0
        assert sums["tokens", DEFAULT_VIEW] == 2 * tiny.random_batch(1).attention_mask.sum()
        assert (sums["unreadable"], sums["seconds"]) == (0, 10.0)


def test_rows_of_single_segments_have_no_pair_label():
    batch = tiny.with_pairs(tiny.random_batch(1), None)
    assert to_device(batch, CPU).row_labels(PAIRS).tolist() == [NO_LABEL] * 8
    assert denominators.count(PAIRS, batch) == 0


def test_held_out_rows_that_repeat_have_no_labels():
    """Eight rows on three ranks: three each; the ninth only keeps the ranks equal."""
    batch, labels = pairs_batch()
    shares = [_share(batch, rank, 3) for rank in range(3)]
    joined = np.concatenate([share.targets[PAIRS].labels for share in shares])
    assert joined.tolist() == [*labels.tolist(), NO_LABEL]
    assert (shares[2].targets[MASKED].labels[2] == NO_LABEL).all()
    assert sum(denominators.count(PAIRS, share) for share in shares) == 7


def test_views_are_cut_and_moved_with_their_examples():
    batch = tiny.random_batch(1)
    wide = tiny.random_batch(2)
    both = dataclasses.replace(batch, views={"wide": wide})
    cut = list(to_micro_batches(both, 3, CPU))
    seen = torch.cat([micro.view("wide").input_ids for micro in cut])
    assert seen.tolist() == wide.input_ids.tolist()
    assert cut[1].view("default") is cut[1]
    alone = list(to_micro_batches(wide, 3, CPU))
    for micro, expected in zip(cut, alone, strict=True):
        ours, theirs = (one.targets[MASKED].positions for one in (micro.view("wide"), expected))
        assert ours.tolist() == theirs.tolist()
