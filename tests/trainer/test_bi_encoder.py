"""A bi-encoder: trained on two ranks, and its scores by the formulas of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AutoModel, AutoTokenizer

import configs
import tandem
from data_pipeline import DataError
from model import EncoderConfig, build, from_pretrained, save_pretrained
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.job_data.examples import with_examples
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

WORDS = ["the", "of", "and", "to", "in", "that", "was", "his"]
SIZES = "hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12"
JOB = """
name: alike
steps: 6
output_dir: {folder}/runs
data: {{root: {folder}, train: train.tsv, validation: train.tsv, sequence_length: 12,
  tokenizer: {corpus}/tokenizer}}
batch: {{size: 28, micro_batch: 5}}
teacher:
  model: {{{sizes}}}
  optimizer: {{learning_rate: 3.0e-3}}
  dropout: 0.0
  objective: {{bi_encoder: &task {{highest: 5, {pooling}}}}}
students:
  small:
    model: {{{sizes}}}
    optimizer: {{learning_rate: 3.0e-3}}
    objective: {{bi_encoder: *task, soft_labels: {{}}}}
evaluation: {{every: 1000}}
checkpoint: {{every: 1000}}
log: {{every: 1, wandb: disabled}}
"""


def pairs() -> list[tuple[str, str, float]]:
    """Pairs of texts of two words; the number is 2.5 for each shared word."""
    texts = [f"{one} {other}" for one in WORDS[:3] for other in WORDS[4:]]
    chosen = [(a, b) for n, a in enumerate(texts) for b in texts[n : n + 3]][:28]
    return [(a, b, 2.5 * len({*a.split()} & {*b.split()})) for a, b in chosen]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alike")
    rows = [f"{a}\t{b}\t{label}" for a, b, label in pairs()]
    (folder / "train.tsv").write_text("\n".join(["text_a\ttext_b\tlabel", *rows]) + "\n")
    return folder


def load(folder: Path, corpus: Path, pooling: str, *words: str) -> JobConfig:
    text = JOB.format(folder=folder, corpus=corpus, pooling=pooling, sizes=SIZES)
    return with_examples(configs.load_text(text, JobConfig, "job", words, "job.yaml"))


def train(*job: Any) -> str:
    """Collective."""
    run = jobs.run(load(*job))
    jobs.finish(run)
    return str(run.path)


def vectors(folder: Path, texts: list[str], pooling: str) -> torch.Tensor:
    """What sentence-transformers' Pooling makes of `transformers`' states, scaled to length 1."""
    read = AutoTokenizer.from_pretrained(folder)(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**read).last_hidden_state
    mask = read["attention_mask"][..., None].float()
    pooled = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1)


@pytest.mark.parametrize("pooling", ["mean", pytest.param("cls", marks=pytest.mark.slow)])
def test_scores_and_predictions_are_cosines(folder, corpus, tmp_path, pooling: str) -> None:
    import scipy.stats
    from sentence_transformers import SentenceTransformer

    words = f"output_dir={tmp_path}"
    run = RunFolder(
        Path(run_distributed(train, 2, folder, corpus, f"pooling: {pooling}", words)[0])
    )
    facts = json.loads(run.evaluation.read_text())["learners"]
    for learner, name in (("teacher", "teacher"), ("students/small", "small")):
        exported = run.path / "exports" / name
        texts = [[row[n] for row in pairs()] for n in (0, 1)]
        first, second = (vectors(exported, some, pooling) for some in texts)
        theirs = SentenceTransformer(str(exported), device="cpu").encode(texts[0])
        ours = tandem.embed(exported, texts[0], pooling=pooling)
        ours /= np.linalg.norm(ours, axis=1, keepdims=True)
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)
        cosines = (first * second).sum(dim=1).numpy()
        labels = [row[2] for row in pairs()]
        right = scipy.stats.spearmanr(cosines, labels).statistic
        assert facts[learner]["bi_encoder_spearman"] == pytest.approx(right, abs=1e-4)
        right = scipy.stats.pearsonr(cosines, labels).statistic
        assert facts[learner]["bi_encoder_pearson"] == pytest.approx(right, abs=1e-4)
        ended = CliRunner().invoke(
            tandem.main, ["predict", str(exported), str(folder / "train.tsv")]
        )
        said = [json.loads(line)["number"] for line in ended.stdout.splitlines()]
        assert said == pytest.approx((5 * cosines).tolist(), abs=1e-4)


def test_an_export_without_a_head_gives_sentence_transformers_the_mean(corpus, tmp_path) -> None:
    from sentence_transformers import SentenceTransformer

    model = build(EncoderConfig(**yaml.safe_load(f"{{{SIZES}}}")), seed=1)
    save_pretrained(model, tmp_path, corpus / "tokenizer")
    texts = ["the end of that", "his"]
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    ours = tandem.embed(tmp_path, texts)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


def test_the_loss_is_the_squared_difference_of_the_cosine(folder, corpus, tmp_path) -> None:
    """The first step's, of untrained weights: a rate of 1e-12 leaves the export as it began."""
    words = [f"output_dir={tmp_path}", "teacher.optimizer.learning_rate=1e-12", "students=null"]
    run = RunFolder(Path(run_distributed(train, 1, folder, corpus, "", *words)[0]))
    exported = run.path / "exports" / "teacher"
    first, second = (vectors(exported, [row[n] for row in pairs()], "mean") for n in (0, 1))
    labels = torch.tensor([row[2] / 5 for row in pairs()])
    loss = torch.nn.functional.mse_loss((first * second).sum(dim=1), labels)
    told = [row["teacher/loss"] for row in metrics.read(run.metrics) if "teacher/loss" in row]
    assert told[0] == pytest.approx(loss.item(), rel=1e-4)


def test_a_dense_layer_and_a_projection(folder, corpus, tmp_path) -> None:
    words = [f"output_dir={tmp_path}", "students=null", "steps=2"]
    run = RunFolder(
        Path(run_distributed(train, 1, folder, corpus, "dense: true, size: 6", *words)[0])
    )
    model = from_pretrained(run.path / "exports" / "teacher")
    assert model(torch.arange(5)[None]).heads["bi_encoder"].shape == (1, 6)
    head = model.config.task_heads["bi_encoder"]
    assert (head.transform, head.size, head.normalise) == ("tanh", 6, True)


def test_labels_above_the_highest_are_refused(folder, corpus) -> None:
    with pytest.raises(DataError, match=r"label: 5.0 is more than highest: 1; set obj"):
        load(folder, corpus, "", "teacher.objective.bi_encoder.highest=1", "students=null")
