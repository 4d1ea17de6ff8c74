"""Every command in the recipes does what the page says, with small models and few steps."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest
import transformers
import yaml

from model import EncoderConfig, build, save_pretrained
from tests.conftest import TINY_JOB, tandem
from tests.test_docs import DOCS, blocks, fitting
from tests.trainer.test_sentence_tasks import lines

PAGE = "recipes.md"
TITLES = re.findall(r"^## (.*)$", (DOCS / PAGE).read_text(), re.M)
TABLES = {"reviews.csv": 64, "new.csv": 8, "more.csv": 16}
# What a test cannot afford is replaced at the end of a command that trains.
SHORT = [
    *("steps=6", "batch.size=4", "batch.micro_batch=2", "evaluation={every: 3, sequences: 4}"),
    *("checkpoint.every=3", "data.sequence_length=32", "teacher.precision=fp32"),
]
OF_TASKS = ["epochs=1", "data.sequence_length=32"]


def commands(title: str) -> list[list[str]]:
    """The commands below a title that are run."""
    text = (DOCS / PAGE).read_text()
    start = text.index(f"## {title}\n")
    end = text.find("\n## ", start)
    return [
        command
        for block in blocks(PAGE)
        if block.kind == "bash" and block.is_run
        and start < block.position < (end if end > 0 else len(text))
        for command in block.commands
    ]  # fmt: skip


def write_tables(folder: Path) -> None:
    for name, count in TABLES.items():
        rows = [line.split("\t") for line in lines(count, len(name))]
        with (folder / name).open("w", newline="") as file:
            table = csv.writer(file)
            table.writerows([["review", "stars"], *rows])


def save_modernbert(folder: Path, tokenizer: Path) -> None:
    """A narrow ModernBERT, as `transformers` saves it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3}
    config = transformers.ModernBertConfig(
        vocab_size=600, num_hidden_layers=3, max_position_embeddings=128, local_attention=16,
        bos_token_id=2, eos_token_id=3, **sizes, **special,
    )  # fmt: skip
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)


@pytest.fixture
def folder(tmp_path: Path, text: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the recipes begin with."""
    (tmp_path / "text").mkdir()
    shutil.copy(text, tmp_path / "text/prose.txt")
    shutil.copy(text, tmp_path / "held_out.txt")
    tokenizer = corpus.parent / "tokenizer"
    sizes = {"hidden_size": 32, "ffn_size": 64, "heads": 4, "layers": 12, "max_positions": 128}
    save_pretrained(
        build(EncoderConfig(vocab_size=600, **sizes), seed=0), tmp_path / "models/bert", tokenizer
    )
    save_modernbert(tmp_path / "modernbert", tokenizer)
    write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_corpus_and_job(folder: Path, corpus: Path) -> None:
    """What the recipes of machines take for granted."""
    (folder / "corpora").mkdir()
    shutil.copytree(corpus, folder / "corpora/mine")
    job = {
        **yaml.safe_load(TINY_JOB.read_text()),
        "data": {"path": "corpora/mine", "sequence_length": 32},
        "batch": {"size": 16, "micro_batch": 8},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def shortened(command: list[str]) -> list[str]:
    words = [fitting(word) for word in command[1:]]
    if words[:2] == ["train", "job.yaml"]:
        return words
    if words[0] == "train" and words[1].endswith(".yaml"):
        return [*words, *SHORT]
    return [*words, *OF_TASKS] if words[0] in ("train", "finetune") else words


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_a_recipe_can_be_followed(title: str, folder: Path, corpus: Path) -> None:
    pytest.importorskip("onnxruntime")
    if title in ("From a laptop to SLURM", "Several GPUs"):
        add_corpus_and_job(folder, corpus)
    for command in commands(title):
        done = tandem(*shortened(command), WANDB_MODE="disabled")
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_the_page_has_the_recipes_that_are_looked_for() -> None:
    assert [len(commands(title)) > 0 for title in TITLES] == [True] * 5
