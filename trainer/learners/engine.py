"""DeepSpeed engines: one per learner, several in one process, on one process group."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Before the import: DeepSpeed would print that it had to guess. So nobody imports it before this.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from trainer.device import own_device
from trainer.learner_config import LearnerConfig
from trainer.measure.timing import watch_collectives
from trainer.optimizers import GatedOptimizer, Lamb, Shards
from trainer.process_group import allow_open_files

# DeepSpeed keeps reduction buckets per engine, 5e8 elements by default: ten small students would
# cost tens of gigabytes. A bucket never needs to be larger than the model, and a large model's
# gradients are reduced while its backward pass goes on only if they fill several: 7 for BERT-large.
LARGEST_BUCKET = 50_000_000

deepspeed_logger.setLevel(logging.ERROR)
# DeepSpeed calls collectives by names that newer torch versions deprecate.
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)


def start_engine(
    module: nn.Module,
    optimizer: GatedOptimizer | None,
    config: LearnerConfig,
    micro_batch_size: int,
    accumulation_steps: int,
) -> DeepSpeedEngine:
    """Put `module` (complete, on any device) under DeepSpeed at the learner's ZeRO stage.

    Without an `optimizer` the engine only runs forward; stage 3 still partitions the parameters.
    """
    parameters = sum(parameter.numel() for parameter in module.parameters())
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_config(config, parameters, micro_batch_size, accumulation_steps),
    )
    if optimizer is not None and isinstance(optimizer.inner, Lamb):
        optimizer.inner.shards = Shards.of(engine)
    if config.zero_stage == 0 and dist.get_world_size() == 1:
        # Nobody to add up gradients with: spares copying them all together and apart again.
        engine.enable_backward_allreduce = False
    return engine


def deepspeed_config(
    config: LearnerConfig, parameters: int, micro_batch_size: int, accumulation_steps: int
) -> dict[str, Any]:
    """The DeepSpeed JSON of a learner with this many parameters.

    Precision is not in it: parameters and optimizer states stay float32, and bf16 and fp16 are
    autocast in the learner's forward pass, which is right at every stage (DeepSpeed's `bf16` is not
    at 0). Stage 0 is clipped by `clip_gradients`.
    """
    bucket = bucket_size(parameters)
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": config.gradient_clipping if config.zero_stage else 0.0,
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            # One bucket is full when the backward pass ends: nothing is left to overlap with, and
            # DeepSpeed would wait for the device.
            "overlap_comm": on_gpu() and parameters > LARGEST_BUCKET,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10_000,
            "memory_efficient_linear": False,  # for the whole process: see `partitioned_linear`
            **_offload(config),
        },
        "timers": {"throughput": {"enabled": False}},  # waits for the device in every pass
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def bucket_size(parameters: int) -> int:
    """Elements of the reduction bucket of a learner with this many parameters."""
    return min(LARGEST_BUCKET, parameters + parameters % 2)  # DeepSpeed wants an even number


def _offload(config: LearnerConfig) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": on_gpu()}
    kept = {
        "offload_optimizer": config.offload != "none" and not config.frozen,
        "offload_param": config.offload == "parameters",
    }
    return {key: host for key, wanted in kept.items() if wanted}


@contextlib.contextmanager
def partitioned_linear(engine: DeepSpeedEngine) -> Iterator[None]:
    """At stage 3, for the block: linear layers that keep no whole weights for their backward.

    DeepSpeed would put its own in place for everybody in the process, so that the rounding of a
    learner's gradients would depend on who else is in the job.
    """
    if engine.zero_optimization_stage() < 3:
        yield
        return
    usual = nn.functional.linear
    nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        nn.functional.linear = usual


def forget_gradients(engine: DeepSpeedEngine) -> None:
    """Before a step's first backward: let no parameter have the gradient of an earlier step.

    At stage 3, and wherever optimizer states are in host memory, DeepSpeed would go on with the
    last gradient of a parameter that gets none any more, since a term of the objective is off.
    """
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        wrapper.grad_partitions_flat_buffer.zero_()
    if stage:
        masters = (
            "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        )
        for master in getattr(wrapper, masters):
            if master.grad is not None:  # it is in host memory
                master.grad.zero_()


def backward(engine: DeepSpeedEngine, loss: Tensor, loss_scale: float) -> None:
    """Accumulate the gradients of `loss` (a scalar) summed over the ranks, times a scale.

    The scale is divided out again before the gradients are clipped: at stages 1 to 3 by DeepSpeed,
    at stage 0 by `clip_gradients`.
    """
    loss = loss * dist.get_world_size()  # DeepSpeed averages over ranks
    scale = _averaged(loss_scale)
    if engine.zero_optimization_stage() == 0:
        loss = loss * scale
    else:
        engine.optimizer.override_loss_scale(scale)  # and multiplies the loss by it
    engine.backward(loss, scale_wrt_gas=False)


def _averaged(loss_scale: float) -> float:
    """The scale of gradients averaged over the ranks, if backward ran on `loss_scale` x the loss.

    So float16 overflows at the same scale on any number of ranks.
    """
    return loss_scale if loss_scale == 1.0 else loss_scale / dist.get_world_size()


def clip_gradients(engine: DeepSpeedEngine, clipping: float, loss_scale: float) -> Tensor:
    """At stage 0, before the step: divide the gradients by the scale and clip them (0: do not).

    A parameter without a gradient gets one of zeros, as DeepSpeed has it at the other stages and
    on several ranks. Returns their L2 norm before clipping, a float32 scalar.
    """
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if loss_scale != 1.0:
        torch._foreach_mul_([p.grad for p in parameters], 1 / _averaged(loss_scale))
    return torch.nn.utils.clip_grad_norm_(parameters, clipping or float("inf"))


def gradient_norm(engine: DeepSpeedEngine) -> float:
    """At stages 1 to 3, from within the step on: the L2 norm of the gradient before clipping."""
    return float(engine.optimizer._global_grad_norm)


@contextlib.contextmanager
def gathered(engine: DeepSpeedEngine, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Make `parameters` whole on every rank for the block, at any stage. Read only. Collective."""
    if engine.zero_optimization_stage() < 3:
        yield
        return
    with deepspeed.zero.GatheredParameters(list(parameters)):
        yield


def join_process_group() -> torch.device:
    """Enter the process group that RANK, WORLD_SIZE and MASTER_ADDR describe; returns our device.

    gloo on CPU, NCCL on GPUs. Not DeepSpeed's own entry point, which compiles a shared-memory
    extension on CPUs; its engines find the group that exists, and share it. Raises TrainingError
    where the GPU or the limit of open files does not serve.
    """
    # Needs a compiler, and gains nothing on gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    device = own_device()
    backend = "gloo"
    if device.type == "cuda":
        backend, os.environ["LOCAL_RANK"] = "nccl", str(device.index)  # DeepSpeed's device, too
    allow_open_files(int(os.environ["WORLD_SIZE"]))
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    assert dist.is_initialized()
    deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD  # it would make another one like it
    watch_collectives()
    return device
