"""The kernels of a graph that Inductor compiles for a GPU, counted without compiling one.

Inductor lowers and schedules the graphs that ``torch.compile`` cuts, which fuses their kernels.
Neither Triton nor a GPU is needed: no code is generated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    compile_fx,
    record_original_output_strides,
)
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from benchmarks.roofline_kernels import Kernel, Kernels

Run = Callable[..., Any]
FLOAT8_PRODUCT = torch.ops.aten._scaled_mm


def counting() -> Run:
    """A backend of ``torch.compile``: a run of a graph adds its fused kernels to the active."""

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **_: object) -> Run:
        with Kernels.active.replaced_by(()):
            fused = list(fused_kernels(graph, inputs))

        def run(*arguments: Any) -> Any:
            with Kernels.active.replaced_by(fused):
                return graph.forward(*arguments)

        return make_boxed_func(run)

    # Constants would be folded by computing them on the GPU.
    without = {"joint_graph_constant_folding": False}
    return partial(compile_fx, inner_compile=compile_graph, config_patches=without)


def fused_kernels(graph: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[Kernel]:
    """The kernels that Inductor makes of a graph of PyTorch's operators."""
    record_original_output_strides(graph)
    fake_mode = detect_fake_mode(inputs)
    with V.set_fake_mode(fake_mode):
        _recursive_post_grad_passes(graph, is_inference=False)
    lowering = GraphLowering(graph, is_inference=False)
    handlers = (
        mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        V.set_graph_handler(lowering),
        V.set_debug_handler(DebugContext()),
        V.set_fake_mode(fake_mode),
    )
    with contextlib.ExitStack() as contexts:
        for handler in handlers:
            contexts.enter_context(handler)
        lowering.run(*inputs)
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        for node in lowering.scheduler.nodes:
            # Others only allocate, or are names for the results of a kernel that has several.
            if not isinstance(node, NopKernelSchedulerNode) and type(node.node) is not MultiOutput:
                moved = node.get_read_write_buffers_sizes()
                yield Kernel(_name(node), _flops(node), moved)


def _name(node: BaseSchedulerNode) -> str:
    """Its kind; of a product in 8 bits, which has a rate of its own, the operator's name."""
    if isinstance(node, ExternKernelSchedulerNode):
        targets = {getattr(origin.target, "overloadpacket", None) for origin in node.node.origins}
        if FLOAT8_PRODUCT in targets:
            return "_scaled_mm"
    return type(node).__name__


def _flops(node: BaseSchedulerNode) -> int:
    """FLOPs of a kernel that is called, such as a matrix product; of one that is fused 0."""
    if not isinstance(node, ExternKernelSchedulerNode):
        return 0
    counts = []
    for origin in node.node.origins:  # casts and views, and the call
        count = flop_registry.get(getattr(origin.target, "overloadpacket", None))
        if count is not None:
            arguments, named = tree_map(_value, (origin.args, origin.kwargs))
            counts.append(int(count(*arguments, **named, out_val=origin.meta["val"])))
    return max(counts, default=0)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
