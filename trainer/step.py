"""One optimizer step of teachers and students, from one forward of each teacher per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from data_pipeline import Batch
from data_pipeline.masking.torch_masker import TorchMasker
from trainer.batches import to_micro_batches
from trainer.control.requests import NO_REQUESTS, Requests
from trainer.denominators import StepSums
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.learners.step_shape import MicroStep
from trainer.look_ahead import look_ahead
from trainer.teacher_passes import TeacherPasses


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step over all ranks, for every learner that is trained.

    terms: learner -> term about the batch -> unweighted value; losses: learner -> weighted sum of
    its terms.
    """

    terms: dict[str, dict[str, float]]
    losses: dict[str, float]
    tokens: dict[str, int]  # view -> attended positions of the global batch
    positions: int  # of the global batch, padding included
    unreadable: int  # sequences that could not be read
    requests: Requests  # what any rank asked for
    seconds: float  # training time before this step, by rank 0's clock
    shares: dict[str, float]  # metric -> how much of a learner's text its terms compare


def train_step(
    teacher: Learner,
    students: Sequence[Learner],
    batch: Batch,
    step: int,
    requests: Callable[[], Requests] = lambda: NO_REQUESTS,
    seconds: float = 0.0,
    masker: TorchMasker | None = None,
    others: Sequence[Learner] = (),
) -> StepResult:
    """Train all learners on this rank's rows of the global batch of `step`. Collective.

    A learner whose loss or gradient is non-finite or spikes skips the step on all ranks; the other
    learners take theirs. `requests` is called after the last backward pass, so that a request to
    stop takes effect at the end of the step during which it arrived. `seconds` is the training time
    so far; all ranks use rank 0's. `masker` masks batches that arrive unmasked. `others` are
    further teachers, which are frozen. If no term reads a further teacher in this step, it does not
    run.
    """
    learners = [learner for learner in (teacher, *students) if learner.is_trained]
    measured = [learner for learner in (teacher, *students) if learner.has_terms]
    in_use = chain.from_iterable(learner.counted.values() for learner in measured)
    shares = dict(chain.from_iterable(learner.coverage.items() for learner in measured))
    sums = StepSums.over_ranks(batch, in_use, seconds, teacher.device, shares)
    rows = batch if learners else batch.rows(0, 0)  # a frozen teacher without students: no work
    _accumulate([teacher, *others], students, rows, step, sums, masker)
    totals = _Totals.over_ranks(measured, sums, requests(), teacher.device)
    terms = totals.terms
    losses: dict[str, float] = {}
    for learner in learners:
        loss = learner.objective.total(terms[learner.name], learner.own_step(step))
        norm, length = totals.squared_norms[learner.name], batch.common_length
        learner.update(step, loss, norm, length, totals.seconds, batch.targets)
        losses[learner.name] = loss
    for student in students:
        if student.objective.lead is not None:
            student.record_lead(terms[student.name], terms[TEACHER])
    return StepResult(
        terms={
            learner.name: {
                name: terms[learner.name][name] for name in learner.objective.about(batch.targets)
            }
            for learner in learners
        },
        losses=losses,
        tokens=totals.tokens,
        positions=totals.positions,
        unreadable=totals.unreadable,
        requests=totals.requests,
        seconds=totals.seconds,
        shares=totals.shares,
    )


def _accumulate(
    teachers: Sequence[Learner],
    students: Sequence[Learner],
    rows: Batch,
    step: int,
    sums: StepSums,
    masker: TorchMasker | None,
) -> None:
    """All forward and backward passes, one micro-batch and one student's graph at a time."""
    main = teachers[0]
    size = main.step_shape.micro_rows(rows.input_ids.shape[1])
    count = -(-len(rows.input_ids) // size)
    for student in students:
        student.compare_with(main)
    if count > 1:
        cut = partial(to_micro_batches, rows, size, main.device, masker)
        look_ahead(teachers, students, cut, step, rows.targets)
    passes = TeacherPasses.of(teachers, students, step, rows.targets)
    micro_batches = to_micro_batches(rows, size, main.device, masker)
    for number, micro_batch in enumerate(micro_batches):
        micro_step = MicroStep(step, number, is_last=number == count - 1)
        micro_batch, sources = passes.sources(micro_batch, sums, micro_step)
        for student in students:
            if student.name not in passes.generators:
                student.accumulate(micro_batch, student.totals(sums), micro_step, sources)
        del sources  # what was captured, before the teacher's next pass


@dataclass(frozen=True)
class _Totals:
    """The outcome of a step over all ranks, on the host."""

    terms: dict[str, dict[str, float]]  # learner -> term -> value
    squared_norms: dict[str, float]  # learner -> of its gradient
    requests: Requests
    tokens: dict[str, int]
    positions: int
    unreadable: int
    seconds: float
    shares: dict[str, float]

    @classmethod
    def over_ranks(
        cls, learners: Sequence[Learner], sums: StepSums, requests: Requests, device: torch.device
    ) -> _Totals:
        """The sums over all ranks, in one collective and the one host sync of a step."""
        votes = torch.tensor(requests.votes()).to(device, non_blocking=True)
        shares = [(learner.take_shares(), learner.squared_gradient_norm()) for learner in learners]
        parts = torch.cat([part.double() for part in (*chain.from_iterable(shares), votes)])
        ranks = dist.get_world_size()
        everyone = parts.new_empty(ranks * len(parts))
        dist.all_gather_into_tensor(everyone, parts)
        on_host = torch.cat([everyone, sums.stacked()]).cpu().numpy()
        values = iter(_sum_by_rank(on_host[: len(everyone)].reshape(ranks, -1)))
        terms, squared_norms = {}, {}
        for learner in learners:
            terms[learner.name] = {term: next(values) for term in learner.objective.terms}
            squared_norms[learner.name] = next(values)
        positions, unreadable, seconds, *by_name = on_host[len(everyone) :].tolist()
        views = len(sums.tokens)
        return cls(
            terms=terms,
            squared_norms=squared_norms,
            requests=Requests.agreed(list(values)),
            tokens=dict(zip(sums.tokens, map(int, by_name[:views]), strict=True)),
            positions=int(positions),
            unreadable=int(unreadable),
            seconds=seconds,
            shares=dict(zip(sums.shares, by_name[views:], strict=True)),
        )


def _sum_by_rank(values: np.ndarray) -> list[float]:
    """[ranks, n] summed over the ranks, in their order.

    An all-reduce of three ranks or more adds in an order that depends on a number's place in the
    tensor. A learner's loss would then depend on the other learners.
    """
    total: list[float] = np.add.accumulate(values, axis=0)[-1].tolist()
    return total
