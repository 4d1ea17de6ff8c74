"""Answers autograd's questions to CUDA's runtime and driver, on a machine without a GPU.

Import it before PyTorch, so that these functions are found before CUDA's. It compiles them: a C++
compiler is needed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

_ANSWERS = """
static signed char devices = 0;
extern "C" void pretend_devices(int count) { devices = static_cast<signed char>(count); }
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
    *flags = 0;
    *active = 0;
    return 0;
}
namespace c10::cuda {
signed char device_count() noexcept { return devices; }
}
"""


def _load() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        options = ["-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        command = ["c++", *options, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=_ANSWERS, text=True, check=True)
        return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)


_answers = _load()


def pretend_devices(count: int) -> None:
    """Make PyTorch believe that there are this many GPUs; at first there is none."""
    _answers.pretend_devices(count)
