"""The device that a rank computes on, and the GPUs that are refused, without any GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from commands.training import launch_ranks
from configs.errors import OptionError
from tests.conftest import TINY_JOB, tandem
from tests.fork_server import REPOSITORY
from tests.gpu_kit.ranks import run_as_rank_zero
from trainer import device
from trainer.errors import TrainingError
from trainer.watch.ranks import explained

RANK_OF_TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "15999",
}
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def gpus(monkeypatch):
    """Simulated GPUs, each like an H100; yields what is set, by name."""
    made = {"count": 4, "capability": (9, 0)}
    fakes = {
        "is_available": lambda: made["count"] > 0,
        "device_count": lambda: made["count"],
        "set_device": lambda device: made.update(device=str(device)),
        "get_device_capability": lambda device: made["capability"],
        "get_device_name": lambda device: "Tesla V100-SXM2-32GB",
        "get_arch_list": lambda: CU130,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    yield made
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("count", "local_rank", "found"), [(4, 3, "cuda:3"), (1, 3, "cuda:0")])
def test_a_rank_takes_its_own_gpu_whether_it_is_shown_all_or_one(gpus, count, local_rank, found):
    gpus["count"] = count
    assert str(device.own_device({"LOCAL_RANK": str(local_rank)})) == gpus["device"] == found


def test_more_ranks_than_gpus_are_refused(gpus):
    gpus["count"] = 2
    with pytest.raises(TrainingError, match=r"local rank 3 sees 2 GPUs .*: 0,1"):
        device.own_device({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"})


def test_two_ranks_on_one_gpu_are_told_so(monkeypatch):
    """Each of them sees one GPU, as a rank does that is shown its own only; NCCL knows better."""
    monkeypatch.setenv("RANK", "1")
    nccl = "ncclInvalidUsage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    for said, wanted in ((nccl, "rank 1 computes on the same GPU"), ("aborted", "lost the connec")):
        assert wanted in str(explained(torch.distributed.DistBackendError(said)))


def test_more_processes_than_gpus_are_refused_before_any_starts(gpus):
    gpus["count"] = 1
    with pytest.raises(OptionError, match=r"--nproc 2: a rank needs a GPU .* shows 1; leave"):
        launch_ranks(["train", "demo"], lambda: 0, nproc=2)


def test_float32_products_use_tf32_on_a_gpu_only(gpus):
    assert torch.get_float32_matmul_precision() == "highest"
    device.own_device({})
    assert torch.get_float32_matmul_precision() == "high"


FAULTS = """
import resource, torch
from trainer import device

def faults():
    "Those of ten tensors of 40 MB, one after the other, once fifty have come and gone."
    for number in range(60):
        if number == 50:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

by_default = faults()
device.own_device({})
print(by_default, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_a_process_on_a_cpu_keeps_the_memory_that_it_frees():
    """In a process of its own: a fork may use a part of the heap that cannot hold them.

    Small chunks that malloc keeps in between let it take some more memory first.
    """
    command = [sys.executable, "-c", FAULTS]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True)
    by_default, kept = map(int, ran.stdout.split())
    assert by_default >= 10 * 20, "pages of 2 MB at most"
    assert kept < by_default / 10


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((7, 0), CU130, False),
        ((7, 0), ["sm_70", *CU130], True),
        ((8, 9), CU130, True),  # binary code for 8.6
        ((8, 0), ["sm_86"], False),
        ((12, 1), ["sm_90", "compute_120"], True),
        ((8, 0), ["compute_90"], False),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_what_a_build_runs_on(capability, built_for, runs):
    assert device.has_kernels(capability, built_for) is runs


def test_a_gpu_that_the_build_has_no_kernels_for_is_refused(gpus):
    gpus["capability"] = (7, 0)
    with pytest.raises(TrainingError, match=r"V100-SXM2-32GB \(sm_70\): .* for sm_75, .* only"):
        device.own_device({})


@pytest.fixture
def driver(tmp_path, monkeypatch, gpus):
    """An H100 with an old driver, which PyTorch cannot use."""
    gpus["count"] = 0
    facts = tmp_path / "gpus" / "0000:0a:00.0"
    facts.mkdir(parents=True)
    (facts / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t 42\n")
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n"
    (tmp_path / "version").write_text(version)
    monkeypatch.setattr(device, "DRIVER", tmp_path)
    return tmp_path


def test_a_cuda_build_does_not_train_on_the_cpu_beside_a_gpu(driver):
    with pytest.raises(TrainingError, match=r"use NVIDIA H100 80GB HBM3 with driver 535\.104\.05;"):
        device.own_device({})


def test_a_cuda_build_does_not_train_on_the_cpu_where_it_was_given_gpus(
    gpus, tmp_path, monkeypatch
):
    gpus["count"] = 0
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    with pytest.raises(TrainingError, match="cannot use GPU 0,1 with no driver;"):
        device.own_device({"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("visible", device.NO_GPU)
def test_the_cpu_can_be_asked_for(driver, visible):
    assert str(device.own_device({"CUDA_VISIBLE_DEVICES": visible})) == "cpu"


def test_a_cpu_build_only_warns_in_commands_other_than_training(driver, monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert str(device.own_device({})) == "cpu"
    assert "is built for CPUs, beside NVIDIA H100 80GB HBM3; install a build" in caplog.text


@pytest.mark.parametrize("build", [None, "13.0"])
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_job_beside_an_unused_gpu_is_refused_unless_its_device_is_cpu(
    driver, monkeypatch, build, wanted
):
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(TrainingError, match=r"NVIDIA H100 80GB HBM3.*; install .* device=cpu"):
        device.choose_device(wanted, {})
    environment: dict[str, str] = {}
    device.choose_device("cpu", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def test_a_job_for_gpus_is_refused_where_there_is_none(gpus, monkeypatch, tmp_path):
    gpus["count"] = 0
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(TrainingError, match=r"device: cuda, but .* sees no GPU .*: empty\);"):
        device.choose_device("cuda", hidden)
    device.choose_device("auto", hidden)


@pytest.fixture
def listed_gpu(tmp_path):
    """The environment of a machine whose `nvidia-smi` lists a GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA RTX A2000 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA")
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("command", ["train", "store", "finetune"])
def test_no_command_trains_silently_on_the_cpu_beside_a_gpu(
    listed_gpu, command, launched, tmp_path, corpus
):
    if launched and command == "finetune":
        pytest.skip("ranks of a task's job are started as `tandem train`")
    task = ["single_sentence", "--model", tmp_path, "data.train=a.tsv", "data.validation=b.tsv"]
    argv = task if command == "finetune" else [TINY_JOB, f"data.path={corpus}"]
    environment = {**listed_gpu, **(RANK_OF_TORCHRUN if launched else {})}
    done = tandem(command, *argv, **environment)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "built for CPUs, beside NVIDIA RTX A2000; install a build" in line
    assert "device=cpu" in line


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA")
@pytest.mark.parametrize("launched", [False, True])
def test_a_run_on_the_cpu_by_request_says_first_how_it_computes(
    listed_gpu, tmp_path, corpus, launched
):
    words = [f"data.path={corpus}", f"output_dir={tmp_path}", "device=cpu"]
    words += ["steps=2", "batch.growth=[{step: 1, size: 16}]"] if launched else ["steps=1"]
    environment = {**listed_gpu, **(RANK_OF_TORCHRUN if launched else {})}
    ranks = [] if launched else ["--nproc", 2]
    done = tandem("train", TINY_JOB, *words, *ranks, **environment)
    assert done.returncode == 0, done.stderr
    batch = "largest batch 16 = 4 x 4 x 1" if launched else "batch 8 = 4 x 1 x 2"
    ranks = "1 rank" if launched else "2 ranks"
    assert done.stdout.splitlines()[0] == (
        f"CPU · {ranks} · 1 thread each · fp32 · {batch} "
        f"(micro-batch x accumulation x ranks) · {tmp_path}/tiny"
    )


ON_THE_CPU = """
import os, sys, torch

def is_available():
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "", "it would initialise CUDA, with all GPUs"
    return False

torch.cuda.is_available, torch.cuda.device_count = is_available, lambda: 2 * (
    os.environ.get("CUDA_VISIBLE_DEVICES") != ""
)
from tandem import main
try:
    main()
finally:
    print(os.environ["DS_ACCELERATOR"])
"""


def test_a_job_on_the_cpu_asks_for_no_gpu_before_it_has_hidden_them(tmp_path):
    """CUDA reads which GPUs it may see once: at the first `torch.cuda.is_available()`."""
    words = [f"data.path={tmp_path}", f"output_dir={tmp_path}", "device=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    for variable in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        environment.pop(variable, None)
    ran = subprocess.run(
        [sys.executable, "-c", ON_THE_CPU, "train", TINY_JOB, *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "it would initialise CUDA" not in ran.stderr
    assert ran.stdout.splitlines()[-1] == "cpu", ran.stderr


ON_GPUS = """
import os, torch
torch.cuda.device_count = lambda: 2
import model
print(os.environ["DS_ACCELERATOR"])
"""


def test_a_rank_on_gpus_has_not_the_device_of_the_login_node_that_submitted_it():
    """`tandem submit` names it too, and sbatch hands its environment on."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}
    ran = subprocess.run([sys.executable, "-c", ON_GPUS], env=environment, capture_output=True)
    assert ran.stdout == b"cuda\n", ran.stderr


def rank_3_with_one_gpu():
    """The engine of a rank whose launcher shows it one GPU, and the device DeepSpeed selects."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator

    from tests.gpu_kit.device import PretendedGpu, pretend_gpu
    from tests.trainer import tiny
    from trainer.batch_config import StepShape
    from trainer.learner_names import TEACHER
    from trainer.learners import engine
    from trainer.learners.learner import Learner

    pretend_gpu()
    os.environ["LOCAL_RANK"] = "3"
    current = []
    one_gpu = {"device_count": lambda self: 1, "set_device": lambda self, n: current.append(n)}
    init = engine.deepspeed.init_distributed

    def enter_gloo(**_: object) -> None:
        init()

    with (
        mock.patch.multiple(PretendedGpu, **one_gpu),
        mock.patch.object(engine, "own_device", return_value=torch.device("cuda", 0)),
        mock.patch.object(engine.deepspeed, "init_distributed", side_effect=enter_gloo),
    ):
        assert get_accelerator().device_count() == 1
        engine.join_process_group()
        config = tiny.learner_configs((0, 0, 0))[TEACHER]
        Learner(TEACHER, config, config.model, StepShape(20, 3, 2, 2))
    return current


def test_deepspeed_takes_the_same_gpu():
    assert set(run_as_rank_zero(rank_3_with_one_gpu, 2)) == {0}
