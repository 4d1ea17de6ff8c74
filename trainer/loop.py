"""The training loop."""

from __future__ import annotations

from enum import Enum

from configs import runs
from trainer.job import Job
from trainer.step import train_step


class Outcome(Enum):
    """How a call of `train` ended; the value is the exit code of the process."""

    FINISHED = 0
    STOPPED = runs.STOPPED  # on request, after saving: start it again


def train(job: Job) -> Outcome:
    """Train `job` from its current step to its end, or to a requested stop. Collective."""
    while not job.is_done:
        job.grow_teacher()
        job.finish_teacher()
        job.admit_students()
        job.saving.return_to_best()
        job.recorder.before(job.state.step)
        result = train_step(
            job.learners.teacher,
            job.learners.active,
            job.batches.take(),
            job.state.step,
            job.context.requests,
            job.seconds,
            job.masker,
            job.learners.others,
        )
        job.advance(result)
        job.context.made_a_step()
        if job.state.step % job.config.watch.replicas_every == 0:
            job.verify_replicas()
        if job.evaluates_now:
            job.evaluate()
        if result.requests.stop:
            job.saving.save(wait=True)
            job.recorder.say(
                f"stopped and saved at step {job.state.step:,}; start it again to resume"
            )
            return Outcome.STOPPED
        if job.saving.is_due(result.requests.save) and not job.is_done:
            job.saving.save()
    job.finish()
    return Outcome.FINISHED
