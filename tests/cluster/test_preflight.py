"""The check that each node passes before training."""

import datetime
import os
import re
import subprocess
import sys

import pytest

from cluster import preflight
from cluster.local import launch
from cluster.ranks import Ranks, free_port


def test_run_folder(tmp_path):
    assert preflight.folder_fault(tmp_path, 0.001) is None
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_run_folder_that_is_not_there(tmp_path):
    assert preflight.folder_fault(tmp_path / "no", 0) == f"{tmp_path}/no: No such file or directory"


def test_full_disk(tmp_path):
    assert "GB free of 1e+06 needed" in str(preflight.folder_fault(tmp_path, 1e6))


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
    argv = [sys.executable, "-m", "cluster.preflight", str(tmp_path), "0", "0.001"]
    assert launch(argv, 2) == 0
    assert capfd.readouterr().out == "ok n1\n"


def test_another_one_stays_away(monkeypatch):
    """Then this node is not to blame: the silent one is."""
    monkeypatch.setattr(preflight, "MEETING", datetime.timedelta(seconds=0.5))
    assert preflight.meeting_fault(Ranks(0, 2, 0, 1, 0, "127.0.0.1", free_port()), 0) is None


def test_the_first_node_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(preflight, "MEETING", datetime.timedelta(seconds=0.5))
    port = free_port()
    fault = preflight.meeting_fault(Ranks(1, 2, 0, 1, 1, "127.0.0.1", port), 0)
    assert str(fault).startswith(f"cannot reach 127.0.0.1:{port}")
    assert "\n" not in str(fault)


@pytest.mark.gpu
@pytest.mark.skipif(not preflight.torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_compute_and_meet(tmp_path):
    """On a machine with a GPU: the device check, and a sum over NCCL."""
    command = [sys.executable, "-m", "cluster.preflight", str(tmp_path), "1", "0.001"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert result.stdout.startswith("ok "), result.stdout + result.stderr
