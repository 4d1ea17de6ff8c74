"""FLOPs and memory of a job's step, measured by running the real step on fake tensors.

Nothing is computed, while every byte that the step would allocate and every matrix product (by the
formulas of ``torch.utils.flop_counter``) is counted. Of layers of equal shape one runs: the others
take what that one took.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from model import Features
from model.precision import kernels_of
from trainer.batches import MicroBatch, MicroLogits
from trainer.config import JobConfig
from trainer.footprint.fake_step import fake_batch, fake_modules, fake_step
from trainer.footprint.fake_tensors import FakeMode, FakeTensor, layouts
from trainer.footprint.work import Cost, Work, storage_of, tensors_among
from trainer.learner_config import LearnerConfig
from trainer.learner_names import is_teacher
from trainer.learners.module import LearnerModule, Train
from trainer.optimizers.config import parameter_groups

MODE = FakeMode()  # remembers the operations of all measurements
LEAST_TOKENS = 4096  # with fewer, the losses' chunks are not full and memory grows not linearly


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

    parameters: elements, including the objective's; trained: those with a gradient; states: of the
    optimizer, for each of these; projection: elements of the vocabulary projection
    and word embedding that others read.
    activations: the peak of forward and backward in bytes, as (fixed, per row), without parameters,
    gradients and tensors of earlier learners. captured: bytes kept for later learners after its own
    backward, in the same form.
    """

    parameters: int
    trained: int
    states: float
    projection: int
    activations: tuple[float, float]
    captured: tuple[float, float]


def footprints_and_passes(
    job: JobConfig, device: str, length: int, shorter: Collection[int] = ()
) -> tuple[dict[str, Footprint], dict[int, dict[str, Passes]]]:
    """The footprint of every learner of `job` on sequences of `length`, and shorter passes.

    Counts the kernels that `device` would run. Bytes are exact at the job's micro-batch and at
    twice that, and linear in the rows elsewhere. The passes are every learner's work on one
    sequence of each `shorter` length; of these only FLOPs count, which are as many in each row.
    """
    rows = job.batch.micro_rows(length)
    more = max(2 * rows, -(-LEAST_TOKENS // length))
    shapes = [(rows, length), (more, length), *((1, other) for other in shorter)]
    few, many, *others = _measure(job, job.learners, device, shapes)
    largest = {name: _line(few[name], many[name], rows, more) for name in few}
    return largest, {
        other: _passes(by_learner, rows=1)
        for other, by_learner in zip(shorter, others, strict=True)
    }


def passes_apart(job: JobConfig, rows: Mapping[int, int]) -> dict[int, dict[str, Passes]]:
    """Every learner's work on a GPU if each student had its own job with the finished teachers.

    There the teachers only run forward: they have neither losses nor a backward pass. By length of
    the sequences; kernels are those of a micro-batch of this many `rows` of a length.
    """
    learners = {
        name: dataclasses.replace(config.finished(), stored=None) if is_teacher(name) else config
        for name, config in job.learners.items()
    }
    shapes = [(number, length) for length, number in rows.items()]
    measured = _measure(job, learners, "gpu", shapes, are_apart=True)
    return {
        length: _passes(by_learner, number)
        for (number, length), by_learner in zip(shapes, measured, strict=True)
    }


@dataclass(frozen=True)
class _Measured:
    parameters: int
    trained: int
    states: float
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
        states=few.states,
        projection=few.projection,
        forward_flops=many.forward_flops / more,
        backward_flops=many.backward_flops / more,
        kernels=few.kernels,
        activations=fit(few.activations, many.activations),
        captured=fit(few.captured, many.captured),
    )


def _passes(measured: Mapping[str, _Measured], rows: int) -> dict[str, Passes]:
    return {
        name: Passes(work.forward_flops / rows, work.backward_flops / rows, work.kernels)
        for name, work in measured.items()
    }


def _measure(
    job: JobConfig,
    learners: Mapping[str, LearnerConfig],
    device: str,
    shapes: Sequence[tuple[int, int]],
    are_apart: bool = False,
) -> list[dict[str, _Measured]]:
    """Measure `learners` on micro-batches of `job` of these (rows, length), the teachers first."""
    with MODE, kernels_of(device):
        modules = fake_modules(job, learners)
        batches = (fake_batch(FakeTensor, job, *shape) for shape in shapes)
        return [_step(modules, learners, batch, are_apart) for batch in batches]


def _step(
    modules: Mapping[str, LearnerModule],
    learners: Mapping[str, LearnerConfig],
    batch: MicroBatch,
    are_apart: bool,
) -> dict[str, _Measured]:
    """Measure forward and backward of `learners` on one micro-batch."""
    measured = {name: _only_stored(given) for name, given in batch.stored.items()}
    for name, run, projection in fake_step(modules, learners, batch, _Run, are_apart):
        measured[name] = run.result(projection, learners[name])
    return measured


def _only_stored(given: MicroLogits) -> _Measured:
    """A teacher of which nothing runs: its stored predictions are read."""
    size = sum(tensor.nbytes for tensor in (given.values, given.ids) if tensor is not None)
    return _Measured(0, 0, 0.0, 0, 0.0, 0.0, 0, 0, captured=size)


class _Run:
    """Counts one module's forward and backward."""

    def __init__(self, module: LearnerModule) -> None:
        self.module = module
        self.mode = self.work = Work(module.model.kernel_flops)
        self.forward_flops = 0

    def __call__(self, program: Train, batch: MicroBatch) -> Features:
        """Run forward and backward; returns the module's features."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p: self.work.set_aside(p.grad))
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]
        self.module.model.run_layers_by(RepeatedLayers(self.work))
        with self.work:
            loss, _, features = self.module(program, batch)
            self.forward_flops = self.work.flops
            if loss.requires_grad:
                loss.backward()
        for hook in hooks:
            hook.remove()
        self.module.zero_grad()
        self.module.model.run_layers_by(_directly)
        return features

    def result(self, projection: int, config: LearnerConfig) -> _Measured:
        """The measurements so far; tensors that are still alive count as captured."""
        parameters = list(self.module.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return _Measured(
            parameters=sum(p.numel() for p in parameters),
            trained=trained,
            states=_states(self.module, config) / max(1, trained),
            projection=projection,
            forward_flops=self.forward_flops,
            backward_flops=self.work.flops - self.forward_flops,
            kernels=self.work.kernels,
            activations=self.work.peak,
            captured=self.work.now,
        )


def _directly(run_layer: Callable[..., tuple[Tensor, ...]], *how: Any) -> tuple[Tensor, ...]:
    return run_layer(*how)


def _states(module: LearnerModule, config: LearnerConfig) -> int:
    """Elements of the states that are kept for a module's trained parameters."""
    groups = parameter_groups(module, config.optimizer, module.objective)
    averages = int(config.average is not None)
    return sum(
        (len(group["states"]) + averages) * sum(parameter.numel() for parameter in group["params"])
        for group in groups
    )


Run = Callable[[], tuple[Tensor, ...]]


@dataclass
class _Layer:
    """One layer that has run: its cost, and what is alive between its passes."""

    forward: Cost
    outputs: Sequence[Tensor]
    saves: Sequence[int]  # which of all inputs and outputs its graph keeps
    kept: int  # bytes that its graph keeps besides
    backward: dict[tuple[bool, ...], Cost]  # by which outputs have a gradient


@dataclass(frozen=True)
class _Call:
    """A call of a layer, which can be repeated with tensors that are not counted."""

    layer: _Layer
    run: Run
    x: Tensor
    trained: Sequence[Tensor]  # its parameters


class RepeatedLayers:
    """Runs one layer of each form, on fake tensors (`Model.run_layers_by`).

    Parameters get no gradients; only `work` shows what these would take.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self._layers: dict[Any, _Layer] = {}

    def __call__(
        self,
        run_layer: Callable[..., tuple[Tensor, ...]],
        attention: nn.Module,
        feed_forward: nn.Module,
        x: Tensor,
        *how: Any,
    ) -> tuple[Tensor, ...]:
        parameters = [*attention.parameters(), *feed_forward.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        has_graph = torch.is_grad_enabled() and bool(trained or x.requires_grad)
        state = has_graph, x.requires_grad, len(trained), attention.training
        form = layouts([x, *how, *parameters, *state], [])
        copies = tree_map_only(Tensor, FakeTensor, (x, *how))
        copies[0].requires_grad_(x.requires_grad)
        run = partial(_run, _autocast(), run_layer, attention, feed_forward, *copies)
        if form not in self._layers:
            self._layers[form] = self._try(run, copies, trained if has_graph else None)
        layer = self._layers[form]
        if not has_graph:
            return self.forward(layer)
        anchor = x if x.requires_grad else trained[0]
        call = _Call(layer, run, copies[0], trained)
        return _Repeated.apply(anchor, self, call, (x, *how))

    def _try(self, run: Run, inputs: Sequence[Any], trained: Sequence[Tensor] | None) -> _Layer:
        """Run a layer forward, and backward from its next x unless `trained` is None."""
        saved: set[int] = set()
        costs: dict[tuple[bool, ...], Cost] = {}

        def save(tensor: Tensor) -> Tensor:
            saved.add(storage_of(tensor))
            return tensor.detach()  # with its graph it would keep itself

        with self.work.aside():
            with self.work.aside() as cost, saved_tensors_hooks(save, lambda tensor: tensor):
                outputs = run()
            sizes = {storage_of(output): output.untyped_storage().nbytes() for output in outputs}
            candidates = enumerate(tensors_among([*inputs, *outputs]))
            saves = [number for number, tensor in candidates if storage_of(tensor) in saved]
            if trained is not None:
                upstream = FakeTensor(outputs[0]), *(None for _ in outputs[1:])
                costs[_form(upstream)] = self._backward([inputs[0], *trained], outputs, upstream)
        kept = cost.kept - sum(sizes.values())
        return _Layer(cost, [FakeTensor(output) for output in outputs], saves, kept, costs)

    def forward(self, layer: _Layer) -> tuple[Tensor, ...]:
        """Count a layer's forward pass; returns its outputs."""
        self.work.repeat(layer.forward)
        return tuple(self.work.hold(FakeTensor(output)) for output in layer.outputs)

    def backward(self, call: _Call, upstream: Sequence[Tensor | None]) -> Tensor | None:
        """Count a layer's backward pass; returns the gradient of x."""
        costs, form = call.layer.backward, _form(upstream)
        if form not in costs:
            with self.work.aside(), torch.enable_grad():
                costs[form] = self._backward([call.x, *call.trained], call.run(), upstream)
        self.work.repeat(costs[form])
        return self.work.hold(FakeTensor(call.x)) if call.x.requires_grad else None

    def _backward(
        self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], upstream: Sequence[Tensor | None]
    ) -> Cost:
        """Run a layer backward; its `leaves` keep no gradients."""
        pairs = zip(outputs, upstream, strict=True)
        roots, gradients = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
        with self.work.aside() as cost:
            torch.autograd.backward(roots, gradients)
        for leaf in leaves:
            leaf.grad = None
        return cost


def _form(upstream: Sequence[Tensor | None]) -> tuple[bool, ...]:
    return tuple(gradient is not None for gradient in upstream)


def _autocast() -> torch.autocast:
    """The autocast that is on, without its cache of weights, which would outlive a trial."""
    dtype, is_on = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    return torch.autocast("cpu", dtype, is_on, cache_enabled=False)


def _run(
    autocast: torch.autocast, run_layer: Callable[..., tuple[Tensor, ...]], *inputs: Any
) -> tuple[Tensor, ...]:
    with autocast:
        return run_layer(*inputs)


class _Repeated(torch.autograd.Function):
    """A layer that does not run."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, layers: RepeatedLayers, call: _Call, inputs: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        outputs, layer = layers.forward(call.layer), call.layer
        tensors = [*tensors_among([*inputs, *outputs])]
        kept = layers.work.hold(FakeTensor.of_bytes(layer.kept))
        ctx.save_for_backward(*(tensors[number] for number in layer.saves), kept)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.call = layers, call
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.layers.backward(ctx.call, upstream), None, None, None
