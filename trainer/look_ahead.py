"""Before a step of several micro-batches: what losses over all of them say of each.

Each micro-batch runs forward without gradient, and again in the step, with the gradient at its
outputs (arXiv 2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from trainer.batches import MicroBatch
from trainer.learners.learner import Learner
from trainer.learners.step_shape import MicroStep
from trainer.objectives.term import ExampleLosses, Term

_Heads = Sequence[Mapping[str, Tensor]]  # of each micro-batch, the outputs of heads by name


def look_ahead(
    teachers: Sequence[Learner],
    students: Sequence[Learner],
    cut: Callable[[], Iterable[MicroBatch]],
    step: int,
    targets: Collection[str],
) -> None:
    """Give each learner with a `WholeBatchTerm` its losses for a batch with these targets.

    `cut` makes the micro-batches of this rank. Collective.
    """
    terms = {
        learner: on
        for learner in (*teachers, *students)
        if (on := learner.objective.over_whole_batch(learner.own_step(step), targets))
    }
    if not terms:
        return
    batches = [*cut()]

    def heads_of(learner: Learner, heads: Collection[str] = ()) -> _Heads:
        steps = (MicroStep(step, number, is_last=False) for number in range(len(batches)))
        return [learner.heads_ahead(*some, heads) for some in zip(batches, steps, strict=True)]

    read = {(term.source, term.head) for on in terms.values() for term in on}
    theirs = {
        teacher.name: heads_of(teacher, heads)
        for teacher in teachers
        if (heads := sorted(head for source, head in read if source == teacher.name))
    }
    for learner, on in terms.items():
        outputs, seen = heads_of(learner), [batch.view(learner.view) for batch in batches]
        losses: list[dict[Term, ExampleLosses]] = [{} for _ in batches]
        for term in on:
            ours = [heads[term.head] for heads in outputs]
            source = [] if term.source is None else theirs[term.source]
            by_batch = term.over_batch(ours, seen, [heads[term.head] for heads in source])
            for known, of_batch in zip(losses, by_batch, strict=True):
                known[term] = of_batch
        learner.whole_batch = [*losses]
