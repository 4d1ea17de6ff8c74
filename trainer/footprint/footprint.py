"""FLOPs and memory of a job's step, measured by running the real step on fake tensors.

A fake tensor has a shape and no data (``torch._subclasses.FakeTensorMode``). The models' and
losses' own code runs without computing anything, while every byte that it would allocate and every
matrix product (``torch.utils.flop_counter``) is counted. A new architecture or objective needs no
change here.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import data_pipeline
from data_pipeline import MASKED, PAIRS, Batch, Corpus, Target
from data_pipeline.examples.example import TOKENS
from data_pipeline.examples.reading import layout_of
from model import Capture, Features, Model, ModelConfig, module_of
from model.precision import kernels_of
from trainer.batches import MicroBatch, MicroTarget, StoredLogits, to_device
from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_names import MEAN, TEACHER, is_teacher
from trainer.learners.module import LearnerModule, always_captured, assemble
from trainer.learners.programs import Train
from trainer.objectives import ObjectiveConfig
from trainer.objectives.demand import Demand
from trainer.objectives.term import ExampleLosses
from trainer.teacher_outputs import (
    OutputProjection,
    TeacherOutputs,
    detach,
    mean_of,
    of_stored,
    union,
)


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of fused attention on a CPU; torch's counter knows the GPU kernels only."""
    return 4 * math.prod(q) * k[-2]


def _attention_backward(grad: Any, q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _attention(q, k, k)  # without the kernel's recomputation


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}  # operations that torch's counter does not know
LEAST_ROWS = 32  # with fewer, the losses' chunks are not full and memory does not grow linearly

_SEEN = ExampleLosses(torch.ones(()), torch.ones(()))  # of a loss over the whole batch


@dataclass(frozen=True)
class Passes:
    """A learner's work in a step.

    flops: matrix products of one row (a sequence), forward and backward, losses included; kernels:
    operations that would be launched on a device for a micro-batch, whatever its size.
    """

    forward_flops: float
    backward_flops: float
    kernels: int


@dataclass(frozen=True)
class Footprint(Passes):
    """One learner's share of a step. Bytes are of one rank and one micro-batch of `rows` rows.

    parameters: elements, including the objective's; trained: those with a gradient; projection:
    elements of a teacher's vocabulary projection, 0 when no student reads it.
    activations: the peak of forward and backward in bytes, as (fixed, per row), without parameters,
    gradients and tensors of earlier learners. captured: bytes kept for later learners after its own
    backward, in the same form.
    """

    parameters: int
    trained: int
    projection: int
    activations: tuple[float, float]
    captured: tuple[float, float]


def footprints(job: JobConfig, device: str, length: int) -> dict[str, Footprint]:
    """The footprint of every learner of `job` on sequences of `length`.

    Counts the kernels that `device` would run. Bytes are exact at the job's micro-batch and at
    twice that, and linear in the rows elsewhere.
    """
    rows = job.batch.micro_batch
    more = max(2 * rows, LEAST_ROWS)
    few = _measure(job, job.learners, device, rows, length)
    many = _measure(job, job.learners, device, more, length)
    return {name: _line(few[name], many[name], rows, more) for name in few}


def passes_apart(job: JobConfig, device: str, length: int) -> dict[str, Passes]:
    """The work of every learner if each student had its own job with the finished teachers.

    There the teachers only run forward: they have neither losses nor a backward pass.
    """
    rows = max(2 * job.batch.micro_batch, LEAST_ROWS)
    finished = {
        name: dataclasses.replace(
            one, model=one.architecture, objective=ObjectiveConfig(), stored=None
        )
        for name, one in job.learners.items()
        if is_teacher(name)
    }
    found: dict[str, _Measured] = {}
    for name, student in job.learners.items():
        if not is_teacher(name):
            found |= _measure(job, {**finished, name: student}, device, rows, length)
    return {
        name: Passes(one.forward_flops / rows, one.backward_flops / rows, one.kernels)
        for name, one in found.items()
    }


@dataclass(frozen=True)
class _Measured:
    parameters: int
    trained: int
    projection: int
    forward_flops: float
    backward_flops: float
    kernels: int
    activations: int
    captured: int


def _line(few: _Measured, many: _Measured, rows: int, more: int) -> Footprint:
    def fit(a: int, b: int) -> tuple[float, float]:
        slope = (b - a) / (more - rows)
        return a - slope * rows, slope

    return Footprint(
        parameters=few.parameters,
        trained=few.trained,
        projection=few.projection,
        forward_flops=many.forward_flops / more,
        backward_flops=many.backward_flops / more,
        kernels=few.kernels,
        activations=fit(few.activations, many.activations),
        captured=fit(few.captured, many.captured),
    )


def _measure(
    job: JobConfig, learners: Mapping[str, LearnerConfig], device: str, rows: int, length: int
) -> dict[str, _Measured]:
    """Measure forward and backward of `learners` on a micro-batch of `job`, the teachers first."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, kernels_of(device):
        batch = _to_fake(fake, _micro_batch(job, rows, length))
        modules = {name: _module(name, config, job) for name, config in learners.items()}
        teachers = [name for name in modules if is_teacher(name)]
        students = [name for name in modules if not is_teacher(name)]
        readers = [(modules[name].objective, 0) for name in students]
        demands = {
            name: Demand.of(name, learners[name].architecture.task_heads, readers, batch.targets)
            for name in teachers
        }
        found: dict[str, _Measured] = {}
        sources: dict[str, TeacherOutputs] = {}
        for name, demand in demands.items():
            module = modules[name]
            if learners[name].stored is not None:
                given, vocabulary = batch.stored[name], learners[name].model.vocab_size
                sources[name] = of_stored(given, vocabulary, demand.own_logits)
                found[name] = _Measured(0, 0, 0, 0.0, 0.0, 0, 0, _bytes(given))
                continue
            run = _Run(module, demand.reads_logits)
            always = always_captured(name, learners[name])
            features = run(_train(module, {}, [demand.capture, always], batch), batch)
            with run.live, module.autocast(torch.device("cpu")):
                sources[name] = detach(features, run.projection, demand.own_logits)
            del features
            found[name] = run.result()
        if any(objective.reads(0, MEAN, batch.targets) for objective, _ in readers):
            read = [sources[name] for name, demand in demands.items() if demand.is_read]
            sources[MEAN] = mean_of(read, demands[TEACHER].mean_logits)
        for name in students:
            run = _Run(modules[name])
            run(_train(modules[name], sources, [], batch), batch)
            found[name] = run.result()
    return found


def _bytes(stored: StoredLogits) -> int:
    return sum(one.nbytes for one in (stored.values, stored.ids) if one is not None)


def _train(
    module: LearnerModule,
    sources: Mapping[str, TeacherOutputs],
    captures: Sequence[Capture],
    batch: MicroBatch,
) -> Train:
    """The program of a step on `batch`, which captures what the module's own terms read too."""
    objective = module.objective
    totals = {name: torch.ones(()) for name in objective.denominators}
    known = dict.fromkeys(objective.over_whole_batch(0), _SEEN)
    capture = union([*captures, objective.student_capture(0, batch.targets)])
    return Train(totals, sources, capture, whole_batch=known)


class _Run:
    """Counts one module's forward and backward."""

    def __init__(self, module: LearnerModule, reads_logits: bool = False) -> None:
        """`reads_logits`: whether students read a teacher's vocabulary projection."""
        self.module = module
        self.projection: OutputProjection | None = None
        if reads_logits:
            weight, bias = module.model.output_projection()
            whole = None if bias is None else bias.detach()
            self.projection = OutputProjection(weight.detach(), whole)
        self.live = LiveBytes()
        kernels = {**KERNELS, **module.model.kernel_flops}
        self.flops = FlopCounterMode(display=False, custom_mapping=kernels)
        self.forward_flops = 0

    def __call__(self, program: Train, batch: MicroBatch) -> Features:
        """Run forward and backward; returns the module's features."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p: self.live.set_aside(p.grad))
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]
        with self.live, self.flops:
            loss, _, features = self.module(program, batch)
            self.forward_flops = self.flops.get_total_flops()
            if loss.requires_grad:
                loss.backward()
        for hook in hooks:
            hook.remove()
        return features

    def result(self) -> _Measured:
        """The measurements so far; tensors that are still alive count as captured."""
        parameters = list(self.module.parameters())
        return _Measured(
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            projection=0 if self.projection is None else self.projection.weight.numel(),
            forward_flops=self.forward_flops,
            backward_flops=self.flops.get_total_flops() - self.forward_flops,
            kernels=self.live.kernels,
            activations=self.live.peak,
            captured=self.live.now,
        )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages created under it: those alive `now`, and their peak.

    `kernels` counts the operations that did more than create a view of a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        if function.namespace != "aten":  # a query, such as for a tensor's device
            return result
        self.kernels += not function.is_view
        given = {_storage(leaf) for leaf in tree_leaves((arguments, keywords)) if _is_tensor(leaf)}
        for leaf in tree_leaves(result):
            # A view's bytes are counted already, and a meta tensor has none.
            if _is_tensor(leaf) and not leaf.is_meta and _storage(leaf) not in given:
                self._add(leaf.untyped_storage())
        return result

    def set_aside(self, tensor: Tensor | None) -> None:
        """Stop counting a tensor, although it stays alive."""
        if tensor is not None:
            self._remove(_storage(tensor))

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _module(name: str, config: LearnerConfig, job: JobConfig) -> LearnerModule:
    others = {name: one.model for name, one in job.other_teachers.items()}
    own = config.in_steps(job.steps)
    module = assemble(name, own, job.teacher.model, job.seed, _make, others)
    is_trained = bool(config.objective.terms())
    module.requires_grad_(is_trained)
    return module.train(is_trained)


def _make(config: ModelConfig) -> Model:
    # Fused kernels save a generator's state instead of the mask, which the CPU version would save.
    config = config.without_attention_dropout()
    return module_of(config)(config)


def _micro_batch(job: JobConfig, rows: int, length: int) -> MicroBatch:
    """Sequences without padding, with as many masked positions as the job may have."""
    if job.data.has_examples:
        return to_device(_examples(job, rows, length), torch.device("cpu"))
    masked = round(job.data.masking.highest_rate * (length - 2))
    ids = np.zeros((rows, length), np.int64)
    slots = np.zeros((rows, masked), np.int64)
    one = np.zeros(rows, np.int64)
    targets = {MASKED: Target(slots, slots), PAIRS: Target(one)}
    batch = Batch(ids, ids, ids + 1, targets, one, one, stored=_stored(job, slots))
    return to_device(batch, torch.device("cpu"))


def _stored(job: JobConfig, slots: np.ndarray) -> dict[str, data_pipeline.StoredLogits]:
    """What the job reads of its teacher's predictions in these slots [R, M], if it does."""
    vocabulary = job.teacher.model.vocab_size
    if job.teacher.stored is None:
        return {}
    k = job.teacher.stored.size(vocabulary)
    values = np.zeros((*slots.shape, k), np.float32)
    ids = np.zeros(values.shape, np.int64) if k < vocabulary else None
    return {TEACHER: data_pipeline.StoredLogits(values, ids)}


def _examples(job: JobConfig, rows: int, length: int) -> Batch:
    """Examples without padding, of the task whose examples have the most sequences."""
    layouts = [layout_of(Corpus.open(path), "train") for path in job.data.paths()]
    layout = max(layouts, key=lambda one: len(one.segments))
    choices = len(layout.segments)
    ids = np.zeros((rows, length) if choices == 1 else (rows, choices, length), np.int64)
    tokens, one = np.zeros((rows, choices * length), np.int64), np.zeros(rows, np.int64)
    targets = {
        name: Target(tokens, tokens) if kind == TOKENS else Target(one.astype(layout.dtype(name)))
        for name, kind in layout.targets.items()
    }
    return Batch(ids, ids, ids + 1, targets, one, one)


def _to_fake(mode: FakeTensorMode, batch: MicroBatch) -> MicroBatch:
    def fakes(of: MicroBatch | MicroTarget | StoredLogits) -> dict[str, Any]:
        return {
            field.name: mode.from_tensor(value)
            for field in dataclasses.fields(of)
            if isinstance(value := getattr(of, field.name), Tensor)
        }

    targets = {name: MicroTarget(**fakes(target)) for name, target in batch.targets.items()}
    stored = {name: dataclasses.replace(one, **fakes(one)) for name, one in batch.stored.items()}
    return dataclasses.replace(batch, targets=targets, stored=stored, **fakes(batch))
