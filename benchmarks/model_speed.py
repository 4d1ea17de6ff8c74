"""Training speed of the encoder, side by side with `transformers`' BertForMaskedLM.

Forward, backward and AdamW on one micro-batch of random tokens with 15% masked, V = 30,522,
L = 128, no dropout; the same threads, batch, optimizer and precision. The two take turns, so that
other work on the machine meets both. Time is that of the process over all its threads with one
thread, and wall time with more.

    python benchmarks/model_speed.py --size small --precision float32 --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import model
from model.vocabulary_loss import chunked_cross_entropy

SIZES = {"small": (256, 4, 4), "base": (768, 12, 12)}  # hidden size, layers, heads
V, L, MASKED = 30522, 128, 19
MASKED_ONLY = model.Capture(last_hidden_state=False)

Loss = Callable[[], Tensor]


def main() -> None:
    """Print tokens per second of both and the ratio of their medians."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    ids, positions = _batch(arguments.rows)
    sizes = SIZES[arguments.size]
    bfloat16 = arguments.precision == "bfloat16"
    trainees = {
        "transformers": _theirs(sizes, ids, positions),
        "tandem": _ours(sizes, ids, positions),
    }
    steps = {name: _step(*trainee, bfloat16) for name, trainee in trainees.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.steps + 1):
        for name, step in steps.items():
            began = clock()
            step()
            if turn:  # the first allocates and initialises
                seconds[name].append(clock() - began)
    tokens = ids.numel()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {tokens / median:.0f} tokens/s")
    print(f"ratio: {medians['transformers'] / medians['tandem']:.2f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    """Ids [rows, L] and the flat masked positions, MASKED in each row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, V, (rows, L), generator=generator)
    chosen = [torch.randperm(L, generator=generator)[:MASKED] + row * L for row in range(rows)]
    return ids, torch.cat(chosen).sort().values


def _theirs(sizes: tuple[int, int, int], ids: Tensor, positions: Tensor) -> tuple[nn.Module, Loss]:
    hidden, layers, heads = sizes
    config = BertConfig(
        vocab_size=V, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    trained = BertForMaskedLM(config).train()
    labels = torch.full_like(ids, -100)
    labels.view(-1)[positions] = ids.view(-1)[positions]
    return trained, lambda: trained(ids, labels=labels).loss


def _ours(sizes: tuple[int, int, int], ids: Tensor, positions: Tensor) -> tuple[nn.Module, Loss]:
    hidden, layers, heads = sizes
    config = model.EncoderConfig(
        vocab_size=V, hidden_size=hidden, layers=layers, heads=heads, ffn_size=4 * hidden,
        dropout=0.0, attention_dropout=0.0, pooler="none",
    )  # fmt: skip
    trained = model.build(config, seed=0)
    labels = ids.view(-1)[positions]

    def loss() -> Tensor:
        found = trained.features(ids, masked_positions=positions, capture=MASKED_ONLY)
        total, count = chunked_cross_entropy(found.vocabulary_input, *trained.decoder(), labels)
        return total / count

    return trained, loss


def _step(trained: nn.Module, loss: Loss, bfloat16: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
