"""Forward and backward time of both attention kernels on a CPU, behind `choose_kernel`.

python benchmarks/model_attention.py --threads 1
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from model.attention_kernel import FUSED, PLAIN, AttentionPattern, attend

HEADS, HEAD_SIZE, TOKENS = 4, 64, 2048


def main() -> None:
    """Print milliseconds by dtype, padding and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    print("dtype, padded, length: plain, fused (ms)")
    for dtype in (torch.float32, torch.bfloat16):
        for padded in (False, True):
            for length in (64, 128, 256, 512):
                plain, fused = (_measure(k, dtype, padded, length) for k in (PLAIN, FUSED))
                print(f"{dtype}, {padded}, {length}: {plain:.1f}, {fused:.1f}")


def _measure(kernel: str, dtype: torch.dtype, padded: bool, length: int) -> float:
    rows = TOKENS // length
    q, k, v = (_operand(rows, length, dtype) for _ in range(3))
    visible = None
    if padded:
        visible = torch.ones(rows, 1, 1, length, dtype=torch.bool)
        visible[..., -length // 4 :] = False
    times = []
    for _ in range(4):
        began = time.process_time()
        mixed = (
            attend(q, k, v, AttentionPattern.of(kernel, visible, q.dtype), 0.0)
            .transpose(1, 2)
            .flatten(2)
        )
        mixed.backward(torch.ones_like(mixed))
        times.append(time.process_time() - began)
    return 1000 * min(times)


def _operand(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """[rows, heads, length, head size] in the memory order that a dense layer leaves."""
    flat = torch.randn(rows, length, HEADS * HEAD_SIZE, dtype=dtype, requires_grad=True)
    return flat.unflatten(2, (HEADS, HEAD_SIZE)).transpose(1, 2)


if __name__ == "__main__":
    main()
