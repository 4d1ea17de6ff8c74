"""A job in plain numbers, for whoever plans it without knowing models or objectives."""

from __future__ import annotations

from typing import Any

from trainer.batch_plan import usual_rows
from trainer.config import JobConfig, LearnerConfig
from trainer.engine import bucket_size
from trainer.learner import TEACHER, student_key
from trainer.measure.footprint import Footprint, footprints


def demands(job: JobConfig, device: str = "gpu") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the job, its learners with the teacher first), as the fields of the cluster's plan.

    With phases of several lengths, memory is that of the longest sequences, and FLOPs are the mean
    over the steps; the global batch is that of most steps. Students that wait for the teacher's
    quality are taken to train from the start.
    """
    shares = _lengths(job)
    sizes = {length: footprints(job, device, length) for length in shares}
    configs = {TEACHER: job.teacher, **{student_key(n): one for n, one in job.students.items()}}
    learners = [
        _learner(name, config, {length: found[name] for length, found in sizes.items()}, job)
        for name, config in configs.items()
    ]
    facts = {
        "name": job.name,
        "steps": job.steps,
        "rows": usual_rows(job),
        "length": sum(length * share for length, share in shares.items()),
        "micro_batch": job.batch.micro_batch,
        "checkpoint_every": job.checkpoint.every,
    }
    return facts, learners


def _lengths(job: JobConfig) -> dict[int, float]:
    """Each length of the job's sequences, and the share of the steps that have it."""
    starts = [0, *(min(phase.from_step, job.steps) for phase in job.data.phases), job.steps]
    shares: dict[int, float] = {}
    for number, (length, _) in enumerate(job.data.lengths_and_packings()):
        steps = starts[number + 1] - starts[number]
        if steps:
            shares[length] = shares.get(length, 0.0) + steps / job.steps
    return shares


def _learner(
    name: str, config: LearnerConfig, sizes: dict[int, Footprint], job: JobConfig
) -> dict[str, Any]:
    largest, shares = sizes[max(sizes)], _lengths(job)
    return {
        "name": name.removeprefix("students/"),
        "zero_stage": config.zero_stage,
        "precision": config.precision,
        "parameters": largest.parameters,
        "trained": largest.trained,
        "bucket": bucket_size(largest.parameters),
        "forward_flops": sum(shares[length] * one.forward_flops for length, one in sizes.items()),
        "backward_flops": sum(shares[length] * one.backward_flops for length, one in sizes.items()),
        "kernels": largest.kernels,
        "activations": largest.activations,
        "knowledge": largest.knowledge,
        "decoder": largest.decoder,
        "active": 1 - min(config.start.step, job.steps) / job.steps,
    }
