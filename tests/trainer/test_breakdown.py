"""What a learner gets right and wrong by class, against sklearn and seqeval."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.tokenization.tokenizer import load
from model import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    ModelConfig,
    TaskHeadConfig,
    with_task_head,
)
from model.task_head_config import TAGGING
from tests.trainer import tiny
from trainer.batches import MicroBatch, MicroTarget
from trainer.evaluation.breakdown import Breakdown
from trainer.evaluation.mistakes import WRONG
from trainer.scoring.task_metrics import (
    END,
    ClassMetric,
    GroupRanking,
    MultiLabelMetric,
    NumberMetric,
    TagMetric,
)

LABELS = ["bad", "good", "neither"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC"]
WORDS = ["the", "file", "statement", "is", "read"]


def with_head(name: str, kind: str, labels: list[str]) -> ModelConfig:
    return with_task_head(tiny.encoder(), name, TaskHeadConfig(kind, labels))


def batch_of(folder: Path, rows: int, **target: MicroTarget) -> tuple[MicroBatch, list[int]]:
    """The words of `WORDS` between [CLS] and [SEP] in every row, and where each begins."""
    tokenizer, vocabulary = load(folder)
    pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in WORDS]
    ids = [vocabulary.cls, *(token for piece in pieces for token in piece), vocabulary.sep]
    starts = [1 + sum(map(len, pieces[:number])) for number in range(len(pieces))]
    input_ids = torch.tensor([[*ids, 0, 0]] * rows)
    mask = torch.tensor([[True] * len(ids) + [False] * 2] * rows)
    return MicroBatch(input_ids, input_ids * 0, mask, int(mask.sum()), target), starts


def test_classes_are_counted_as_sklearn_counts_them(corpus: Path) -> None:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    right = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(1))
    right[7] = -100
    predicted = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(2))
    metric, folder = ClassMetric("moods", ["accuracy"]), corpus.parent / "tokenizer"
    found = Breakdown([metric], with_head("moods", CLASSIFICATION, LABELS), folder)
    for rows in (slice(0, 90), slice(90, 200)):
        labels = right[rows]
        batch, _ = batch_of(folder, len(labels), moods=MicroTarget(labels))
        there = labels != -100
        found.add(batch, [torch.stack([predicted[rows], labels], dim=1)[there].double()])
    result = found.finish()["moods"]
    known = right != -100
    truth, guesses = right[known].numpy(), predicted[known].numpy()
    np.testing.assert_array_equal(result["confusion"], confusion_matrix(truth, guesses))
    theirs = np.array(precision_recall_fscore_support(truth, guesses)).T
    ours = [[*result["by_class"][label].values()] for label in LABELS]
    np.testing.assert_allclose(ours, theirs)
    assert result["wrong_examples"] == (truth != guesses).sum()
    assert len(result["wrong"]) == WRONG
    for one in result["wrong"]:
        assert one["text"] == " ".join(WORDS)
        assert one["label"] != one["predicted"]


def test_labels_that_may_all_be_right_are_counted_as_sklearn_counts_them(corpus: Path) -> None:
    from sklearn.metrics import precision_recall_fscore_support

    right, predicted = (
        torch.randint(0, 2, (60, 3), generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    metric, folder = MultiLabelMetric("moods", ["micro_f1"]), corpus.parent / "tokenizer"
    found = Breakdown([metric], with_head("moods", MULTI_LABEL, LABELS), folder)
    batch, _ = batch_of(folder, 60, moods=MicroTarget(right))
    numbers = torch.arange(3).expand(60, 3)
    found.add(batch, [torch.stack([predicted, right, numbers], dim=-1).view(-1, 3).double()])
    result = found.finish()["moods"]
    theirs = np.array(precision_recall_fscore_support(right.numpy(), predicted.numpy())).T
    ours = [[*result["by_class"][label].values()] for label in LABELS]
    np.testing.assert_allclose(ours, theirs)
    assert result["wrong_examples"] == int((right != predicted).any(dim=1).sum())
    assert "confusion" not in result
    assert any("(none)" in one.values() for one in result["wrong"])


def test_the_largest_errors_of_numbers_come_first(corpus: Path) -> None:
    right = torch.arange(30.0)
    right[3] = torch.nan
    guesses = torch.where(torch.arange(30) % 7 == 0, right * 3, right + 0.5)
    metric, folder = NumberMetric("stars", ["pearson"]), corpus.parent / "tokenizer"
    found = Breakdown([metric], with_head("stars", REGRESSION, []), folder)
    batch, _ = batch_of(folder, 30, stars=MicroTarget(right))
    known = ~right.isnan()
    found.add(batch, [torch.stack([guesses, right], dim=1)[known]])
    result = found.finish()["stars"]
    assert [one["label"] for one in result["wrong"][:5]] == ["28", "21", "14", "7", "1"]
    assert result["wrong"][0]["predicted"] == "84"
    assert len(result["wrong"]) == WRONG
    assert {tuple(point) for point in result["points"]} == {
        (a, b) for a, b in zip(right[known].tolist(), guesses[known].tolist(), strict=True)
    }


def test_queries_whose_right_answer_stands_low_come_first(corpus: Path) -> None:
    """Of equal margins the right answers come last; a query without a right one is no mistake."""
    margins = [0.9, 0.1, 0.5, 0.5, 0.7, 0.2, 0.1, 0.3]
    labels = [1, 0, 1, 0, 0, 0, 1, 0]
    groups = [0, 0, 1, 1, 2, 2, 2, 3]
    metric, folder = GroupRanking("answers", ["map"]), corpus.parent / "tokenizer"
    found = Breakdown([metric], with_head("answers", CLASSIFICATION, ["no", "yes"]), folder)
    targets = {"answers": labels, GroupRanking.group("answers"): groups}
    given = {name: MicroTarget(torch.tensor(one)) for name, one in targets.items()}
    batch, _ = batch_of(folder, 8, **given)
    found.add(batch, [torch.tensor([margins, labels, groups]).T])
    result = found.finish()["answers"]
    assert result["wrong_examples"] == 2
    assert [one["label"][:2] for one in result["wrong"]] == ["3.", "2."]


def test_entities_are_counted_by_type_and_the_wrong_words_are_named(corpus: Path) -> None:
    from seqeval.metrics import f1_score

    folder = corpus.parent / "tokenizer"
    right = [[1, 2, 0, 0, 3], [0, 0, 3, 0, 1]]
    guesses = [[1, 2, 0, 0, 3], [0, 0, 1, 0, 1]]
    batch, starts = batch_of(folder, 2)
    length = batch.input_ids.shape[1]
    positions = torch.tensor([row * length + start for row in range(2) for start in starts])
    target = MicroTarget(torch.tensor(right).flatten(), positions)
    batch, _ = batch_of(folder, 2, names=target)
    rows = [
        pair
        for guess, tags in zip(guesses, right, strict=True)
        for pair in [*zip(guess, tags, strict=True), (END, END)]
    ]
    metric = TagMetric("names", ["entity_f1"], TAGS)
    found = Breakdown([metric], with_head("names", TAGGING, TAGS), folder)
    found.add(batch, [torch.tensor(rows).double()])
    result = found.finish()["names"]
    by_type = {name: scores["f1"] for name, scores in result["by_class"].items()}
    for name, score in by_type.items():
        only = [
            [[tag if tag.endswith(name) else "O" for tag in (TAGS[n] for n in one)] for one in of]
            for of in (right, guesses)
        ]
        assert score == pytest.approx(f1_score(*only))
    assert {name: one["count"] for name, one in result["by_class"].items()} == {"PER": 2, "LOC": 2}
    assert result["wrong"] == [
        {"text": " ".join(WORDS), "label": "statement B-LOC", "predicted": "statement B-PER"}
    ]
