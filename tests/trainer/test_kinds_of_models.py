"""A student of a different kind than its teacher, through a whole job."""

from __future__ import annotations

import ast
import json
import tempfile
from pathlib import Path

import pytest
import torch

import configs
import model
from configs import ConfigError
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.evaluation.finished import SavedLearners
from trainer.footprint.footprint import footprints_and_passes
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

ROOT = Path(__file__).parents[2]
STUDENT = """
students:
  lstm:
    model: {kind: bilstm, vocab_size: 600, hidden_size: 16, pooled_size: 8}
    objective: {mlm: {}, soft_kl: {temperature: 2.0, min_lead: null}, hidden_mse: {}, nsp: {}}
    zero_stage: STAGE
    optimizer: {learning_rate: 3.0e-3}
"""


def job(corpus: Path, runs: Path, *overrides: str, stage: int = 0) -> JobConfig:
    text = f"base: {jobs.TINY_JOB}\n{STUDENT.replace('STAGE', str(stage))}"
    places = [f"data.path={corpus}", f"output_dir={runs}", "data.packing=segment_pair"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # each rank's own
        file.write(text)
        file.flush()
        return configs.load(file.name, JobConfig, "job", [*places, *overrides])


def trained(corpus: Path, runs: Path) -> list[str]:
    """Folders of a run without a stop, of the same run stopped and resumed, and at ZeRO 3."""
    whole = jobs.run(job(corpus, runs, "name=whole"))
    jobs.finish(whole)
    jobs.run(job(corpus, runs, "name=resumed"), stop_after=3)
    resumed = jobs.run(job(corpus, runs, "name=resumed"))
    cut = jobs.run(job(corpus, runs, "name=cut", stage=3))
    return [str(folder.path) for folder in (whole, resumed, cut)]


@pytest.mark.slow
def test_a_bilstm_is_trained_resumed_scored_and_exported(corpus, tmp_path) -> None:
    paths = run_distributed(trained, 2, corpus, tmp_path / "runs")[0]
    whole, resumed, cut = (RunFolder(Path(path)) for path in paths)
    curve = jobs.curve(whole, "students/lstm")
    losses = [value for _, key, value in curve if key == "students/lstm/loss"]
    assert losses[-1] < losses[0]
    assert jobs.curve(resumed, "students/lstm") == curve
    at_stage_3 = [v for _, k, v in jobs.curve(cut, "students/lstm") if k == "students/lstm/loss"]
    torch.testing.assert_close(at_stage_3, losses, rtol=1e-4, atol=0.0)
    results = json.loads(whole.evaluation.read_text())["learners"]["students/lstm"]
    assert {"loss", "accuracy", "pair_accuracy"} <= results.keys()
    exported = model.from_pretrained(whole.path / "exports" / "lstm")
    ours = SavedLearners(whole).load("students/lstm")
    ids = torch.arange(1, 13)[None]
    assert torch.equal(exported(ids).logits, ours(ids).logits)
    assert any("students/lstm/nsp" in row for row in metrics.read(whole.metrics))


@pytest.mark.slow
def test_a_plan_counts_its_products(corpus, tmp_path) -> None:
    off = [f"students.lstm.objective.{term}=null" for term in ("soft_kl", "hidden_mse", "nsp")]
    config = job(corpus, tmp_path, *off)
    length = config.data.sequence_length
    student = config.students["lstm"]
    masked = config.data.masking.slots(length) / length
    told = model.describe(student.architecture, length, masked)
    found = footprints_and_passes(config, "gpu", length)[0]["students/lstm"]
    flops = found.forward_flops + found.backward_flops
    assert flops / length == pytest.approx(told.flops_per_token, rel=0.01)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("students.lstm.compile=true", "students.lstm.compile: a model of kind bilstm cannot comp"),
        ("students.lstm.freeze_positions=true", "lstm.freeze_positions: a model of kind bilstm"),
        ("students.lstm.checkpoint_activations=true", "lstm.checkpoint_activations: a model of"),
        ("students.lstm.progressive={}", "students.lstm.progressive: a model of kind bilstm can"),
        ("students.lstm.objective.attention_mse={}", "attention_mse: the student.s model gives no"),
        ("students.lstm.init.teacher_layers=[0]", "teacher_layers: model.kind is bilstm, and the"),
        ("students.lstm.init.teacher_embeddings=true", "teacher_embeddings: model.kind is bilstm"),
        ("students.lstm.model.kind=lstm", "students.lstm.model.kind: must be one of"),
        ("students.lstm.model.heads=2", "students.lstm.model.heads: is for kind: encoder"),
    ],
)
def test_what_the_kind_cannot_do_is_refused(corpus, tmp_path, override, message) -> None:
    with pytest.raises(ConfigError, match=message):
        job(corpus, tmp_path, override)


PLUGIN = '''
from dataclasses import dataclass, field

from model.kinds.bilstm import BiLSTM, BiLSTMConfig
from model.protocol import register


@dataclass
class Wide(BiLSTMConfig):
    """A kind of the user's own."""

    kind: str = field(default="wide", kw_only=True)
    hidden_size: int = 32


@register(Wide)
class WideModel(BiLSTM):
    """Its module."""
'''


def test_a_plugin_brings_a_kind(corpus, tmp_path, monkeypatch) -> None:
    from configs import kinds
    from model import protocol

    known = {base: dict(found) for base, found in kinds._KINDS.items()}
    monkeypatch.setattr(kinds, "_KINDS", known)
    monkeypatch.setattr(protocol, "_MODULES", dict(protocol._MODULES))
    (tmp_path / "wide_kind.py").write_text(PLUGIN)
    wide = "students.wide={model: {kind: wide, vocab_size: 600}, objective: {mlm: {}}}"
    config = job(corpus, tmp_path, f"plugins=[{tmp_path}/wide_kind.py]", wide)
    student = config.students["wide"].model
    assert (student.kind, student.hidden_size) == ("wide", 32)
    assert type(model.build(student, 0)).__name__ == "WideModel"


# The modules that are a kind's own; the others are for models of every kind.
OF_KINDS = ["config", "masked_language_model", "encoder", "embedding", "attention", "parts"]
OF_KINDS += ["initial_values", "kinds"]


def test_training_knows_no_kind_of_model() -> None:
    """`trainer` imports only the protocol, neither the encoder nor a module of a kind."""
    named = set()
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
            if name in ("EncoderConfig", "MaskedLanguageModel", "BiLSTM", "BiLSTMConfig"):
                named.add(f"{path}: {name}")
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("model."):
                inside = str(node.module).split(".")[1]
                if inside in OF_KINDS:
                    named.add(f"{path}: {node.module}")
    assert named == set()
