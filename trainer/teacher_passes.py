"""The teachers' side of a step: one forward of each teacher, for all of its students.

Generators run before the learners that read their samples (`trainer.replaced_tokens`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from data_pipeline import MASKED
from trainer.batches import MicroBatch
from trainer.denominators import StepSums
from trainer.learner_names import MEAN
from trainer.learners.learner import Learner
from trainer.learners.step_shape import MicroStep
from trainer.objectives.objective import Demand
from trainer.replaced_tokens import with_view
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
        heads = teacher.model.config.task_heads
        discriminators = sum(student.generator == teacher.name for student in students)
        demand = Demand.of(teacher.name, heads, consumers, targets, discriminators)
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
        totals = self.teacher.totals(sums)
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
    # Students whose samples others read, by name, and their output projections.
    generators: Mapping[str, tuple[Learner, OutputProjection]]
    sampled: frozenset[str | None]  # the names of all learners whose samples others read
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
        is_mean_read = any(
            student.objective.reads(student.own_step(step), MEAN, targets) for student in students
        )
        needed = [teacher_pass for teacher_pass in passes if teacher_pass.is_needed]
        by_name = {learner.name: learner for learner in (*teachers, *students)}
        for learner in by_name.values():
            learner.share_embedding(by_name)
        sampled = frozenset(learner.generator for learner in by_name.values())
        generators = {
            student.name: (student, student.output_projection())
            for student in students
            if student.name in sampled
        }
        mean_logits, seed = passes[0].demand.mean_logits, teachers[0].step_shape.seed
        return cls(needed, is_mean_read, mean_logits, generators, sampled, seed)

    def sources(
        self, micro_batch: MicroBatch, sums: StepSums, micro_step: MicroStep
    ) -> tuple[MicroBatch, dict[str, TeacherOutputs]]:
        """Run the generators and the teachers on a micro-batch.

        Returns the micro-batch with a view for each generator, under its name, and the outputs of
        teachers, by name, and their mean.
        """
        for name, (generator, projection) in self.generators.items():
            features = generator.accumulate(micro_batch, generator.totals(sums), micro_step)
            with generator.autocast():
                told = detach(features, projection)
            micro_batch = with_view(micro_batch, name, told.distributions[MASKED], self.seed)
        outputs: dict[str, TeacherOutputs] = {}
        for teacher_pass in self.passes:
            name = teacher_pass.teacher.name
            outputs[name] = teacher_pass.teach(micro_batch, sums, micro_step)
            if name in self.sampled:
                samples = outputs[name].distributions[MASKED]
                micro_batch = with_view(micro_batch, name, samples, self.seed)
        if self.is_mean_read:
            outputs[MEAN] = mean_of(list(outputs.values()), self.mean_logits)
        return micro_batch, outputs
