"""Savings by sharing one teacher forward: joint steps against the same learners one at a time.

    python benchmarks/cotraining_speed.py [--rows 8] [--rounds 3] [--threads 1]

A BERT-medium teacher and up to five students of at most a quarter of its step learn from random
tokens (V = 30,522, L = 128, 19 masked positions a row; MLM and soft targets, fp32, AdamW) in one
process. Every arm is a real `train_step`, or the part of one that it names. The arms take turns, so
that other work on the machine affects them equally; the median of each is used. Time is CPU time
with one thread, and wall-clock time with more or on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learners import LENGTH, Size, Step, batch_of, join_alone, student, teacher
from benchmarks.turns import clock_for, median_seconds
from data_pipeline import Batch
from model import Features
from trainer.batch_config import MicroStep
from trainer.batches import to_device
from trainer.denominators import StepSums
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.objectives.objective import union
from trainer.step import train_step
from trainer.teacher_outputs import TeacherOutputs, detach

STUDENT_SIZES = [(256, 4), (192, 4), (256, 2), (128, 4), (128, 2)]
COUNTS = (0, 1, 2, 3, 5)


def main() -> None:
    """Print the table of joint steps, and the resulting ratios."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    join_alone()
    arms = arms_of(Size("BERT-medium", 512, 8, LENGTH, arguments.rows))
    print_table(median_seconds(arms, arguments.rounds, clock_for(arguments.threads)))


def arms_of(size: Size) -> dict[str, Step]:
    """Everything that is timed, by name.

    offline: a step of the usual recipe, with a teacher forward for this student alone. own: the
    student's part of a step, as the first to ask for the teacher's distribution; further: after
    others have asked.
    """
    batch, main = batch_of(size), teacher(size.encoder, size.rows)
    students = [student(number, size, *shape) for number, shape in enumerate(STUDENT_SIZES)]
    arms: dict[str, Step] = {
        f"joint {number}": partial(train_step, main, students[:number], batch, step=0)
        for number in COUNTS
    }
    features = forward(main, students, batch)
    shared = detach(features, main.output_projection(), logit_consumers=2)
    for number, learner in enumerate(students):
        alone = teacher(size.smaller(*STUDENT_SIZES[number]), size.rows)
        arms[f"mlm {number}"] = partial(train_step, alone, [], batch, step=0)
        arms[f"offline {number}"] = partial(_offline, main, learner, batch)
        arms[f"own {number}"] = partial(_own, main, learner, features, batch)
        arms[f"further {number}"] = partial(learn, learner, shared, batch)
    return arms


def _own(teacher: Learner, student: Learner, features: Features, batch: Batch) -> None:
    learn(student, detach(features, teacher.output_projection()), batch)


def _offline(teacher: Learner, student: Learner, batch: Batch) -> None:
    _own(teacher, student, forward(teacher, [student], batch), batch)


@torch.no_grad()
def forward(teacher: Learner, students: list[Learner], batch: Batch) -> Features:
    """The teacher's features that `students` need, without training it."""
    inputs = to_device(batch, teacher.device)
    capture = union(student.objective.source_capture(0) for student in students)
    return teacher.model.features(
        inputs.input_ids, inputs.segment_ids, inputs.visible, inputs.masked_positions, capture
    )


def learn(student: Learner, teacher_outputs: TeacherOutputs, batch: Batch) -> None:
    """A student's forward, backward and optimizer step, given its teacher's outputs."""
    totals = StepSums.over_ranks(batch, student.counted, 0.0, student.device).totals
    micro_step = MicroStep(0, 0, is_last=True)
    sources = {TEACHER: teacher_outputs}
    student.accumulate(to_device(batch, student.device), totals, micro_step, sources)
    norm = float(student.take_sums()[-1])
    student.update(0, loss=1.0, squared_norm=norm, seconds=0.0, batch=batch)


def print_table(seconds: dict[str, float]) -> None:
    """Markdown."""
    teacher = seconds["joint 0"]
    print("| students | joint step | over the sum of parts | over the usual recipe | its bound |")
    print("|---|---|---|---|---|")
    for number in COUNTS:
        joint = seconds[f"joint {number}"]
        parts = teacher + sum(seconds[f"own {n}"] for n in range(number))
        usual = teacher + sum(seconds[f"offline {n}"] for n in range(number))
        print(
            f"| {number} | {joint:.2f} s | {joint / parts:.3f} "
            f"| {joint / usual:.3f} | {parts / usual:.3f} |"
        )
    print("\n| student | share of the teacher's step | its own MLM step | further cost over that |")
    print("|---|---|---|---|")
    for number, (hidden_size, layers) in enumerate(STUDENT_SIZES):
        mlm, further = seconds[f"mlm {number}"], seconds[f"further {number}"]
        print(
            f"| {layers} layers, H = {hidden_size} | {further / teacher:.3f} | {mlm:.3f} s "
            f"| {further / mlm:.2f} |"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
