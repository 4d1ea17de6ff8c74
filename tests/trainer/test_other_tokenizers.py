"""Students of text that have another tokenizer than their teacher."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

import configs
from configs import ConfigError
from data_pipeline import DEFAULT_VIEW, MASKED, NO_LABEL, BatchStream, DataError, open_corpora
from data_pipeline.reading.batches import shared_view
from data_pipeline.tokenization.alignment import shared_tokens
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.batches import MicroRuns
from trainer.config import JobConfig
from trainer.job_data.fit import require_fit
from trainer.job_data.other_tokenizers import other_views
from trainer.objectives.row_losses import kl_divergence
from trainer.objectives.shared_spans import _means
from trainer.objectives.terms.divergences import sorted_distance
from trainer.objectives.terms.predictions import among
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.vocabulary_projection import Distribution, Projection

JOB = """
name: text
steps: 6
output_dir: {folder}/runs
data: {{path: {folder}/data, sequence_length: 64}}
batch: {{size: 8, micro_batch: 2}}
teacher: {{frozen: true, init: {{pretrained: {folder}/wordpiece}}}}
students:
  same:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 64}}
    objective: {{mlm: {{}}, soft_kl: {{}}}}
  other:
    tokenizer: {folder}/bpe
    init: {{pretrained: {folder}/bpe}}
    objective:
      mlm: {{}}
      soft_kl: {{temperature: 2.0}}
      uld: {{}}
      hidden_mse: {{}}
      pkd: {{layers: final}}
      cosine: {{}}
evaluation: {{every: 3, sequences: 16}}
checkpoint: {{every: 3}}
log: {{every: 1, wandb: disabled}}
"""
OTHER = "students.other"


def load(folder: Path, *overrides: str) -> JobConfig:
    text = JOB.format(folder=folder)
    return configs.load_text(text, JobConfig, "job", overrides, "job.yaml")


@pytest.fixture(scope="module")
def folder(corpus, text, tmp_path_factory) -> Path:
    """Two masked-LM models by `transformers`, and the text in the tokens of both."""
    folder = tmp_path_factory.mktemp("tokenizers")
    shutil.copytree(corpus / "tokenizer", folder / "wordpiece")
    for command in (
        ("tokenizer", "train", text, "--kind", "bpe", "--vocab-size", 700, "--out", folder / "bpe"),
        (
            *("data", "build", text, "--tokenizer", folder / "wordpiece"),
            *("--also", folder / "bpe", "--val-fraction", 0.1, "--out", folder / "data"),
        ),
    ):
        done = tandem(*command)
        assert done.returncode == 0, done.stderr
    torch.manual_seed(3)
    for name, vocab_size in (("wordpiece", 600), ("bpe", 700)):
        config = BertConfig(
            vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=128, initializer_range=0.3,
        )  # fmt: skip
        BertForMaskedLM(config).save_pretrained(folder / name)
    (folder / "job.yaml").write_text(JOB.format(folder=folder))
    return folder


def run(folder: Path, *overrides: str, stop_after: int | None = None) -> RunFolder:
    return jobs.run(load(folder, *overrides), stop_after=stop_after)


def trained(folder: Path) -> list[str]:
    """Folders of a whole run, of one that stops and resumes, and of one without the student."""
    whole = run(folder, "name=whole")
    jobs.finish(whole)
    run(folder, "name=resumed", stop_after=2)
    resumed = run(folder, "name=resumed")
    alone = run(folder, "name=alone", "students.other=null")
    return [str(made.path) for made in (whole, resumed, alone)]


def compared_by_transformers(folder: Path) -> tuple[float, float, float]:
    """soft_kl and uld of the first step by `transformers` alone, and the share of masked tokens."""
    job = load(folder)
    corpora = open_corpora(job.data)
    views = other_views(job, corpora)
    batch = BatchStream.open(job.data, "train", job.seed, 8, corpora=corpora, views=views).batch(0)
    form = job.students["other"].form
    both = batch.view(shared_view(DEFAULT_VIEW, form))
    row, slot = np.nonzero(both.targets[MASKED].labels != NO_LABEL)
    span = both.targets[MASKED].positions[row, slot]
    logs = []
    for name, view in (("wordpiece", DEFAULT_VIEW), ("bpe", form)):
        read = batch.view(view)
        model = AutoModelForMaskedLM.from_pretrained(folder / name).eval()
        with torch.no_grad():
            logits = model(
                torch.from_numpy(read.input_ids),
                attention_mask=torch.from_numpy(read.attention_mask),
            ).logits
        logs.append(logits[row, both.runs[view].first[row, span]])
    theirs, ours = logs
    tokens = [AutoTokenizer.from_pretrained(folder / name) for name in ("wordpiece", "bpe")]
    shared = shared_tokens(folder / "bpe", folder / "wordpiece")
    columns = np.flatnonzero(shared >= 0)
    for column in columns[::7]:
        plain = tokens[1].convert_ids_to_tokens(int(column)).removeprefix("\u0120")
        assert tokens[0].convert_ids_to_tokens(int(shared[column])).removeprefix("##") == plain
    log_p = (theirs[:, shared[columns]] / 2).log_softmax(-1)
    log_q = (ours / 2)[:, columns].log_softmax(-1)
    labels = batch.view(form).targets[MASKED].labels[row, both.runs[form].slots[row, slot]]
    is_common = torch.from_numpy(shared[labels] >= 0)
    assert 0 < is_common.sum() < len(row)
    kl = 4 * float(((log_p.exp() * (log_p - log_q)).sum(-1) * is_common).mean())
    p, q = (F.pad(it.softmax(-1), (0, 700 - it.shape[1])).sort(-1)[0] for it in (theirs, ours))
    masked = (batch.view(form).targets[MASKED].labels != NO_LABEL).sum()
    return kl, float((p - q).abs().sum(-1).mean()), len(row) / masked


@pytest.mark.slow
def test_it_learns_from_the_teacher_and_is_exported_with_its_tokenizer(folder, tmp_path) -> None:
    paths = run_distributed(trained, 2, folder)[0]
    whole, resumed, alone = (RunFolder(Path(path)) for path in paths)
    curve = jobs.curve(whole)
    assert curve == jobs.curve(resumed)
    assert jobs.curve(whole, "students/same") == jobs.curve(alone, "students/same")
    first = next(row for row in metrics.read(whole.metrics) if row["step"] == 1)
    kl, uld, share = compared_by_transformers(folder)
    assert first["students/other/soft_kl"] == pytest.approx(kl, rel=1e-4)
    assert first["students/other/uld"] == pytest.approx(uld, rel=1e-4)
    assert first["students/other/aligned_masked"] == pytest.approx(share)
    assert 0.9 < first["students/other/aligned_tokens"] <= 1
    single = tandem("train", whole.config, f"output_dir={tmp_path}", "--nproc", 1)
    assert single.returncode == 0, single.stderr
    assert jobs.assert_same_losses(RunFolder(tmp_path / "whole"), curve)
    change = f"{OTHER}.tokenizer={folder}/wordpiece"
    moved = tandem("train", folder / "job.yaml", "name=whole", "steps=8", change)
    assert moved.returncode == 1
    assert f"{OTHER}.tokenizer: " in moved.stderr
    assert "would read other tokens" in moved.stderr
    results = json.loads(whole.evaluation.read_text())["learners"]["students/other"]
    assert (results["retention"], results["agreement"]) == (None, None)
    assert "other ends worse" not in (whole.path / "report.html").read_text()
    export = whole.path / "exports" / "other"
    text = "The lambda expression's Parameters, naively (re)evaluated."
    read, theirs = (AutoTokenizer.from_pretrained(it)(text) for it in (export, folder / "bpe"))
    assert read["input_ids"] == theirs["input_ids"]
    assert AutoModelForMaskedLM.from_pretrained(export).config.vocab_size == 700


@pytest.mark.slow
def test_commands_know_the_form_of_each_learner(folder) -> None:
    planned = tandem("plan", folder / "job.yaml", "--device", "cpu", "--json")
    assert planned.returncode == 0, planned.stderr
    refused = tandem("train", folder / "job.yaml", f"{OTHER}.tokenizer={folder}/none")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "none" in refused.stderr


def test_a_pruned_vocabulary_keeps_its_tokens(folder, text, tmp_path) -> None:
    pruned = tmp_path / "pruned"
    done = tandem("tokenizer", "prune", folder / "wordpiece", text, "--size", 300, "--out", pruned)
    assert done.returncode == 0, done.stderr
    found = shared_tokens(tmp_path / "pruned", folder / "wordpiece")
    few, many = (
        AutoTokenizer.from_pretrained(it) for it in (tmp_path / "pruned", folder / "wordpiece")
    )
    tokens = few.convert_ids_to_tokens(range(len(few)))
    ordinary = [at for at, token in enumerate(tokens) if not re.fullmatch(r"\[\w+\]", token)]
    assert found[ordinary].tolist() == many.convert_tokens_to_ids([tokens[at] for at in ordinary])
    assert (np.delete(found, ordinary) == -1).all()


def test_states_of_spans_are_means_over_their_tokens() -> None:
    states = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    first = torch.tensor([[0, 1, 4, 6], [0, 2, 0, 0]])
    sizes = torch.tensor([[1, 2, 2, 1], [1, 3, 0, 0]])
    means = _means(states, MicroRuns(first, sizes, first))
    for row in range(2):
        for span in range(4):
            begin, size = int(first[row, span]), int(sizes[row, span])
            inside = states[row, begin : begin + size]
            mean = inside.mean(0) if size else torch.zeros(3, dtype=torch.float64)
            torch.testing.assert_close(means[row, span], mean)
    weights = torch.randn_like(means)
    (gradient,) = torch.autograd.grad((means * weights).sum(), states)
    expected = torch.zeros_like(states)
    for row in range(2):
        for span in range(4):
            for at in range(int(sizes[row, span])):
                expected[row, int(first[row, span]) + at] = weights[row, span] / sizes[row, span]
    torch.testing.assert_close(gradient, expected)


def test_a_distribution_over_shared_tokens_at_some_rows() -> None:
    x, weight, bias = torch.randn(6, 4), torch.randn(9, 4), torch.randn(9)
    whole = Distribution(Projection(x, weight, bias))
    tokens, rows = torch.tensor([3, -1, 8, 0]), torch.tensor([5, 0, 0])
    p, _ = whole.take(rows).over(tokens).at(slice(0, 3), 2.0)
    expected = ((x @ weight.t() + bias) / 2)[rows][:, [3, 8, 0]].softmax(-1)
    torch.testing.assert_close(p[:, [0, 2, 3]], expected)
    assert (p[:, 1] == 0).all()


def test_logits_of_further_tokens_get_no_gradient() -> None:
    common = torch.tensor([True, False, True, True])
    logits = torch.randn(2, 4, requires_grad=True)
    log_q = among(logits.log_softmax(-1), common)
    torch.testing.assert_close(log_q[:, common], logits[:, common].log_softmax(-1))
    log_p = among(torch.randn(2, 4), common)
    kl_divergence(log_q, log_p).sum().backward()
    torch.testing.assert_close(logits.grad, log_q.exp() - log_p.exp())


def test_sorted_probabilities_of_two_vocabularies() -> None:
    q, p = torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    distance = sorted_distance(q.log(), p.log())
    torch.testing.assert_close(distance, torch.tensor([0.1 + 0.0 + 0.1 + 0.0]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention_mse={}", "compares token with token, so that its teacher must have the same"),
        ("soft_kl.positions=attended", "compares predictions across tokenizers at masked"),
    ],
)
def test_terms_that_cannot_compare_are_refused(folder, override, message) -> None:
    name = re.split(r"[.=]", override)[0]
    with pytest.raises(ConfigError, match=rf"{OTHER}.objective.{name}: {message}") as refused:
        load(folder, f"{OTHER}.objective.{override}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "teacher.tokenizer=any",
            "teacher.tokenizer: masks are drawn on the teacher's tokens; bui",
        ),
        ("data.masking.on_device=true", "data.masking.on_device: students.other.tokenizer needs"),
        (f"{OTHER}.objective.soft_kl.min_lead=0.1", "is about a teacher that this job trains"),
        ("students.same.generator=other", "students.same.generator: is for learners of the job's"),
    ],
)
def test_settings_for_one_tokenizer_are_refused(folder, override, message) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(folder, override)
    assert "\n" not in str(refused.value)


def test_a_corpus_without_the_tokenizer_is_refused(folder, corpus) -> None:
    job = load(folder, f"data.path={corpus}")
    with pytest.raises(DataError, match="build it again with `--also "):
        require_fit(job, open_corpora(job.data))
    job = load(folder, f"{OTHER}.tokenizer={job.data.path}/tokenizer", f"data.path={corpus}")
    with pytest.raises(DataError, match=r"itself; remove the student's `tokenizer`$"):
        require_fit(job, open_corpora(job.data))
