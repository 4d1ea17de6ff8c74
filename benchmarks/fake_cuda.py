"""A CUDA device without one: fake tensors on cuda:0, and the kernels that a GPU would be given.

Any build of PyTorch will do. Import it before PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import benchmarks.cuda_answers  # noqa: F401

# isort: split
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda:0")
CAPABILITY = (9, 0)  # an H100's; kernels are chosen alike from 8.0 on
H100 = SimpleNamespace(
    name="H100", type="cuda", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=80 << 30,
    multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip
aten = torch.ops.aten


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Fake tensors may be on `CUDA`, with its autocast and its kernels of attention."""
    answers: dict[str, Any] = {
        "torch.accelerator.is_available": lambda: False,  # else its stream is asked for
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda._exchange_device": lambda _: 0,
        "torch.cuda._maybe_exchange_device": lambda _: 0,
        "torch._dynamo.device_interface.CudaInterface.current_device": lambda: 0,
        "torch._dynamo.device_interface.CudaInterface.get_device_properties": lambda *_: H100,
        "torch.cuda.get_device_capability": lambda *_: CAPABILITY,
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.cuda.is_bf16_supported": lambda *_: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.nn.functional.scaled_dot_product_attention": attention,
    }
    with contextlib.ExitStack() as patches:
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
    the same products. q, k and v are [B, A, L, D]; masks are bool, or what is added to the scores.
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
    if mask.dtype == torch.bool:
        none = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        mask = none.masked_fill(~mask, -torch.inf)
    return mask.expand(*q.shape[:3], k.shape[2])
