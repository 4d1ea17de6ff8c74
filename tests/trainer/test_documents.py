"""Rows of several documents in training: losses as of the documents alone, ranks, resuming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline import Batch
from model import QKV
from tests.conftest import TINY_JOB, tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.batches import to_device
from trainer.denominators import ATTENDED, ATTENDED_PAIRS, ROWS, count
from trainer.objectives.terms.attention import attention_cross_entropy, attention_mse, relation_kl
from trainer.objectives.terms.states import patient_mse

SIZES, LENGTH = [[3, 8, 1], [12], [5, 4]], 12  # three positions of padding in the last row
CPU = torch.device("cpu")


def batch_of(sizes: list[list[int]]) -> Batch:
    """Rows of documents of these sizes."""
    ids = np.zeros((len(sizes), LENGTH), np.int64)
    for row, of_row in enumerate(sizes):
        ids[row, : sum(of_row)] = np.repeat(np.arange(len(of_row)) + 1, of_row)
    zeros = np.zeros(len(sizes), np.int64)
    return Batch(ids, ids * 0, (ids > 0) * 1, {}, zeros, zeros, document_ids=ids)


def alone(sizes: list[list[int]]) -> list[tuple[int, slice]]:
    """The row and the columns of each document."""
    return [
        (row, slice(sum(of_row[:nth]), sum(of_row[: nth + 1])))
        for row, of_row in enumerate(sizes)
        for nth in range(len(of_row))
    ]


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("loss", [attention_mse, attention_cross_entropy, relation_kl])
def test_losses_of_attention_are_those_of_the_documents_alone(loss, window: int) -> None:
    generator = torch.manual_seed(0)
    student, teacher = (
        QKV(*torch.randn(3, len(SIZES), 2, LENGTH, 4, generator=generator)) for _ in range(2)
    )
    texts = to_device(batch_of(SIZES), CPU).texts
    q = student.q.clone().requires_grad_()
    total, size = loss((q, student.k), (teacher.q, teacher.k), texts, window)
    total.backward()
    expected, positions, gradient = torch.zeros(()), 0, torch.zeros_like(q)
    for row, columns in alone(SIZES):
        part = [
            tuple(x[row : row + 1, :, columns].detach() for x in (of.q, of.k))
            for of in (student, teacher)
        ]
        part[0][0].requires_grad_()
        mask = torch.ones(1, columns.stop - columns.start, dtype=torch.bool)
        value, counted = loss(*part, mask, window)
        value.backward()
        gradient[row, :, columns] = part[0][0].grad[0]
        expected, positions = expected + value.detach(), positions + int(counted)
    torch.testing.assert_close(total.detach(), expected)
    torch.testing.assert_close(q.grad, gradient)
    assert int(size) == positions


def test_first_tokens_and_denominators_are_of_documents() -> None:
    batch = batch_of(SIZES)
    firsts, is_text = to_device(batch, CPU).first_tokens
    assert firsts[is_text].tolist() == [row * LENGTH + span.start for row, span in alone(SIZES)]
    sizes = np.array([size for of_row in SIZES for size in of_row])
    counts = [count(name, batch) for name in (ROWS, ATTENDED, ATTENDED_PAIRS)]
    assert counts == [len(sizes), sizes.sum(), (sizes**2).sum()]
    states = torch.randn(LENGTH * len(SIZES), 8)
    assert int(patient_mse(states[firsts], states[firsts], is_text)[1]) == len(sizes)


def trained(corpus: Path, runs: Path, packing: str) -> list[list]:
    """The curves of a run, and of one that stops and resumes."""
    words = [f"data.packing={packing}", "students.distilbert=null"]
    words += [f"students.tinybert.objective.{name}={{}}" for name in ("pkd", "value_relation")]
    words.append("students.tinybert.model.hidden_size=32")
    first = jobs.run(jobs.tiny_job(corpus, runs, *words, "name=first"))
    jobs.finish(first)
    jobs.run(jobs.tiny_job(corpus, runs, *words, "name=again"), stop_after=3)
    again = jobs.run(jobs.tiny_job(corpus, runs, *words, "name=again"))
    return [jobs.curve(first), jobs.curve(again)]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["best_fit", "documents"])
def test_a_job_is_the_same_on_two_ranks_and_resumed(
    corpus: Path, tmp_path: Path, packing: str
) -> None:
    (first, again), _ = run_distributed(trained, 2, corpus, tmp_path / "two", packing)
    assert first == again
    ((single, _),) = run_distributed(trained, 1, corpus, tmp_path / "one", packing)
    losses, others = (
        [value for _, key, value in curve if key.endswith("/loss")] for curve in (first, single)
    )
    assert len(losses) > 8
    assert losses == pytest.approx(others, rel=1e-5)


def test_a_model_that_reads_a_row_as_one_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    student = "students={lstm: {model: {kind: bilstm, vocab_size: 600}, objective: {mlm: {}}}}"
    words = [TINY_JOB, f"data.path={corpus}", f"output_dir={tmp_path}", "data.packing=documents"]
    ended = tandem("train", *words, student)
    assert (ended.returncode, ended.stdout) == (1, "")
    why = "a model of kind bilstm cannot tell several documents in a row apart, as data.packing: "
    assert ended.stderr.endswith(f"students.lstm.model.kind: {why}documents needs\n")


def test_documents_are_shown_and_dumped(corpus: Path, tmp_path: Path) -> None:
    words = [TINY_JOB, f"data.path={corpus}", "data.packing=documents"]
    shown = tandem("data", "show", *words)
    assert "padding: 0." in shown.stdout
    assert ", documents: " in shown.stdout
    out = tmp_path / "rows.npz"
    tandem("data", "dump", *words, "--steps", "0:40", "--out", out)
    arrays = np.load(out)
    documents, is_token = arrays["document_ids"], arrays["attention_mask"] == 1
    assert ((documents > 0) == is_token).all()
    assert documents.max() > 1
