"""Fine-tuning and prediction beside `transformers`' own Trainer: examples per second, and scores.

    python benchmarks/finetune_speed.py --tokenizer DIR --train FILE --validation FILE
        [--model DIR] [--layers 4] [--hidden-size 256] [--text sentence] [--batch 32] [--length 64]
        [--steps 100] [--rounds 3] [--threads 2] [--precision fp32] [--epochs 0] [--profile]

The files are tables with a header and the columns `--text` and label, as SST-2's. The model is a
random BERT of that size, exported, unless `--model` names a BERT: every arm loads the same folder.
The arms are separate processes that take turns, so that other work on the machine affects them
equally: `tandem` (the job of `tandem finetune`, and the passes of `tandem predict`, which forms its
own batches), `random` (the Trainer with its defaults) and `grouped` (the Trainer with its grouping
by length). Each pads to the longest text of a batch, and has the same batch, precision, threads,
optimizer (fused AdamW), clipping and dropout.
The first steps are not timed. Prediction runs on the validation file, already encoded. Results are
medians over the rounds, in wall-clock and CPU time; on a busy machine only CPU time with
`--threads 1` is meaningful. With `--epochs`, each arm trains on the whole file instead, with a new
seed in each round, and all of it is timed, so that accuracies can be compared, and speeds over
batches of every length: the few steps of a short run may have read long texts or short ones only.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

ARMS = ("tandem", "random", "grouped")
WARM_UP = 10  # steps before the clock starts
WEIGHT_DECAY = 0.01


def main() -> None:
    """Run all arms in turn or, in a process started by this one, a single arm."""
    arguments = _arguments()
    if arguments.arm:
        found = (tandem_arm if arguments.arm == "tandem" else trainer_arm)(arguments)
        print("\n" + json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or str(random_model(arguments, Path(folder) / "model"))
        results: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for turn in range(arguments.rounds):
            for arm in ARMS:
                own = {"arm": arm, "seed": turn + 1, "model": model, "folder": folder}
                results[arm].append(in_a_process({**vars(arguments), **own}))
                print(f"round {turn + 1}, {arm}: {json.dumps(results[arm][-1])}", flush=True)
    print_table(results)


def random_model(arguments: argparse.Namespace, folder: Path) -> Path:
    """A BERT with random weights and the tokenizer, as a folder that both sides load."""
    from data_pipeline.tokenization.tokenizer import install, load
    from model import EncoderConfig, build, save_pretrained

    size = arguments.hidden_size
    config = EncoderConfig(
        vocab_size=load(Path(arguments.tokenizer))[1].vocab_size,
        hidden_size=size, layers=arguments.layers, heads=max(1, size // 64), ffn_size=4 * size,
    )  # fmt: skip
    save_pretrained(build(config, seed=0), folder)
    install(Path(arguments.tokenizer), folder)
    return folder


def in_a_process(settings: dict[str, Any]) -> dict[str, float]:
    """The results of one arm."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in settings.items()
        if value
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"])}
    done = subprocess.run(
        [sys.executable, __file__, *words], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{settings['arm']}: {done.stderr[-3000:]}")
    if settings["profile"]:
        print(done.stdout)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class Marks:
    """The wall-clock and CPU time at the beginning of each step."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def set(self) -> None:
        """A step begins."""
        self.at.append((time.perf_counter(), time.process_time()))

    def rates(self, batch: int, warm_up: int) -> dict[str, float]:
        """Examples per second of the clock, and processor milliseconds per example."""
        (began, worked), (ended, worked_in_all) = self.at[warm_up], self.at[-1]
        examples = batch * (len(self.at) - 1 - warm_up)
        return {
            "train": examples / (ended - began),
            "train_cpu_ms": 1000 * (worked_in_all - worked) / examples,
        }


def warm_up(arguments: argparse.Namespace) -> int:
    """Steps that are not timed: none of whole epochs, so that batches of every length count."""
    return 0 if arguments.epochs else WARM_UP


@contextmanager
def timed_prediction(examples: int) -> Iterator[dict[str, float]]:
    """Time predicting this many examples."""
    found: dict[str, float] = {}
    began, worked = time.perf_counter(), time.process_time()
    yield found
    found["predict"] = examples / (time.perf_counter() - began)
    found["predict_cpu_ms"] = 1000 * (time.process_time() - worked) / examples


def tandem_arm(arguments: argparse.Namespace) -> dict[str, float]:
    """The job of `tandem finetune` in this process, and the predictions of what it exports."""
    import torch

    from benchmarks.one_rank import join_alone
    from commands.job_configs import load_job, prepare
    from data_pipeline import TextEncoder
    from trainer.evaluation.finished import SavedLearners
    from trainer.learner_names import TEACHER
    from trainer.prediction.fine_tuned import head_outputs
    from trainer.run import run_job
    from trainer.run_folder.folder import RunFolder
    from trainer.step import train_step

    marks = Marks()

    def marked(*inputs: Any, **keywords: Any) -> Any:
        marks.set()
        return train_step(*inputs, **keywords)

    mock.patch("trainer.run.train_step", marked).start()
    torch.set_num_threads(arguments.threads)
    join_alone()
    job = prepare(load_job("single_sentence", tuple(tandem_words(arguments))))
    with profiled(arguments.profile):
        run_job(lambda: job, lambda: False, lambda *_: None)
    model = SavedLearners(RunFolder.of(job)).load(TEACHER)
    names = model.config.task_heads["single_sentence"].labels
    texts, labels = read_table(arguments.validation, arguments.text)
    encoder = TextEncoder(Path(arguments.model), arguments.length)
    encoded = [encoder.sequence([text], "") for text in texts]
    with timed_prediction(len(labels)) as speed:
        outputs = head_outputs(model, "single_sentence", encoder.vocabulary, encoded)
        told = [names[int(logits.argmax())] for logits in outputs]
    accuracy = statistics.mean(a == b for a, b in zip(told, labels, strict=True))
    return {**marks.rates(arguments.batch, warm_up(arguments)), **speed, "accuracy": accuracy}


def tandem_words(arguments: argparse.Namespace) -> Iterator[str]:
    """The job's settings, as on the command line."""
    yield from (f"data.train={arguments.train}", f"data.validation={arguments.validation}")
    yield f"data.columns.text={arguments.text}"
    yield f"data.sequence_length={arguments.length}"
    yield f"teacher.init.pretrained={arguments.model}"
    yield f"teacher.precision={arguments.precision}"
    yield f"teacher.optimizer={{learning_rate: {arguments.rate}, weight_decay: {WEIGHT_DECAY}}}"
    yield from (f"seed={arguments.seed}", f"name=seed-{arguments.seed}")
    yield f"output_dir={arguments.folder}/runs"
    yield from (f"batch.size={arguments.batch} batch.micro_batch={arguments.batch}".split())
    if arguments.epochs:
        yield f"epochs={arguments.epochs}"
    else:
        yield from (f"steps={WARM_UP + arguments.steps + 1}", "epochs=null")
    yield from ("evaluation.every=1000000", "checkpoint.every=1000000", "log.wandb=disabled")


def trainer_arm(arguments: argparse.Namespace) -> dict[str, float]:
    """`transformers`' Trainer."""
    import numpy as np
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
    )

    torch.set_num_threads(arguments.threads)
    marks = Marks()

    class Mark(TrainerCallback):
        def on_step_begin(self, *states: Any, **keywords: Any) -> None:
            marks.set()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts, labels = read_table(arguments.train, arguments.text)
    names = sorted(set(labels))
    torch.manual_seed(arguments.seed)
    fine_tuned = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            arguments.model, num_labels=len(names)
        ),
        args=training_arguments(arguments),
        train_dataset=rows(tokenizer, texts, arguments.length, map(names.index, labels)),
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[Mark()],
    )
    with profiled(arguments.profile):
        fine_tuned.train()
    texts, labels = read_table(arguments.validation, arguments.text)
    encoded = rows(tokenizer, texts, arguments.length, map(names.index, labels))
    with timed_prediction(len(labels)) as speed:
        found = fine_tuned.predict(encoded)  # any sequence will do
        told = np.argmax(found.predictions, axis=1)
    # Grouped by length, they come in another order than the file's, and the labels with them.
    accuracy = float(np.mean(told == found.label_ids))
    return {**marks.rates(arguments.batch, warm_up(arguments)), **speed, "accuracy": accuracy}


def training_arguments(arguments: argparse.Namespace) -> Any:
    """The Trainer's own defaults, except for what both sides share."""
    from transformers import TrainingArguments

    length = {"num_train_epochs": arguments.epochs} if arguments.epochs else {
        "max_steps": WARM_UP + arguments.steps + 1
    }  # fmt: skip
    return TrainingArguments(
        output_dir=f"{arguments.folder}/{arguments.arm}",
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=arguments.batch,
        learning_rate=arguments.rate,
        weight_decay=WEIGHT_DECAY,
        warmup_steps=0.1,
        bf16=arguments.precision == "bf16",
        seed=arguments.seed,
        train_sampling_strategy="group_by_length" if arguments.arm == "grouped" else "random",
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **length,
    )


def rows(
    tokenizer: Any, texts: Sequence[str], length: int, labels: Iterator[int] | None = None
) -> list[dict[str, Any]]:
    """Encoded texts as a Dataset: a list of inputs for the collator."""
    found = tokenizer(list(texts), truncation=True, max_length=length)
    encoded = [
        dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)
    ]
    if labels is None:
        return encoded
    return [{**row, "labels": label} for row, label in zip(encoded, labels, strict=True)]


def read_table(path: str, column: str) -> tuple[list[str], list[str]]:
    """The texts and labels of a tab-separated, possibly compressed table."""
    with (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row[column] for row in found], [row["label"] for row in found]


@contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """If wanted, print the time by operator."""
    if not wanted:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        yield
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    """Print a Markdown table of medians, and of Tandem's speed-ups."""
    middle = {
        arm: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for arm, found in results.items()
    }
    print("\n| | " + " | ".join(ARMS) + " | over random | over grouped |")
    print("|---|" + "---|" * (len(ARMS) + 2))
    for key in middle["tandem"]:
        ours = middle["tandem"][key]
        ratios = [ours / middle[arm][key] for arm in ARMS[1:]]
        cells = [f"{middle[arm][key]:.3g}" for arm in ARMS] + [f"{one:.2f}" for one in ratios]
        print(f"| {key} | " + " | ".join(cells) + " |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True)
    parser.add_argument("--validation", required=True)
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--text", default="sentence")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    for name, default in {"layers": 4, "hidden_size": 256, "batch": 32, "length": 64, "steps": 100,
                          "rounds": 3, "threads": 2, "epochs": 0, "seed": 0}.items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=5e-5, help="a random model needs 5e-4")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--arm", choices=ARMS, default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.model or arguments.tokenizer):
        parser.error("name a --tokenizer for a random model, or a --model")
    return arguments


if __name__ == "__main__":
    main()
