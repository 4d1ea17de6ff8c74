"""The device that this process computes on, and errors for a GPU that cannot be used."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.utils import deterministic

from trainer.errors import TrainingError

_log = logging.getLogger(__name__)
DRIVER = Path("/proc/driver/nvidia")  # exists where NVIDIA's kernel driver is loaded
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")  # sm_80, sm_90a, compute_120
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
NO_GPU = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES; the last one is SLURM's


def own_device(env: Mapping[str, str] = os.environ) -> torch.device:
    """This rank's GPU, made the current one, or the CPU where there is no GPU.

    A launcher may show a rank all GPUs of its node or only its own. On a GPU, float32 matrix
    products use TF32 (NVIDIA_TF32_OVERRIDE=0 in the environment turns that off). On a CPU the
    process keeps the memory that it frees.

    Raises TrainingError where there is a GPU that cannot be used.
    """
    if not torch.cuda.is_available():
        _require_no_gpu(env)
        _keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", gpu_number(int(env.get("LOCAL_RANK", "0")), env))
    torch.cuda.set_device(device)
    _require_kernels(device)
    torch.set_float32_matmul_precision("high")
    return device


def _keep_freed_memory() -> None:
    """Let malloc reuse freed memory, where there is glibc, rather than return it to the system.

    By default each large tensor is mapped and unmapped, and the first touch of its pages costs as
    much as the work on them: a tenth of a step (benchmarks/RESULTS.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # A threshold above 32 MB in place of "never map" is refused before glibc 2.35.
    if mallopt is not None and mallopt(_MMAP_MAX, 0):
        mallopt(_TRIM_THRESHOLD, -1)


def fix_order_of_sums() -> None:
    """Have this process use only kernels that add in the same order each time (docs of PyTorch:
    "Reproducibility"), attention's backward pass among them. Call it before the first product.

    An operator without such a kernel raises RuntimeError, which names it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Nothing here reads such memory. The module replaces its class, which type checkers cannot see.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    _log.info("deterministic kernels: %s", torch.are_deterministic_algorithms_enabled())


def gpu_number(local_rank: int, env: Mapping[str, str] = os.environ) -> int:
    """The number, among the visible GPUs, of the GPU for the rank with this local rank."""
    count = torch.cuda.device_count()
    if count == 1 or local_rank < count:
        return 0 if count == 1 else local_rank
    visible = env.get("CUDA_VISIBLE_DEVICES", "not set")
    raise TrainingError(
        f"local rank {local_rank} sees {count} GPUs (CUDA_VISIBLE_DEVICES: {visible}); start as "
        "many ranks per node as it has GPUs, or show each rank its own GPU only"
    )


def has_kernels(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a CUDA build for these architectures ("sm_80", "compute_90") runs on a GPU.

    Binary code runs on the same major version from its minor version on; PTX, which the driver
    compiles, on everything newer (CUDA C++ Programming Guide, "Binary Compatibility").
    """
    for kind, major, minor in _ARCHITECTURE.findall(" ".join(built_for)):
        built = int(major), int(minor)
        is_binary = kind == "sm" and built[0] == capability[0]
        if (is_binary or kind == "compute") and built <= capability:
            return True
    return False


def _require_kernels(device: torch.device) -> None:
    if torch.version.cuda is None:
        return  # ROCm has its own names of architectures
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not has_kernels(capability, built_for):
        raise TrainingError(
            f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]}): PyTorch "
            f"{torch.__version__} has kernels for {', '.join(built_for)} only; install a build for "
            "this GPU (docs/cluster.md says which)"
        )


def _require_no_gpu(env: Mapping[str, str]) -> None:
    """Raise TrainingError where PyTorch was built for CUDA and does not see the GPU."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None or visible in NO_GPU:
        return
    gpus, driver = installed_gpus(), driver_version()
    if gpus or visible:
        raise TrainingError(
            f"PyTorch {torch.__version__} cannot use {gpus[0] if gpus else f'GPU {visible}'} with "
            f"{f'driver {driver}' if driver else 'no driver'}; install a newer driver or a build "
            "for this one (docs/cluster.md says which), or set CUDA_VISIBLE_DEVICES= to train on "
            "the CPU"
        )


def installed_gpus() -> list[str]:
    """The names of the GPUs that NVIDIA's driver knows."""
    facts = sorted(DRIVER.glob("gpus/*/information"))
    lines = (line for one in facts for line in one.read_text().splitlines())
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def driver_version() -> str | None:
    """The version of NVIDIA's driver, as in "535.104.05"; None where it is not loaded."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", (DRIVER / "version").read_text())
    except OSError:
        return None
    return found[0] if found else None
