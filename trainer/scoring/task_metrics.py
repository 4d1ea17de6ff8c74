"""Metrics of the heads that tasks add: they gather predictions over ranks and score them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import NO_LABEL
from model import decode
from model.heads import uncertainty
from trainer.scoring import task_scores
from trainer.scoring.columns import NUMBER, SHARE, Column
from trainer.scoring.metric import GatheredMetric, PairedMetric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import Score

END = -1.0  # marks the end of a sentence in the rows of a `TagMetric`
TAG_SCORES = ("entity_f1", "entity_precision", "entity_recall", "accuracy")
CORRELATIONS = ("matthews", "pearson", "spearman")


class TaskMetric(PairedMetric[ScoreInputs]):
    """Scores of a head by name, the first of which is primary; columns are ``HEAD_SCORE``.

    Raises TrainingError where a package that a score needs is not installed.
    """

    functions: ClassVar[Mapping[str, Score]] = {}  # of predictions and labels, by name

    def __init__(self, head: str, names: Sequence[str]) -> None:
        task_scores.require_packages(names)
        self.head, self.names = head, tuple(names)
        self.columns = tuple(
            Column(f"{head}_{name}", name, NUMBER if name in CORRELATIONS else SHARE)
            for name in names
        )

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[rows, 2]: prediction and label; no rows for a batch of another task."""
        if self.head not in outputs.batch.targets:
            return self.empty(outputs.batch.input_ids.device)
        return self.labelled(outputs)

    @abstractmethod
    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """The rows for a batch that has the head's target."""

    def scores(
        self, predictions: NDArray[np.float64], labels: NDArray[np.float64]
    ) -> dict[str, float]:
        return {
            f"{self.head}_{name}": self.functions[name](predictions, labels) for name in self.names
        }


class ClassMetric(TaskMetric):
    """`CLASS_SCORES` of a head that predicts a class, or the right one of several choices."""

    functions = task_scores.CLASS_SCORES

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 2]: the class with the highest logit, and the label."""
        labels = outputs.batch.row_labels(self.head)
        logits = outputs.features.heads[self.head].view(len(labels), -1)
        return _labelled(logits.argmax(dim=-1), labels, labels != NO_LABEL)


class MultiLabelMetric(TaskMetric):
    """`MULTI_LABEL_SCORES` of a head whose labels are right or not, each by itself."""

    functions = task_scores.MULTI_LABEL_SCORES

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[examples * labels, 3]: whether it is predicted, whether right, and the label."""
        logits, labels = outputs.features.heads[self.head], outputs.batch.row_labels(self.head)
        has_label = (labels != NO_LABEL).expand(logits.shape)
        numbers = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
        rows = torch.stack([(logits > 0).long(), labels.expand(logits.shape), numbers], dim=-1)
        return rows[has_label].double()

    def finish(self, total: Tensor) -> dict[str, float]:
        if not len(total):
            return {}
        count = int(total[:, 2].max()) + 1
        predicted, right = total[:, :2].cpu().numpy().T.reshape(2, -1, count)
        return self.scores(predicted, right)


class MarginMetric(TaskMetric):
    """How well a head ranks examples by the second of two labels: `MARGIN_SCORES`."""

    functions = task_scores.MARGIN_SCORES

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 2]: the second label's logit less the first's, and the right label."""
        labels = outputs.batch.row_labels(self.head)
        logits = outputs.features.heads[self.head].double()  # in 16 bits, more margins would tie
        return _labelled(logits[:, 1] - logits[:, 0], labels, labels != NO_LABEL)


class PartAccuracy(ClassMetric):
    """The accuracy over the examples of one part of a file; undefined without any.

    number: the bit of the part in the target `parts`, which says what parts an example is in.
    """

    def __init__(self, head: str, name: str, heading: str, number: int) -> None:
        super().__init__(head, [name])
        self.columns, self.bit = (Column(f"{head}_{name}", heading),), 1 << number

    @staticmethod
    def parts(head: str) -> str:
        """The target that holds a bit for each part of the file that an example is in."""
        return f"{head}_parts"

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        rows, labels = super().labelled(outputs), outputs.batch.row_labels(self.head)
        parts = outputs.batch.row_labels(self.parts(self.head))[labels != NO_LABEL]
        return rows[(parts & self.bit) > 0]

    def scores(
        self, predictions: NDArray[np.float64], labels: NDArray[np.float64]
    ) -> dict[str, float]:
        return {self.columns[0].name: task_scores.accuracy(predictions, labels)}


class GroupRanking(MarginMetric):
    """`TREC_NAMES` over groups of pairs, such as a question's answers: means over the groups.

    The pairs of a group are ranked by the second of two labels, which makes a pair relevant.
    Groups without a relevant pair are left out, as ``trec_eval`` does. Of pairs with equal margins
    the relevant ones come last, so that the score depends neither on their order nor on the ranks.
    """

    @staticmethod
    def group(head: str) -> str:
        """The target that holds the number of a pair's group."""
        return f"{head}_group"

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 3]: the margin, the right label, and the group."""
        labels = outputs.batch.row_labels(self.head)
        groups = outputs.batch.row_labels(self.group(self.head))[labels != NO_LABEL]
        return torch.cat([super().labelled(outputs), groups[:, None].double()], dim=1)

    def finish(self, total: Tensor) -> dict[str, float]:
        if not len(total):
            return {}
        margins, labels, groups = total.cpu().numpy().T
        ranked: dict[str, dict[str, float]] = {}
        relevance: dict[str, dict[str, int]] = {}
        # Of equal scores, trec_eval ranks the name first that sorts last.
        for rank, place in enumerate(np.lexsort((-labels, margins))):
            group, pair = str(int(groups[place])), f"{rank:012d}"
            ranked.setdefault(group, {})[pair] = margins[place]
            relevance.setdefault(group, {})[pair] = int(labels[place])
        if not labels.any():
            return {}
        scores = task_scores.ranking_scores(ranked, relevance, self.names)
        return {f"{self.head}_{name}": score for name, score in scores.items()}


class NumberMetric(TaskMetric):
    """`NUMBER_SCORES` of a head that predicts a number. NaN means that there is no label."""

    functions = task_scores.NUMBER_SCORES

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 2]: the predicted number, and the label."""
        numbers = outputs.batch.row_labels(self.head)
        predicted = outputs.features.heads[self.head].view(-1)
        return _labelled(predicted, numbers, ~numbers.isnan())


class CosineMetric(NumberMetric):
    """`NUMBER_SCORES` of the cosine of two texts' vectors, which the head scales to length 1."""

    @staticmethod
    def cosines(vectors: Tensor) -> Tensor:
        """Of the vectors [2 N, D] of N pairs, one after the other: float32 [N]."""
        first, second = vectors.float().unflatten(0, (-1, 2)).unbind(dim=1)
        return (first * second).sum(dim=-1)

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 2]: the cosine, and the label."""
        numbers = outputs.batch.row_labels(self.head)
        cosines = self.cosines(outputs.features.heads[self.head])
        return _labelled(cosines, numbers, ~numbers.isnan())


class TagMetric(TaskMetric):
    """`TAG_SCORES` of a head that predicts a tag for each word of a sentence."""

    def __init__(self, head: str, names: Sequence[str], tags: Sequence[str]) -> None:
        super().__init__(head, names)
        self.tags = np.array(tags)

    def labelled(self, outputs: ScoreInputs) -> Tensor:
        """[words + sentences, 2]: predicted tag and label by number, with `END` after a sentence.

        A sentence is a row of the batch; its words are the positions that have a label.
        """
        target = outputs.batch.targets[self.head]
        assert target.positions is not None
        logits = outputs.features.heads[self.head]  # [B, L, tags]
        predicted = self._predicted(outputs).flatten().index_select(0, target.positions)
        rows = torch.stack([predicted, target.labels], dim=1).view(len(logits), -1, 2)
        ends = rows.new_full((len(rows), 1, 2), int(END))
        rows = torch.cat([rows, ends], dim=1).view(-1, 2)
        return rows[rows[:, 1] != NO_LABEL].double()

    def _predicted(self, outputs: ScoreInputs) -> Tensor:
        """The tag at every position, [B, L]; with a CRF, at the words that have a label."""
        logits, target = outputs.features.heads[self.head], outputs.batch.targets[self.head]
        transitions = outputs.features.transitions.get(self.head)
        if transitions is None:
            return logits.argmax(dim=-1)
        assert target.positions is not None
        words = torch.zeros_like(outputs.batch.input_ids, dtype=torch.bool)
        words.view(-1)[target.positions[target.labels != NO_LABEL]] = True
        return decode(logits, transitions, words)

    def scores(
        self, predictions: NDArray[np.float64], labels: NDArray[np.float64]
    ) -> dict[str, float]:
        words = labels != END
        scores = {"accuracy": task_scores.accuracy(predictions[words], labels[words])}
        if set(self.names) - {"accuracy"}:
            scores |= task_scores.entity_scores(
                self._sentences(predictions), self._sentences(labels)
            )
        return {f"{self.head}_{name}": scores[name] for name in self.names}

    def _sentences(self, numbers: NDArray[np.float64]) -> list[list[str]]:
        ends = np.flatnonzero(numbers == END)
        parts = np.split(numbers, ends + 1)[:-1]
        return [self.tags[part[:-1].astype(np.int64)].tolist() for part in parts]


MetricOf = Callable[[str, Sequence[str]], TaskMetric]  # of a head, with these scores
METRICS: dict[str, MetricOf] = {  # by score: the metric of a head with labels
    **dict.fromkeys(task_scores.CLASS_SCORES, ClassMetric),
    **dict.fromkeys(task_scores.MARGIN_SCORES, MarginMetric),
    **dict.fromkeys(task_scores.TREC_NAMES, GroupRanking),
}


def _labelled(predictions: Tensor, labels: Tensor, has_label: Tensor) -> Tensor:
    return torch.stack([predictions.double(), labels.double()], dim=1)[has_label]


class BranchMetric(GatheredMetric[ScoreInputs]):
    """Gathers whether each branch is right and how uncertain it is (FastBERT); has no score."""

    dtype: ClassVar[torch.dtype] = torch.float32
    reads_branches: ClassVar[bool] = True
    columns: tuple[Column, ...] = ()

    def __init__(self, head: str) -> None:
        self.head = head

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[examples, 2 * layers]: whether each branch is right, then its uncertainty."""
        features, labels = outputs.features, outputs.batch.row_labels(self.head)
        branches = [*features.branches[self.head], features.heads[self.head]]
        right = [(logits.argmax(dim=-1) == labels).float() for logits in branches]
        rows = torch.stack([*right, *map(uncertainty, branches)], dim=1)
        return rows[labels != NO_LABEL]

    def finish(self, total: Tensor) -> dict[str, float]:
        return {}
