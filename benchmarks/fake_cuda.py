"""A CUDA device without one: fake tensors on cuda:0, and the kernels that a GPU would be given.

It needs a CUDA build of PyTorch. Import it before PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.cuda_answers import pretend_devices

# isort: split
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda:0")
CAPABILITY = (9, 0)  # an H100's; kernels are chosen alike from 8.0 on
MOST = 127  # devices; autograd asks about every number that one may have
aten = torch.ops.aten


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Fake tensors may be on `CUDA`, with its autocast and its kernels of attention."""
    torch._C._ensureCUDADeviceGuardSet()  # one that does nothing, since there is no device yet
    pretend_devices(MOST)
    answers: dict[str, Any] = {
        "torch.cuda.get_device_capability": lambda *_: CAPABILITY,
        "torch.cuda.is_bf16_supported": lambda *_: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.functional.scaled_dot_product_attention": attention,
    }
    with contextlib.ExitStack() as patches:
        patches.callback(pretend_devices, 0)
        for name, answer in answers.items():
            patches.enter_context(mock.patch(name, answer))
        yield patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """The kernel that `scaled_dot_product_attention` chooses at capability 8.0.

    PyTorch's own choice asks the driver. On newer GPUs it may prefer cuDNN's kernels, which compute
    the same products. q, k and v are [B, A, L, D]; masks are bool.
    """
    half, size = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    if half and attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, False, False, scale=scale)[0]
    if size % (8 if half else 4) == 0:
        efficient = aten._scaled_dot_product_efficient_attention
        bias = None if attn_mask is None else _bias(attn_mask, q, k)
        return efficient(q, k, v, bias, True, dropout_p, False, scale=scale)[0]
    plain = aten._scaled_dot_product_attention_math
    return plain(q, k, v, attn_mask, dropout_p, False, scale=scale)[0]


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    none = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    return none.masked_fill(~mask, -torch.inf).expand(*q.shape[:3], k.shape[2])
