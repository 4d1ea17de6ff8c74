"""One micro-batch of a job on fake tensors, which have a shape and no data.

The code of models and losses is that of a real step (`trainer.footprint.fake_tensors`), so a
new architecture or objective needs no change here.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from data_pipeline import (
    DEFAULT_VIEW,
    MASKED,
    PAIRS,
    Batch,
    Corpus,
    StoredLogits,
    Target,
    View,
    with_masks,
)
from data_pipeline.examples.example import SEVERAL, TOKENS, WHOLE
from data_pipeline.examples.reading import layout_of
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.reading.batches import Runs, shared_view
from model import Capture, Features, Model, ModelConfig, module_of
from trainer.batches import MicroBatch, MicroLogits, MicroRuns, MicroTarget, to_device
from trainer.config import JobConfig
from trainer.job_data.examples import views_of
from trainer.job_data.other_tokenizers import shared_spans
from trainer.learner_config import DISENTANGLED, LearnerConfig
from trainer.learner_names import MEAN, TEACHER, is_teacher
from trainer.learners.module import (
    WORD_EMBEDDING,
    LearnerModule,
    Predict,
    Train,
    always_captured,
    assemble,
)
from trainer.objectives.objective import Demand, union
from trainer.objectives.term import ExampleLosses, Term
from trainer.replaced_tokens import REPLACED
from trainer.teacher_outputs import OutputProjection, TeacherOutputs, detach, mean_of, of_stored

CPU = torch.device("cpu")


class Meter(Protocol):
    """Measures one learner's part of a step."""

    @property
    def mode(self) -> TorchDispatchMode:
        """The mode that sees all of its operations."""

    def __call__(self, program: Train, batch: MicroBatch) -> Features:
        """Run the learner forward and backward; returns its features."""


M = TypeVar("M", bound=Meter)


def fake_modules(
    job: JobConfig, learners: Mapping[str, LearnerConfig], device: torch.device = CPU
) -> dict[str, LearnerModule]:
    """The modules of `learners`, without weights, for any number of fake steps."""
    modules = {name: _module(name, config, job) for name, config in learners.items()}
    for module in modules.values():
        _move(module, device)
    return modules


def fake_step(
    modules: Mapping[str, LearnerModule],
    learners: Mapping[str, LearnerConfig],
    batch: MicroBatch,
    meter: Callable[[LearnerModule], M],
    are_apart: bool = False,
) -> Iterator[tuple[str, M, int]]:
    """Run `learners` on `batch`, the teachers first, each in a meter of its own.

    If the students `are_apart`, none of them reads what another one has computed of a teacher.
    Yields, while what later learners read is still alive: name, meter, and the elements of the
    learner's tables that others read. Teachers of which only stored predictions are read do not
    run.
    """
    teachers = [name for name in modules if is_teacher(name)]
    students = [name for name in modules if not is_teacher(name)]
    readers = [(modules[name].objective, 0) for name in students]
    generators = [learners[name].generator_name for name in students]
    demands = {
        name: Demand.of(
            *(name, learners[name].architecture.task_heads, readers, batch.targets),
            generators.count(name),
        )
        for name in teachers
    }
    sources: dict[str, TeacherOutputs] = {}
    for name, demand in demands.items():
        if learners[name].stored is not None:
            vocabulary = learners[name].model.vocab_size
            sources[name] = of_stored(batch.stored[name], vocabulary, demand.own_logits)
            continue
        run = meter(modules[name])
        sources[name], projected = _teach(run, name, modules, learners, demand, batch)
        yield name, run, projected + _shared_words(name, modules, learners)
    if any(demand.is_mean_read for demand in demands.values()):
        read = [sources[name] for name, demand in demands.items() if demand.is_read]
        sources[MEAN] = mean_of(read, demands[TEACHER].mean_logits)
    for name in students:
        run = meter(modules[name])
        if are_apart:
            sources = {source: outputs.unread() for source, outputs in sources.items()}
        run(_train(modules[name], sources, [], batch), _read(batch, learners[name]))
        is_generator = any(name == learner.generator_name for learner in learners.values())
        projected = _elements(_projection(modules[name])) if is_generator else 0
        yield name, run, projected + _shared_words(name, modules, learners)


def fake_batch(
    to_fake: Callable[[Tensor], Tensor],
    job: JobConfig,
    rows: int,
    length: int,
    device: torch.device = CPU,
    is_padded: bool = False,
) -> MicroBatch:
    """A micro-batch of `job` with as many masked positions as it may have."""
    batch = _rows(job, rows, length)
    if any(PACKINGS[kind].separates_documents for _, kind in job.data.lengths_and_packings()):
        ids = np.ones_like(batch.input_ids)
        ids[:, length // 2 :] = 2
        views = {
            name: dataclasses.replace(view, document_ids=ids) for name, view in batch.views.items()
        }
        batch = dataclasses.replace(batch, document_ids=ids, views=views)
    batch = dataclasses.replace(batch, is_causal=job.data.has_next_tokens)
    for form in (batch, *batch.views.values()) if is_padded else ():
        form.attention_mask[..., length // 2 :] = 0
    with _disable_current_modes():  # the host counts documents
        micro_batch = to_device(batch, CPU)
    return _to_fake(to_fake, micro_batch, device)


def _teach(
    run: Meter,
    name: str,
    modules: Mapping[str, LearnerModule],
    learners: Mapping[str, LearnerConfig],
    demand: Demand,
    batch: MicroBatch,
) -> tuple[TeacherOutputs, int]:
    """Run a teacher; returns its outputs, and the elements of a projection that students read."""
    module, config = modules[name], learners[name]
    projection = _projection(module) if demand.own_logits or demand.mean_logits else None
    with run.mode:  # what the teacher reads of students is for its own sake
        peers = _peers(module, modules, learners, batch)
    captures = [demand.capture, always_captured(name, config)]
    features = run(_train(module, peers, captures, batch), _read(batch, config))
    with run.mode, module.autocast(batch.input_ids.device):
        outputs = detach(features, projection, demand.own_logits)
    return outputs, _elements(projection)


def _elements(projection: OutputProjection | None) -> int:
    return 0 if projection is None or projection.weight is None else projection.weight.numel()


def _shared_words(
    name: str, modules: Mapping[str, LearnerModule], learners: Mapping[str, LearnerConfig]
) -> int:
    """The elements of a generator's word embedding, once for each learner that adds to it."""
    sharing = (learner for learner in learners.values() if learner.generator_name == name)
    times = sum(learner.embedding_sharing == DISENTANGLED for learner in sharing)
    return times * modules[name].model.get_parameter(WORD_EMBEDDING).numel() if times else 0


@torch.no_grad()
def _peers(
    module: LearnerModule,
    modules: Mapping[str, LearnerModule],
    learners: Mapping[str, LearnerConfig],
    batch: MicroBatch,
) -> dict[str, TeacherOutputs]:
    """The predictions of the students from which a teacher's `module` learns, without dropout."""
    outputs = {}
    for name in module.objective.sources & modules.keys():
        peer = modules[name].eval()
        features = peer(Predict(), batch.view(learners[name].form))
        with peer.autocast(batch.input_ids.device):
            outputs[name] = detach(features, _projection(peer))
        peer.train()
    return outputs


def _read(batch: MicroBatch, config: LearnerConfig) -> MicroBatch:
    """The view of a learner; a generator's samples are as many tokens."""
    if config.generator is None:
        return batch.view(config.form)
    labels = MicroTarget(batch.input_ids.flatten())
    return dataclasses.replace(batch, targets={**batch.targets, REPLACED: labels})


def _projection(module: LearnerModule) -> OutputProjection:
    return OutputProjection(*module.model.output_projection()).detached()


def _train(
    module: LearnerModule,
    sources: Mapping[str, TeacherOutputs],
    captures: Sequence[Capture],
    batch: MicroBatch,
) -> Train:
    """The program of a step on `batch`, which captures what the module's own terms read too."""
    objective, unit = module.objective, torch.ones((), device=batch.input_ids.device)
    totals = dict.fromkeys(objective.denominators, unit)
    unknown = ExampleLosses(unit, unit)
    known: dict[Term, ExampleLosses] = dict.fromkeys(objective.over_whole_batch(0), unknown)
    capture = union([*captures, objective.student_capture(0, batch.targets)])
    return Train(totals, sources, capture, whole_batch=known, views=batch.views)


def _module(name: str, config: LearnerConfig, job: JobConfig) -> LearnerModule:
    in_steps = config.in_steps(job.steps)
    module = assemble(name, in_steps, job.teacher.model, job.seed, _make, job.other_models)
    if config.rounds_weights:
        module.round_weights()
    module.objective.set_views(config.form, shared_spans(job, config, _no_tokens))
    return module.train(config.in_training_mode)


def _no_tokens(learner: LearnerConfig, source: LearnerConfig) -> Tensor:
    """In place of the source's ids of the learner's tokens."""
    return torch.zeros(learner.model.vocab_size, dtype=torch.int64)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to `device`; `module.to` cannot move fake tensors."""
    for part in module.modules() if device != CPU else ():
        for name, parameter in part.named_parameters(recurse=False):
            moved = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            part.register_parameter(name, moved)
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, buffer.to(device))


def _make(config: ModelConfig) -> Model:
    # Fused kernels save a generator's state instead of the mask, which the CPU version would save.
    config = config.without_attention_dropout()
    return module_of(config)(config)


def _rows(job: JobConfig, rows: int, length: int) -> Batch:
    """Sequences without padding, with as many masked positions as the job may have."""
    if job.data.has_examples:
        return _examples(job, rows, length)
    masked = job.data.slots(length)
    ids = np.zeros((rows, length), np.int64)
    slots = np.zeros((rows, masked), np.int64)
    zeros = np.zeros(rows, np.int64)
    targets = {MASKED: Target(slots, slots), PAIRS: Target(zeros)}
    batch = Batch(ids, ids, ids + 1, targets, zeros, zeros, stored=_stored(job, slots))
    return dataclasses.replace(batch, views=_by_other_tokenizers(job, batch))


def _by_other_tokenizers(job: JobConfig, batch: Batch) -> dict[str, Batch]:
    """The views of learners of other tokenizers, as if these made the same number of tokens."""
    ids, slots = batch.input_ids, batch.targets[MASKED].labels.astype(np.int64)
    runs = Runs(ids + np.arange(ids.shape[1]), ids + 1, slots + np.arange(slots.shape[1]))
    forms = {learner.form for learner in job.learners.values()} - {DEFAULT_VIEW}
    shared = {
        shared_view(DEFAULT_VIEW, form): dataclasses.replace(
            batch, runs={DEFAULT_VIEW: runs, form: runs}
        )
        for form in forms
    }
    return {**dict.fromkeys(forms, batch), **shared}


def _stored(job: JobConfig, slots: NDArray[Any]) -> dict[str, StoredLogits]:
    """The predictions of its teacher that the job reads in these slots [R, M], if it does."""
    vocabulary = job.teacher.model.vocab_size
    if job.teacher.stored is None:
        return {}
    k = job.teacher.stored.size(vocabulary)
    values = np.zeros((*slots.shape, k), np.float32)
    ids = np.zeros(values.shape, np.int64) if k < vocabulary else None
    return {TEACHER: StoredLogits(values, ids)}


def _examples(job: JobConfig, rows: int, length: int) -> Batch:
    """Examples without padding, of the task whose examples have the most sequences."""
    layouts = [layout_of(Corpus.open(path), "train").first for path in job.data.paths()]
    layout = max(layouts, key=lambda layout: len(layout.segments))
    choices = len(layout.segments)
    ids = _sequences(rows, choices, length)
    tokens, zeros = np.zeros((rows, choices * length), np.int64), np.zeros(rows, np.int64)
    labels = {WHOLE: zeros, SEVERAL: zeros[:, None]}  # as of rows that cannot be read
    targets = {
        name: Target(tokens, tokens)
        if kind == TOKENS
        else Target(labels[kind].astype(layout.dtype(name)))
        for name, kind in layout.targets.items()
    }
    if layout.predicted is not None:
        targets[MASKED] = Target(tokens[:, : length - 1], tokens[:, : length - 1])
    numbers = np.zeros((rows, len(layout.columns))) if layout.columns else None
    batch = Batch(ids, ids, ids + 1, targets, zeros, zeros, numbers=numbers)
    by_corpus = [views_of(job, corpus, job.seed) for corpus in job.data.tasks or [""]]
    views = {name: _viewed(batch, view) for some in by_corpus for name, view in some.items()}
    stored = _stored(job, targets[MASKED].labels) if MASKED in targets else {}
    return dataclasses.replace(batch, views=views, stored=stored)


def _sequences(rows: int, number: int, length: int) -> NDArray[Any]:
    """Token ids of this many sequences for each row."""
    return np.zeros((rows, length) if number == 1 else (rows, number, length), np.int64)


def _viewed(batch: Batch, view: View) -> Batch:
    """The examples in the form of a view, with as many tokens in a second text as may be."""
    ids = _sequences(len(batch.input_ids), len(view.sequences), batch.input_ids.shape[-1])
    viewed = dataclasses.replace(batch, input_ids=ids, segment_ids=ids, attention_mask=ids + 1)
    if view.masks is None:
        return viewed
    second = ids + (np.arange(ids.shape[-1]) > 0)
    return with_masks(dataclasses.replace(viewed, segment_ids=second), view.masks, mask=0)


def _to_fake(
    to_fake: Callable[[Tensor], Tensor], batch: MicroBatch, device: torch.device
) -> MicroBatch:
    def fakes(of: MicroBatch | MicroTarget | MicroLogits | MicroRuns) -> dict[str, Any]:
        return {
            field.name: to_fake(value).to(device)
            for field in dataclasses.fields(of)
            if isinstance(value := getattr(of, field.name), Tensor)
        }

    targets = {name: MicroTarget(**fakes(target)) for name, target in batch.targets.items()}
    stored = {name: dataclasses.replace(it, **fakes(it)) for name, it in batch.stored.items()}
    views = {name: _to_fake(to_fake, view, device) for name, view in batch.views.items()}
    tensors = fakes(batch)
    runs = {name: MicroRuns(**fakes(it)) for name, it in batch.runs.items()}
    if batch.documents is not None:
        tensors["documents"] = batch.documents.map(lambda it: to_fake(it).to(device))
    parts: dict[str, Any] = {"targets": targets, "stored": stored, "views": views, "runs": runs}
    return dataclasses.replace(batch, **parts, **tensors)
