"""A CUDA device without one: fake tensors on cuda:0, and the kernels that a GPU would be given.

It needs a CUDA build of PyTorch and a C++ compiler, and must be entered before any use of CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

# What PyTorch asks the driver although nothing runs. Loaded before PyTorch, these answer first.
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
_folder = tempfile.TemporaryDirectory()


def _load_answers() -> ctypes.CDLL:
    library = Path(_folder.name) / "libcuda.so.1"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        [*command, "-x", "c++", "-", "-o", library], input=_ANSWERS, text=True, check=True
    )
    return ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)


_answers = _load_answers()

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda:0")
CAPABILITY = (9, 0)  # an H100's; kernels are chosen alike from 8.0 on
MOST = 127  # devices: autograd asks about every number that a device may have
aten = torch.ops.aten


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Fake tensors may be on `CUDA`, with CUDA's autocast and its kernels of attention."""
    torch._C._ensureCUDADeviceGuardSet()  # one that does nothing, since there is no device yet
    _answers.pretend_devices(MOST)
    answers = {
        "torch.cuda.get_device_capability": lambda *_: CAPABILITY,
        "torch.cuda.is_bf16_supported": lambda *_: True,
        "torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.functional.scaled_dot_product_attention": attention,
    }
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch(name, answer))
        try:
            yield patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        finally:
            _answers.pretend_devices(0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The kernel that `scaled_dot_product_attention` chooses from capability 8.0 on.

    PyTorch's own choice asks the driver. q, k and v are [B, A, L, D]; masks are bool.
    """
    assert not is_causal
    half, size = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    if half and attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, False, False, scale=scale)[0]
    if size % (8 if half else 4) == 0:
        efficient = aten._scaled_dot_product_efficient_attention
        bias = None if attn_mask is None else _bias(attn_mask, q, k)
        return efficient(q, k, v, bias, True, dropout_p, False, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, attn_mask, dropout_p, False, scale=scale)[0]


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    low = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    return low.expand(*q.shape[:3], k.shape[2])
