"""Stored predictions of a frozen teacher: written once, read in place of the running teacher."""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
import tracemalloc
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from configs import progress
from configs.errors import ConfigError
from configs.plan_facts import StoredFacts
from data_pipeline import MASKED, DataError, Target, open_corpora
from data_pipeline.shards.locking import exclusive
from tests.conftest import TINY_JOB, tandem
from tests.distributed import run_distributed
from tests.failing import one_line
from tests.trainer.jobs import curve, finish, run, tiny_job
from trainer import storing
from trainer.checkpoint.reader import Checkpoint
from trainer.errors import TrainingError
from trainer.footprint.demands import demands, demands_apart
from trainer.lifecycle.start import require_same_order
from trainer.objectives.row_losses import kl_divergence_rows
from trainer.objectives.vocabulary import project_and_sum
from trainer.run import Outcome
from trainer.run_folder.folder import RunFolder
from trainer.stored_logits.format import Manifest, Shard, StepLogits, encode, write_shard
from trainer.stored_logits.reading import StoredReader
from trainer.vocabulary_projection import Distribution, Projection, TopLogits

STUDENTS = [
    "students=null",
    "students.one={model: {base: demo_tinybert, hidden_size: 16, ffn_size: 32, vocab_size: 600, "
    "max_positions: 32}, objective: {soft_kl: {temperature: 2.0}, blended: {}, mlm: {}}}",
]
DETECTOR = (
    "students.detector={model: {base: electra_small, vocab_size: 600, mlm_head: false}, "
    "objective: {rtd: {}}, generator: teacher}"
)
FROZEN = ["teacher.objective=null", "teacher.optimizer=null", "teacher.schedule=null",
          "teacher.frozen=true", "teacher.zero_stage=0"]  # fmt: skip
ALL = ["teacher.stored.top_k=null", "teacher.stored.precision=fp32"]
STEPS, TOP_K = 4, 5
SHARD = 1200  # bytes, so that a folder of the largest logits has several


def words(finished, *overrides):
    """Overrides that make the tiny job one of a frozen teacher and a student."""
    pretrained = f"teacher.init.pretrained={finished / 'exports' / 'teacher'}"
    return [*STUDENTS, *FROZEN, pretrained, f"steps={STEPS}", *overrides]


def job(corpus, runs, finished, folder=None, *overrides):
    stored = [] if folder is None else [f"teacher.stored.path={runs / folder}"]
    return tiny_job(corpus, runs, *words(finished, *stored, *overrides))


def largest(corpus, runs, finished, folder, *overrides):
    return job(corpus, runs, finished, folder, f"teacher.stored.top_k={TOP_K}", *overrides)


def stop_after(steps):
    """What asks to stop in this step."""
    asked = iter(range(1, steps + 1))
    return lambda: next(asked) == steps


def on_two_ranks(corpus, runs, finished):
    storing.SHARD_BYTES = SHARD
    every = job(corpus, runs, finished, "all", *ALL)
    assert storing.store_job(every, lambda: False) is Outcome.FINISHED
    some = largest(corpus, runs, finished, "largest")
    said = []
    assert storing.store_job(some, stop_after(3), said.append) is Outcome.STOPPED
    steps = Manifest.load(runs / "largest").steps
    kept = f"Stopped: {steps} of {STEPS} batches are in {runs / 'largest'}; the same command"
    assert [one.startswith(kept) for one in said[-1:]] == [True] * (dist.get_rank() == 0)
    said.append("")
    for name in (f"shard-{steps:09d}.safetensors", "manifest.json.new"):  # of a killed writer
        (runs / "largest" / name).write_bytes(b"torn")
    assert storing.store_job(some, lambda: False, said.append) is Outcome.FINISHED
    run(job(corpus, runs, finished, None, "name=running"))
    reads = job(corpus, runs, finished, "all", *ALL, "name=reads")
    run(reads, stop_after=2)
    ran = forward_passes()
    finish(run(reads))
    return steps, ran, said[-1]


def forward_passes():
    """A list that grows by the learner's name at each forward pass of a step from here on."""
    from trainer.learners.learner import Learner

    names, accumulate = [], Learner.accumulate

    def noting(learner, *arguments):
        names.append(learner.name)
        return accumulate(learner, *arguments)

    Learner.accumulate = noting
    return names


def on_one_rank(corpus, runs, finished):
    storing.SHARD_BYTES = SHARD
    storing.store_job(job(corpus, runs, finished, "all_alone", *ALL), lambda: False)
    some = largest(corpus, runs, finished, "largest_alone")
    with exclusive(runs / "largest_alone", ""), pytest.raises(DataError, match="is writing there"):
        storing.store_job(some, lambda: False)
    storing.store_job(some, lambda: False)
    with pytest.raises(TrainingError, match=r"stored\.path: .*tiny: holds attempts"):
        storing.store_job(largest(corpus, finished.parent, finished, finished.name), lambda: False)
    logits = Projection.logits
    for dtype, factor in (("fp16", 1e7), ("fp32", float("nan"))):
        Projection.logits = lambda *asked, factor=factor: logits(*asked) * factor
        beyond = largest(corpus, runs, finished, "beyond", f"teacher.stored.precision={dtype}")
        with pytest.raises(TrainingError, match=r"stored\.precision: a logit does not fit"):
            storing.store_job(beyond, lambda: False)
    Projection.logits = logits
    run(job(corpus, runs, finished, "all", *ALL, "name=alone"))
    run(dataclasses.replace(some, name="of_largest"))
    wrong = largest(corpus, runs, finished, "all", *ALL, "name=wrong", "teacher.init.random=true")
    with pytest.raises(TrainingError, match=r"stored\.path: .* of other weights"):
        run(wrong)


@pytest.fixture(scope="module")
def finished_job(finished):
    return finished[0]


@pytest.fixture(scope="module")
def folder(corpus, finished_job, tmp_path_factory):
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def two_ranks(corpus, folder, finished_job):
    return run_distributed(on_two_ranks, 2, corpus, folder, finished_job)[0]


@pytest.fixture(scope="module")
def runs(corpus, folder, finished_job, two_ranks):
    run_distributed(on_one_rank, 1, corpus, folder, finished_job)
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.slow
def test_all_logits_in_fp32_teach_as_the_running_teacher_does_also_resumed(runs, two_ranks):
    running, reads = (curve(RunFolder(runs / name)) for name in ("running", "reads"))
    assert len(running) > 30
    assert reads == running
    assert set(two_ranks[1]) == {"students/one"}


@pytest.mark.slow
def test_a_single_rank_learns_what_two_do(runs):
    two, one = (
        {(step, key): value for step, key, value in curve(RunFolder(runs / name), "students/one")}
        for name in ("reads", "alone")
    )
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "largest"])
def test_any_number_of_ranks_writes_the_same_bytes_also_after_a_stop(runs, two_ranks, name):
    together, alone = runs / name, runs / f"{name}_alone"
    assert files(together) == files(alone)
    assert Manifest.load(together).shards == Manifest.load(alone).shards
    assert two_ranks[0] == 3 < STEPS == Manifest.load(runs / "largest").steps


def everything(folder):
    """Values and tokens of a folder, [N, k] each."""
    steps = [
        Shard(folder / one.file).step(number, 0, 1)
        for one in Manifest.load(folder).shards
        for number in range(one.steps)
    ]
    return StepLogits.joined(steps)


@pytest.mark.slow
def test_the_largest_logits_are_the_teachers_in_the_stated_size(runs, two_ranks):
    every, largest = everything(runs / "all"), everything(runs / "largest")
    values, ids = every.values.topk(TOP_K)
    assert every.ids is None
    assert largest.ids.dtype == torch.uint16
    assert torch.equal(largest.ids.to(torch.int64), ids)
    assert torch.equal(largest.values, values.to(torch.float16))
    assert torch.equal(largest.counts, every.counts)
    manifest = Manifest.load(runs / "largest")
    assert sum(one.positions for one in manifest.shards) == len(values) > 100
    assert max(one.bytes for one in manifest.shards) < 2 * SHARD
    before, _, said = two_ranks
    old = sum(one.positions for one in manifest.shards if one.first < before)
    covered = every.values.softmax(1).topk(TOP_K)[0].sum(1)[old:].mean().item()
    assert said.endswith(f"; those written now hold {covered:.2%} of the teacher's probability")


def test_a_distribution_of_the_largest_logits_is_their_softmax():
    torch.manual_seed(0)
    values, ids = torch.randn(9, 50, dtype=torch.float64).float().topk(6)
    x, weight = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8)
    weights, temperature = torch.ones(9), 3.0
    teacher = Distribution(TopLogits(values, ids, 50))
    loss, _ = project_and_sum(
        x, (weight, None), [kl_divergence_rows(teacher, temperature, weights)]
    )
    loss.backward()
    other = x.detach().clone().requires_grad_()
    p = (values / temperature).softmax(-1)
    target = torch.zeros(9, 50).scatter(1, ids, p)
    ours = (other @ weight.t() / temperature).log_softmax(-1)
    right = F.kl_div(ours, target, reduction="sum")
    right.backward()
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["seed=7"], "another job: seed: 1 -> 7"),
        (["batch.size=4"], "another job: batch.size: 8 -> 4"),
        (["data.masking.rate=0.2"], r"another job: data\.masking\.rate: 0\.15 -> 0\.2"),
        (["teacher.precision=bf16"], "another job: teacher.precision: fp32 -> bf16"),
        (["teacher.stored.precision=fp32"], "another job: teacher.stored.precision: fp16"),
        (["teacher.stored.top_k=4"], "another job: teacher.stored.top_k: 5 -> 4"),
        (["steps=9"], "has 4 of the 9 batches"),
        (["rollback=[{checkpoint: 0, skip: [1, 2]}]"], "has 4 of the 5 batches"),
        (["teacher.stored.path=nowhere"], "nowhere: no stored predictions there"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_naming_what_differs(
    corpus, runs, finished_job, overrides, said
):
    other = largest(corpus, runs, finished_job, "largest", *overrides)
    with pytest.raises(TrainingError, match=rf"^teacher\.stored\.path: .*{said}"):
        require_same_order(other, open_corpora(other.data))


def rolled_back(corpus, runs, finished):
    run(largest(corpus, runs, finished, "rolled_back", "name=rolled_back"))
    skips = "rollback=[{checkpoint: 2, skip: [2, 3]}]"
    fixed = ["deterministic=true", "name=rolled_back", skips]
    config = largest(corpus, runs, finished, "rolled_back", *fixed)
    said, progress.LINE_SECONDS = [], 0.0
    with progress.shown(), redirect_stderr(io.StringIO()) as told:
        assert storing.store_job(config, lambda: True, said.append) is Outcome.FINISHED
    said += [told.getvalue()]
    said.append(f"deterministic: {torch.are_deterministic_algorithms_enabled()}")
    run(config)
    return said


@pytest.mark.slow
def test_the_batches_that_a_rollback_adds_are_stored_and_trained_on(corpus, runs, finished_job):
    shutil.copytree(runs / "largest", runs / "rolled_back")
    said = run_distributed(rolled_back, 1, corpus, runs, finished_job)[0]
    assert said[1].startswith(f"batches {STEPS} to {STEPS + 1}: ")
    assert "storing: 1 of 1 batches" in said[-2]
    assert said[-1] == "deterministic: True", "the kernels are the running teacher's"
    assert Manifest.load(runs / "rolled_back").steps == STEPS + 1
    state = Checkpoint(RunFolder(runs / "rolled_back").checkpoints, STEPS).trainer_state
    assert state["rolled_back"] == [{"checkpoint": 2, "skip": [2, 3]}]


@pytest.mark.slow
def test_a_corpus_that_has_moved_is_the_same(corpus, runs, finished_job, tmp_path):
    shutil.copytree(corpus, tmp_path / "moved")
    other = largest(tmp_path / "moved", runs, finished_job, "largest", "batch.micro_batch=1")
    require_same_order(other, open_corpora(other.data))


def batch_like(counts, slots=8):
    """What a reader looks at of a batch with this many masked positions in its rows."""
    labelled = np.arange(slots) < np.asarray(counts)[:, None]
    target = Target(np.where(labelled, 7, -100), np.zeros(labelled.shape, np.int64))
    return SimpleNamespace(targets={MASKED: target}, to_mask=None, readable=None)


def test_rows_are_found_by_example_in_little_memory(tmp_path):
    examples = np.random.default_rng(0).permutation(4000)
    manifest = Manifest("", {}, "", by_example=True)
    for number, some in enumerate(np.split(examples, [1000, 3000])):
        rows = len(some)
        values = torch.from_numpy(np.stack([some, some], axis=1)).float()
        ones, ids = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 2, dtype=torch.uint8)
        content = encode([StepLogits(ones, values, ids, torch.from_numpy(some))])
        shard = write_shard(tmp_path, range(number, number + 1), rows, content)
        manifest = manifest.with_shard(shard)
    manifest.save(tmp_path)
    reader, batch = StoredReader(tmp_path, 0, 1), batch_like([1, 1, 1])
    batch.sample_ids = np.array([17, 3999, 0])
    tracemalloc.start()
    try:
        read = reader.read(5, batch)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read.values[:, 0, 0].tolist() == [17, 3999, 0]
    assert held < 40 * len(examples)
    batch.sample_ids = np.array([17, 4000, 0])
    with pytest.raises(TrainingError, match="batch 5: example 4000 is not stored"):
        reader.read(5, batch)


@pytest.mark.slow
def test_damaged_shards_and_other_masks_are_told(runs, tmp_path):
    shutil.copytree(runs / "largest", tmp_path / "folder")
    counts = everything(tmp_path / "folder").counts[:8].tolist()
    found = StoredReader(tmp_path / "folder", 0, 1).read(0, batch_like(counts))
    assert found.values.shape == (8, 8, TOP_K)
    lost = batch_like([0, *counts[1:]])
    with pytest.raises(TrainingError, match="batch 0: has other masked positions"):
        StoredReader(tmp_path / "folder", 0, 1).read(0, lost)
    lost.readable = np.arange(8) > 0
    without = StoredReader(tmp_path / "folder", 0, 1).read(0, lost)
    assert not without.values[0].any()
    assert np.array_equal(without.values[1:], found.values[1:])
    shard = tmp_path / "folder" / "shard-000000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(TrainingError, match=r"shard-0+\.safetensors: is missing or damaged"):
        StoredReader(tmp_path / "folder", 0, 1).read(0, batch_like(counts))
    shard.unlink()
    manifest = Manifest.load(tmp_path / "folder")
    assert list(manifest.missing(tmp_path / "folder", STEPS)) == [range(manifest.shards[0].end)]
    (tmp_path / "folder" / "manifest.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"manifest\.json: is damaged"):
        Manifest.load(tmp_path / "folder")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["teacher.frozen=false"], "teacher.stored: is for a frozen teacher"),
        (["teacher.stored.top_k=601"], "teacher.stored.top_k: the vocabulary has 600 tokens"),
        (["students.one.objective.hidden_mse={}"], r"objective\.hidden_mse: needs more than pred"),
        (["students.one.objective.soft_kl.positions=attended"], "soft_kl: needs more than predic"),
        (["students.one.objective.soft_kl.teacher=mean"], "soft_kl: the mean is of teachers that"),
        (
            ["teacher.stored.top_k=4", "students.one.objective.blended.top_k=5"],
            r"objective\.blended\.top_k: must be at most teacher\.stored\.top_k, which is 4; null",
        ),
        (
            ["teacher.stored.top_k=1", "students.one.objective={decoupled_kd: {}}"],
            r"decoupled_kd: compares what is beside the label, so teacher\.stored\.top_k must be 2",
        ),
        (["students.one.stored={path: x}"], "students.one.stored: is for a frozen teacher"),
        (
            [DETECTOR],
            r"detector\.generator: samples every token; set teacher\.stored\.top_k to null",
        ),
    ],
)
def test_configs_that_need_a_running_teacher_are_refused(corpus, tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        job(corpus, tmp_path, Path("x"), "folder", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["teacher.stored.top_k=4", "students.one.objective.soft_kl.top_k=4"],
        ["teacher.stored.top_k=4", "students.one.objective.soft_kl.top_k=null"],
        ["teacher.stored.top_k=null", "students.one.objective.soft_kl.top_k=600"],
        ["teacher.stored.top_k=null", DETECTOR],
        ["teacher.stored.samples=4", "students.one=null", DETECTOR],
    ],
)
def test_a_term_reads_what_is_stored_or_less(corpus, tmp_path, overrides):
    job(corpus, tmp_path, Path("x"), "folder", *overrides)


def test_the_plan_states_the_size_and_the_saving(corpus, tmp_path):
    reads = job(corpus, tmp_path, Path("x"), "folder")
    facts = demands(reads)
    masked = round(0.15 * 30)
    size = 8 * (2 + 2)
    assert facts.stored == StoredFacts(
        "8 of its logits in fp16 with their tokens", size, bytes=size * masked * 8 * STEPS
    )
    running = demands(dataclasses.replace(
        reads, teacher=dataclasses.replace(reads.teacher, stored=None)))  # fmt: skip
    assert running.stored is None
    (teacher, student), (theirs, same) = facts.learners, running.learners
    assert teacher.forward_flops == 0 < theirs.forward_flops
    assert student.forward_flops < same.forward_flops  # without its logits
    assert demands_apart(reads, facts.learners)[0].forward_flops > 0


def test_from_the_command_line(corpus, finished_job, tmp_path):
    places = [f"data.path={corpus}", f"output_dir={tmp_path}", "steps=2"]
    stored = f"teacher.stored.path={tmp_path / 'folder'}"
    asked = words(finished_job, *places, stored)
    failed = tandem("store", TINY_JOB, *words(finished_job, *places))
    assert "teacher.stored: must be set" in one_line(failed.stderr)
    done = tandem("store", TINY_JOB, *asked)
    assert done.returncode == 0, done.stderr
    assert "batches 0 to 2" in done.stdout
    assert re.search(
        r"The 8 largest logits of 2 batches .* hold \d+\.\d\d% of the teacher's", done.stdout
    )
    planned = tandem("plan", TINY_JOB, *asked, "--gpus-per-node", 1)
    assert "8 of its logits in fp16 with their tokens, 32 bytes" in planned.stdout, planned.stderr
    failed = tandem("train", TINY_JOB, *asked, "seed=3")
    assert failed.returncode == 1
    assert "was written for another job: seed: 1 -> 3; change it back" in one_line(failed.stderr)
