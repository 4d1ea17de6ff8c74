"""What sharing one teacher forward saves: joint steps against the same learners one at a time.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.masked_batches import VOCABULARY, masked_batch
from benchmarks.one_rank import join_alone
from benchmarks.turns import clock_for, median_seconds
from data_pipeline import Batch
from model import EncoderConfig, Features
from trainer.batch_config import MicroStep, StepShape
from trainer.batches import to_device
from trainer.denominators import StepSums
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.objectives.objective import union
from trainer.objectives.terms.predictions import SoftKL
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling
from trainer.teacher_outputs import TeacherOutputs, detach

TEACHER_SIZE = (512, 8)  # hidden size, layers: BERT-medium
STUDENT_SIZES = [(256, 4), (192, 4), (256, 2), (128, 4), (128, 2)]
COUNTS = (0, 1, 2, 3, 5)

Arm = Callable[[], object]


def main() -> None:
    """Print the table of joint steps, and the resulting ratios."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    join_alone()
    found = arms(Cast(arguments.rows), masked_batch(arguments.rows))
    print_table(median_seconds(found, arguments.rounds, clock_for(arguments.threads)))


class Cast:
    """The learners: a teacher, its students, and the same students learning by MLM alone."""

    def __init__(self, rows: int) -> None:
        mlm = ObjectiveConfig(mlm=MaskedLanguageModelling())
        both = ObjectiveConfig(mlm=MaskedLanguageModelling(), soft_kl=SoftKL(temperature=2.0))
        step_shape = StepShape(1_000_000, 0, rows, 1)

        def learner(name: str, size: tuple[int, int], objective: ObjectiveConfig) -> Learner:
            config = LearnerConfig(model=encoder(*size), objective=objective)
            return Learner(name, config, encoder(*TEACHER_SIZE), step_shape)

        self.teacher = learner(TEACHER, TEACHER_SIZE, mlm)
        self.students = [
            learner(student_key(str(one)), size, both) for one, size in enumerate(STUDENT_SIZES)
        ]
        self.alone = [learner(TEACHER, size, mlm) for size in STUDENT_SIZES]


def arms(cast: Cast, batch: Batch) -> dict[str, Arm]:
    """Everything that is timed, by name.

    offline: a step of the usual recipe, with a teacher forward for this student alone. own: the
    student's part of a step, as the first to ask for the teacher's distribution; further: after
    others have asked.
    """
    teacher = cast.teacher
    found: dict[str, Arm] = {
        f"joint {number}": partial(train_step, teacher, cast.students[:number], batch, step=0)
        for number in COUNTS
    }
    features = forward(teacher, cast.students, batch)
    shared = detach(features, teacher.output_projection(), logit_consumers=2)
    for number, student in enumerate(cast.students):
        found[f"mlm {number}"] = partial(train_step, cast.alone[number], [], batch, step=0)
        found[f"offline {number}"] = partial(_offline, teacher, student, batch)
        found[f"own {number}"] = partial(_own, teacher, student, features, batch)
        found[f"further {number}"] = partial(learn, student, shared, batch)
    return found


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


def encoder(hidden_size: int, layers: int) -> EncoderConfig:
    """A BERT of this size."""
    return EncoderConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, layers=layers, heads=hidden_size // 64,
        ffn_size=4 * hidden_size, pooler="none",
    )  # fmt: skip


def print_table(seconds: dict[str, float]) -> None:
    """Markdown."""
    teacher = seconds["joint 0"]
    print("| students | joint step | over the sum of parts | over the usual recipe | its bound |")
    print("|---|---|---|---|---|")
    for number in COUNTS:
        joint = seconds[f"joint {number}"]
        own = [seconds[f"own {one}"] for one in range(number)]
        usual = teacher + sum(seconds[f"offline {one}"] for one in range(number))
        forwards = sum(seconds[f"offline {one}"] - seconds[f"own {one}"] for one in range(number))
        bound = (teacher + sum(own)) / (teacher + sum(own) + forwards)
        print(
            f"| {number} | {joint:.2f} s | {joint / (teacher + sum(own)):.3f} "
            f"| {joint / usual:.3f} | {bound:.3f} |"
        )
    print("\n| student | share of the teacher's step | its own MLM step | further cost over that |")
    print("|---|---|---|---|")
    for one, (hidden_size, layers) in enumerate(STUDENT_SIZES):
        mlm, further = seconds[f"mlm {one}"], seconds[f"further {one}"]
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
