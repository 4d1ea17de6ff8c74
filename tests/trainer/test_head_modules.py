"""Heads of tasks with modules of their own: one that is shipped, and CONTRIBUTING's as a plugin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import configs
from configs import ConfigError
from model import CLASSIFICATION, EncoderConfig, TaskHeadConfig, build, with_task_head
from model.accounting import head_flops
from model.errors import ModelError
from model.head_modules.attention_pooling import AttentionPooling, AttentionPoolingConfig
from tests.conftest import REPOSITORY, tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_sentence_tasks import LABELS, lines, write
from trainer.config import JobConfig
from trainer.job_data.examples import with_examples

JOB = """
name: moods
steps: 40
plugins: [{folder}/max_pooling.py]
output_dir: {folder}/runs
data:
  {{root: {folder}, train: train.tsv, validation: held_out.tsv,
  sequence_length: 12, tokenizer: {corpus}/tokenizer}}
batch: {{size: 16, micro_batch: 4}}
teacher:
  model: {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 12}}
  optimizer: {{learning_rate: 3.0e-3}}
  objective: {{single_sentence: {{module: {{kind: max_pooling}}}}}}
students:
  small:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
    optimizer: {{learning_rate: 3.0e-3}}
    objective:
      single_sentence: {{module: {{kind: attention_pooling, width: 8}}}}
      soft_labels: {{temperature: 2.0}}
evaluation: {{every: 20}}
checkpoint: {{every: 20}}
log: {{every: 1, wandb: disabled}}
"""
SIZES = {"hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 32, "vocab_size": 60}


@pytest.fixture(name="job")
def job_with_a_plugin(corpus: Path, tmp_path: Path) -> Path:
    (example,) = re.findall(
        r'```python\n("""Max pooling.*?)```', (REPOSITORY / "CONTRIBUTING.md").read_text(), re.S
    )
    (tmp_path / "max_pooling.py").write_text(example)
    write(tmp_path / "train.tsv", lines(80, 0))
    write(tmp_path / "held_out.tsv", lines(21, 400))
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path, corpus=corpus))
    return path


def trained(path: Path) -> list:
    """The records of a run, and of one that stops and resumes. Collective."""
    job = with_examples(configs.load(str(path), JobConfig, "job"))
    whole = jobs.run(job)
    jobs.finish(whole)
    again = with_examples(configs.load(str(path), JobConfig, "job", ["name=again"]))
    jobs.run(again, stop_after=13)
    return [jobs.curve(whole), jobs.curve(jobs.run(again))]


@pytest.mark.slow
def test_a_plugins_head_and_a_shipped_one_are_trained_resumed_exported_and_predict(
    job: Path, tmp_path: Path
) -> None:
    whole, again = run_distributed(trained, 2, job)[0]
    assert again == whole
    run = tmp_path / "runs" / "moods"
    results = json.loads((run / "evaluation.json").read_text())["learners"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(line.partition("\t")[0] for line in lines(21, 400)) + "\n")
    for learner, name in (("teacher", "teacher"), ("students/small", "small")):
        assert results[learner]["single_sentence_accuracy"] > 0.9
        export = run / "exports" / name
        assert json.loads((export / "config.json").read_text())["model_type"] == "tandem"
        plugin = ["--plugin", tmp_path / "max_pooling.py"] if name == "teacher" else []
        told = tandem("predict", export, texts, *plugin)
        assert told.returncode == 0, told.stderr
        labels = [json.loads(line)["label"] for line in told.stdout.splitlines()]
        right = [line.endswith(label) for line, label in zip(lines(21, 400), labels, strict=True)]
        accuracy = results[learner]["single_sentence_accuracy"]
        assert sum(right) / len(right) == pytest.approx(accuracy)
        told = tandem("embed", export, "a text", *plugin)
        assert told.returncode == 0, told.stderr
        held_out = f"data.validation={tmp_path}/held_out.tsv"  # both task.json name the teacher's
        scored = tandem("evaluate", export, held_out, "--plugin", tmp_path / "max_pooling.py")
        assert scored.returncode == 0, scored.stderr
        told = tandem("analyze", export, texts, *plugin)
        assert told.stderr.endswith("has no masked-LM head; name a task instead of a text\n")
    unknown = tandem("predict", run / "exports" / "teacher", texts)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    kinds = "attention_pooling, or one that a plugin adds (plugins, --plugin), not 'max_pooling'"
    assert f"module.kind: must be one of {kinds}" in unknown.stderr
    # Another job begins with the head, and its labels may be in another order.
    new = yaml.safe_load(job.read_text())
    new |= {"name": "new", "steps": 1, "students": None}
    new["teacher"] |= {"init": {"pretrained": str(run / "exports" / "teacher")}}
    new["teacher"]["objective"]["single_sentence"]["labels"] = LABELS[::-1]
    new["teacher"]["optimizer"] = {"learning_rate": 1e-30}
    del new["teacher"]["model"]
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(new))
    begun = tandem("train", tmp_path / "new.yaml")
    assert begun.returncode == 0, begun.stderr
    kept = json.loads((tmp_path / "runs" / "new" / "evaluation.json").read_text())["learners"]
    score = "single_sentence_accuracy"
    assert kept["teacher"][score] == results["teacher"][score]


def head(kind: str = CLASSIFICATION, **keys: object) -> TaskHeadConfig:
    return TaskHeadConfig(kind, LABELS, module=AttentionPoolingConfig(width=8), **keys)


@torch.no_grad()
def test_attention_pooling_is_its_formula_and_ignores_padding() -> None:
    model = build(with_task_head(EncoderConfig(**SIZES), "mood", head()), seed=0).eval()
    ids = torch.arange(5, 23).view(2, 9)
    for mask in (torch.tensor([9, 4]), (torch.arange(9) < torch.tensor([[9], [4]])).long()):
        found = model(ids, None, mask).heads["mood"]
        states = model(ids[1:, :4], output_hidden_states=True).hidden_states[-1][0]
        module = model.task_heads["mood"].module
        scores = torch.tanh(states @ module.hidden.weight.T + module.hidden.bias)
        weights = (scores @ module.score.weight[0]).softmax(0)
        wanted = module.output.weight @ (weights @ states) + module.output.bias
        torch.testing.assert_close(found[1], wanted)


def test_its_products_are_counted() -> None:
    config = with_task_head(EncoderConfig(**SIZES), "mood", head())
    bare = head_flops(EncoderConfig(**SIZES), 10)
    assert head_flops(config, 10) - bare == 10 * 2 * (16 * 8 + 8 + 16 * 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation": "relu"}, "activation: is for a head without a module"),
        ({"numbers": ["price"]}, "numbers: is for a head without a module"),
        ({"kind": "tagging"}, "module: attention_pooling has no output for each token"),
    ],
)
def test_keys_of_the_usual_head_are_refused_beside_it(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head(**keys)


@pytest.mark.parametrize("changed", [lambda x: x[:, :1], lambda x: x[None], lambda x: x.mean()])
def test_a_module_that_returns_another_shape_is_refused(monkeypatch, changed: Callable) -> None:
    model = build(with_task_head(EncoderConfig(**SIZES), "mood", head()), seed=0).eval()
    plain = AttentionPooling.forward
    monkeypatch.setattr(AttentionPooling, "forward", lambda *given: changed(plain(*given)))
    with pytest.raises(ModelError, match=r"AttentionPooling: must return \[2, 2\], not \["):
        model(torch.arange(5, 23).view(2, 9))


def test_a_wrong_kind_is_one_line(job: Path) -> None:
    change = ["teacher.objective.single_sentence.module.kind=max_poling"]
    with pytest.raises(ConfigError, match=r"module\.kind: must be one of .*did you mean max_pool"):
        configs.load(str(job), JobConfig, "job", change)
