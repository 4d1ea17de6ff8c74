"""A named pipe among the files that a command reads is named at once: it may have no writer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import tandem
from model import build, save_pretrained
from tests.trainer import tiny


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model/config.json", "embed {0}/model text"),
        ("model/model.safetensors", "import {0}/model --out {0}/new"),
        ("model/tokenizer.json", "embed {0}/model text"),
        ("corpus/corpus.json", "data check {0}/corpus"),
        ("run/config.yaml", "evaluate {0}/run"),
        ("pipe", "data build {0}/text.txt --tokenizer {0}/model --out {0}/pipe"),
        ("pipe", "import {0}/model --out {0}/pipe"),
        ("pipe", "export {0}/run --learner teacher --out {0}/pipe"),
        ("pipe.tsv", "data perturb sst2 --replace 0 data.train={0}/pipe.tsv --out {0}/new.tsv"),
        (
            "text.txt",
            "tokenizer train {0}/text.txt --kind wordpiece --vocab-size 300 --out {0}/new",
        ),
    ],
)
def test_a_pipe_is_named_at_once(name: str, words: str, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    save_pretrained(build(tiny.encoder(), seed=1), tmp_path / "model")
    shutil.copytree(corpus / "tokenizer", tmp_path / "model", dirs_exist_ok=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text("A text.\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    ended = CliRunner().invoke(tandem.main, words.format(tmp_path).split())
    assert ended.exit_code in (1, 2), ended.output
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    (line,) = ended.stderr.strip().splitlines()[-1:]
    assert "pipe" in line or Path(name).stem in line
