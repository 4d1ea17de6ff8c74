"""A task in a user's file, named by `plugins:`, through the real command line from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from transformers import AutoModelForSequenceClassification

from tests.conftest import tandem

PLUGIN = '''
"""Whether a text is short."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from configs.rules import COUNT
from data_pipeline import EncodedExample
from data_pipeline.task_files.contents import Dropped
from model import CLASSIFICATION, TaskHeadConfig
from trainer.objectives.labels import label_cross_entropy
from trainer.objectives.task import TaskConfig, TaskTerm
from trainer.objectives.term import register
from trainer.scoring.task_metrics import ClassMetric


@register("shortness")
@dataclass
class Shortness(TaskConfig):
    """Whether a text has fewer words than a limit."""

    limit: Annotated[int, COUNT, "Texts of this many words are long."] = 4

    name: ClassVar[str] = "shortness"
    fields: ClassVar[tuple[str, ...]] = ("text",)

    def equip(self, model):
        return self.with_head(model, TaskHeadConfig(CLASSIFICATION, ["long", "short"]))

    def encode(self, file, encoder):
        dropped = Dropped()
        for place, row in self.rows(file, "text", dropped=dropped):
            is_short = len(row["text"].split()) < self.limit
            yield EncodedExample([encoder.sequence([row["text"]], place)], {self.head: is_short})
        dropped.tell(file.path)

    def choices(self, logits, batch):
        return logits, (batch.row_labels(self.head) >= 0).float()

    def own_metrics(self):
        return (ClassMetric(self.head, ["accuracy"]),)

    def build(self, student, teacher):
        return ShortnessTerm(self)


class ShortnessTerm(TaskTerm):
    def forward(self, inputs):
        return label_cross_entropy(
            inputs.features.heads[self.head], inputs.batch.row_labels(self.head)
        )
'''
JOB = """
name: lengths
steps: 30
plugins: [{folder}/shortness.py]
output_dir: {folder}/runs
data:
  root: {folder}
  train: train.tsv
  validation: held_out.tsv
  sequence_length: 12
  tokenizer: {corpus}/tokenizer
batch: {{size: 16, micro_batch: 16}}
teacher:
  model: {{hidden_size: 32, layers: 1, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 12}}
  optimizer: {{learning_rate: 3.0e-3}}
  objective: {{shortness: {{limit: 4, head_name: mine}}}}
evaluation: {{every: 30}}
checkpoint: {{every: 30}}
log: {{wandb: disabled}}
"""


@pytest.fixture
def job(corpus: Path, tmp_path: Path) -> Path:
    words = ["the", "of", "and", "to", "in", "was"]
    for name, count in (("train.tsv", 60), ("held_out.tsv", 20)):
        texts = [" ".join(words[: 1 + number % 6]) for number in range(count)]
        (tmp_path / name).write_text("\n".join(["text", *texts]) + "\n")
    (tmp_path / "shortness.py").write_text(PLUGIN)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path, corpus=corpus))
    return path


def test_a_users_task_is_trained_evaluated_and_exported(job: Path, tmp_path: Path) -> None:
    trained = tandem("train", job)
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "runs" / "lengths"
    scored = tandem("evaluate", run, "--json")
    assert scored.returncode == 0, scored.stderr
    results = json.loads(scored.stdout)
    assert results["metric"] == "mine_accuracy"
    assert results["learners"]["teacher"]["mine_accuracy"] > 0.9
    exported = tandem("export", run, "--learner", "teacher", "--out", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.id2label == {0: "long", 1: "short"}


@pytest.mark.slow
def test_an_editor_learns_the_keys_of_a_plugin(job: Path, tmp_path: Path) -> None:
    made = tandem("schema", tmp_path / "shortness.py")
    assert made.returncode == 0, made.stderr
    schema = json.loads(made.stdout)
    found = {"name": "a", "steps": 1, "data": {}, "teacher": {"objective": {"shortness": {}}}}
    jsonschema.validate(found, schema)
    found["teacher"]["objective"]["shortness"]["limit"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema)
    missing = tandem("schema", tmp_path / "missing.py")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("tandem: plugins: ")


def test_several_labels_for_a_head_that_tells_one_are_refused(job: Path, tmp_path: Path) -> None:
    several = "(int(is_short), 1)"
    plugin = PLUGIN.replace("{self.head: is_short}", f"{{self.head: {several}}}")
    (tmp_path / "shortness.py").write_text(plugin)
    ended = tandem("train", job)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert "mine: its examples have several labels each" in ended.stderr


def test_a_task_without_a_method_is_one_line(job: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "shortness.py"
    plugin.write_text(PLUGIN.replace("def encode(", "def encoded("))
    ended = tandem("train", job)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert re.search(rf"{plugin}:\d+: TypeError: Shortness has to define encode\n$", ended.stderr)


@pytest.mark.parametrize(
    ("line", "other", "said"),
    [
        ("yield EncodedExample(", "example = (", ": must return Iterable, not NoneType"),
        (
            "yield EncodedExample(",
            "yield (",
            ": each example: must return EncodedExample, not tuple",
        ),
    ],
)
def test_examples_of_another_type_are_one_line(
    job: Path, tmp_path: Path, line: str, other: str, said: str
) -> None:
    (tmp_path / "shortness.py").write_text(PLUGIN.replace(line, other))
    ended = tandem("data", "show", job)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.endswith(f"tandem: Shortness.encode{said}\n")
