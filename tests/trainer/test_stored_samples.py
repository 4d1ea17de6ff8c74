"""Tokens drawn of a teacher's predictions: unbiased, a function of what they are for, resumable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from configs import ConfigError
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, finish, run
from tests.trainer.test_stored_logits import batch_like, job, stop_after
from trainer import storing
from trainer.errors import TrainingError
from trainer.footprint.demands import demands
from trainer.objectives.row_losses import kl_divergence_rows
from trainer.objectives.vocabulary import project_and_sum
from trainer.run import Outcome
from trainer.run_folder.folder import RunFolder
from trainer.stored_logits.format import Manifest, StoredConfig
from trainer.stored_logits.reading import StoredReader, as_logits, draw, uniforms
from trainer.vocabulary_projection import Distribution, Projection, TopLogits

VOCABULARY, SAMPLES, TEMPERATURE = 40, 6, 2.0
TERM = "students.one.objective={blended: null, soft_kl: {temperature: 2.0}}"
SAMPLED = (f"teacher.stored.samples={SAMPLES}", f"teacher.stored.temperature={TEMPERATURE}", TERM)


def drawn(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """Draws of the same distribution at the first place of this many samples."""
    places = np.zeros(rows, np.int64), np.arange(rows), np.arange(rows) % 5
    numbers = uniforms(3, *places, SAMPLES)
    return draw(logits.expand(rows, -1), torch.from_numpy(numbers), TEMPERATURE)


def gradient(distribution: Distribution, rows: int, ours: torch.Tensor, weight: torch.Tensor):
    """The mean gradient over rows, at the input of a student's projection to the vocabulary."""
    x = ours.expand(rows, -1).clone().requires_grad_()
    loss = kl_divergence_rows(distribution, TEMPERATURE, torch.ones(rows))
    project_and_sum(x, (weight, None), [loss])[0].backward()
    return x.grad.double().mean(dim=0)


def test_the_gradient_is_that_of_the_whole_distribution_in_expectation() -> None:
    """The largest logits alone, as many bytes, give another one."""
    generator, rows = torch.Generator().manual_seed(1), 20_000
    logits = 2 * torch.randn(1, VOCABULARY, generator=generator)
    ours, weight = torch.randn(1, 8, generator=generator), torch.randn(40, 8, generator=generator)
    whole = gradient(Distribution(Projection(logits, torch.eye(VOCABULARY), None)), 1, ours, weight)
    tokens = drawn(logits, rows)
    sampled = Distribution(TopLogits(as_logits(tokens, TEMPERATURE), tokens, VOCABULARY))
    largest = Distribution(TopLogits(*logits.topk(SAMPLES), VOCABULARY))
    wrong = (gradient(largest, 1, ours, weight) - whole).norm() / whole.norm()
    assert (gradient(sampled, rows, ours, weight) - whole).norm() / whole.norm() < 0.02 < wrong / 5


def test_shares_are_those_of_draws_and_never_far_from_the_probabilities() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0, -2.0, -1.0]])
    tokens = drawn(logits, 5000)
    assert (tokens.diff(dim=1) >= 0).all()
    counts = torch.nn.functional.one_hot(tokens, 5).sum(dim=1).double()
    p = (logits / TEMPERATURE).softmax(dim=1).double()
    assert ((counts - SAMPLES * p).abs() < 2).all()  # one token from each of the parts
    torch.testing.assert_close(counts.mean(dim=0) / SAMPLES, p[0], rtol=0.03, atol=2e-3)
    of_rows = TopLogits(as_logits(tokens, TEMPERATURE), tokens, 5)
    shares, _ = Distribution(of_rows).at(slice(0, 5000), TEMPERATURE)
    torch.testing.assert_close(shares.double(), counts / SAMPLES, rtol=1e-5, atol=1e-6)


def test_numbers_depend_on_nothing_but_seed_sample_and_position() -> None:
    places = [np.array(part) for part in ([0, 0, 1, 1], [7, 8, 7, 8], [3, 3, 4, 3])]
    together = uniforms(5, *places, SAMPLES)
    assert len(np.unique(together)) == together.size
    assert ((together > 0) & (together < 1)).all()
    for row in range(4):
        alone = uniforms(5, *(part[row : row + 1] for part in places), SAMPLES)
        assert np.array_equal(alone[0], together[row])
    assert not np.array_equal(uniforms(6, *places, SAMPLES), together)


def on_ranks(corpus: Path, runs: Path, finished: Path, ranks: int):
    storing.SHARD_BYTES = 600
    folder = f"drawn_{ranks}"
    config = job(corpus, runs, finished, folder, *SAMPLED, f"name=reads_{ranks}")
    if ranks == 2:
        assert storing.store_job(config, stop_after(2)) is Outcome.STOPPED
    assert storing.store_job(config, lambda: False) is Outcome.FINISHED
    finish(run(config))


@pytest.fixture(scope="module")
def runs(corpus, finished, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    for ranks in (1, 2):
        run_distributed(on_ranks, ranks, corpus, folder, finished[0], ranks)
    return folder


@pytest.mark.slow
def test_a_stopped_writer_on_other_ranks_writes_the_same_bytes(runs) -> None:
    alone, resumed = (sorted((runs / f"drawn_{ranks}").iterdir()) for ranks in (1, 2))
    shards = [path for path in alone if path.suffix == ".safetensors"]
    assert len(shards) > 1
    assert [path.name for path in alone] == [path.name for path in resumed]
    for first, second in zip(alone, resumed, strict=True):
        if first.suffix == ".safetensors":
            assert first.read_bytes() == second.read_bytes(), first.name
    positions = sum(shard.positions for shard in Manifest.load(runs / "drawn_1").shards)
    size = sum(path.stat().st_size for path in shards)
    assert size < positions * 2 * SAMPLES + 1000 * len(shards)
    first, second = (curve(RunFolder(runs / f"reads_{ranks}"), "students/one") for ranks in (1, 2))
    assert [row[:2] for row in first] == [row[:2] for row in second]
    assert [row[2] for row in first] == pytest.approx([row[2] for row in second], rel=1e-4)


@pytest.mark.slow
def test_a_damaged_shard_is_told_in_one_line(runs, tmp_path) -> None:
    folder = runs / "drawn_1"
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "shard-000000000.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"shard-0+\.safetensors: is missing or damaged; rem"):
        StoredReader(tmp_path, 0, 1).read(0, batch_like([1]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["teacher.stored.top_k=4"], r"stored\.top_k: is for logits, and samples are tokens"),
        (["teacher.stored.precision=fp32"], r"stored\.precision: is for logits"),
        (["teacher.stored.samples=null"], r"stored\.temperature: is for samples"),
        (
            ["students.one.objective.soft_kl.temperature=1.0"],
            r"soft_kl: its teacher's temperature must be teacher\.stored\.temperature, 2",
        ),
        (["students.one.objective.soft_kl.top_k=3"], r"soft_kl\.top_k: is for logits"),
        (
            ["students.one.objective.jensen_shannon={temperature: 2.0}"],
            r"jensen_shannon: is not linear in the target, so draws would bias it",
        ),
    ],
)
def test_what_does_not_go_with_drawn_tokens(corpus, tmp_path, overrides, said) -> None:
    with pytest.raises(ConfigError, match=said):
        job(corpus, tmp_path, Path("x"), "folder", *SAMPLED, *overrides)


def test_a_plan_counts_their_bytes(corpus, tmp_path) -> None:
    facts = demands(job(corpus, tmp_path, Path("x"), "folder", *SAMPLED)).stored
    assert facts.position_bytes == 2 * SAMPLES == StoredConfig("x", samples=6).position_bytes(600)
    assert facts.kept == "6 tokens drawn from its predictions"
