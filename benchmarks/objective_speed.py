"""What terms of an objective cost a student, beside masked-word training alone.

    python benchmarks/objective_speed.py [--rows 16] [--rounds 5]

Forward and backward of a 4-layer student (H = 312, 12 heads) that learns from a BERT-base's states,
on random tokens (V = 30,522, L = 128, 19 masked positions a row, float32, one thread). ``apart`` is
the same two terms without sharing the student's vocabulary projection. The arms take turns in one
process; the median of each is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configs
from benchmarks.masked_batches import masked_batch
from benchmarks.turns import median_seconds
from data_pipeline import DEFAULT_VIEW
from model import Capture, EncoderConfig, build
from tests.trainer.tiny import totals_of
from trainer.batches import to_device
from trainer.denominators import Totals
from trainer.learner_names import TEACHER
from trainer.objectives import LossInputs, Objective, ObjectiveConfig
from trainer.objectives.terms.attention import AttentionMSE, AttentionRelation, ValueRelation
from trainer.objectives.terms.predictions import SoftKL
from trainer.objectives.terms.states import HiddenMSE
from trainer.tasks.pretraining import MaskedLanguageModelling
from trainer.teacher_outputs import OutputProjection, detach

MLM, SOFT = MaskedLanguageModelling(), SoftKL(temperature=2.0)
OBJECTIVES = {
    "mlm": ObjectiveConfig(mlm=MLM),
    "mlm + soft": ObjectiveConfig(mlm=MLM, soft_kl=SOFT),
    "mlm + hidden": ObjectiveConfig(mlm=MLM, hidden_mse=HiddenMSE()),
    "mlm + attention": ObjectiveConfig(mlm=MLM, attention_mse=AttentionMSE()),
    "mlm + attention_relation + value_relation": ObjectiveConfig(
        mlm=MLM, attention_relation=AttentionRelation(), value_relation=ValueRelation()
    ),
}


def main() -> None:
    """Print the table of arms and what each costs over masked-word training."""
    arguments = _arguments()
    torch.set_num_threads(1)
    scene = Scene(arguments.rows)
    arms: dict[str, Callable[[], object]] = {
        name: partial(scene.learn, config) for name, config in OBJECTIVES.items()
    }
    arms["mlm + soft, apart"] = partial(scene.learn, OBJECTIVES["mlm + soft"], apart=True)
    seconds = median_seconds(arms, arguments.rounds, process_time)
    print("| terms | seconds | over mlm |\n|---|---|---|")
    for name, median in seconds.items():
        print(f"| {name} | {median:.3f} | {median / seconds['mlm']:.2f} |")


class Scene:
    """A student, a batch, and what its teacher knows of it."""

    def __init__(self, rows: int) -> None:
        self.teacher_config = configs.load("bert_base", EncoderConfig, "model")
        self.config = configs.load("tinybert_4", EncoderConfig, "model")
        self.student = build(self.config, seed=1).eval()  # without dropout
        batch = masked_batch(rows)
        self.batch = to_device(batch, torch.device("cpu"))
        self.totals = totals_of(batch)
        self.teacher = build(self.teacher_config, seed=2).eval()
        numbers = tuple(range(13))
        with torch.no_grad():
            features = self.teacher.features(
                self.batch.input_ids,
                self.batch.segment_ids,
                None,
                self.batch.masked_positions,
                Capture(hidden_states=numbers, attention=numbers[1:], last_hidden_state=True),
            )
        # Another student has asked for the distribution before, as in a job with several.
        projection = OutputProjection(*self.teacher.output_projection())
        self.sources = {TEACHER: detach(features, projection, logit_consumers=2)}

    def learn(self, config: ObjectiveConfig, apart: bool = False) -> None:
        """Forward and backward of the student."""
        objective = Objective(config, self.config, self.teacher_config, seed=0)
        features = self.student.features(
            self.batch.input_ids,
            self.batch.segment_ids,
            None,
            self.batch.masked_positions,
            objective.student_capture(0),
        )
        inputs = LossInputs(
            self.batch,
            features,
            OutputProjection(*self.student.output_projection()),
            self.sources,
        )
        loss = (
            _apart(objective, inputs, self.totals) if apart else objective(inputs, self.totals)[0]
        )
        loss.backward()


def _apart(objective: Objective, inputs: LossInputs, totals: Totals) -> Tensor:
    terms = objective.by_name.values()
    shares = [term(inputs)[0] / totals[DEFAULT_VIEW, term.denominator] for term in terms]
    return torch.stack(shares).sum()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
