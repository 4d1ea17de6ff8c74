"""Exact search: the documents whose vectors have the highest dot products with a query's."""

from __future__ import annotations

import torch
from torch import Tensor

QUERIES, DOCUMENTS = 1 << 8, 1 << 16  # of a block: 64 MiB of scores


def nearest_documents(queries: Tensor, documents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` documents, or all, of each query: their scores and rows, the best first.

    queries: [Q, D]; documents: [N, D]; both results: [Q, min(count, N)]. Every query is compared
    with every document.
    """
    found = [_of_queries(block, documents, count) for block in queries.split(QUERIES)]
    scores, rows = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(rows)


def _of_queries(queries: Tensor, documents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = queries.new_zeros(len(queries), 0)
    rows = best.long()
    for first in range(0, len(documents), DOCUMENTS):
        scores = queries @ documents[first : first + DOCUMENTS].t()
        numbers = torch.arange(first, first + scores.shape[1], device=rows.device)
        scores = torch.cat([best, scores], dim=1)
        rows = torch.cat([rows, numbers.expand(len(queries), -1)], dim=1)
        best, places = scores.topk(min(count, scores.shape[1]), dim=1)
        rows = rows.gather(1, places)
    return best, rows
