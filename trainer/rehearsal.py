"""A job scaled down to minutes on a CPU, with everything that happens in it in the same order."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from configs.errors import OptionError
from configs.reference import declared
from configs.section import Section
from data_pipeline import DataConfig
from model import ModelConfig
from trainer.batch_config import BatchConfig, GrowthConfig
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.counting import rows_by_step, usual_rows
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig

LONGEST = 512  # tokens
SHORTEST = 16
LARGEST_BATCH = 16  # sequences
MULTIPLE = 4  # of a batch's sequences, for up to as many ranks
MICRO_BATCH = 4  # sequences
MICRO_TOKENS = 1024
SCORED = 16  # sequences of each corpus
_Section = TypeVar("_Section", bound=Section)


def rehearsal(job: JobConfig, steps: int) -> JobConfig:
    """The job in this many steps, on a CPU, with narrow models, short sequences and small batches.

    Phases, growing batches, schedules, joining and leaving students, ZeRO stages, precisions and
    depths of models stay. Where a teacher is frozen, all models keep their sizes and weights, and
    its predictions are not read from `stored`; elsewhere models begin at random. A student that
    waits for a score of its teacher begins halfway.

    Raises TrainingError for a job of examples, OptionError for too few steps for its events.
    """
    if job.data.has_examples:
        raise TrainingError("data: a rehearsal is for jobs about text; give a task fewer epochs")
    job = job.in_steps
    events = sorted({*_events(job), job.steps})
    if steps < 2 * len(events):
        raise OptionError(f"--steps: this job needs {2 * len(events)} or more")
    at = _timeline(events, steps)
    scale = min(1.0, LONGEST / max(length for length, _ in job.data.lengths_and_packings()))
    is_resized = not any(teacher.frozen for teacher in (job.teacher, *job.teachers.values()))

    def of_learner(learner: LearnerConfig) -> LearnerConfig:
        moved = _moved(_ready(learner, job), at)
        return _small(moved, scale) if is_resized else moved

    batch = _few(job, at)
    data = _mixed(_short(_moved(job.data, at), scale), batch)
    return replace(
        job,
        name=f"{job.name}-rehearsal",
        steps=steps,
        data=data,
        batch=batch,
        teacher=replace(of_learner(job.teacher), stored=None),  # which is of other batches
        students={name: of_learner(student) for name, student in job.students.items()},
        evaluation=replace(
            job.evaluation, every=None, sequences=min(SCORED, job.evaluation.sequences)
        ),
        checkpoint=replace(job.checkpoint, every=max(1, steps // 10), keep_every=None),
        log=replace(job.log, every=min(job.log.every, max(1, steps // 30)), wandb="disabled"),
        rollback=[],
        hours=None,
        device="cpu",
    )


def _timeline(events: list[int], steps: int) -> Callable[[int], int]:
    """The step at which each of the job's events, ascending, happens in a rehearsal of `steps`.

    Half of the steps are shared equally among the events, so that none is lost in a long job's few
    last steps; the other half keeps the proportions.
    """
    gap, last = steps // 2 // len(events), events[-1]
    rest = steps - gap * len(events)

    def at(event: int) -> int:
        if event > last:  # never reached
            return steps + event - last
        return gap * (bisect_left(events, event) + 1) + event * rest // last if event else 0

    return at


def _events(job: JobConfig) -> Iterator[int]:
    """Every number of steps in the sections that say what happens when."""
    events: list[int] = []

    def seen(step: int) -> int:
        events.append(step)
        return step

    learners = (_ready(learner, job) for learner in job.learners.values())
    for section in (job.data, job.batch, *learners):
        _moved(section, seen)
    return (step for step in events if 0 < step < job.steps)


def _moved(section: _Section, at: Callable[[int], int]) -> _Section:
    """The section with every number in steps, and every step that is a key, moved by `at`."""

    def moved(value: Any, is_steps: bool) -> Any:
        if isinstance(value, Section):
            return _moved(value, at)
        if isinstance(value, list):
            return [moved(item, is_steps) for item in value]
        if isinstance(value, Mapping):
            # Numbers by step, but not a layer by the layer that learns from it, both whole numbers.
            by_step = all(isinstance(item, float) for item in value.values())
            return {
                at(key) if by_step and isinstance(key, int) else key: moved(item, is_steps)
                for key, item in value.items()
            }
        return at(value) if is_steps and value is not None else value

    return replace(
        cast("Any", section),
        **{
            key.name: moved(getattr(section, key.name), key.unit == "steps")
            for key in declared(type(section))
        },
    )


def _ready(learner: LearnerConfig, job: JobConfig) -> LearnerConfig:
    """The learner with a start and a budget in steps, whatever its teacher's score."""
    start, budget = learner.start, learner.budget
    if start.teacher is not None:
        start = replace(start, teacher=None, step=start.step or job.steps // 2)
    if budget.tokens:
        length, _ = job.data.lengths_and_packings()[0]
        last = min(budget.tokens // (usual_rows(job) * length) or 1, budget.steps or job.steps)
        budget = replace(budget, tokens=None, steps=last)
    return replace(learner, start=start, budget=replace(budget, hours=None))


def _small(learner: LearnerConfig, scale: float) -> LearnerConfig:
    """The learner with a narrow model at random, for sequences as much shorter as `scale` says."""
    init = InitConfig(
        teacher_layers=learner.init.teacher_layers,
        teacher_embeddings=learner.init.teacher_embeddings,
    )
    return replace(learner, model=_narrow(learner.model, scale), init=init, compile=False)


def _narrow(model: ModelConfig, scale: float) -> ModelConfig:
    """The model, where it has attention, with as many layers and heads, of 2 to 4 numbers each."""
    keys: Any = vars(model)
    if not {"heads", "bottleneck_size", "ffn_size"} <= keys.keys():
        return model
    size = keys["bottleneck_size"] or model.hidden_size
    inner = model.heads * max(2, size // model.heads // 32 * 2)

    def width(of: int) -> int:
        return of and max(8, of * inner // size)

    return replace(
        cast("Any", model),
        hidden_size=width(model.hidden_size) if keys["bottleneck_size"] else inner,
        bottleneck_size=keys["bottleneck_size"] and inner,
        embedding_size=width(keys["embedding_size"]),
        ffn_size=width(keys["ffn_size"]),
        max_positions=max(LONGEST + 2, round(keys["max_positions"] * scale)),
        local_window=keys["local_window"] and max(2, round(keys["local_window"] * scale / 2) * 2),
    )


def _short(data: DataConfig, scale: float) -> DataConfig:
    """The data in shorter sequences; its batches are those of `_few`."""
    phases = [
        replace(
            phase,
            batch=None,
            sequence_length=phase.sequence_length and _shorter(phase.sequence_length, scale),
        )
        for phase in data.phases
    ]
    length = _shorter(data.sequence_length, scale)
    return replace(data, sequence_length=length, phases=phases)


def _shorter(length: int, scale: float) -> int:
    return max(SHORTEST, round(length * scale))


def _mixed(data: DataConfig, batch: BatchConfig) -> DataConfig:
    """The data with weights that give each corpus that is read a row of the smallest batch."""
    sizes = [batch.size, *(growth.size for growth in batch.growth)]
    rows = min(size for size in sizes if size)

    def weights(step: int) -> dict[str, float]:
        given = {name: weight for name, weight in data.weights_at(step).items() if weight}
        rest = (rows - len(given)) / (sum(given.values()) or 1.0)
        return {name: 1 + rest * given[name] if name in given else 0.0 for name in data.mixture}

    phases = [
        replace(phase, mixture=phase.mixture and weights(phase.from_step)) for phase in data.phases
    ]
    mixture = {name: replace(data.mixture[name], weight=of) for name, of in weights(0).items()}
    return replace(data, mixture=mixture, phases=phases)


def _few(job: JobConfig, at: Callable[[int], int]) -> BatchConfig:
    """The job's batches in few sequences, in their proportions; one or more for each corpus."""
    rows_from = rows_by_step(job)
    largest, least = max(rows_from.values()), max(1, math.ceil(len(job.data.mixture) / MULTIPLE))

    def few(rows: int) -> int:
        return MULTIPLE * max(least, round(rows * LARGEST_BATCH / largest / MULTIPLE))

    return BatchConfig(
        size=few(rows_from.pop(0)),
        micro_batch=MICRO_BATCH,
        micro_tokens=job.batch.micro_tokens and MICRO_TOKENS,
        growth=[GrowthConfig(at(step), size=few(rows)) for step, rows in rows_from.items()],
    )
