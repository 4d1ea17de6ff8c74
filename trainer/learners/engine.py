"""DeepSpeed engines: one per learner, and the averaged weights in it.

All engines of a process share one process group.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import model  # noqa: F401 - before DeepSpeed, which would print that it had to guess the device

# isort: split
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine  # others read it here
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn

from configs.progress import work
from trainer.batch_config import bucket_size
from trainer.checkpoint.layout import FROZEN, layout, refresh, set_masters, torch_optimizer
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.snapshot import AVERAGE
from trainer.device import (
    allow_open_files,
    limit_waiting,
    meeting_place,
    named_meeting,
    own_device,
)
from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.learner_names import BACKWARD, FORWARD, STEP
from trainer.learners.module import LearnerModule
from trainer.learners.zero import flatten_gradients, forget, gather_flat, replaces, streamline
from trainer.measure import watch_collectives
from trainer.optimizers.gated import GatedOptimizer, MasterOptimizer
from trainer.optimizers.shards import Shards, squared_norm

BEGINNING, EVALUATION = "beginning", "evaluation"  # building weights and engine; scoring
IN_MICRO_BATCHES = (FORWARD, BACKWARD, STEP, EVALUATION)

# A RuntimeError of a CPU's or a GPU's allocator, driver or libraries has one of these words.
MEMORY_WORDS = (
    *("out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("DefaultCPUAllocator", "not enough memory"),
)


@contextlib.contextmanager
def named_for(section: str, config: LearnerConfig, part: str, micro_batch: int) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a TrainingError that says where it happened.

    `section` is the learner's section of the job's config, `part` the part of its work.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY_WORDS):
            raise _explained(section, config, part, micro_batch) from error
        raise


def _explained(section: str, config: LearnerConfig, part: str, micro_batch: int) -> TrainingError:
    remedies = []
    if micro_batch > 1 and part in IN_MICRO_BATCHES:
        remedies.append(f"batch.micro_batch={micro_batch // 2} (it is {micro_batch})")
    if not (config.frozen or config.checkpoint_activations) and part in (FORWARD, BACKWARD):
        remedies.append(f"{section}.checkpoint_activations=true")
    if config.zero_stage < (3 if config.frozen else 2):
        remedies.append(f"{section}.zero_stage={3 if config.frozen else config.zero_stage + 1}")
    remedies.append("more GPUs")
    return TrainingError(
        f"{section}: out of memory in its {part}; try {', or '.join(remedies)} "
        "(`tandem plan` says what fits)"
    )


deepspeed_logger.setLevel(logging.ERROR)
# DeepSpeed calls collectives by names that newer torch versions deprecate.
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)


def start_engine(
    module: LearnerModule,
    optimizer: GatedOptimizer | None,
    config: LearnerConfig,
    micro_batch_size: int,
    accumulation_steps: int,
) -> DeepSpeedEngine:
    """Put `module` (complete, on any device) under DeepSpeed at the learner's ZeRO stage.

    Without an `optimizer` the engine only runs forward; stage 3 still partitions the parameters.
    """
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if dist.get_world_size() == 1:  # there is nothing to exchange, and nothing to round for it
        config = dataclasses.replace(config, communication="fp32")
    exact = module.round_weights() if config.rounds_weights else {}
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_config(config, parameters, micro_batch_size, accumulation_steps),
    )
    if isinstance(optimizer, MasterOptimizer):
        optimizer.keep_masters()
    if exact and optimizer is not None:
        set_masters(engine, exact)
    if optimizer is not None and optimizer.needs_shards:
        optimizer.use(Shards.of(engine))
    if optimizer is not None and config.zero_stage in (1, 2):
        engine.optimizer.compute_grad_norm = False  # the learner's own is of all its parameters
        # Else it would hold views of the moments, also of those that a stage has forgotten.
        engine.optimizer._hp_optimizer_states_linked = True
        if are_flat(config):
            flatten_gradients(engine, engine.communication_data_type)
    if config.zero_stage == 3 and replaces():
        if optimizer is not None:
            streamline(engine)
        if dist.get_world_size() > 1:
            narrow = config.rounds_weights or config.communication == "bf16"
            gather_flat(engine.module, torch.bfloat16 if narrow else torch.float32)
    if config.zero_stage == 0 and dist.get_world_size() == 1:
        # One rank has nothing to reduce; this saves copying all gradients to a bucket and back.
        engine.enable_backward_allreduce = False
    return engine


def deepspeed_config(
    config: LearnerConfig, parameters: int, micro_batch_size: int, accumulation_steps: int
) -> dict[str, Any]:
    """The DeepSpeed JSON of a learner with this many parameters.

    It does not set the precision. Parameters have their dtype already, gradients are added up in
    float32, and the learner's forward pass autocasts, which is correct at every stage (DeepSpeed's
    `bf16` adds up in bfloat16 at stage 0, and has the host wait to look for overflows). It does not
    set clipping either, because the learner's optimizer clips.
    """
    bucket = bucket_size(parameters)
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": 0.0,
        "communication_data_type": config.communication,
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            # Else stages 1 and 2 copy every gradient once more, in a loop over the ranks. Stage 3
            # would add up whole gradients on every rank without it.
            "reduce_scatter": config.zero_stage == 3,
            # A single bucket is full only when the backward pass ends, so there is nothing to
            # overlap with, and DeepSpeed would wait for the device.
            "overlap_comm": on_gpu() and parameters > bucket and not are_flat(config),
            "stage3_prefetch_bucket_size": bucket,
            "stage3_param_persistence_threshold": 10_000,
            "memory_efficient_linear": False,  # for the whole process: see `partitioned_linear`
            **_offload(config),
        },
        "timers": {"throughput": {"enabled": False}},  # it would sync with the device every pass
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def are_flat(config: LearnerConfig) -> bool:
    """Whether gradients are reduced as flat tensors, and not in DeepSpeed's buckets."""
    return config.zero_stage in (1, 2) and config.offload == "none" and replaces()


def import_for_engines() -> None:
    """Import what DeepSpeed's first engine would: it looks for its Muon, which loads a compiler.

    This takes two seconds. Forks of a process that has called it do not spend them again.
    """
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def _offload(config: LearnerConfig) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": on_gpu()}
    kept = {
        "offload_optimizer": config.offload != "none" and not config.frozen,
        "offload_param": config.offload == "parameters",
    }
    return {key: host for key, wanted in kept.items() if wanted}


@contextlib.contextmanager
def partitioned_linear() -> Iterator[None]:
    """Make linear layers in the block save no whole weights for their backward, as at stage 3.

    DeepSpeed's `memory_efficient_linear` would do this for the whole process. The rounding of one
    learner's gradients would then depend on the other learners in the job.
    """
    usual = nn.functional.linear
    nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        nn.functional.linear = usual


def forget_gradients(engine: DeepSpeedEngine) -> None:
    """Clear the gradients of the previous step at stages 1 to 3, before a step's first backward.

    A parameter may get no gradient in a step, because a term of the objective is off. At stage 3,
    and with optimizer states in host memory, DeepSpeed would then reuse the parameter's last one.
    """
    wrapper, masters = engine.optimizer, "single_partition_of_fp32_groups"
    if engine.zero_optimization_stage() == 3:
        wrapper.grad_partitions_flat_buffer.zero_()
        masters = "fp32_partitioned_groups_flat"
    for master in getattr(wrapper, masters):
        if master.grad is not None:  # optimizer states are in host memory
            master.grad.zero_()


def squared_norm_part(engine: DeepSpeedEngine) -> Tensor:
    """This rank's part of the squared L2 norm of the gradient: float64 [], on the device.

    The sum over the ranks is the squared norm of the whole gradient, as the step's backward passes
    left it. DeepSpeed's own norms take a collective for each parameter group, and the host waits
    for each. Here the step adds up the parts of all learners at once.
    """
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        gradients = fill_gradients(engine)  # equal on all ranks: one counts
        return squared_norm(gradients if dist.get_rank() == 0 else [], engine.device)
    if getattr(wrapper, "offload_optimizer" if stage == 3 else "cpu_offload"):
        norms = list(wrapper.norm_for_param_grads.values())  # taken on the way to the host
        none = torch.zeros((), dtype=torch.float64, device=engine.device)
        return torch.stack(norms).double().square().sum() if norms else none
    groups = wrapper.averaged_gradients.values()
    return squared_norm([part for group in groups for part in group], engine.device)


def fill_gradients(engine: DeepSpeedEngine) -> list[Tensor]:
    """The gradients that the optimizer reads at stage 0: of the parameters, or of their masters.

    A parameter without a gradient gets one of zeros, as DeepSpeed does at the other stages, and on
    several ranks.
    """
    stepped = [tensor for group in engine.optimizer.param_groups for tensor in group["params"]]
    for parameter in stepped:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in stepped]


def backward(engine: DeepSpeedEngine, loss: Tensor, loss_scale: float) -> None:
    """Accumulate the gradients of `loss` (a scalar) summed over the ranks, x `gradient_scale`."""
    loss = loss * dist.get_world_size()  # DeepSpeed averages over ranks
    engine.backward(loss * gradient_scale(loss_scale), scale_wrt_gas=False)
    if isinstance(engine.optimizer, MasterOptimizer):
        engine.optimizer.take_gradients()


def gradient_scale(loss_scale: float) -> float:
    """The scale of gradients averaged over the ranks, if each computes at `loss_scale`.

    Dividing by the number of ranks makes float16 overflow at the same scale on any number of ranks.
    """
    return loss_scale if loss_scale == 1.0 else loss_scale / dist.get_world_size()


def join_process_group() -> torch.device:
    """Join the process group that RANK, WORLD_SIZE and MASTER_ADDR describe; returns our device.

    The backend is gloo on CPUs and NCCL on GPUs. DeepSpeed's own entry point is not used, because
    it compiles a shared-memory extension on CPUs; its engines share the group that exists. Raises
    TrainingError where the GPU cannot be used, the limit on open files is too low, or the ranks
    cannot connect.
    """
    device = own_device()
    if device.type == "cuda":
        backend, os.environ["LOCAL_RANK"] = "nccl", str(device.index)  # DeepSpeed's device, too
    else:
        backend = "gloo"
        # Needs a compiler, and gains nothing on gloo. On a GPU the first look at this table would
        # probe every operator of DeepSpeed, each of which prints that there is no nvcc.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    allow_open_files(int(os.environ["WORLD_SIZE"]))
    ticks = os.environ["RANK"] == "0"
    with work(f"meeting the other ranks at {meeting_place()}", ticks=ticks), named_meeting():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    assert dist.is_initialized()
    limit_waiting()  # until the config is known
    deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD  # else it creates a second, equal group
    watch_collectives()
    return device


def free_engine(engine: DeepSpeedEngine) -> None:
    """Let an engine's weights, gradients and optimizer states be freed with the last reference."""
    module = engine.module
    engine.destroy()
    forget(module)


def has_means(engine: DeepSpeedEngine) -> bool:
    """Whether there are means of the weights: after the first step, or checkpoint."""
    optimizer = torch_optimizer(engine)
    return optimizer is not None and any(AVERAGE in state for state in optimizer.state.values())


@contextlib.contextmanager
def averaged(engine: DeepSpeedEngine) -> Iterator[None]:
    """Give the model its averaged weights in the block, and its own afterwards, to the last bit.

    A parameter without a mean, which has never been trained, keeps its weights.
    """
    _exchange(engine)
    try:
        yield
    finally:
        _exchange(engine)


@torch.no_grad()
def _exchange(engine: DeepSpeedEngine) -> None:
    """Exchange weights and means, without a copy of all of them."""
    optimizer = torch_optimizer(engine)
    assert optimizer is not None
    for holder, state in optimizer.state.items():
        if AVERAGE in state:
            weights = holder.detach().clone()
            holder.data.copy_(state[AVERAGE])
            state[AVERAGE].copy_(weights)
    refresh(engine)


@torch.no_grad()
def average_checkpoints(engine: DeepSpeedEngine, name: str, earlier: Sequence[Checkpoint]) -> None:
    """Set the means to the mean of the current weights and the weights in `earlier` checkpoints.

    Checkpoints without this learner, or with another shape of it, do not count.
    """
    optimizer = torch_optimizer(engine)
    assert optimizer is not None
    pieces = [piece for piece in layout(engine) if piece.group != FROZEN]
    shapes = {piece.name: list(piece.shape) for piece in pieces}
    readers = [
        checkpoint.weights_of(name) for checkpoint in earlier if checkpoint.fits(name, shapes)
    ]
    for piece in pieces:
        total = piece.of(piece.holder).clone()
        for read in readers:
            total += read(piece)
        state = optimizer.state[piece.holder]
        if AVERAGE not in state:
            state[AVERAGE] = torch.zeros_like(piece.holder, requires_grad=False)
        piece.of(state[AVERAGE]).copy_(total / (1 + len(readers)))
