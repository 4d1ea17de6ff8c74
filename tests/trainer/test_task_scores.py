"""The scores of tasks against published or independently computed values."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from data_pipeline import NO_LABEL
from model import Features, build
from tests.trainer import tiny
from trainer.batches import MicroBatch, MicroTarget
from trainer.errors import TrainingError
from trainer.scoring import task_scores
from trainer.scoring.metric import Tally
from trainer.scoring.scores import ScoreInputs, columns_of, task_mean
from trainer.scoring.task_metrics import (
    ClassMetric,
    GroupRanking,
    MarginMetric,
    NumberMetric,
    TagMetric,
)

NAN = float("nan")


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_scores_of_classes() -> None:
    # The examples in the documentation of scikit-learn's functions.
    assert task_scores.matthews(array(1, 0, 1, 1), array(1, 1, 1, 0)) == pytest.approx(-1 / 3)
    predicted, right = array(0, 2, 1, 0, 0, 1), array(0, 1, 2, 0, 1, 2)
    assert task_scores.macro_f1(predicted, right) == pytest.approx(0.2666666, abs=1e-6)
    assert task_scores.accuracy(array(0, 2, 1, 3), array(0, 1, 2, 3)) == 0.5
    # Precision 2/3, recall 1/2, of label 1.
    assert task_scores.f1(array(1, 1, 1, 0, 0, 0), array(1, 1, 0, 0, 1, 1)) == pytest.approx(4 / 7)


def test_examples_ranked_by_the_second_of_two_labels() -> None:
    # The example in the documentation of scikit-learn's function.
    margins, right = array(0.1, 0.4, 0.35, 0.8), array(0, 0, 1, 1)
    assert task_scores.average_precision(margins, right) == pytest.approx(0.8333, abs=1e-4)
    assert np.isnan(task_scores.average_precision(margins, array(0, 0, 0, 0)))
    logits = torch.tensor([[0.0, 0.1], [0.1, 0.5], [0.0, 0.35], [-0.8, 0.0], [0.0, 9.0]])
    metric = MarginMetric("task", ["average_precision"])
    found = total(metric, outputs(logits, torch.tensor([0, 0, 1, 1, NO_LABEL])))
    assert found == {"task_average_precision": pytest.approx(0.8333, abs=1e-4)}
    narrow = torch.tensor([[-3.5, 3.5], [-3.5, 3.515625]], dtype=torch.bfloat16)
    found = total(metric, outputs(narrow, torch.tensor([0, 1])))
    assert found == {"task_average_precision": 1.0}  # a tie, if the margins were rounded


def test_pairs_ranked_in_groups() -> None:
    """Group 1: precision 1 and 2/3; group 2: a tie, which counts against the model; 3: nothing."""
    margins = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.5, 9.0, 7.0])
    labels, groups = torch.tensor([1, 0, 1, 1, 0, 0, NO_LABEL]), torch.tensor([1, 1, 1, 2, 2, 3, 1])
    metric, logits = GroupRanking("task", ["map", "mrr"]), torch.stack([0 * margins, margins], 1)

    def batch(rows: torch.Tensor) -> ScoreInputs:
        found = outputs(logits[rows], labels[rows])
        found.batch.targets["task_group"] = MicroTarget(groups[rows], None)  # type: ignore[index]
        return found

    expected = {"task_map": pytest.approx((5 / 6 + 1 / 2) / 2), "task_mrr": 0.75}
    for order in (torch.arange(7), torch.arange(6, -1, -1)):
        assert total(metric, *(batch(part) for part in order.split(2))) == expected
    assert total(metric, batch(torch.tensor([5]))) == {}


def test_correlations() -> None:
    # The examples in the documentation of scipy's functions.
    x, y = array(1, 2, 3, 4, 5, 6, 7), array(10, 9, 2.5, 6, 4, 3, 2)
    assert task_scores.pearson(x, y) == pytest.approx(-0.828503883588428)
    x, y = array(1, 2, 3, 4, 5), array(5, 6, 7, 8, 7)
    assert task_scores.spearman(x, y) == pytest.approx(0.8207826816681233)
    assert np.isnan(task_scores.pearson(array(1, 1, 1), array(1, 2, 3)))


@pytest.mark.parametrize(
    ("right", "predicted", "expected"),
    [
        (  # the example in seqeval's own description
            ["O O O B-MISC I-MISC I-MISC O", "B-PER I-PER O"],
            ["O O B-MISC I-MISC I-MISC I-MISC O", "B-PER I-PER O"],
            0.5,
        ),
        (["I-PER I-PER O I-LOC B-LOC"], ["I-PER I-PER O I-LOC I-LOC"], 0.4),  # IOB1: 1 of 3 and 2
        (["B-PER E-PER O S-LOC S-LOC"], ["B-PER E-PER O S-LOC O"], 0.8),  # BIOES: 2 of 3 and 2
        (["B-PER L-PER O U-LOC U-LOC"], ["B-PER L-PER O U-LOC O"], 0.8),  # BILOU: 2 of 3 and 2
        (["S-LOC B-LOC M-LOC E-LOC"], ["S-LOC M-LOC M-LOC E-LOC"], 1.0),  # BMES, as S I I E
        (["O O"], ["O O"], 0.0),
    ],
)
def test_entities(right: list[str], predicted: list[str], expected: float) -> None:
    found = task_scores.entity_scores(*([s.split() for s in one] for one in (predicted, right)))
    assert found["entity_f1"] == pytest.approx(expected)


def test_answers_as_squad_normalises_them() -> None:
    assert task_scores.normalised_answer("  The  U.S.A's an-other TEAM! ") == "usas another team"
    right = {
        "exact": ["Denver Broncos", "the Denver Broncos!"],
        "part": ["Santa Clara, California", "Levi's Stadium"],
        "null": [],
        "missed": ["gold"],
        "invented": [],
        "unanswered": ["1999"],
        "punctuation": ["--", "gold"],
    }
    predicted = {
        "punctuation": "",
        "exact": "The Denver broncos.",
        "part": "in Santa Clara",  # 2 words of 3 and of 3
        "null": "the",  # nothing is left of it
        "missed": "",
        "invented": "blue",
    }
    found = task_scores.answer_scores(predicted, right)
    assert found["exact_match"] == pytest.approx(2 / 7)
    assert found["answer_f1"] == pytest.approx((1 + 2 / 3 + 1 + 0 + 0 + 0 + 0) / 7)


@pytest.mark.parametrize("labels", [1, 2, 5])
def test_decisions_about_labels_as_sklearn_scores_them(labels: int) -> None:
    """A label that never occurs counts; of a single label, not what it is not."""
    from sklearn.metrics import f1_score

    right, predicted = np.random.default_rng(labels).integers(0, 2, (2, 40, labels)).astype(float)
    right[:, 4:] = 0.0
    scores = task_scores.MULTI_LABEL_SCORES
    by_label = [f1_score(right[:, n], predicted[:, n], zero_division=0) for n in range(labels)]
    assert scores["macro_f1"](predicted, right) == pytest.approx(np.mean(by_label))
    all_decisions = f1_score(right.ravel(), predicted.ravel())
    assert scores["micro_f1"](predicted, right) == pytest.approx(all_decisions)
    if labels > 1:
        for name in ("macro", "micro"):
            theirs = f1_score(right, predicted, average=name, zero_division=0)
            assert scores[f"{name}_f1"](predicted, right) == pytest.approx(theirs)


def test_rankings_as_trec_eval_scores_them() -> None:
    # The example in the description of pytrec_eval, with the values that it prints.
    relevance = {"q1": {"d1": 0, "d2": 1, "d3": 0}, "q2": {"d1": 0, "d2": 1, "d3": 1}}
    ranked = {
        "q1": {"d1": 1.0, "d2": 0.0, "d3": 1.5},
        "q2": {"d1": 1.5, "d2": 0.2, "d3": 0.5},
    }
    found = task_scores.ranking_scores(ranked, relevance)
    assert found["map"] == pytest.approx((0.3333333 + 0.5833333) / 2, abs=1e-6)
    assert found["ndcg_10"] == pytest.approx((0.5 + 0.6934264036172708) / 2)
    assert found["mrr"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["recall_100"] == 1.0
    unfound = task_scores.ranking_scores({"q1": ranked["q1"]}, relevance | {"q3": {"d1": 0}})
    assert unfound["map"] == pytest.approx(0.3333333 / 2, abs=1e-6)


def outputs(logits: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None):
    """A metric's input: a batch with the outputs of the head "task"."""
    ids = torch.zeros(len(logits), 4, dtype=torch.int64)
    targets = {"task": MicroTarget(labels, positions)}
    batch = MicroBatch(ids, ids, ids.bool(), ids.numel(), targets)
    features = Features(None, {}, {}, None, None, {"task": logits})
    return ScoreInputs(features, None, batch, build(tiny.encoder(), seed=0))


def total(metric, *batches: ScoreInputs) -> dict[str, float]:
    tally = Tally([metric], torch.device("cpu"))
    for batch in batches:
        tally.add([metric.of_batch(batch)])
    return tally.finish()


def test_classes_and_numbers_of_several_batches() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    labels = torch.tensor([0, NO_LABEL, 0])
    metric = ClassMetric("task", ["accuracy", "matthews"])
    found = total(metric, outputs(logits, labels), outputs(logits[1:], torch.tensor([1, 1])))
    assert found["task_accuracy"] == 0.75
    assert found["task_matthews"] == pytest.approx(1 / 3**0.5)
    numbers = NumberMetric("task", ["pearson"])
    values = torch.tensor([[1.0], [2.0], [3.0], [9.0]])
    assert total(numbers, outputs(values, torch.tensor([2.0, 4.0, 6.0, NAN]))) == {
        "task_pearson": pytest.approx(1.0)
    }
    other = outputs(logits, labels)
    other.batch.targets.clear()  # type: ignore[attr-defined]
    assert total(metric, other) == total(numbers, other) == {}


def test_tags_stay_in_their_sentences() -> None:
    tags = ["O", "B-PER", "I-PER"]
    # Two sentences of two words; the third slot of each is unused. A word has pieces 1 and 2.
    labels = torch.tensor([0, 1, NO_LABEL, 2, 0, NO_LABEL])
    positions = torch.tensor([1, 3, 0, 4 + 1, 4 + 2, 4])
    predicted = torch.tensor([[0, 0, 1, 1], [0, 2, 0, 1]])
    logits = torch.nn.functional.one_hot(predicted, 3).float()
    metric = TagMetric("task", ["entity_f1", "accuracy"], tags)
    batch = outputs(logits, labels, positions)
    assert total(metric, batch, batch) == {"task_entity_f1": 1.0, "task_accuracy": 1.0}
    wrong = outputs(logits, torch.tensor([0, 1, NO_LABEL, 0, 0, NO_LABEL]), positions)
    assert total(metric, wrong) == {
        "task_entity_f1": pytest.approx(2 / 3),
        "task_accuracy": 0.75,
    }


def test_a_score_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ClassMetric("task", ["accuracy"])
    message = r"metrics: f1 needs sklearn: pip install 'tandem-distill\[tasks\]'"
    with pytest.raises(TrainingError, match=message):
        ClassMetric("task", ["accuracy", "f1"])


def test_the_first_ten_of_a_ranking() -> None:
    relevance = {"q": {"d": 1}, "r": {"d": 1}}
    run = {
        "q": {"d": 0.0, **{f"x{n}": 1.0 for n in range(9)}},
        "r": {"d": 0.0, **{f"x{n}": 1.0 for n in range(10)}},
    }
    found = task_scores.ranking_scores(run, relevance, ["mrr", "mrr_10"])
    assert found["mrr"] == pytest.approx((1 / 10 + 1 / 11) / 2)
    assert found["mrr_10"] == pytest.approx(1 / 20)


@pytest.mark.parametrize("other", ["c", "e"])
def test_a_tie_at_rank_10_is_cut_as_trec_eval_cuts_it(other: str) -> None:
    """By the measure that it cuts itself; with one relevant document, of gain 1 / log2(11)."""
    run = {"q": {**{f"x{n}": 1.0 for n in range(9)}, "d": 0.0, other: 0.0}}
    found = task_scores.ranking_scores(run, {"q": {"d": 1}}, ["mrr_10", "ndcg_10"])
    assert found["mrr_10"] == pytest.approx(0.1 if found["ndcg_10"] else 0.0)
    assert bool(found["ndcg_10"]) == (other == "c")  # the later name comes first


# BERT-base on GLUE's test sets, as table 1 of arXiv 1810.04805 has it with its average.
GLUE = {"mnli": 84.6, "mnli_mm": 83.4, "qqp": 71.2, "qnli": 90.5, "sst2": 93.5}
GLUE |= {"cola": 52.1, "stsb": 85.8, "mrpc": 88.9, "rte": 66.4}


def one_of_each(tasks: dict[str, float]) -> list[ClassMetric]:
    """A metric with two scores for each head; the first is the primary one."""
    return [ClassMetric(name, ["accuracy", "macro_f1"]) for name in tasks]


def test_the_mean_over_tasks_is_the_published_one() -> None:
    scores = {f"{name}_accuracy": score for name, score in GLUE.items()}
    scores |= {f"{name}_macro_f1": 0.0 for name in GLUE}
    assert next(iter(columns_of(one_of_each(GLUE), GLUE))) == "task_mean"
    found = task_mean(scores, one_of_each(GLUE), GLUE)
    assert found == {"task_mean": pytest.approx(79.6, abs=0.05)}


def test_there_is_no_mean_without_the_scores_of_all_tasks() -> None:
    metrics, tasks = one_of_each(GLUE), ("sst2", "rte")
    scores = {"sst2_accuracy": 0.9, "rte_accuracy": None}
    assert task_mean(scores, metrics, tasks) == {"task_mean": None}  # a head is untrained
    assert task_mean({"sst2_accuracy": 0.9}, metrics, tasks) == {}  # a score is undefined
    for heads, among in ((metrics[:3], tasks), (metrics, ("sst2",)), (metrics, ())):
        assert "task_mean" not in columns_of(heads, among)
