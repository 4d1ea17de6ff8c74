"""Layers of equal shape, of which a plan runs one: the others take what that one took."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from trainer.footprint.fake_tensors import FakeTensor, layouts
from trainer.footprint.work import Cost, Work, storage_of, tensors_among

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
