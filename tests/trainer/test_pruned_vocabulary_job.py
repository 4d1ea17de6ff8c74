"""A student with a part of its teacher's vocabulary: from the teacher's folder to the export."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

import configs
from data_pipeline import MASKED, BatchStream, Corpus, open_corpora
from model import from_pretrained
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.run_folder.folder import RunFolder

JOB = """
name: pruned
steps: 6
seed: 3
output_dir: {folder}/runs
data: {{path: {folder}/corpus, sequence_length: 32}}
batch: {{size: 8, micro_batch: 4}}
teacher: {{frozen: true, init: {{pretrained: {folder}/pruned}}}}
students:
  small:
    model: {{base: {folder}/pruned/model.yaml, layers: 1}}
    init: {{teacher_layers: [0]}}
    objective: {{soft_kl: {{}}, mlm: {{}}, hidden_mse: {{}}}}
evaluation: {{every: 3, sequences: 8}}
checkpoint: {{every: 2}}
log: {{every: 1, wandb: disabled}}
"""


def job(folder: Path, *overrides: str) -> JobConfig:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # each rank's own
        file.write(JOB.format(folder=folder))
        file.flush()
        return configs.load(file.name, JobConfig, "job", overrides)


@pytest.fixture(scope="module", name="folder")
def made(corpus, text, tmp_path_factory) -> Path:
    """A teacher with 600 entries, the same with 350 of them, and a corpus of these."""
    folder = tmp_path_factory.mktemp("vocabularies")
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=608, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=48, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder / "whole")
    AutoTokenizer.from_pretrained(corpus / "tokenizer").save_pretrained(folder / "whole")
    pruned = folder / "pruned"
    for command in (
        ["tokenizer", "prune", folder / "whole", text, "--size", 350, "--out", pruned],
        ["data", "build", text, "--tokenizer", pruned, "--out", folder / "corpus"],
    ):
        done = tandem(*command)
        assert done.returncode == 0, done.stderr
    return folder


def trained(folder: Path) -> list[str]:
    """Folders of a run without a stop, and of the same run stopped and resumed."""
    whole = jobs.run(job(folder, "name=whole"))
    jobs.finish(whole)
    jobs.run(job(folder, "name=resumed"), stop_after=3)
    resumed = jobs.run(configs.load(f"{folder}/runs/resumed/config.yaml", JobConfig, "job"))
    return [str(run.path) for run in (whole, resumed)]


def restricted_kl(folder: Path) -> float:
    """soft_kl of the first step by `transformers`: the whole teacher, among the kept entries."""
    config = job(folder)
    corpora = open_corpora(config.data)
    batch = BatchStream.open(config.data, "train", 3, 8, corpora=corpora).batch(0)
    ids, mask = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)
    places = torch.from_numpy(batch.targets[MASKED].in_columns(ids.shape)) >= 0
    old = AutoTokenizer.from_pretrained(folder / "whole").get_vocab()
    new = AutoTokenizer.from_pretrained(folder / "pruned").get_vocab()
    kept = torch.tensor([old[token] for token, _ in sorted(new.items(), key=lambda item: item[1])])
    teacher = transformers.BertForMaskedLM.from_pretrained(folder / "whole").eval()
    with torch.no_grad():
        theirs = teacher(kept[ids], attention_mask=mask).logits[..., kept][places].log_softmax(-1)
        del teacher.bert.encoder.layer[1]
        ours = teacher(kept[ids], attention_mask=mask).logits[..., kept][places].log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.slow
def test_it_learns_from_the_teacher_among_its_own_entries(folder: Path, text: Path) -> None:
    paths = run_distributed(trained, 2, folder)[0]
    whole, resumed = (RunFolder(Path(path)) for path in paths)
    curve = jobs.curve(whole)
    assert curve == jobs.curve(resumed)
    alone = tandem("train", whole.config, "name=alone", "--nproc", 1)
    assert alone.returncode == 0, alone.stderr
    assert jobs.assert_same_losses(RunFolder(whole.path.with_name("alone")), curve)
    first = next(value for _, name, value in curve if name == "students/small/soft_kl")
    assert first == pytest.approx(restricted_kl(folder), rel=1e-4)
    assert json.loads(whole.evaluation.read_text())["learners"]["students/small"]["agreement"]
    export = whole.path / "exports" / "small"
    theirs = AutoTokenizer.from_pretrained(export)
    assert len(theirs) == from_pretrained(export).config.vocab_size == 350
    documents = [" ".join(part.split()) for part in text.read_text().split("\n\n")]
    read = {tuple(theirs(document, add_special_tokens=False).input_ids) for document in documents}
    block = Corpus.open(str(folder / "corpus")).split("train").read_block(0)
    ends = np.cumsum(block.sentences)[np.cumsum(block.documents) - 1]
    trained_on = {tuple(document.tolist()) for document in np.split(block.tokens, ends[:-1])}
    assert len(trained_on) > 40
    assert trained_on <= read
