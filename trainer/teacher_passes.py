"""The teachers' side of a step: one forward of each, whatever its students read of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainer.batches import MicroBatch
from trainer.denominators import StepSums
from trainer.learner_names import MEAN
from trainer.learners.learner import Learner
from trainer.learners.step_shape import MicroStep
from trainer.objectives.objective import Demand
from trainer.teacher_outputs import (
    OutputProjection,
    TeacherOutputs,
    detach,
    mean_of,
    of_stored,
)


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
        consumers = [(student.objective, student.own_step(step)) for student in students]
        heads = teacher.config.architecture.task_heads
        demand = Demand.of(teacher.name, heads, consumers, targets)
        runs = teacher.config.stored is None
        projection = teacher.output_projection() if runs and demand.reads_logits else None
        read = teacher.objective.sources
        peers = {
            peer.name: (peer, peer.output_projection()) for peer in students if peer.name in read
        }
        return cls(teacher, demand, projection, peers)

    @property
    def is_needed(self) -> bool:
        """Whether the teacher has to run: it has terms, or someone reads it."""
        return self.teacher.has_terms or self.demand.is_read

    def teach(
        self, micro_batch: MicroBatch, sums: StepSums, micro_step: MicroStep
    ) -> TeacherOutputs:
        """Run the teacher forward and backward once; returns the outputs that students read.

        A teacher whose predictions are stored does not run.
        """
        if stored := micro_batch.stored.get(self.teacher.name):
            vocabulary = self.teacher.config.model.vocab_size
            return of_stored(stored, vocabulary, self.demand.own_logits)
        sources = {
            name: peer.predictions(micro_batch, projection)
            for name, (peer, projection) in self.peers.items()
        }
        totals = sums.totals.get(self.teacher.view, {})
        capture = self.demand.capture
        features = self.teacher.accumulate(micro_batch, totals, micro_step, sources, capture)
        with self.teacher.autocast():
            return detach(features, self.projection, self.demand.own_logits)


@dataclass(frozen=True)
class TeacherPasses:
    """The teachers of a step, the job's own first; those that are not needed are left out."""

    passes: Sequence[TeacherPass]
    is_mean_read: bool
    mean_logits: int  # students whose terms need the mean's logits

    @classmethod
    def of(
        cls,
        teachers: Sequence[Learner],
        students: Sequence[Learner],
        step: int,
        targets: Collection[str],
    ) -> TeacherPasses:
        """Who reads whom at `step` of a batch with these `targets`. Collective."""
        passes = [TeacherPass.of(teacher, students, step, targets) for teacher in teachers]
        is_mean_read = any(
            student.objective.reads(student.own_step(step), MEAN, targets) for student in students
        )
        needed = [teacher_pass for teacher_pass in passes if teacher_pass.is_needed]
        return cls(needed, is_mean_read, passes[0].demand.mean_logits)

    def sources(
        self, micro_batch: MicroBatch, sums: StepSums, micro_step: MicroStep
    ) -> dict[str, TeacherOutputs]:
        """The outputs of teachers for one micro-batch, by name, and their mean."""
        outputs = {
            teacher_pass.teacher.name: teacher_pass.teach(micro_batch, sums, micro_step)
            for teacher_pass in self.passes
        }
        if self.is_mean_read:
            outputs[MEAN] = mean_of(list(outputs.values()), self.mean_logits)
        return outputs
