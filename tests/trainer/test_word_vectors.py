"""A learner whose words begin with vectors from a file, in GloVe's or word2vec's text form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import configs
from configs import ConfigError
from data_pipeline import DataError
from data_pipeline.augmentation.word_vectors import token_vectors, vector_size
from model import build
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_kinds_of_models import job
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.fit import require_inputs
from trainer.learners.first_weights import from_word_vectors
from trainer.learners.module import weights_seed
from trainer.run_folder.folder import RunFolder

SIZE = 16
TABLE = "embeddings.word.weight"


def words_of(corpus: Path) -> dict[str, int]:
    """The corpus's tokens, by themselves: lower-case words among them."""
    tree = json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    return {word: number for word, number in vocabulary.items() if word.isalpha()}


def write(path: Path, words: list[str], header: bool = False) -> dict[str, np.ndarray]:
    """A vector for each word, in a file."""
    rng = np.random.default_rng(0)
    vectors = {word: rng.normal(size=SIZE).round(3).astype(np.float32) for word in words}
    lines = [f"{len(words)} {SIZE}"] * header
    lines += [f"{word} {' '.join(map(str, row.tolist()))}" for word, row in vectors.items()]
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return vectors


@pytest.mark.parametrize(("name", "header"), [("glove.txt", False), ("w2v.txt.gz", True)])
def test_tokens_that_begin_a_word_have_its_vector(corpus, tmp_path, name, header):
    vocabulary = words_of(corpus)
    known = sorted(vocabulary)[:20]
    first, second = known[:2]
    file = tmp_path / name
    spelled = [*known[1:], first.upper(), second.upper(), ". . .", "nowhere-to-be-found"]
    vectors = write(file, spelled, header)
    found = token_vectors(file, corpus / "tokenizer")
    assert vector_size(file) == SIZE
    assert set(found) == {vocabulary[word] for word in known}
    for word in known[1:]:
        assert np.array_equal(found[vocabulary[word]], vectors[word])
    assert np.array_equal(found[vocabulary[first]], vectors[first.upper()])


def test_a_file_that_ends_early_is_refused(corpus, tmp_path):
    file = tmp_path / "cut.txt"
    file.write_text("3 2\na 1 2\nb 1 2\n")
    with pytest.raises(DataError, match=r"cut\.txt: its first line says 3 words, but it has 2$"):
        token_vectors(file, corpus / "tokenizer")


def begin(corpus: Path, runs: Path, *overrides: str) -> str:
    """The folder of a run of one step at a rate that changes nothing. Collective."""
    still = ["students.lstm.optimizer.learning_rate=1e-30", "steps=1"]
    return str(jobs.run(job(corpus, runs, *still, *overrides, stage=1)).path)


def test_a_student_begins_with_them_and_with_random_weights_elsewhere(corpus, tmp_path):
    vocabulary = words_of(corpus)
    known = sorted(vocabulary)[:20]
    vectors = write(tmp_path / "glove.txt", known)
    file = f"students.lstm.init.word_vectors={tmp_path / 'glove.txt'}"
    folder = run_distributed(begin, 2, corpus, tmp_path / "runs", file)[0]
    found = SavedLearners(RunFolder(Path(folder))).load("students/lstm").state_dict()
    config = job(corpus, tmp_path, file)
    student = config.students["lstm"]
    drawn = build(student.architecture, weights_seed("students/lstm", student, config.seed))
    expected = drawn.state_dict()
    for word in known:
        expected[TABLE][vocabulary[word]] = torch.from_numpy(vectors[word])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a 1 2\n", r"lstm\.init\.word_vectors: .*x\.txt has vectors of 2 numbers, .* have 16;"),
        ("", r"x\.txt: holds no word vectors"),
        ("5 2\na 1\n", r"x\.txt:2: must be a word and its 2 numbers"),
        (None, r"x\.txt: cannot be read"),
    ],
    ids=["narrow", "empty", "odd", "absent"],
)
def test_a_file_that_does_not_fit_is_named_before_the_job_begins(corpus, tmp_path, lines, message):
    if lines is not None:
        (tmp_path / "x.txt").write_text(lines)
    config = job(corpus, tmp_path, f"students.lstm.init.word_vectors={tmp_path / 'x.txt'}")
    with pytest.raises((DataError, TrainingError), match=message):
        require_inputs(config)


def test_a_file_without_a_word_of_the_tokenizer_is_refused(corpus, tmp_path):
    write(tmp_path / "x.txt", ["qqqqqq"])
    with pytest.raises(DataError, match=r"x\.txt: has no word of the tokenizer in"):
        from_word_vectors(str(tmp_path / "x.txt"), corpus / "tokenizer", torch.nn.Linear(1, 1))


def test_weights_have_one_origin(corpus, tmp_path):
    both = ["students.lstm.init={word_vectors: x, pretrained: y}"]
    with pytest.raises(ConfigError, match=r"init\.pretrained: set one of this, .*word_vectors"):
        configs.load(str(jobs.TINY_JOB), JobConfig, "job", [f"data.path={corpus}", *both])
