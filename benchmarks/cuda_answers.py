"""Answers autograd's questions about a GPU, on a machine without one and in any build of PyTorch.

Import it before PyTorch, which asks some of them while it is imported. It compiles the answers: a
C++ compiler is needed.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

_ANSWERS = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using c10::Device, c10::DeviceIndex, c10::Stream;

namespace at {
struct CUDAHooks : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    bool isBuilt() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
    Stream getStream(Device) const noexcept override {
        return Stream(Stream::DEFAULT, getDevice());
    }
    void record(void **, const Stream &, DeviceIndex, c10::EventFlag) const override {}
    void block(void *, const Stream &) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


def _load() -> None:
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    installed = Path(torch.origin).parent
    libraries = installed / "lib"
    link = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "answers.so"
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{installed / 'include'}"]
        command = ["c++", *options, "-o", str(library), "-x", "c++", "-", *link]
        subprocess.run(command, input=_ANSWERS, text=True, check=True)
        ctypes.CDLL(str(library))


_load()
