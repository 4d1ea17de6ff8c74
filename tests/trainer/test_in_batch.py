"""In-batch negatives: the loss of the global batch, on any number of ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from data_pipeline import Batch, Target
from model import Features
from tests.distributed import run_distributed
from tests.trainer import tiny
from tests.trainer.test_exactness import record_first_gradients
from trainer.batch_config import StepShape
from trainer.batches import MicroBatch, MicroTarget
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.objectives import LossInputs, ObjectiveConfig
from trainer.step import train_step
from trainer.tasks.retrieval import NAME, Retrieval, documents_of, relevant_of

ROWS, NEGATIVES, TEMPERATURE = 8, 1, 0.2
UNREADABLE = 5


def batch() -> Batch:
    """Queries with a positive and a negative; some documents come twice, or answer others too."""
    rng = np.random.default_rng(3)
    shape = ROWS, 2 + NEGATIVES, 10
    mask = (np.arange(10) < rng.integers(4, 11, shape[:2])[..., None]).astype(np.int64)
    documents = np.array([[0, 9], [1, 8], [2, 0], [0, 7], [4, 9], [5, 1], [6, 2], [3, 4]])
    relevant = np.full((ROWS, 2), -100)
    relevant[:, 0] = documents[:, 0]
    relevant[1, 1], relevant[6, 1] = 3, 9
    targets = {
        NAME: Target(np.arange(ROWS)),
        documents_of(NAME): Target(documents),
        relevant_of(NAME): Target(relevant),
    }
    lost = np.arange(ROWS) == UNREADABLE
    return Batch(
        input_ids=rng.integers(5, tiny.VOCABULARY, shape) * mask,
        segment_ids=np.zeros(shape, np.int64),
        attention_mask=mask,
        targets={name: target.without(lost) for name, target in targets.items()},
        sample_ids=np.arange(ROWS),
        epochs=np.zeros(ROWS, np.int64),
        is_trimmed=True,
    )


def learner(micro_batch: int, passes: int, stage: int, dropout: float = 0.0) -> Learner:
    task = Retrieval(negatives=NEGATIVES, temperature=TEMPERATURE)
    config = LearnerConfig(
        model=tiny.encoder(layers=2),
        objective=ObjectiveConfig(retrieval=task),
        zero_stage=stage,
        gradient_clipping=0.0,
        dropout=dropout,
    )
    return Learner(TEACHER, config, config.model, StepShape(tiny.STEPS, 1, micro_batch, passes))


def trained(cuts: list[tuple[int, int, int]], dropout: float = 0.0):
    """The loss and the gradients of one step, for each way to cut it: (size, passes, stage)."""
    found = []
    for size, passes, stage in cuts:
        one = learner(size, passes, stage, dropout)
        gradients = record_first_gradients(one)
        result = train_step(one, [], tiny.my_rows(batch()), 0)
        found.append((result.losses[TEACHER], gradients))
    return found


def expected():
    """The same by plain torch: every query against every document of the batch."""
    whole, one = batch(), learner(ROWS, 1, 0)
    shape = whole.input_ids.shape
    ids, mask = (
        torch.from_numpy(array).view(-1, shape[-1])
        for array in (whole.input_ids, whole.attention_mask)
    )
    states = one.model(ids, torch.zeros_like(ids), mask, output_hidden_states=True)
    mean = (states.hidden_states[-1] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    vectors = F.normalize(mean, dim=-1).view(*shape[:2], -1)
    documents, relevant = (
        whole.targets[name].labels for name in (documents_of(NAME), relevant_of(NAME))
    )
    losses = []
    for row in range(ROWS):
        if row == UNREADABLE:
            continue
        kept = [
            (other, place)
            for other in range(ROWS)
            for place in range(documents.shape[1])
            if (other, place) == (row, 0)
            or documents[other, place] not in {-100, *relevant[row].tolist()}
        ]
        scores = torch.stack([vectors[row, 0] @ vectors[other, 1 + place] for other, place in kept])
        losses.append(-(scores / TEMPERATURE).log_softmax(0)[kept.index((row, 0))])
    loss = torch.stack(losses).mean()
    loss.backward()
    named = one.engine.module.named_parameters()
    return loss.item(), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    ("ranks", "cuts"), [(1, [(8, 1, 0), (3, 3, 0)]), (2, [(4, 1, 0), (3, 2, 0), (2, 2, 3)])]
)
def test_loss_and_gradient_are_those_of_the_whole_batch(ranks, cuts) -> None:
    (right, gradients) = run_distributed(expected, 1)[0]
    for loss, found in run_distributed(trained, ranks, cuts)[0]:
        assert loss == pytest.approx(right, rel=1e-6)
        for name, gradient in gradients.items():
            if not name.endswith("key.bias"):  # whose true gradient is zero
                distance = (found[name] - gradient).norm() / gradient.norm()
                assert distance < 1e-5, name


def test_both_passes_have_the_same_dropout() -> None:
    """A cut into micro-batches of the same rows draws what the passes without gradient drew."""
    ((difference, twice),) = run_distributed(dropped, 1)[0]
    assert twice
    assert difference == 0.0


def dropped():
    """How far the vectors of the first pass are from those of the second."""
    one = learner(4, 2, 0, dropout=0.3)
    seen = []
    one.engine.module.model.task_heads[NAME].register_forward_hook(
        lambda module, given, out: seen.append(out.detach())
    )
    train_step(one, [], batch(), 0)
    first, second = torch.cat(seen[:2]), torch.cat(seen[2:])
    return [((first - second).abs().max().item(), len(seen) == 4)]


def test_without_in_batch_an_example_has_its_own_documents_only() -> None:
    task = Retrieval(negatives=1, in_batch=False, temperature=0.5)
    vectors = torch.randn(2 * 3, 4)
    ids = torch.zeros(2 * 3, 5, dtype=torch.int64)
    labels = MicroTarget(torch.tensor([7, -100]))
    micro = MicroBatch(ids, ids, ids.bool(), ids.numel(), {NAME: labels}, sequences=3)
    shape = tiny.encoder()
    features = Features(None, {}, {}, None, None, {NAME: vectors})
    total, count = task.build(shape, shape)(LossInputs(micro, features, None, {}))
    scores = torch.stack([vectors[0] @ vectors[1], vectors[0] @ vectors[2]])
    torch.testing.assert_close(total, -(scores / 0.5).log_softmax(0)[0])
    assert count == 1
    choices, weights = task.choices(vectors, micro)
    torch.testing.assert_close(choices[0], scores)
    assert weights.tolist() == [1.0, 0.0]
