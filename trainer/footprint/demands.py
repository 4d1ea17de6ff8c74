"""A job in plain numbers, for a planner that knows neither models nor objectives."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from configs.plan_facts import CacheFacts, JobFacts, LearnerFacts, StoredFacts
from data_pipeline import Corpus, ExampleSplit
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.shards.blocks import SHARD_MB
from data_pipeline.shards.sources import is_url
from trainer.batch_config import bucket_size
from trainer.config import JobConfig
from trainer.footprint.footprint import Footprint, Passes, footprints_and_passes, passes_apart
from trainer.job_data.counting import usual_rows
from trainer.job_data.examples import predicts_by_example, tasks_of
from trainer.learner_config import FROZEN_STAGES, LearnerConfig
from trainer.learner_names import TEACHER, is_teacher, plain_name

_Passes = TypeVar("_Passes", bound=Passes)


def demands(job: JobConfig, device: str = "gpu") -> JobFacts:
    """The job and its learners, the teachers first, with the kernels that `device` would run.

    With phases of several sequence lengths, memory is for the longest sequences and FLOPs are the
    mean over the steps. The job's ``assumed`` lists the other simplifications.
    """
    job = job.in_steps
    shares = _lengths(job)
    longest = max(shares)
    largest, shorter = _over_the_job(job, device, longest, shares.keys() - {longest})
    by_length: dict[int, Mapping[str, Passes]] = {**shorter, longest: largest}
    learners = [
        _learner(
            *(name, config, largest[name]),
            {length: by_learner[name] for length, by_learner in by_length.items()},
            job,
        )
        for name, config in job.learners.items()
    ]
    return JobFacts(
        name=job.name,
        steps=job.steps,
        rows=usual_rows(job),
        length=sum(length * share for length, share in shares.items()),
        micro_batch=job.batch.micro_rows(max(shares)),
        checkpoint_every=job.checkpoint.every,
        learners=tuple(learners),
        assumed=tuple(line for holds, line in _simplified(job) if holds),
        stored=_stored(job),
        cache=_cache(job),
    )


def demands_apart(job: JobConfig, learners: Sequence[LearnerFacts]) -> list[LearnerFacts]:
    """The `learners` of `demands` if each student were distilled in a separate job.

    The job's own teacher has been pre-trained alone, and all teachers are frozen. Empty without
    students.
    """
    if not job.students:
        return []
    shares = _lengths(job)
    longest = max(shares)
    rows = dict.fromkeys(shares, 1) | {longest: job.batch.micro_rows(longest)}
    apart = passes_apart(job, rows)
    teacher, *others = (
        dataclasses.replace(
            learner, **_mean_passes({length: apart[length][name] for length in shares}, shares)
        )
        for name, learner in zip(job.learners, learners, strict=True)
    )
    stage = job.teacher.zero_stage if job.teacher.zero_stage in FROZEN_STAGES else 0
    return [dataclasses.replace(teacher, trained=0, zero_stage=stage, active=1.0), *others]


def _mean_passes(by_length: Mapping[int, Passes], shares: Mapping[int, float]) -> dict[str, Any]:
    """A row's FLOPs, averaged over the steps, and the kernels at the largest length."""
    return {
        "forward_flops": sum(
            share * by_length[length].forward_flops for length, share in shares.items()
        ),
        "backward_flops": sum(
            share * by_length[length].backward_flops for length, share in shares.items()
        ),
        "kernels": by_length[max(by_length)].kernels,
    }


def _over_the_job(
    job: JobConfig, device: str, length: int, shorter: Collection[int]
) -> tuple[dict[str, Footprint], dict[int, dict[str, Passes]]]:
    """The `footprints_and_passes`; a teacher's FLOPs are the mean over all steps."""
    largest, others = footprints_and_passes(job, device, length, shorter)
    trained = _budget_steps(job.teacher, job) / job.steps
    if trained < 1:
        only_teaches = dataclasses.replace(job, teacher=job.teacher.finished())
        finished, short = footprints_and_passes(only_teaches, device, length, shorter)
        largest[TEACHER] = _mean(largest[TEACHER], finished[TEACHER], trained)
        for other, by_learner in others.items():
            by_learner[TEACHER] = _mean(by_learner[TEACHER], short[other][TEACHER], trained)
    return largest, others


def _mean(training: _Passes, finished: Passes, trained: float) -> _Passes:
    """The work of a teacher that trains in this fraction of the steps."""
    return dataclasses.replace(
        training,
        forward_flops=trained * training.forward_flops + (1 - trained) * finished.forward_flops,
        backward_flops=trained * training.backward_flops,
    )


def _lengths(job: JobConfig) -> dict[int, float]:
    """The fraction of the steps that use it, by sequence length."""
    starts = [0, *(min(phase.from_step, job.steps) for phase in job.data.phases), job.steps]
    shares: dict[int, float] = {}
    for number, (length, _) in enumerate(job.data.lengths_and_packings()):
        steps = starts[number + 1] - starts[number]
        if steps:
            shares[length] = shares.get(length, 0.0) + steps / job.steps
    return shares


def _learner(
    name: str,
    config: LearnerConfig,
    largest: Footprint,
    by_length: Mapping[int, Passes],
    job: JobConfig,
) -> LearnerFacts:
    return LearnerFacts(
        name=plain_name(name),
        teaches=is_teacher(name),
        generates=not is_teacher(name)
        and any(learner.generator_name == name for learner in job.learners.values()),
        zero_stage=config.zero_stage if config.stored is None else 0,
        offloaded=config.offload != "none",
        precision=config.precision,
        exchanged=2 if config.communication == "bf16" else 4,
        weight_bytes=2 if config.rounds_weights else 4,
        parameters=largest.parameters,
        trained=largest.trained,
        states=largest.states,
        bucket=max(1, bucket_size(largest.parameters)),
        **_mean_passes(by_length, _lengths(job)),
        activations=largest.activations,
        captured=largest.captured,
        projection=largest.projection,
        active=_active_steps(config, job) / job.steps,
        training=_budget_steps(config, job) / job.steps if config is job.teacher else 1.0,
    )


def _active_steps(config: LearnerConfig, job: JobConfig) -> float:
    """The number of steps that a learner takes part in, from its start and its budget."""
    if config is job.teacher or config.frozen:  # teachers keep teaching to the end
        return job.steps
    left = max(0, job.steps - config.start.step)
    return min(left, _budget_steps(config, job))


def _budget_steps(config: LearnerConfig, job: JobConfig) -> float:
    """The number of steps in a learner's budget; at most the job's."""
    tokens = usual_rows(job) * sum(length * share for length, share in _lengths(job).items())
    budgets = [config.budget.steps, config.budget.tokens and config.budget.tokens / tokens]
    return min([job.steps, *(budget for budget in budgets if budget)])


def _stored(job: JobConfig) -> StoredFacts | None:
    """The stored predictions that the job reads; None where its teacher runs."""
    stored, vocabulary = job.teacher.stored, job.teacher.model.vocab_size
    if stored is None:
        return None
    each = stored.position_bytes(vocabulary)
    count = f"{stored.size(vocabulary):,}"
    logits = f"{count} of its logits in {stored.precision} with their tokens"
    return StoredFacts(
        kept=logits if stored.samples is None else f"{count} tokens drawn from its predictions",
        position_bytes=each,
        bytes=each * _predicted(job) * _stored_rows(job),
    )


def _stored_rows(job: JobConfig) -> float:
    """The rows whose predictions are stored: each example once where it is always read alike."""
    read = usual_rows(job) * job.steps
    if not predicts_by_example(job):
        return read
    totals = (ExampleSplit(Corpus.open(path), "train").total for path in job.data.paths())
    return min(read, sum(totals))


def _predicted(job: JobConfig) -> float:
    """The tokens that are predicted of a row: at most, of text; on average, of examples."""
    if job.data.has_examples:
        splits = [ExampleSplit(Corpus.open(path), "train") for path in job.data.paths()]
        tokens = sum(split.predicted_tokens() for split in splits)
        return tokens / sum(split.total for split in splits)
    slots = job.data.slots
    return sum(share * slots(length) for length, share in _lengths(job).items())


def _cache(job: JobConfig) -> CacheFacts | None:
    """The cache of a node for corpora behind URLs; None where all corpora are folders.

    A sequence of a batch is read from a shard of its own. Shards have the size that `tandem data
    build` gives them.
    """
    if not any(map(is_url, job.data.paths())):
        return None
    return CacheFacts(shard_bytes=SHARD_MB * 2**20, limit_gb=job.data.cache_gb)


def _simplified(job: JobConfig) -> Iterator[tuple[bool, str]]:
    """(whether it makes a difference to this job, a line for the user) by simplification."""
    students = job.students.values()
    waits = any(learner.start.teacher is not None for learner in students)
    clocks = [job.hours, *(learner.budget.hours for learner in (job.teacher, *students))]
    yield waits, "no student waits for the teacher's quality"
    yield any(clocks), "budgets of hours are not used up before those of steps"
    yield bool(job.batch_sizes.growth), "the global batch is the size of most steps"
    offloads = [learner.offload for learner in job.learners.values()]
    is_offloaded = any(offload != "none" for offload in offloads)
    yield is_offloaded, "offloaded optimizers take no time of their own"
    yield "parameters" in offloads, "offloaded parameters stay in the device's memory"
    kinds = {PACKINGS[kind] for _, kind in job.data.lengths_and_packings()}
    is_packed = any(kind.separates_documents for kind in kinds)
    yield is_packed, "attention within documents takes as many products as over whole rows"
    masks_later = job.data.has_next_tokens and not job.data.held_out_masking.is_causal
    yield masks_later, "phases with masks predict as many tokens as those of next tokens"
    is_two_way = job.teacher.objective.from_student is not None
    yield is_two_way, "the teacher learns from its student in all steps, and in each recipe"
    yield bool(job.teacher.stacking.steps), "the teacher has all of its layers from the start"
    yield bool(job.data.tasks and job.teachers), "every teacher runs in every step"
    views = {learner.view for learner in job.learners.values()}
    tasks = [entry.task for entry in tasks_of(job)]
    is_part = any({*task.texts_of(view)} < {*task.texts} for task in tasks for view in views)
    yield is_part, "every learner reads whole examples"
    yield job.teacher.stored is not None, "the teacher's weights are in host memory"
    learners = job.learners.values()
    transfers = (section for learner in learners for section in learner.transfers.values())
    yield from ((True, line) for line in sorted({section.simplified for section in transfers}))
