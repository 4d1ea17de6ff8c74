"""Terms whose loss compares examples of the whole global batch, on all ranks."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import NO_LABEL
from model import Capture
from trainer.batches import MicroBatch
from trainer.objectives.task import TaskTerm
from trainer.objectives.term import ExampleLosses, LossInputs


class WholeBatchTerm(TaskTerm):
    """A task's loss in which each example's loss depends on the whole global batch.

    It reads the outputs of the task's head and, where it has a `source`, those of the source's head
    for the task; nothing else of the models.
    """

    @abstractmethod
    def over_batch(
        self, outputs: Sequence[Tensor], batches: Sequence[MicroBatch], theirs: Sequence[Tensor]
    ) -> list[ExampleLosses]:
        """The losses of each micro-batch of this rank, by the head's outputs, detached. Collective.

        `theirs` are the outputs of the source, for each micro-batch; none without a source. The
        gradients are those of the sum over all examples of all ranks, in the outputs' shape.
        """

    def source_capture(self, step: int) -> Capture:
        return Capture() if self.source is None else Capture(heads=(self.head,))

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        outputs = inputs.features.heads[self.head]
        example_losses = inputs.whole_batch.get(self)
        if example_losses is None:  # this rank has one micro-batch
            theirs = [] if self.source is None else [*self.outputs(inputs).heads[self.head]]
            (example_losses,) = self.over_batch([outputs.detach()], [inputs.batch], theirs)
        through = (outputs.float() * example_losses.gradients).sum()
        total = example_losses.losses.sum() + (
            through - through.detach()
        )  # this value, that gradient
        return total, (inputs.batch.row_labels(self.denominator) != NO_LABEL).sum()


def against_all(
    rows: Tensor, others: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each of this rank's `rows`, by the `others` of all ranks. Collective.

    rows: [r, ...]; others: [r, ...], of this rank; loss: of (rows, the others of all ranks), [r].
    Returns the losses, and the gradients of their sum over all ranks at `rows` and `others`.
    """
    everyone = over_ranks(others)
    with torch.enable_grad(), torch.autocast(rows.device.type, enabled=False):
        leaves = rows.clone().requires_grad_(), everyone.requires_grad_()
        losses = loss(*leaves)
        of_rows, of_others = torch.autograd.grad(losses.sum(), leaves)
    dist.all_reduce(of_others)  # the rows of every rank are compared with them
    first = dist.get_rank() * len(others)
    return losses.detach(), of_rows, of_others[first : first + len(others)]


def over_ranks(rows: Tensor) -> Tensor:
    """The rows of all ranks, [ranks * rows, ...], in their order; all have equally many."""
    rows = rows.contiguous()
    gathered = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows)
    return gathered
