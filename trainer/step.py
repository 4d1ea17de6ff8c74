"""One optimizer step of teachers and students, from one forward of each teacher per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import MASKED, Batch
from data_pipeline.masking.torch_masker import TorchMasker
from trainer.batch_config import MicroStep
from trainer.batches import MicroBatch, to_micro_batches
from trainer.control import Requests
from trainer.denominators import InView, StepSums, Totals
from trainer.learner_names import MEAN, TEACHER
from trainer.learners.learner import Learner
from trainer.objectives.objective import Demand
from trainer.objectives.term import ExampleLosses, Term
from trainer.replaced_tokens import with_view
from trainer.teacher_outputs import (
    UNREAD,
    OutputProjection,
    TeacherOutputs,
    detach,
    mean_of,
    of_stored,
)
from trainer.vocabulary_projection import Distribution

_Heads = Sequence[Mapping[str, Tensor]]  # of each micro-batch, the outputs of heads by name


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
    requests: Callable[[], Requests] = Requests,
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
    in_use: set[InView] = set()
    for learner in measured:
        in_use.update(learner.counted, *learner.coverage.values())
    sums = StepSums.over_ranks(batch, in_use, seconds, teacher.device)
    rows = batch if learners else batch.rows(0, 0)  # a frozen teacher without students: no work
    _accumulate([teacher, *others], students, rows, step, sums.totals, masker)
    result, terms, squared_norms = _sum_over_ranks(measured, sums, requests())
    for learner in learners:
        name, objective = learner.name, learner.objective
        loss = objective.total(terms[name], learner.own_step(step))
        learner.update(step, loss, squared_norms[name], result.seconds, batch)
        result.losses[name] = loss
        result.terms[name] = {
            term: value
            for term, value in terms[name].items()
            if objective.by_name[term].concerns(batch.targets)
        }
    for student in students:
        if student.objective.lead is not None:
            student.record_lead(terms[student.name], terms[TEACHER])
    return result


def _accumulate(
    teachers: Sequence[Learner],
    students: Sequence[Learner],
    rows: Batch,
    step: int,
    totals: Totals,
    masker: TorchMasker | None,
) -> None:
    """All forward and backward passes, one micro-batch and one student's graph at a time."""
    main = teachers[0]
    for learner in (*teachers, *students):
        learner.turn_positions(step)
    size = main.step_shape.micro_rows(rows.input_ids.shape[1])
    count = -(-len(rows.input_ids) // size)
    if count > 1:
        cut = partial(to_micro_batches, rows, size, main.device, masker)
        look_ahead(teachers, students, cut, step, rows.targets)
    passes = TeacherPasses.of(teachers, students, step, rows.targets)
    micro_batches = to_micro_batches(rows, size, main.device, masker)
    for number, micro_batch in enumerate(micro_batches):
        micro_step = MicroStep(step, number, is_last=number == count - 1)
        micro_batch, sources = passes.sources(micro_batch, totals, micro_step)
        for student in students:
            if student.name not in passes.generators:
                student.accumulate(micro_batch, totals, micro_step, sources)
        del sources  # what was captured, before the teacher's next pass


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


@dataclass(frozen=True)
class TeacherPass:
    """One teacher's side of a step: the outputs that students read, and the peers that it reads."""

    teacher: Learner
    demand: Demand
    projection: OutputProjection | None  # the teacher's; None where nobody reads its logits
    peers: Mapping[str, tuple[Learner, OutputProjection]]  # students it learns from, by name

    @classmethod
    def of(
        cls, teacher: Learner, students: Sequence[Learner], step: int, targets: Collection[str]
    ) -> TeacherPass:
        """The pass of a teacher at `step`, for a batch with these `targets`.

        Collective: ZeRO 3 gathers the output projections.
        """
        consumers, discriminators, peers = [], 0, {}
        for student in students:
            consumers.append((student.objective, student.own_step(step)))
            discriminators += student.generator == teacher.name
            if teacher.objective.reading(student.name, teacher.own_step(step), targets):
                peers[student.name] = student, student.output_projection()
        heads = teacher.model.config.task_heads
        demand = Demand.of(teacher.name, heads, consumers, targets, discriminators)
        runs = teacher.config.stored is None
        is_projected = runs and (demand.own_logits or demand.mean_logits)
        projection = teacher.output_projection() if is_projected else None
        return cls(teacher, demand, projection, peers)

    def teach(
        self, micro_batch: MicroBatch, totals: Totals, micro_step: MicroStep
    ) -> TeacherOutputs:
        """Run the teacher forward and backward once; returns the outputs that students read.

        A teacher whose predictions are stored does not run. One that nobody reads keeps nothing.
        """
        if stored := micro_batch.stored.get(self.teacher.name):
            vocabulary = self.teacher.config.model.vocab_size
            return of_stored(stored, vocabulary, self.demand.own_logits)
        sources = {
            name: peer.predictions(micro_batch, projection)
            for name, (peer, projection) in self.peers.items()
        }
        capture = self.demand.capture
        features = self.teacher.accumulate(micro_batch, totals, micro_step, sources, capture)
        if not self.demand.is_read:
            return UNREAD
        with self.teacher.autocast():
            return detach(features, self.projection, self.demand.own_logits)


@dataclass(frozen=True)
class TeacherPasses:
    """The teachers of a step, the job's own first; those that are not needed are left out."""

    passes: Sequence[TeacherPass]
    is_mean_read: bool
    mean_logits: int  # students whose terms need the mean's logits
    # Students whose samples others read, by name, and their output projections.
    generators: Mapping[str, tuple[Learner, OutputProjection]]
    sampled: Collection[str]  # the names of all learners whose samples others read
    seed: int

    @classmethod
    def of(
        cls,
        teachers: Sequence[Learner],
        students: Sequence[Learner],
        step: int,
        targets: Collection[str],
    ) -> TeacherPasses:
        """The passes of a step, for a batch with these `targets`. Collective."""
        passes = [TeacherPass.of(teacher, students, step, targets) for teacher in teachers]
        by_name = {learner.name: learner for learner in (*teachers, *students)}
        sampled = set()
        for learner in by_name.values():
            if learner.generator is not None:
                learner.share_embedding(by_name)
                sampled.add(learner.generator)
        generators = {
            student.name: (student, student.output_projection())
            for student in students
            if student.name in sampled
        }
        demand, seed = passes[0].demand, teachers[0].step_shape.seed  # all passes have the mean's
        needed = [each for each in passes if each.teacher.has_terms or each.demand.is_read]
        return cls(needed, demand.is_mean_read, demand.mean_logits, generators, sampled, seed)

    def sources(
        self, micro_batch: MicroBatch, totals: Totals, micro_step: MicroStep
    ) -> tuple[MicroBatch, dict[str, TeacherOutputs]]:
        """Run the generators and the teachers on a micro-batch.

        Returns the micro-batch with a view for each generator, under its name, and the outputs of
        teachers, by name, and their mean.
        """
        for name, (generator, projection) in self.generators.items():
            # Its predictions, of the vocabulary for each slot, are not kept beside the teachers.
            step = micro_batch, totals, micro_step
            micro_batch = with_view(
                micro_batch, name, _learn(generator, projection, *step), self.seed
            )
        outputs: dict[str, TeacherOutputs] = {}
        for teacher_pass in self.passes:
            name = teacher_pass.teacher.name
            outputs[name] = teacher_pass.teach(micro_batch, totals, micro_step)
            if name in self.sampled:
                samples = outputs[name].distributions[MASKED]
                micro_batch = with_view(micro_batch, name, samples, self.seed)
        if self.is_mean_read:
            outputs[MEAN] = mean_of(list(outputs.values()), self.mean_logits)
        return micro_batch, outputs


def _learn(
    generator: Learner,
    projection: OutputProjection,
    micro_batch: MicroBatch,
    totals: Totals,
    micro_step: MicroStep,
) -> Distribution:
    """Train a generator on a micro-batch; returns its predictions of the masked tokens."""
    features = generator.accumulate(micro_batch, totals, micro_step)
    with generator.autocast():
        return detach(features, projection).distributions[MASKED]


def _sum_over_ranks(
    learners: Sequence[Learner], sums: StepSums, requests: Requests
) -> tuple[StepResult, dict[str, dict[str, float]], dict[str, float]]:
    """Sum what the ranks have computed, in one collective and the one host sync of a step.

    Returns the step's result, yet without learners; each learner's terms by name; and the squared
    norm of its gradient.

    Numbers are gathered, and added up in the order of the ranks. An all-reduce of three ranks or
    more adds in an order that depends on a number's place in the tensor. A learner's loss would
    then depend on the other learners.
    """
    votes = torch.tensor(requests, dtype=torch.float64)  # summed over the ranks
    parts = [learner.take_sums() for learner in learners]
    local = torch.cat([*parts, votes.to(sums.values.device, non_blocking=True)])
    ranks = dist.get_world_size()
    gathered = local.new_empty(ranks * len(local))
    dist.all_gather_into_tensor(gathered, local)
    on_host = torch.cat([gathered, sums.values]).cpu().numpy()
    by_rank, known = np.split(on_host, [len(gathered)])
    counts = dict(zip(sums.keys, known.tolist(), strict=True))
    values = iter(np.add.accumulate(by_rank.reshape(ranks, -1), axis=0)[-1].tolist())
    terms, squared_norms, shares = {}, {}, {}
    for learner in learners:
        terms[learner.name] = {term: next(values) for term in learner.objective.terms}
        squared_norms[learner.name] = next(values)
        for name, (compared, total) in learner.coverage.items():
            shares[name] = counts[compared] / (counts[total] or 1.0)
    result = StepResult(
        terms={},
        losses={},
        tokens={view: int(counts["tokens", view]) for view in sums.views},
        positions=int(counts["positions"]),
        unreadable=int(counts["unreadable"]),
        requests=Requests(*map(bool, values)),
        seconds=counts["seconds"],
        shares=shares,
    )
    return result, terms, squared_norms
