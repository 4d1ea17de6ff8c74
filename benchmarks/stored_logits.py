"""What stored predictions save: steps of a student with a frozen teacher that runs, and without.

    python benchmarks/stored_logits.py [--rows 8] [--rounds 5]

The teacher and the first student of `cotraining_speed.py`, which learns from random tokens by MLM
and soft targets at T = 2. Each arm is a real `train_step`; where predictions are stored, it begins
with reading them from a shard, which in a job happens beside the step before. The arms take turns.
Processor time of one thread, median.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cotraining_speed import STUDENT_SIZES, TEACHER_SIZE, Arm, encoder
from benchmarks.masked_batches import VOCABULARY, masked_batch
from benchmarks.one_rank import join_alone
from benchmarks.turns import median_seconds
from data_pipeline import Batch
from trainer.batch_config import StepShape
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.predictions import SoftKL
from trainer.step import train_step
from trainer.stored_logits.format import Manifest, StoredConfig, encode, write_shard
from trainer.stored_logits.reading import StoredReader
from trainer.storing import TeacherLogits
from trainer.tasks.pretraining import MaskedLanguageModelling

RUNNING = "running teacher"
STORED = {
    "8 logits, fp16": StoredConfig("-"),
    "64 logits, fp16": StoredConfig("-", top_k=64),
    "16 drawn tokens": StoredConfig("-", samples=16, temperature=2.0),
    "all logits, fp32": StoredConfig("-", top_k=None, precision="fp32"),
}


def main() -> None:
    """Print the table of steps."""
    arguments = _arguments()
    torch.set_num_threads(1)
    join_alone()
    batch, shape = masked_batch(arguments.rows), StepShape(1_000_000, 0, arguments.rows, 1)
    frozen = LearnerConfig(encoder(*TEACHER_SIZE), init=InitConfig(pretrained="-"), frozen=True)
    teacher = Learner(TEACHER, frozen, frozen.model, shape)
    terms = ObjectiveConfig(mlm=MaskedLanguageModelling(), soft_kl=SoftKL(temperature=2.0))
    config = LearnerConfig(encoder(*STUDENT_SIZES[0]), terms)
    student = Learner(student_key("one"), config, frozen.model, shape)
    with tempfile.TemporaryDirectory() as folder:
        arms: dict[str, Arm] = {RUNNING: partial(train_step, teacher, [student], batch, step=0)}
        for name, stored in STORED.items():
            reader = stored_reader(teacher, stored, batch, Path(folder) / name)
            arms[name] = partial(_read_and_step, teacher, student, batch, reader)
        seconds = median_seconds(arms, arguments.rounds, time.process_time)
    print("| teacher | step | of a step with a running teacher | bytes per masked position |")
    print("|---|---|---|---|")
    for name, own in seconds.items():
        each = f"{STORED[name].position_bytes(VOCABULARY):,}" if name in STORED else ""
        print(f"| {name} | {own:.3f} s | {own / seconds[RUNNING]:.3f} | {each} |")


def stored_reader(
    teacher: Learner, stored: StoredConfig, batch: Batch, folder: Path
) -> StoredReader:
    """A reader of a folder with the teacher's predictions for this batch."""
    folder.mkdir()
    step = TeacherLogits(teacher, stored, 0).of_batch(batch, None)
    shard = write_shard(folder, range(1), int(step.counts.sum()), encode([step]))
    Manifest("", {}, "", (shard,)).save(folder)
    return StoredReader(folder, 0, 1, stored.temperature)


def _read_and_step(teacher: Learner, student: Learner, batch: Batch, reader: StoredReader) -> None:
    stored = {TEACHER: reader.read(0, batch)}
    train_step(teacher, [student], dataclasses.replace(batch, stored=stored), step=0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
