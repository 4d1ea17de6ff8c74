"""Losses over the whole global batch at once, where every example is compared with all others.

Such a loss is no sum over micro-batches, and must depend neither on how the batch is cut into them
nor on the number of ranks. A term has it from the outputs of its head for all examples, with the
gradient at each output; a micro-batch's backward pass then begins at its own (gradient caching,
arXiv 2101.06983). A rank with one micro-batch computes it in that forward pass. With several, each
is run forward without a gradient first, with the same dropout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from data_pipeline import NO_LABEL
from trainer.batches import MicroBatch
from trainer.objectives.task import TaskTerm
from trainer.objectives.term import ExampleLosses, LossInputs


class WholeBatchTerm(TaskTerm):
    """A task's loss of which one example's depends on the whole global batch.

    It reads the outputs of the task's head, and nothing else of the model.
    """

    @abstractmethod
    def over_batch(
        self, outputs: Sequence[Tensor], batches: Sequence[MicroBatch]
    ) -> list[ExampleLosses]:
        """The losses of each micro-batch of this rank, by the head's outputs, detached. Collective.

        The gradients are those of the sum over all examples of all ranks, in the outputs' shape.
        """

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        outputs = inputs.features.heads[self.head]
        found = inputs.whole_batch.get(self.head)
        if found is None:  # this rank has one micro-batch
            (found,) = self.over_batch([outputs.detach()], [inputs.batch])
        through = (outputs.float() * found.gradients).sum()
        total = found.losses.sum() + (through - through.detach())  # this value, that gradient
        return total, (inputs.batch.row_labels(self.denominator) != NO_LABEL).sum()


def over_ranks(rows: Tensor) -> Tensor:
    """The rows of all ranks, [ranks * rows, ...], in their order; all have equally many."""
    rows = rows.contiguous()
    everyone = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(everyone, rows)
    return everyone
