"""A short description of the machine that a run uses."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from configs.durations import counted

CPU_FACTS = Path("/proc/cpuinfo")
NOISE = re.compile(r"\((?:R|TM)\)| CPU| Processor| @ .*")  # in the names of processors


def describe() -> str:
    """This machine, such as "8 x NVIDIA H100, 64 cores, 512 GiB" or "AMD EPYC, 2 cores, 24 GiB".

    Counts only what this process may use.
    """
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {counted(cores, 'core')}, {memory:.0f} GiB"


def _processor() -> str:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        return f"{count} x {name}" if count > 1 else name
    if CPU_FACTS.exists():
        for line in CPU_FACTS.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return NOISE.sub("", line.partition(":")[2]).strip()
    return platform.machine()
