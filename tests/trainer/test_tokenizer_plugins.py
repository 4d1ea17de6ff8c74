"""A kind of tokenizer in a user's file, named by `--plugin`: the one of CONTRIBUTING."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.conftest import REPOSITORY, TINY_JOB, tandem
from trainer.run_folder import metrics

SIZE = 60


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r'```python\n("""Characters:.*?)```', contributing, re.S)
    (tmp_path / "characters.py").write_text(example)
    return tmp_path / "characters.py"


def train(text: Path, plugin: Path, *options: object) -> tuple[int, str]:
    sizes = ("--vocab-size", SIZE, "--out", plugin.parent / "tokenizer")
    done = tandem("tokenizer", "train", text, "--plugin", plugin, *sizes, *options)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_users_tokenizer_is_that_of_a_corpus_and_its_model(text: Path, plugin: Path) -> None:
    assert train(text, plugin, "--kind", "characters") == (0, "")
    folder = plugin.parent / "tokenizer"
    read = PreTrainedTokenizerFast.from_pretrained(folder)
    words = "the rest of it"
    assert read.tokenize(words) == list(words)
    assert read.decode(read.encode(words, add_special_tokens=False)) == words
    corpus = plugin.parent / "data"
    built = tandem("data", "build", text, "--tokenizer", folder, "--out", corpus)
    assert built.returncode == 0, built.stderr
    trained = tandem(
        "train", TINY_JOB, f"data.path={corpus}", f"output_dir={plugin.parent}", "students=null",
        f"teacher.model.vocab_size={SIZE}", "steps=2", "evaluation.every=2", "--nproc", 2,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    rows = metrics.read(plugin.parent / "tiny" / "metrics.jsonl")
    assert [row["step"] for row in rows if "teacher/loss" in row] == [1, 2]
    exported = plugin.parent / "tiny" / "exports" / "teacher" / "tokenizer.json"
    assert json.loads(exported.read_text()) == json.loads((folder / "tokenizer.json").read_text())


def test_mistakes_are_one_line(text: Path, plugin: Path) -> None:
    kinds = "wordpiece, bpe, unigram, characters, or one of a --plugin"
    code, said = train(text, plugin, "--kind", "letters")
    assert (code, said) == (2, f"tandem: --kind letters: must be one of {kinds}\n")
    plugin.write_text("import nothing_of_this_name")
    code, said = train(text, plugin, "--kind", "characters")
    assert code == 1
    assert said.startswith(f"tandem: plugins: {plugin}:1: ModuleNotFoundError: ")
