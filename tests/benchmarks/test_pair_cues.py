"""Cues of pairs are judged on held-out documents that are not read over and over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import pair_cues
from data_pipeline import BuildOptions, Corpus, build
from data_pipeline.tokenization.training import train
from tests.data_pipeline.conftest import make_documents


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """The same documents by the fraction that is held out."""
    folder = tmp_path_factory.mktemp("corpora")
    text = folder / "text.txt"
    text.write_text("\n\n".join(make_documents(300, sentences=60)) + "\n")
    train([str(text)], "wordpiece", 300, str(folder / "tokenizer"))
    found = {fraction: folder / f"held-out-{fraction}" for fraction in (0.0, 0.03, 0.5)}
    for fraction, path in found.items():
        options = BuildOptions([str(text)], str(folder / "tokenizer"), val_fraction=fraction)
        build(options, str(path))
    return found


def refusal(monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["pair_cues.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        pair_cues.main()
    return str(ended.value.code)


def test_too_few_held_out_documents_are_refused_in_one_line(
    corpora: dict[float, Path], monkeypatch: pytest.MonkeyPatch
):
    asked = 1000
    said = refusal(monkeypatch, corpora[0.03], "--pairs", asked)
    assert said.startswith(f"{corpora[0.03]}/val: ")
    assert f"too few for --pairs {asked}: build the corpus with --val-fraction 0.5" in said
    assert "\n" not in said
    most = int(said.split("--pairs ")[2].split()[0])
    held_out = Corpus.open(str(corpora[0.03])).split("val")
    pair_cues.require_enough(held_out, most)
    with pytest.raises(SystemExit):
        pair_cues.require_enough(held_out, most + 1)
    for name in ("train", "val"):
        pair_cues.require_enough(Corpus.open(str(corpora[0.5])).split(name), asked)


def test_a_corpus_that_holds_nothing_out_is_refused_in_one_line(
    corpora: dict[float, Path], monkeypatch: pytest.MonkeyPatch
):
    assert "--val-fraction" in refusal(monkeypatch, corpora[0.0])
    assert "\n" not in refusal(monkeypatch, corpora[0.0].parent / "none")
