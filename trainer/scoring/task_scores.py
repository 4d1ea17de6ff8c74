"""The scores of tasks, computed by the packages that are standard in the field.

They are pure functions of predictions and labels. The packages come with the extra
``tandem-distill[tasks]`` and are imported when a score is computed.
"""

import importlib.util
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.errors import TrainingError

Array = NDArray[np.float64]
Score = Callable[[Array, Array], float]  # of predictions and labels
Tags = Sequence[Sequence[str]]
PACKAGES = {  # score -> the package that it needs
    "f1": "sklearn",
    "macro_f1": "sklearn",
    "micro_f1": "sklearn",
    "average_precision": "sklearn",
    "matthews": "sklearn",
    "pearson": "scipy",
    "spearman": "scipy",
    "bleu": "sacrebleu",
    "entity_f1": "seqeval",
    "entity_precision": "seqeval",
    "entity_recall": "seqeval",
    "mrr": "pytrec_eval",
    "mrr_10": "pytrec_eval",
    "map": "pytrec_eval",
    "ndcg_10": "pytrec_eval",
    "recall_100": "pytrec_eval",
}
TREC_NAMES = {
    "mrr": "recip_rank",
    "mrr_10": "recip_rank",  # of the first 10
    "map": "map",
    "ndcg_10": "ndcg_cut_10",
    "recall_100": "recall_100",
}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def require_packages(scores: Collection[str]) -> None:
    """Raise TrainingError, which says what to install, where a score's package is missing."""
    for score in scores:
        package = PACKAGES.get(score)
        if package and importlib.util.find_spec(package) is None:
            raise TrainingError(
                f"metrics: {score} needs {package}: pip install 'tandem-distill[tasks]'"
            )


def accuracy(predictions: Array, labels: Array) -> float:
    """The fraction of predictions [N] that equal the label."""
    return float((predictions == labels).mean())


def f1(predictions: Array, labels: Array) -> float:
    """F1 of the second of two labels (in GLUE's MRPC: paraphrase)."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels == 1, predictions == 1, zero_division=0.0))


def macro_f1(predictions: Array, labels: Array) -> float:
    """The mean F1 of all labels that occur or are predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0.0))


def micro_f1(predictions: Array, labels: Array) -> float:
    """F1 over all decisions about labels [N, K], 1 where a label is right."""
    return f1(predictions.ravel(), labels.ravel())


def label_macro_f1(predictions: Array, labels: Array) -> float:
    """The mean over labels [N, K] of F1 over the decisions about each; 0 where none is positive."""
    return float(np.mean([f1(*of_label) for of_label in zip(predictions.T, labels.T, strict=True)]))


def exact_match(predictions: Array, labels: Array) -> float:
    """The fraction of examples with all labels [N, K] as they should be."""
    return float((predictions == labels).all(axis=1).mean())


def average_precision(margins: Array, labels: Array) -> float:
    """The area under precision and recall of the second of two labels; NaN where it is not there.

    `margins` rank the examples: by how much the second label is the likelier one.
    """
    from sklearn.metrics import average_precision_score

    right = labels == 1
    return float(average_precision_score(right, margins)) if right.any() else float("nan")


def matthews(predictions: Array, labels: Array) -> float:
    """Matthews' correlation coefficient (GLUE's CoLA), for two labels or more."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(predictions: Array, numbers: Array) -> float:
    """Pearson's correlation; NaN where either does not vary."""
    return _correlation("pearsonr", predictions, numbers)


def spearman(predictions: Array, numbers: Array) -> float:
    """Spearman's rank correlation; NaN where either does not vary."""
    return _correlation("spearmanr", predictions, numbers)


def _as_bioes(sentences: Tags) -> list[list[str]]:
    """The tags with those of BILOU and BMES as BIOES calls them, which `seqeval` knows."""
    begins = {"L-": "E-", "U-": "S-", "M-": "I-"}
    return [[begins.get(tag[:2], tag[:2]) + tag[2:] for tag in tags] for tags in sentences]


def entity_scores(predicted: Tags, right: Tags) -> dict[str, float]:
    """Precision, recall and F1 of whole entities, as CoNLL's scorer counts them.

    `predicted` and `right` are the tags of each sentence, in IOB1, IOB2, BIOES, BILOU or BMES.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    tags = _as_bioes(right), _as_bioes(predicted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about types that are never predicted
        figures = precision_recall_fscore_support(*tags, average="micro", zero_division=0)
    names = ("entity_precision", "entity_recall", "entity_f1")
    return {name: float(score) for name, score in zip(names, figures[:3], strict=True)}


def scores_by_type(predicted: Tags, right: Tags) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and number of the entities of each type; see `entity_scores`."""
    from seqeval.metrics import classification_report

    tags = _as_bioes(right), _as_bioes(predicted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = classification_report(*tags, output_dict=True, zero_division=0)
    return {
        kind: {
            "precision": float(scores["precision"]),
            "recall": float(scores["recall"]),
            "f1": float(scores["f1-score"]),
            "count": int(scores["support"]),
        }
        for kind, scores in report.items()
        if not kind.endswith(" avg")
    }


def normalised_answer(text: str) -> str:
    """An answer as SQuAD's official script compares it: lower case, no punctuation or articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(
    predicted: Mapping[str, str], right: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Exact match and word F1 of answers by id, as SQuAD 1.1's and 2.0's scripts compute them.

    `right` holds the annotators' answers, of which the best match counts. An empty list means that
    the passage has no answer, so that an empty prediction is right; so has one of articles and
    punctuation alone. An id without a prediction counts as wrong.
    """
    exact, overlap = [], []
    for name, answers in right.items():
        guess = normalised_answer(predicted[name]) if name in predicted else None
        golden = [*filter(None, map(normalised_answer, answers))] or [""]
        exact.append(guess is not None and guess in golden)
        overlap.append(0.0 if guess is None else max(_word_f1(guess, answer) for answer in golden))
    return {"exact_match": float(np.mean(exact)), "answer_f1": float(np.mean(overlap))}


def ranking_scores(
    ranked: Mapping[str, Mapping[str, float]],
    relevance: Mapping[str, Mapping[str, int]],
    names: Collection[str] = tuple(TREC_NAMES),
) -> dict[str, float]:
    """Measures of ``trec_eval -c``: means over the judged queries; mrr_10: as MS MARCO has it.

    `ranked`: query -> document found -> score; `relevance`: query -> document judged -> relevance.
    A query for which nothing was found counts as 0; one without a relevant document is left out.
    """
    import pytrec_eval

    judged = {
        query: dict(ones) for query, ones in relevance.items() if any(v > 0 for v in ones.values())
    }
    evaluator = pytrec_eval.RelevanceEvaluator(judged, {TREC_NAMES[name] for name in names})
    runs = {query: dict(ones) for query, ones in ranked.items() if query in judged and ones}
    measures, first = evaluator.evaluate(runs), {}
    if "mrr_10" in names:
        first = evaluator.evaluate({query: _first(ones, 10) for query, ones in runs.items()})
    return {
        name: sum(
            values[TREC_NAMES[name]]
            for values in (first if name == "mrr_10" else measures).values()
        )
        / len(judged)
        for name in names
    }


def _first(scores: Mapping[str, float], count: int) -> dict[str, float]:
    """The best documents, ties in the order of ``trec_eval``."""
    ordered = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
    return {document: scores[document] for document in ordered[:count]}


CLASS_SCORES: dict[str, Score] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
}
MULTI_LABEL_SCORES: dict[str, Score] = {  # of decisions [N, K]; accuracy: of each of them
    "micro_f1": micro_f1,
    "macro_f1": label_macro_f1,
    "accuracy": accuracy,
    "exact_match": exact_match,
}
MARGIN_SCORES = {"average_precision": average_precision}
TWO_LABELS = {"f1", *MARGIN_SCORES, *TREC_NAMES}  # the scores of the second of two
NUMBER_SCORES = {"pearson": pearson, "spearman": spearman}


def _correlation(kind: str, predictions: Array, numbers: Array) -> float:
    import scipy.stats

    if len(numbers) < 2 or np.ptp(predictions) == 0 or np.ptp(numbers) == 0:
        return float("nan")
    return float(getattr(scipy.stats, kind)(predictions, numbers).statistic)


def _word_f1(guess: str, answer: str) -> float:
    """2PR/(P+R) over the words of normalised answers; if one is empty, 1 if both are, else 0."""
    guessed, golden = guess.split(), answer.split()
    if not guessed or not golden:
        return float(guessed == golden)
    shared = sum((Counter(guessed) & Counter(golden)).values())
    return 2 * shared / (len(guessed) + len(golden))
