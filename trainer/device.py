"""The device and the process groups of this process, and errors for a GPU that cannot be used.

Each gloo group costs a rank one socket per other rank; each NCCL group costs GPU memory.
"""

import contextlib
import ctypes
import logging
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import deterministic

from trainer.errors import TrainingError

_log = logging.getLogger(__name__)
DRIVER = Path("/proc/driver/nvidia")  # exists where NVIDIA's kernel driver is loaded
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")  # sm_80, sm_90a, compute_120
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
DEVICE_FILE = Path("/dev/nvidia0")
NO_GPU = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES; the last one is SLURM's


def own_device(env: Mapping[str, str] = os.environ) -> torch.device:
    """This rank's GPU, made the current one, or the CPU where there is no GPU.

    A launcher may show a rank all GPUs of its node or only its own. On a GPU, float32 matrix
    products use TF32 (NVIDIA_TF32_OVERRIDE=0 in the environment turns that off). On a CPU the
    process keeps the memory that it frees.

    A build of PyTorch for CPUs warns beside a GPU. Raises TrainingError where a build for CUDA does
    not see the GPU that is there.
    """
    if not torch.cuda.is_available():
        _refuse_unused_gpu(env, refuse=torch.version.cuda is not None)
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
    much as the work on them: a tenth of a step (benchmarks/LIMITS.md).
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


def choose_device(wanted: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Make this process, and those that it starts, compute on the `device` of a job.

    Call it before CUDA is initialised. Raises TrainingError where there is a GPU that cannot be
    used, or none although `wanted` is "cuda".
    """
    if wanted == "cpu":
        env["CUDA_VISIBLE_DEVICES"], env["DS_ACCELERATOR"] = "", "cpu"
    elif not torch.cuda.device_count():
        _refuse_unused_gpu(env, refuse=True)
        if wanted == "cuda":
            visible = env.get("CUDA_VISIBLE_DEVICES", "not set")
            raise TrainingError(
                f"device: cuda, but PyTorch {torch.__version__} sees no GPU (CUDA_VISIBLE_DEVICES: "
                f"{visible or 'empty'}); set device: cpu, or start the job where there is one"
            )


def _refuse_unused_gpu(env: Mapping[str, str], refuse: bool) -> None:
    """Raise TrainingError where there is an NVIDIA GPU that PyTorch does not see, or only warn."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpus = [] if visible in NO_GPU or torch.version.hip else installed_gpus()
    if visible in NO_GPU or not (gpus or visible):
        return
    gpu = gpus[0] if gpus else f"GPU {visible}"
    if torch.version.cuda is None:
        why = f"PyTorch {torch.__version__} is built for CPUs, beside {gpu}"
        remedy = "install a build for the GPU"
    else:
        driver = driver_version()
        of_driver = f"driver {driver}" if driver else "no driver"
        why = f"PyTorch {torch.__version__} cannot use {gpu} with {of_driver}"
        remedy = "install a newer driver or a build for this one"
    if not refuse:
        _log.warning("%s; %s (docs/cluster.md says which)", why, remedy)
        return
    raise TrainingError(
        f"{why}; {remedy} (docs/cluster.md says which), or train on the CPU: device=cpu for a job, "
        "CUDA_VISIBLE_DEVICES= for any command"
    )


def installed_gpus() -> list[str]:
    """The names of the GPUs that NVIDIA's driver knows, whether or not PyTorch can use them."""
    facts = sorted(DRIVER.glob("gpus/*/information"))
    lines = [line for path in facts for line in path.read_text().splitlines()]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names or _listed_gpus() or (["an NVIDIA GPU"] if DEVICE_FILE.exists() else [])


def _listed_gpus() -> list[str]:
    """The names that `nvidia-smi` lists, as where a container or WSL hides the driver's files."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.*?) \(UUID", done.stdout, re.MULTILINE)


def driver_version() -> str | None:
    """The version of NVIDIA's driver, as in "535.104.05"; None where it is not loaded."""
    try:
        version = re.search(r"\d+\.\d+(\.\d+)?", (DRIVER / "version").read_text())
    except OSError:
        return None
    return version[0] if version else None


GLOO_GROUPS = 2  # on the CPU; on GPUs the training's group is NCCL's
FILES = 512  # open files of a rank besides its sockets: shards, logs, libraries
GRACE_SECONDS = 60.0  # time for a hanging rank to write its stacks before collectives time out
ENDLESS = timedelta(days=365)
SAME_GPU = "Duplicate GPU detected"  # what NCCL says when its ranks first meet


@contextlib.contextmanager
def named_meeting() -> Iterator[None]:
    """Turn an error of ranks that connect in the block into a TrainingError that says where."""
    try:
        yield
    except RuntimeError as error:
        if SAME_GPU in str(error):
            raise same_gpu() from error
        reason = str(error).partition("\nException raised from")[0]  # and C++'s stack
        reason = reason.rpartition("Last error:")[2].strip()
        raise TrainingError(
            f"rank {os.environ['RANK']} cannot meet the other ranks at {meeting_place()}: "
            f"{reason}; see that this is rank 0's address, and name a network of all nodes in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error


def meeting_place() -> str:
    """The address at which the ranks meet, which is rank 0's."""
    return "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)


def same_gpu() -> TrainingError:
    """The error of a rank that has the GPU of another."""
    return TrainingError(
        f"rank {os.environ['RANK']} computes on the same GPU as another rank; start as many "
        "ranks per node as it has GPUs, or show each rank its own GPU only"
    )


def allow_open_files(ranks: int) -> None:
    """Raise this process's limit on open files to what a job of this many ranks needs.

    Raises TrainingError where the hard limit is lower.
    """
    needed = GLOO_GROUPS * (ranks + 3) + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < needed:
        raise TrainingError(
            f"{ranks} ranks need {needed} open files each, and the limit is {hard}: raise it "
            "(ulimit -Hn, or LimitNOFILE of slurmd)"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def limit_waiting(hang_timeout_s: float | None = None) -> None:
    """Make the timeout of training's collectives longer than the hang watch's; None: there is none.

    By default they end a process after 10 minutes: before the hang watch has written its stacks,
    and before rank 0 has encoded the examples of a large file, for which the others wait.
    """
    limit = ENDLESS if hang_timeout_s is None else timedelta(seconds=hang_timeout_s + GRACE_SECONDS)
    distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def background_group() -> dist.ProcessGroup:
    """The gloo group for work beside training. Its first call is collective.

    The thread that writes checkpoints uses it and, after the last checkpoint, ranks that wait for
    rank 0. Two threads must not use one group at the same time: they would deadlock. Its
    collectives have no timeout, since a slow disk is not a failure, and the hang watch ends a rank
    that waits in vain.
    """
    assert dist.group.WORLD is not None
    return _beside(dist.group.WORLD)


@lru_cache(maxsize=1)
def _beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    with named_meeting():
        group = dist.new_group(backend="gloo", timeout=ENDLESS)
    assert isinstance(group, dist.ProcessGroup)
    return group
