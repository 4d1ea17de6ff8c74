"""A packing in a user's file, named by `plugins:`: the one of CONTRIBUTING."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs import ConfigError
from data_pipeline import Corpus, DataError
from data_pipeline.building.merging import documents
from data_pipeline.packing.sequences import PackingRules, Spans
from data_pipeline.shards.blocks import Block
from tests.conftest import REPOSITORY, TINY_JOB, tandem
from trainer.run_folder import metrics


@pytest.fixture
def words(tmp_path: Path, corpus: Path) -> list[object]:
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r'```python\n("""Single sentences.*?)```', contributing, re.S)
    (tmp_path / "single_sentence.py").write_text(example)
    return [
        TINY_JOB, f"data.path={corpus}", f"output_dir={tmp_path}",
        f"plugins=[{tmp_path}/single_sentence.py]", "data.packing=single_sentence",
        "students=null", "steps=4", "evaluation.every=4",
    ]  # fmt: skip


def test_a_users_packing_is_trained_on_two_ranks_as_on_one(
    words: list[object], tmp_path: Path
) -> None:
    losses = []
    for ranks in (1, 2):
        trained = tandem("train", *words, f"name=on_{ranks}", "--nproc", ranks)
        assert trained.returncode == 0, trained.stderr
        rows = metrics.read(tmp_path / f"on_{ranks}" / "metrics.jsonl")
        losses.append([row["teacher/loss"] for row in rows if "teacher/loss" in row])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_what_is_dumped_is_its_rows(words: list[object], tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "rows.npz"
    dumped = tandem("data", "dump", *words, "--steps", "0:3", "--world-size", 2, "--rank", 1,
                    "--out", out)  # fmt: skip
    assert dumped.returncode == 0, dumped.stderr
    arrays = np.load(out)
    capacity = arrays["input_ids"].shape[1] - 2
    ends_of_sentences = {
        tuple(tokens[start:].tolist())
        for document in documents(Corpus.open(str(corpus)).split("train"))
        for tokens in np.split(document.tokens, np.cumsum(document.sentences, dtype=int)[:-1])
        for start in range(0, len(tokens), capacity)
    }
    ids = np.where(arrays["labels"] == -100, arrays["input_ids"], arrays["labels"])
    lengths = arrays["attention_mask"].sum(1)
    short = [row[1 : n - 1] for row, n in zip(ids, lengths, strict=True) if n < ids.shape[1]]
    assert len(short) > 3
    assert {tuple(row.tolist()) for row in short} <= ends_of_sentences


def test_a_packing_without_a_rule_is_one_line(words: list[object], tmp_path: Path) -> None:
    plugin = tmp_path / "single_sentence.py"
    plugin.write_text(plugin.read_text().replace("def ends(", "def ended("))
    ended = tandem("data", "show", *words)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.search(rf"{plugin}:\d+: TypeError: \w+ has to define ends\n$", ended.stderr)


@pytest.mark.parametrize("rows", ["np.arange(3)", "np.arange(len(cut.starts))", "None"])
def test_ends_that_never_end_are_one_line(words: list[object], tmp_path: Path, rows: str) -> None:
    plugin = tmp_path / "single_sentence.py"
    plugin.write_text(plugin.read_text().replace("np.arange(len(cut.starts)) + 1", rows))
    ended = tandem("data", "show", *words)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("tandem: data.packing: single_sentence: its `ends` must be an")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: replace(s, lengths=s.lengths + 9),  # a row is too long
        lambda s: replace(s, starts=s.starts + 10**7),
        lambda s: replace(s, starts=s.starts - 10**6),
        lambda s: replace(s, lengths=s.lengths * 0),
        lambda s: replace(s, starts=s.starts[:-1]),
        lambda s: replace(s, first=s.first[:-1]),  # text would be left out
        lambda s: replace(s, first=s.first[:0]),
        lambda s: replace(s, first=np.repeat(s.first, 2)),  # empty rows
        lambda s: replace(s, starts=s.starts * 1.0),
        lambda s: replace(s, starts=s.starts.tolist()),
    ],
)
@pytest.mark.parametrize("kind", ["best_fit", "full_sentences"])
def test_spans_that_are_no_rows_of_the_block_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, change: Callable[[Spans], Spans]
) -> None:
    sizes = np.full(20, 7, np.uint16), np.full(5, 4, np.uint32)
    block, rules = Block(np.arange(140), *sizes), PackingRules(kind, 32)
    made = rules.spans(block)
    monkeypatch.setattr(type(rules.packing), "spans", lambda *_: change(made))
    with pytest.raises(DataError, match=rf"^data\.packing: {kind}: its `spans` must be arrays of"):
        rules.spans(block)
    monkeypatch.setattr(type(rules.packing), "spans", lambda *_: None)
    with pytest.raises(ConfigError, match=r"\.spans: must return Spans, not NoneType$"):
        rules.spans(block)
