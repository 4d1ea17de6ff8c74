"""Losses of rankings: which of several documents answers a query."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL


def hidden_documents(documents: Tensor, relevant: Tensor, own: Tensor) -> Tensor:
    """The documents that are no negatives of a query: bool [B, N].

    They are those that are relevant to it, unless it is its `own` positive, and those that could
    not be read. documents: numbers [N]; relevant: numbers [B, M]; either is -100 where there is
    none; own: the column of each query's positive [B].
    """
    hidden = (documents[None, :, None] == relevant[:, None, :]).any(dim=-1)
    hidden |= documents == NO_LABEL
    hidden[torch.arange(len(own), device=own.device), own] = False
    return hidden


def contrastive(
    queries: Tensor, documents: Tensor, own: Tensor, hidden: Tensor, temperature: float
) -> Tensor:
    """-log softmax of the query's `own` document among all, by dot products over a temperature.

    The loss of dual encoders (DPR, arXiv 2004.04906, section 3.2; InfoNCE, 1807.03748), for each
    query: [B]. queries: [B, D]; documents: [N, D], float32; own: [B], -100 for a query that does
    not count; hidden: bool [B, N].
    """
    scores = queries @ documents.t() / temperature
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return F.cross_entropy(scores, own, ignore_index=NO_LABEL, reduction="none")
