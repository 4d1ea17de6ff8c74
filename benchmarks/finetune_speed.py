"""Fine-tuning and prediction beside `transformers`' own Trainer: examples per second, and scores.

    python benchmarks/finetune_speed.py --tokenizer DIR --train FILE --validation FILE
        [--layers 4] [--hidden-size 256] [--text sentence] [--batch 32] [--length 64]
        [--epochs 1] [--rate 5e-4] [--rounds 3] [--threads 1]

The files are tables with a header and the columns `--text` and label, as SST-2's. The model is a
random BERT of that size, exported, which every arm loads. The arms are separate processes that take
turns, so that other work on the machine affects them equally: `tandem` (the job of `tandem
finetune`, and the passes of `tandem predict`, which forms its own batches), `random` (the Trainer
with its defaults) and `grouped` (the Trainer with its grouping by length). Each pads to the longest
text of a batch, and has the same batch, threads, optimizer (fused AdamW), clipping and dropout.
Each trains on the whole file, with a new seed in each round, and predicts the validation file,
already encoded. Results are medians over the rounds, in wall-clock and CPU time; on a busy machine
only CPU time with `--threads 1` is meaningful.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learners import join_alone
from commands.job_configs import load_job, prepare
from data_pipeline import TextEncoder
from data_pipeline.tokenization.tokenizer import install, load
from model import EncoderConfig, build, save_pretrained
from trainer.evaluation.finished import SavedLearners
from trainer.learner_names import TEACHER
from trainer.prediction.fine_tuned import head_outputs
from trainer.run import run_job
from trainer.run_folder.folder import RunFolder
from trainer.step import train_step

ARMS = ("tandem", "random", "grouped")
WEIGHT_DECAY = 0.01
Speeds = dict[str, float]


def main() -> None:
    """Run all arms in turn, and print their medians."""
    arguments = _arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    results: dict[str, list[Speeds]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(arguments, Path(folder, "model"))
        for seed in range(1, arguments.rounds + 1):
            for arm in ARMS:
                run = tandem_arm if arm == "tandem" else trainer_arm
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    speeds = process.submit(run, arguments, arm, seed, Path(folder)).result()
                results[arm].append(speeds)
                print(f"round {seed}, {arm}: {json.dumps(speeds)}", flush=True)
    print_table(results)


def save_random_model(arguments: argparse.Namespace, folder: Path) -> None:
    """Export a BERT with random weights and the tokenizer, as a folder that both sides load."""
    size = arguments.hidden_size
    config = EncoderConfig(
        vocab_size=load(arguments.tokenizer)[1].vocab_size,
        hidden_size=size, layers=arguments.layers, heads=max(1, size // 64), ffn_size=4 * size,
    )  # fmt: skip
    save_pretrained(build(config, seed=0), folder)
    install(arguments.tokenizer, folder)


class Marks:
    """The wall-clock and CPU time at the beginning of each step."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def set(self) -> None:
        """Note that a step begins."""
        self.at.append((time.perf_counter(), time.process_time()))

    def rates(self, batch: int) -> Speeds:
        """Examples per second of the clock, and processor milliseconds per example."""
        (began, worked), (ended, worked_in_all) = self.at[0], self.at[-1]
        examples = batch * (len(self.at) - 1)
        return {
            "train": examples / (ended - began),
            "train_cpu_ms": 1000 * (worked_in_all - worked) / examples,
        }


@contextmanager
def timed_prediction(examples: int) -> Iterator[Speeds]:
    """Time predicting this many examples."""
    speeds: Speeds = {}
    began, worked = time.perf_counter(), time.process_time()
    yield speeds
    speeds["predict"] = examples / (time.perf_counter() - began)
    speeds["predict_cpu_ms"] = 1000 * (time.process_time() - worked) / examples


def tandem_arm(arguments: argparse.Namespace, arm: str, seed: int, folder: Path) -> Speeds:
    """The job of `tandem finetune` in this process, and the predictions of what it exports."""
    marks = Marks()

    def marked(*inputs: Any, **keywords: Any) -> Any:
        marks.set()
        return train_step(*inputs, **keywords)

    torch.set_num_threads(arguments.threads)
    join_alone()
    words = tandem_words(arguments, folder)
    job = prepare(load_job("single_sentence", (*words, f"seed={seed}", f"name={arm}-{seed}")))
    with mock.patch("trainer.run.train_step", marked):
        run_job(lambda: job, lambda: False, lambda *_: None)
    model = SavedLearners(RunFolder.of(job)).load(TEACHER)
    names = model.config.task_heads["single_sentence"].labels
    texts, labels = read_table(arguments.validation, arguments.text)
    encoder = TextEncoder(folder / "model", arguments.length)
    encoded = [encoder.sequence([text], "") for text in texts]
    with timed_prediction(len(labels)) as speeds:
        outputs = head_outputs(model, "single_sentence", encoder.vocabulary, encoded)
        predicted = [names[int(logits.argmax())] for logits in outputs]
    accuracy = statistics.mean(a == b for a, b in zip(predicted, labels, strict=True))
    return {**marks.rates(arguments.batch), **speeds, "accuracy": accuracy}


def tandem_words(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The job's settings, as on the command line."""
    return [
        f"data.train={arguments.train}",
        f"data.validation={arguments.validation}",
        f"data.columns.text={arguments.text}",
        f"data.sequence_length={arguments.length}",
        f"teacher.init.pretrained={folder}/model",
        f"teacher.optimizer={{learning_rate: {arguments.rate}, weight_decay: {WEIGHT_DECAY}}}",
        f"output_dir={folder}/runs",
        f"batch.size={arguments.batch}",
        f"batch.micro_batch={arguments.batch}",
        f"epochs={arguments.epochs}",
        *("evaluation.every=1000000", "checkpoint.every=1000000", "log.wandb=disabled"),
    ]


def trainer_arm(arguments: argparse.Namespace, arm: str, seed: int, folder: Path) -> Speeds:
    """The Trainer of `transformers`."""
    torch.set_num_threads(arguments.threads)
    marks = Marks()

    class Mark(TrainerCallback):
        def on_step_begin(self, *states: Any, **keywords: Any) -> None:
            marks.set()

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts, labels = read_table(arguments.train, arguments.text)
    names = sorted(set(labels))
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=len(names)
    )
    trainer = Trainer(
        model=model,
        args=training_arguments(arguments, arm, seed, folder),
        train_dataset=rows(tokenizer, texts, arguments.length, map(names.index, labels)),
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[Mark()],
    )
    trainer.train()
    texts, labels = read_table(arguments.validation, arguments.text)
    encoded = rows(tokenizer, texts, arguments.length, map(names.index, labels))
    with timed_prediction(len(labels)) as speeds:
        outputs = trainer.predict(encoded)  # any sequence will do
        predicted = np.argmax(outputs.predictions, axis=1)
    # Grouped by length, they come in another order than the file's, and the labels with them.
    accuracy = float(np.mean(predicted == outputs.label_ids))
    return {**marks.rates(arguments.batch), **speeds, "accuracy": accuracy}


def training_arguments(
    arguments: argparse.Namespace, arm: str, seed: int, folder: Path
) -> TrainingArguments:
    """The Trainer's own defaults, except for what both sides share."""
    return TrainingArguments(
        output_dir=f"{folder}/{arm}",
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=arguments.batch,
        learning_rate=arguments.rate,
        weight_decay=WEIGHT_DECAY,
        warmup_steps=0.1,
        seed=seed,
        train_sampling_strategy="group_by_length" if arm == "grouped" else "random",
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rows(
    tokenizer: Any, texts: Sequence[str], length: int, labels: Iterable[int]
) -> list[dict[str, Any]]:
    """Encoded texts with their labels, as a Dataset: a list of inputs for the collator."""
    encoded = tokenizer(list(texts), truncation=True, max_length=length)
    columns = {**encoded, "labels": list(labels)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def read_table(path: str, column: str) -> tuple[list[str], list[str]]:
    """The texts and labels of a tab-separated, possibly compressed table."""
    with (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
        table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row[column] for row in table], [row["label"] for row in table]


def print_table(results: dict[str, list[Speeds]]) -> None:
    """Print a Markdown table of medians, and of Tandem's speed-ups."""
    print("\n| | " + " | ".join(ARMS) + " | over random | over grouped |")
    print("|---|" + "---|" * (len(ARMS) + 2))
    for key in results["tandem"][0]:
        ours, *others = (statistics.median(turn[key] for turn in results[arm]) for arm in ARMS)
        cells = [f"{value:.3g}" for value in (ours, *others)]
        ratios = [f"{ours / value:.2f}" for value in others]
        print(f"| {key} | " + " | ".join(cells + ratios) + " |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True)
    parser.add_argument("--validation", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", default="sentence")
    for name, default in {"layers": 4, "hidden-size": 256, "batch": 32, "length": 64,
                          "epochs": 1, "rounds": 3, "threads": 1}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=5e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
