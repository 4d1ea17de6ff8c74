"""Commands that take long tell what they are at, on standard error."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from configs import progress
from tandem import main


@pytest.fixture
def told(monkeypatch):
    """What a command writes to standard error, if every moment counts."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.01)

    def run(*words: object) -> str:
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return done.stderr

    return run


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_training_a_tokenizer(told, text, tmp_path, kind):
    words = ("--kind", kind, "--vocab-size", "400", "--out", tmp_path / "tokenizer")
    errors = told("tokenizer", "train", text, *words)
    assert re.search(r"tokenizer: reading the text: [\d,]+ characters · 0s", errors)
    assert re.search(r"tokenizer: learning the vocabulary of [\d,]+ characters · 0s", errors)


def test_scoring_measuring_and_exporting(told, finished, tmp_path):
    run = finished[0]
    errors = told("evaluate", run)
    assert re.search(r"scoring teacher: \d+ batch", errors)
    assert "measuring the speed of teacher" in errors
    errors = told("export", run, "--learner", "teacher", "--out", tmp_path / "teacher")
    assert "exporting teacher" in errors


def test_encoding_examples(told, corpus, tmp_path):
    table = tmp_path / "reviews.tsv"
    table.write_text("text\tlabel\n" + "a fine film\tgood\na waste of time\tbad\n" * 20)
    job = f"teacher.model=bert_tiny teacher.init=null data.train={table}".split()
    place = (f"data.tokenizer={corpus.parent / 'tokenizer'}", f"output_dir={tmp_path / 'runs'}")
    errors = told("data", "show", "single_sentence", *job, *place, "--samples", "1")
    assert re.search(rf"encoding {table}: \d+ examples", errors)


@pytest.mark.parametrize("form", ["npy", "jsonl"])
def test_embedding_a_file(told, finished, tmp_path, form):
    texts = tmp_path / "texts.txt"
    texts.write_text("a fine film\na waste of time\n")
    folder = finished[0] / "exports" / "teacher"
    errors = told("embed", folder, texts, "--out", tmp_path / f"vectors.{form}")
    assert re.search(r"embedding: (1 row|[2-9] rows) · \d+s", errors)
