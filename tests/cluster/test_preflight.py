"""The check that each node passes before training."""

import os
import re
import subprocess
import sys
from unittest import mock

import pytest

from cluster import preflight
from cluster.local import becoming, launch
from cluster.ranks import Ranks, free_port
from cluster.slurm import SOURCE


def test_run_folder(tmp_path):
    assert preflight.folder_fault(tmp_path) is None
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    gone = tmp_path / "no"
    assert preflight.folder_fault(gone) == f"{gone}: No such file or directory"


@pytest.mark.parametrize(
    ("cuda", "hip", "gpus", "words"),
    [
        (None, None, 8, r"^PyTorch \S+ of \S+ is built without CUDA, but the job requests 8 GPUs"),
        (None, None, 0, None),
        ("13.0", None, 8, None),
        (None, "6.4", 8, None),
    ],
)
def test_a_pytorch_without_cuda_is_no_fault_of_a_node(monkeypatch, cuda, hip, gpus, words):
    monkeypatch.setattr(preflight.torch.version, "cuda", cuda)
    monkeypatch.setattr(preflight.torch.version, "hip", hip)
    found = preflight.build_fault(gpus)
    assert found is None if words is None else re.search(words, found)


def test_what_no_other_node_would_cure_is_told_apart(tmp_path, capsys, monkeypatch):
    """Too little space in the shared run folder, and a node that sees no GPU."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(preflight, "connection_fault", lambda *_: None)
    assert preflight.main(tmp_path, 0, 1e6) == 1
    assert re.fullmatch(r"wrong n1: .*GB free of 1e\+06 needed.*\n", capsys.readouterr().out)
    monkeypatch.setattr(preflight.torch.version, "cuda", "13.0")
    assert preflight.main(tmp_path, 99, 0) == 1
    assert re.fullmatch(r"bad n1: \d+ of 99 GPUs found\n", capsys.readouterr().out)


def test_missing_gpus():
    found = preflight.torch.cuda.device_count()
    assert preflight.device_fault(found) is None
    assert preflight.device_fault(found + 1) == f"{found} of {found + 1} GPUs found"


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        ("echo 0, 0; echo 1, 3", "GPU 1 has 3 uncorrected memory errors; reset it"),
        ("echo 0, 0; echo 1, [N/A]", None),
        ("exit 9", "nvidia-smi: .* returned non-zero exit status 9"),
    ],
)
def test_gpu_memory_as_nvidia_smi_sees_it(says, fault, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{says}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = preflight.memory_fault(2)
    assert found is None if fault is None else re.match(fault, found)
    assert preflight.memory_fault(0) is None


def test_ranks_that_meet(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    argv = [sys.executable, str(SOURCE / "tandem.py"), "preflight", str(tmp_path), "0", "0.001"]
    assert launch(becoming(argv), 2) == 0
    assert capfd.readouterr().out == "ok n1\n"


def test_a_node_is_not_blamed_when_another_is_silent(monkeypatch):
    """The silent node is to blame then, not this one."""
    monkeypatch.setattr(preflight, "MEETING_SECONDS", 0.5)
    assert preflight.connection_fault(Ranks(0, 2, 0, 1, 0, "127.0.0.1", free_port()), 0) is None


def test_the_first_node_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(preflight, "MEETING_SECONDS", 0.5)
    port = free_port()
    fault = preflight.connection_fault(Ranks(1, 2, 0, 1, 1, "127.0.0.1", port), 0)
    assert fault is not None
    word, reason = fault
    assert word == "cut"
    assert reason.startswith(f"cannot reach 127.0.0.1:{port}")
    assert "\n" not in reason


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    monkeypatch.setattr(preflight, "MEETING_SECONDS", 0.5)
    fault = preflight.connection_fault(Ranks(0, 1, 0, 1, 0, "127.0.0.1", free_port()), 0)
    assert fault is not None
    assert "no interface ib7" in fault[1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert preflight.own_address("192.0.2.1") == "127.0.0.1"


def test_what_nccl_says_last_is_the_reason(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    said = (
        "NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.27.3\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
        "Last error:\nsocketPollConnect: connect to 10.0.0.2<4711> returned Connection refused\n"
        "Exception raised from checkForNCCLErrors at NCCLUtils.cpp (most recent call first):\nat"
    )
    failing = mock.Mock(side_effect=preflight.dist.DistBackendError(said))
    monkeypatch.setattr(preflight.dist, "init_process_group", failing)
    fault = preflight.connection_fault(Ranks(0, 1, 0, 1, 0, "127.0.0.1", free_port()), 0)
    refused = "socketPollConnect: connect to 10.0.0.2<4711> returned Connection refused"
    assert fault == ("cut", f"all-reduce failed: {refused}")


def test_an_address_that_every_node_has_is_the_fault_of_none(monkeypatch):
    """That of docker0."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")
    same = [f"172.17.0.1:{port}" for port in (1, 2, 3)]
    expected = (
        "wrong",
        "several nodes have the address 172.17.0.1 of docker0; set interface to another",
    )
    assert preflight.reachability_fault(0, same, ["1 2", "0 2", "0 1"]) == expected


def test_whom_most_peers_miss_is_cut_off():
    present = [f"10.0.0.{number}:1" for number in range(4)]
    reports = ["2", "2", "0 3", "2"]  # what each node cannot reach: nobody reaches 2
    faults = [preflight.reachability_fault(rank, present, reports) for rank in range(4)]
    assert [fault and fault[0] for fault in faults] == [None, None, "cut", None]


@pytest.mark.gpu
@pytest.mark.skipif(not preflight.torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_compute_and_meet(tmp_path):
    """On a machine with a GPU: the device check, and a sum over NCCL."""
    command = [sys.executable, str(SOURCE / "tandem.py"), "preflight", str(tmp_path), "1", "0.001"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.stdout.startswith("ok "), result.stdout + result.stderr
