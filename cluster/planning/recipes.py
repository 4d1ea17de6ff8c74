"""The job beside the usual recipe: a teacher pre-trained alone, then students that learn from it.

In the usual recipe every student has a job of its own, and each pays for the forward passes of the
finished teacher. All students in one such job share them. Every learner trains for as many steps as
in the joint job, on batches of the same size, at its own ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.planning.duration import step_time
from cluster.planning.failures import HOUR
from cluster.planning.machine import Machine
from configs.plan_facts import JobFacts, LearnerFacts

JOINT, SEPARATE, SHARED = "joint", "separate", "shared"


@dataclass(frozen=True)
class RecipeCost:
    """What a recipe costs in all its jobs together, without failures.

    Attributes:
        recipe: ``joint`` (this job), ``separate`` (the teacher, then a job for each student) or
            ``shared`` (the teacher, then one job for all students).
        flops: of matrix products.
        cost: None without a price.
        ratio: GPU-hours of the joint job, divided by those of this recipe.
        teacher_steps: how long the joint job's teacher could train for this recipe's GPU-hours,
            where its students train as long as now; None where the teacher is frozen.
    """

    recipe: str
    flops: float
    gpu_hours: float
    cost: float | None
    ratio: float
    teacher_steps: int | None


def compare(job: JobFacts, apart: Sequence[LearnerFacts], machine: Machine) -> list[RecipeCost]:
    """The joint job, and the two recipes beside it; nothing where no student trains.

    `apart` are the job's learners in the order of `job.learners`, as they are in the separate jobs:
    the teachers frozen, and each student with what it no longer shares with the others.
    """
    if not any(one.active for one in job.learners[1:] if not one.teaches):
        return []
    recipes = {JOINT: [job], SEPARATE: [*_separate(job, apart)], SHARED: [*_shared(job, apart)]}
    costs = {name: _cost(jobs, machine) for name, jobs in recipes.items()}
    _, joint = costs[JOINT]
    teacher = job.learners[0]
    a_step = step_time(job, machine).learners[teacher.name].total
    own_steps = round(teacher.training * job.steps)
    return [
        RecipeCost(
            recipe=name,
            flops=flops,
            gpu_hours=seconds / HOUR * machine.ranks,
            cost=None if machine.price is None else machine.price * seconds / HOUR * machine.ranks,
            ratio=joint / seconds,
            teacher_steps=own_steps + int((seconds - joint) / a_step) if teacher.trained else None,
        )
        for name, (flops, seconds) in costs.items()
    ]


def _separate(job: JobFacts, apart: Sequence[LearnerFacts]) -> Iterator[JobFacts]:
    yield from _pretraining(job, apart[0])
    teachers = _teachers(apart)
    for student in apart[len(teachers) :]:
        learners = (*teachers, replace(student, active=1.0))
        yield replace(job, steps=_steps(job, student), learners=learners)


def _shared(job: JobFacts, apart: Sequence[LearnerFacts]) -> Iterator[JobFacts]:
    """The students start together, and the job ends with the one that trains longest."""
    yield from _pretraining(job, apart[0])
    teachers = _teachers(apart)
    students = job.learners[len(teachers) :]
    longest = max(one.active for one in students)
    learners = [replace(one, active=one.active / longest) for one in students]
    yield replace(job, steps=round(longest * job.steps), learners=(*teachers, *learners))


def _teachers(learners: Sequence[LearnerFacts]) -> list[LearnerFacts]:
    """The first of them, and the further ones that teach."""
    return [learners[0], *(one for one in learners[1:] if one.teaches)]


def _pretraining(job: JobFacts, finished: LearnerFacts) -> Iterator[JobFacts]:
    """The steps in which the teacher trains; `finished` is what it takes when it only teaches."""
    teacher = job.learners[0]
    if teacher.trained:
        teaches = 1 - teacher.training
        trains = replace(
            teacher,
            forward_flops=(teacher.forward_flops - teaches * finished.forward_flops)
            / teacher.training,
            backward_flops=teacher.backward_flops / teacher.training,
        )
        yield replace(job, steps=round(teacher.training * job.steps), learners=(trains,))


def _steps(job: JobFacts, learner: LearnerFacts) -> int:
    return round(learner.active * job.steps)


def _cost(jobs: Sequence[JobFacts], machine: Machine) -> tuple[float, float]:
    """FLOPs and seconds of `jobs`, one after another."""
    times = [(one.steps, step_time(one, machine)) for one in jobs]
    return (
        sum(steps * time.flops for steps, time in times),
        sum(steps * time.seconds for steps, time in times),
    )
