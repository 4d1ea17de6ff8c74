"""What the trainer makes of the pipeline's batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from data_pipeline import NO_LABEL
from tests.trainer import tiny
from trainer.batches import count, to_device, to_micro_batches
from trainer.evaluation.held_out import _share

CPU = torch.device("cpu")


def pairs_batch():
    """Eight rows, one of which could not be read."""
    labels = np.array([0, 1, 1, NO_LABEL, 0, 0, 1, 0])
    return dataclasses.replace(tiny.random_batch(1), pair_labels=labels), labels


def test_pair_labels_follow_their_rows_and_are_counted():
    batch, labels = pairs_batch()
    micro_batches = list(to_micro_batches(batch, 3, CPU))
    assert [len(micro.pair_labels) for micro in micro_batches] == [3, 3, 2]
    assert torch.cat([micro.pair_labels for micro in micro_batches]).tolist() == labels.tolist()
    assert count(batch)[-1] == 7


def test_rows_of_single_segments_have_no_pair_label():
    batch = dataclasses.replace(tiny.random_batch(1), pair_labels=None)
    assert to_device(batch, CPU).pair_labels.tolist() == [NO_LABEL] * 8
    assert count(batch)[-1] == 0


def test_held_out_rows_that_repeat_have_no_labels():
    """Eight rows on three ranks: three each, and the ninth is there to keep the ranks equal."""
    batch, labels = pairs_batch()
    shares = [_share(batch, rank, 3) for rank in range(3)]
    joined = np.concatenate([share.pair_labels for share in shares])
    assert joined.tolist() == [*labels.tolist(), NO_LABEL]
    assert (shares[2].masked_labels[2] == NO_LABEL).all()
    assert sum(count(share)[-1] for share in shares) == 7
