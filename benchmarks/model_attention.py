"""Time of attention on a CPU: its kernels, documents in one row, and layers without padding.

    python benchmarks/model_attention.py
    python benchmarks/model_attention.py documents
    python benchmarks/model_attention.py padding

`kernels` prints milliseconds of forward and backward by dtype, padding and length. `documents`
prints what a real token takes in four layers of 256, forward and backward, where each document has
rows of its own, which end in padding, and where `best_fit` puts several into a row. The documents'
lengths are log-normal (median 300 tokens). `padding` prints what the layers of two sizes take
where they compute the real tokens alone, beside all positions, and for which part of the positions
that is. All take CPU time, in one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.turns import median_seconds
from model import Capture, EncoderConfig, Padded, build
from model.attention_kernel import FUSED, PLAIN, AttentionPattern, attend
from model.documents import AttentionMask, Documents

HEADS, HEAD_SIZE, TOKENS = 4, 64, 2048
POSITIONS = 4096  # of a batch of documents
LAST, CPU_TIME = Capture(last_hidden_state=True), time.process_time


def main() -> None:
    """Print one of the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=[*TABLES], nargs="?", default="kernels")
    torch.set_num_threads(1)
    TABLES[parser.parse_args().table]()


def _kernels() -> None:
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


def _documents() -> None:
    print("| length | padding | apart, us | together, us | of apart |\n|---|---|---|---|---|")
    for length in (128, 256, 512):
        rows = _document_rows(length, POSITIONS // length)
        tokens = {name: sum(map(sum, of_arm)) for name, of_arm in rows.items()}
        arms = {name: partial(_learn, of_arm, length) for name, of_arm in rows.items()}
        seconds = median_seconds(arms, 3, CPU_TIME)
        apart, together = (1e6 * seconds[name] / tokens[name] for name in ("apart", "together"))
        padding = 1 - tokens["apart"] / POSITIONS
        print(
            f"| {length} | {padding:.0%} | {apart:.1f} | {together:.1f} | {together / apart:.2f} |"
        )


def _document_rows(length: int, count: int) -> dict[str, list[list[int]]]:
    """The sizes of the documents in each of `count` rows: one a row, and best fit."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(np.log(300), 1.0, 4 * POSITIONS // 300)).astype(int) + 2
    pieces = [min(length, size - start) for size in sizes for start in range(0, size, length)]
    together: list[list[int]] = []
    for piece in sorted(pieces, reverse=True):
        fits = [row for row in together if sum(row) + piece <= length]
        if fits:
            max(fits, key=sum).append(piece)
        else:
            together.append([piece])
    rng.shuffle(together)
    return {"apart": [[piece] for piece in pieces[:count]], "together": together[:count]}


def _learn(rows: list[list[int]], length: int) -> None:
    """Forward and backward of an encoder over rows [B, length]."""
    config = EncoderConfig(
        vocab_size=512, hidden_size=256, layers=4, heads=4, ffn_size=1024, max_positions=length,
        positions="rotary", segment_types=0, pooler="none", dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    mask: AttentionMask | Padded
    if all(len(row) == 1 for row in rows):
        lengths = torch.tensor([row[0] for row in rows])
        mask = Padded(lengths, int(lengths.sum()))
    else:
        mask = Documents.of(torch.tensor([_numbers(row, length) for row in rows]))
    features = build(config, seed=0).features(
        torch.ones(len(rows), length, dtype=torch.long), None, mask
    )
    assert features.last_hidden_state is not None
    features.last_hidden_state.sum().backward()


def _numbers(row: list[int], length: int) -> list[int]:
    numbers = [number for number, size in enumerate(row) for _ in range(size)]
    return numbers + [len(row)] * (length - len(numbers))


def _padding() -> None:
    print("| layers | rows | tokens | trained | inferred |\n|---|---|---|---|---|")
    for hidden, layers in ((256, 4), (768, 1)):
        for rows, length in ((32, 24), (8, 128), (2, 512)):
            for fraction in (0.07, 0.2, 0.4):
                lengths = torch.linspace(length * (1 - 2 * fraction), length, rows).ceil().long()
                padded = Padded(lengths, int(lengths.sum()))
                trained, inferred = (_ratio(hidden, layers, padded, way) for way in (True, False))
                tokens = padded.tokens / (rows * length)
                cells = f"{tokens:.2f} | {trained:.2f} | {inferred:.2f}"
                print(f"| {layers} of {hidden} | {rows} x {length} | {cells} |", flush=True)


def _ratio(hidden: int, layers: int, padded: Padded, trained: bool) -> float:
    """The time of layers on real tokens alone over that on all positions."""
    config = EncoderConfig(
        vocab_size=512, hidden_size=hidden, layers=layers, heads=hidden // 64, pooler="none",
        ffn_size=4 * hidden, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = build(config, seed=0)
    ids = torch.ones(len(padded.lengths), int(padded.lengths.max()), dtype=torch.long)

    def run(mask: Padded | Tensor) -> None:
        with torch.inference_mode(not trained):
            states = model.features(ids, None, mask, capture=LAST).last_hidden_state
        if trained:
            assert states is not None
            states.sum().backward()

    arms = {"tokens": partial(run, padded), "all": partial(run, padded.lengths)}
    seconds = median_seconds(arms, 3, CPU_TIME)
    return seconds["tokens"] / seconds["all"]


TABLES = {"kernels": _kernels, "documents": _documents, "padding": _padding}


if __name__ == "__main__":
    main()
