"""Masked-LM pre-training with `transformers` and torch alone: the leaderboard's first entry.

    python benchmarks/leaderboard_baseline.py --tokenizer runs/enwiki/tokenizer --text enwiki.txt \
        --rows runs/rows.npy --out runs/bert --cpu-seconds 900

The method is that of the example `run_mlm`: lines joined and cut into full rows, 15% of the tokens
masked anew in each pass, `BertForMaskedLM` with its own loss, AdamW (fused), gradients clipped at
norm 1, a linear decay after a warm-up. Nothing here comes from Tandem.

After SIGTERM the state is saved in OUT.pt, and the exit code is 75. The same command then goes on
from there, with a new pass over the rows.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

LENGTH = 128  # tokens of a row
WARMUP = 0.06  # of the budget
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def bert(special: dict[str, int]) -> PreTrainedModel:
    """A BERT of the size of the demo's teacher, without dropout."""
    config = BertConfig(
        **SHAPE, **special, intermediate_size=512, max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def modernbert(special: dict[str, int]) -> PreTrainedModel:
    """The architecture of the demo's teacher, configs/model/demo_teacher.yaml."""
    config = ModernBertConfig(
        **SHAPE, **special, intermediate_size=256, max_position_embeddings=LENGTH,
        local_attention=16, global_attn_every_n_layers=4, initializer_range=0.05,
        bos_token_id=special["cls_token_id"], eos_token_id=special["sep_token_id"],
        sparse_prediction=True,  # the output layer reads masked tokens only
    )  # fmt: skip
    return ModernBertForMaskedLM(config)


ARCHITECTURES: dict[str, Callable[[dict[str, int]], PreTrainedModel]] = {
    "bert": bert,
    "modernbert": modernbert,
}


@click.command()
@click.option("--tokenizer", "tokenizer_path", required=True, help="A folder with a tokenizer.")
@click.option("--text", type=Path, required=True, help="The training text.")
@click.option("--rows", type=Path, required=True, help="Its tokens; made if it does not exist.")
@click.option("--out", required=True, help="The folder of the trained model.")
@click.option("--cpu-seconds", type=float, required=True, help="Processor time of the process.")
@click.option("--architecture", type=click.Choice(sorted(ARCHITECTURES)), default="bert")
@click.option("--rate", default=1e-3, show_default=True, help="The peak learning rate.")
@click.option("--mask", default=0.15, show_default=True, help="The fraction of masked tokens.")
@click.option("--batch", default=16, show_default=True, help="Rows of a step.")
@click.option("--bf16", is_flag=True, help="Products in bfloat16, by autocast.")
@click.option("--seed", default=1, show_default=True)
def main(
    tokenizer_path: str,
    text: Path,
    rows: Path,
    out: str,
    cpu_seconds: float,
    architecture: str,
    rate: float,
    mask: float,
    batch: int,
    bf16: bool,
    seed: int,
) -> None:
    """Train a model on a text until the process has used its processor time."""
    state = Path(f"{out}.pt")
    saved = torch.load(state) if state.exists() else None
    set_seed(seed + (saved["step"] if saved else 0))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    if not rows.exists():
        np.save(rows, packed(tokenizer, text.read_text(encoding="utf-8")))
    special = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "cls_token_id": tokenizer.cls_token_id,
        "sep_token_id": tokenizer.sep_token_id,
    }
    model = ARCHITECTURES[architecture](special)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=mask)
    data = batches(np.load(rows), collator, batch)
    stopped = train(model, data, rate, cpu_seconds, saved, bf16)
    if stopped is not None:
        torch.save(stopped, state)
        sys.exit(75)
    state.unlink(missing_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def packed(tokenizer: PreTrainedTokenizerBase, text: str) -> NDArray[Any]:
    """The tokens of all lines, each with its special tokens, in full rows: int32 [rows, LENGTH]."""
    lines = [line for line in text.splitlines() if line.strip()]
    tokens = np.fromiter(chain.from_iterable(tokenizer(lines)["input_ids"]), np.int32)
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


def batches(
    rows: NDArray[Any], collator: DataCollatorForLanguageModeling, size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Masked batches of the rows, in a new order in each epoch, without end."""
    while True:
        order = random.sample(range(len(rows)), len(rows))
        for start in range(0, len(order) - size + 1, size):
            yield collator([{"input_ids": rows[row]} for row in order[start : start + size]])


def train(
    model: PreTrainedModel,
    data: Iterator[dict[str, torch.Tensor]],
    rate: float,
    budget: float,
    saved: dict[str, Any] | None,
    bf16: bool,
) -> dict[str, Any] | None:
    """Train in place until `budget` seconds are used; the rate follows their fraction.

    So the decay ends when the budget does, however fast the machine is. `saved` is the state of an
    earlier sitting; after SIGTERM such a state is the result, and otherwise None.
    """
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)
    begun, seconds, first = used(), 0.0, 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begun, seconds, first = saved["begun"], saved["seconds"], saved["step"]
    is_stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_stopped.set())
    model.train()
    for step, batch in enumerate(data, first):
        if (now := seconds + used()) >= budget:
            return None
        if is_stopped.is_set():
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return {**states, "begun": begun, "seconds": now, "step": step}
        progress = (now - begun) / (budget - begun)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(progress / WARMUP, (1 - progress) / (1 - WARMUP))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):  # it keeps casts of weights
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            click.echo(f"step {step}, {now:.0f} s: loss {loss.item():.3f}")
    return None


def used() -> float:
    """The processor time of this process, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
