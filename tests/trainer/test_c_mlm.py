"""C-MLM: a BERT that reads source and target teaches a model that translates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

import configs
from configs import ConfigError
from configs.plan_facts import StoredFacts
from data_pipeline import (
    MASKED,
    Batch,
    BatchSizes,
    Corpus,
    ExampleSplit,
    ExampleStream,
    SomeTokens,
    TextEncoder,
    open_corpora,
)
from model import EncoderConfig, build, save_pretrained
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.failing import fails
from tests.trainer import jobs
from tests.trainer.test_translation import OTHERS, WORDS, lines
from trainer import storing
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.footprint.demands import demands
from trainer.job_data.examples import predicts_by_example, views_of, with_examples
from trainer.lifecycle.start import batches_to_store, require_same_order, require_written_for
from trainer.objectives.row_losses import RowLoss
from trainer.objectives.terms.predictions import soft_cross_entropy
from trainer.objectives.vocabulary import project_and_sum
from trainer.run import Outcome
from trainer.run_folder.folder import RunFolder
from trainer.stored_logits.format import Manifest, Shard, StepLogits, decode
from trainer.vocabulary_projection import Distribution, Projection

PAIRS, STEPS, TOP_K, VOCABULARY = 40, 4, 3, 600
TASK = """{source_language: xx, target_language: yy, beams: 1, max_length: 8,
  length_penalty: 1.0, length_divisor: length}"""
SHARED = (
    *("epochs=null", f"steps={STEPS}", "data.train=train.xx", "data.validation=held_out.xx"),
    *("data.sequence_length=20", "batch={size: 8, micro_batch: 3}", "evaluation={every: 2}"),
    *("checkpoint={every: 2}", "log={every: 1, wandb: disabled}"),
)
STUDENT = (
    "students.student.dropout=0.0",
    f"students.student.model={{kind: seq2seq, hidden_size: 8, layers: 1, decoder_layers: 1, "
    f"heads: 2, ffn_size: 16, vocab_size: {VOCABULARY}, max_positions: 20}}",
    f"students.student.objective.translation={TASK}",
    "students.student.objective.translation.weight=0.5",
)
TERM = "students.student.objective.soft_cross_entropy"
EXAMPLES = 38  # so that the fifth batch of 8 straddles two epochs
EPOCHS = (f"data.max_trained={EXAMPLES}", "steps=12")
FP32 = "teacher.stored.precision=fp32"
ALL = ("teacher.stored.top_k=null", f"{TERM}.top_k=null", FP32)
SOME = (f"teacher.stored.top_k={TOP_K}", f"{TERM}.top_k=null", FP32)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory) -> Path:
    """Pairs of texts, and a BERT with the vocabulary of both languages."""
    folder = tmp_path_factory.mktemp("c_mlm")
    for language, words in (("xx", WORDS), ("yy", OTHERS)):
        (folder / f"train.{language}").write_text(lines(PAIRS, 0, words))
        (folder / f"held_out.{language}").write_text(lines(13, 100, words))
    sizes = {"hidden_size": 16, "layers": 1, "heads": 2, "ffn_size": 32, "max_positions": 20}
    bert = build(EncoderConfig(vocab_size=VOCABULARY, **sizes), seed=1)
    save_pretrained(bert, folder / "bert", corpus / "tokenizer")
    return folder


def load(name: str, folder: Path, teacher: str, *overrides: str) -> JobConfig:
    places = [f"data.root={folder}", f"output_dir={folder}/runs"]
    pretrained = f"teacher.init.pretrained={folder}/{teacher}"
    given = [*places, pretrained, *SHARED, *overrides]
    return with_examples(configs.load(name, JobConfig, "task", given))


def fine_tuning(folder: Path, *overrides: str) -> JobConfig:
    task = f"teacher.objective.translation={TASK}"
    return load("c_mlm", folder, "bert", task, "teacher.dropout=0.0", *overrides)


def student(folder: Path, *overrides: str) -> JobConfig:
    return load("c_mlm_student", folder, "runs/two/exports/teacher", *STUDENT, *overrides)


def stored_in(folder: Path, name: str, *overrides: str) -> list[str]:
    return [f"teacher.stored.path={folder}/{name}", *overrides]


def on_two_ranks(folder: Path) -> None:
    jobs.finish(jobs.run(fine_tuning(folder, "name=two")))
    every = student(folder, *stored_in(folder, "all", *ALL), "name=reads")
    storing.store_job(every, lambda: False)
    jobs.finish(jobs.run(student(folder, *of_largest("null"), "name=running")))
    jobs.run(every, stop_after=2)
    jobs.run(every)
    storing.SHARD_BYTES = 100_000  # so that there are several
    once = several_epochs(folder, "once", "name=reads_epochs")
    asked = iter(range(1, 99))
    assert storing.store_job(once, lambda: next(asked) == 2) is Outcome.STOPPED
    assert storing.store_job(once, lambda: False) is Outcome.FINISHED
    jobs.run(once, stop_after=7)
    jobs.run(once)
    running = of_largest("null")
    jobs.run(student(folder, *running, *EPOCHS, "name=running_epochs"))


def several_epochs(folder: Path, name: str, *overrides: str) -> JobConfig:
    return student(folder, *stored_in(folder, name, *ALL), *EPOCHS, *overrides)


def of_largest(top_k: object) -> list[str]:
    return [f"{TERM}.top_k={top_k}"]


def on_one_rank(folder: Path) -> None:
    some = student(folder, *stored_in(folder, "some", *SOME), "name=reads_some")
    storing.store_job(some, lambda: False)
    jobs.run(some)
    jobs.run(student(folder, *of_largest(TOP_K), "name=of_some"))


def again_on_one_rank(folder: Path) -> None:
    jobs.run(fine_tuning(folder, "name=one"))
    jobs.run(student(folder, *stored_in(folder, "all", *ALL), "name=alone"))


def store_on_one_rank(folder: Path) -> list[str]:
    storing.SHARD_BYTES = 100_000
    said: list[str] = []
    storing.store_job(several_epochs(folder, "once_alone"), lambda: False, said.append)
    more = several_epochs(folder, "once", "steps=30", "name=more")
    storing.store_job(more, lambda: False, said.append)
    jobs.run(more, stop_after=25)
    return said


def in_one_job(folder: Path) -> None:
    both = [
        *("teacher.frozen=false", "teacher.optimizer.learning_rate=1.0e-2"),
        f"teacher.objective.translation={TASK}",
    ]
    jobs.run(student(folder, *both, "name=together"))


@pytest.fixture(scope="module")
def two_ranks(folder) -> Path:
    run_distributed(on_two_ranks, 2, folder)
    return folder


@pytest.fixture(scope="module")
def runs(two_ranks) -> Path:
    run_distributed(on_one_rank, 1, two_ranks)
    return two_ranks


def curve(runs: Path, name: str) -> dict[tuple[float, str], float]:
    found = jobs.curve(RunFolder(runs / "runs" / name))
    return {(step, key): value for step, key, value in found}


def batch(job: JobConfig, view: str, numbers: list[int], epoch: int = 0, seed: int = 1) -> Batch:
    teacher = dataclasses.replace(job.teacher, view=view)
    views = views_of(dataclasses.replace(job, teacher=teacher), "", seed)
    split = ExampleSplit(Corpus.open(job.data.path), "train", views=views)
    return split.batch(np.array(numbers), np.full(len(numbers), epoch))


def sequences(folder: Path, corpus: Path) -> Iterator[tuple[list[int], int]]:
    """``[CLS] X [SEP] Y [SEP]`` of each pair, and where Y begins."""
    encoder = TextEncoder(corpus / "tokenizer", 20)
    cls, sep = encoder.vocabulary.cls, encoder.vocabulary.sep
    texts = ((folder / f"train.{one}").read_text().splitlines() for one in ("xx", "yy"))
    for pair in zip(*texts, strict=True):
        x, y = (encoder.encode(text, "").ids for text in pair)
        yield [cls, *x, sep, *y, sep], len(x) + 2


def test_seven_sequences_mask_every_token_of_a_target_once(folder, corpus) -> None:
    whole = batch(fine_tuning(folder), "every_token", [0, 5, 6, 39])
    seen, mask = whole.view("every_token"), TextEncoder(corpus / "tokenizer", 20).vocabulary.mask
    assert np.array_equal(seen.targets[MASKED].labels, whole.targets[MASKED].labels)
    texts = list(sequences(folder, corpus))
    for row, number in enumerate((0, 5, 6, 39)):
        ids, begin = texts[number]
        masked = np.zeros(len(ids), int)
        for sequence, (found, segments, there) in enumerate(
            zip(seen.input_ids[row], seen.segment_ids[row], seen.attention_mask[row], strict=True)
        ):
            right = [mask if at >= begin and (at - begin) % 7 == sequence else ids[at]
                     for at in range(len(ids))]  # fmt: skip
            assert found[: len(ids)].tolist() == right
            assert there.sum() == len(ids)
            assert segments[: len(ids)].tolist() == [0] * begin + [1] * (len(ids) - begin)
            masked += np.array(right) == mask
        assert masked.tolist() == [0] * begin + [1] * (len(ids) - begin)
        target = seen.targets[MASKED]
        assert seen.input_ids[row].ravel()[target.positions[row, : len(ids) - begin]].tolist() == [
            mask
        ] * (len(ids) - begin)


def test_fine_tuning_masks_targets_alone_anew_in_every_epoch(folder, corpus) -> None:
    job, numbers = fine_tuning(folder), list(range(PAIRS))
    mask = TextEncoder(corpus / "tokenizer", 20).vocabulary.mask
    epochs = [batch(job, "masked", numbers, epoch).view("masked") for epoch in (0, 1)]
    for seen in epochs:
        target = seen.targets[MASKED]
        for row, (ids, begin) in enumerate(sequences(folder, corpus)):
            found = seen.input_ids[row, : len(ids)]
            chosen = np.flatnonzero(found == mask)
            assert len(chosen) >= 1
            assert chosen.min() >= begin
            kept = np.delete(np.arange(len(ids)), chosen)
            assert np.array_equal(found[kept], np.array(ids)[kept])
            there = target.labels[row] >= 0
            assert target.positions[row][there].tolist() == chosen.tolist()
            assert target.labels[row][there].tolist() == [ids[at] for at in chosen]
    first, other = (one.input_ids for one in epochs)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, batch(job, "masked", numbers, seed=2).view("masked").input_ids)
    alone = batch(job, "masked", [7]).view("masked").input_ids[0]
    assert np.array_equal(first[7, : len(alone)], alone)


def test_data_commands_tell_what_a_learner_reads(folder, corpus, tmp_path) -> None:
    """A file of the job: its only view, the one that a learner has, and a question otherwise."""
    path, out = tmp_path / "job.yaml", tmp_path / "rows.npz"
    seen = fine_tuning(folder)
    path.write_text(configs.dump(seen))
    shown = tandem("data", "show", path, "--samples", 1)
    assert "[MASK]" in shown.stdout, shown.stderr
    assert "masked: " in shown.stdout
    done = tandem("data", "dump", path, "--steps", "4:6", "--out", out)
    assert done.returncode == 0, done.stderr
    rows, mask = np.load(out), TextEncoder(corpus / "tokenizer", 20).vocabulary.mask
    for epoch, step in ((0, 4), (1, 5)):
        ours = rows["step"] == step
        assert set(rows["epochs"][ours]) == {epoch}
        right = batch(seen, "masked", rows["sample_ids"][ours].tolist(), epoch).view("masked")
        width = right.input_ids.shape[1]
        assert np.array_equal(rows["input_ids"][ours][:, :width], right.input_ids)
        assert np.array_equal(rows["labels_masked"][ours][:, :width], right.labels())
        assert ((right.labels() >= 0) == (right.input_ids == mask)).all()
    pretrained = student(folder, f"teacher.init.pretrained={folder}/bert")
    path.write_text(configs.dump(pretrained))
    failed = tandem("data", "dump", path, "--steps", "0:1", "--out", out)
    assert failed.returncode == 2
    assert (
        "learners read different views: teacher (every_token), student (default)" in failed.stderr
    )
    for learner, sequences in (("teacher", (7,)), ("student", (2,))):
        done = tandem("data", "dump", path, "--steps", "0:1", "--out", out, "--learner", learner)
        assert done.returncode == 0, done.stderr
        assert np.load(out)["input_ids"].shape[1:-1] == sequences
    failed = tandem("data", "show", path, "--learner", "x")
    assert "--learner: x: must be one of teacher, student" in failed.stderr


def test_each_token_is_masked_with_the_probability_and_at_least_one() -> None:
    masks = SomeTokens(0.15, seed=1)
    many = np.stack([masks(40, epoch, number) for epoch in range(5) for number in range(400)])
    assert (many == 0).mean() == pytest.approx(0.15, abs=0.005)
    assert (many == 0).mean(axis=0).std() < 0.015  # sqrt(.15 * .85 / 2000) = 0.008
    few = np.stack([masks(2, 0, number) for number in range(400)])
    assert ((few == 0).sum(axis=1) >= 1).all()


def test_an_example_that_cannot_be_read_has_no_labels_in_any_view(folder) -> None:
    whole = batch(fine_tuning(folder), "masked", [0, 1])
    kept = whole.without_labels(np.array([True, False])).view("masked").targets[MASKED]
    assert kept.is_labelled.any(axis=1).tolist() == [False, True]


@pytest.mark.slow
def test_two_ranks_train_as_one_does(runs) -> None:
    run_distributed(again_on_one_rank, 1, runs)
    for two, one in (("two", "one"), ("reads", "alone")):
        ours, theirs = curve(runs, two), curve(runs, one)
        compared = [key for key in theirs if key[1].endswith(("/loss", "/soft_cross_entropy"))]
        assert len(compared) >= STEPS
        for key in compared:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


@pytest.mark.slow
def test_all_stored_logits_teach_as_the_running_teacher_does_also_resumed(runs) -> None:
    running, reads = (curve(runs, name) for name in ("running", "reads"))
    assert any(key.endswith("student/soft_cross_entropy") for _, key in running)
    assert reads == running


def everything(folder: Path) -> StepLogits:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return StepLogits.joined([decode(path.read_bytes()) for path in files])


@pytest.mark.slow
def test_each_example_is_stored_once_for_any_number_of_epochs(runs) -> None:
    """Exactly as running in the first epoch; later, kernels round by the rows of a batch."""
    running, reads = (curve(runs, f"{name}_epochs") for name in ("running", "reads"))
    assert running.keys() == reads.keys()
    for key, value in running.items():
        if key[1].endswith(("loss", "soft_cross_entropy")):
            assert reads[key] == (value if key[0] < 5 else pytest.approx(value, rel=1e-5)), key
    said = run_distributed(store_on_one_rank, 1, runs)[0]
    assert said[-1].startswith("The 600 largest logits of 5 batches, of each example once, are in")
    assert sum("batches 0 to" in line for line in said) == 1, "the longer job runs no teacher"
    two, alone = (everything(runs / name) for name in ("once", "once_alone"))
    assert sorted(two.examples.tolist()) == list(range(EXAMPLES))
    assert torch.equal(two.examples, alone.examples)
    assert torch.equal(two.counts, alone.counts)
    torch.testing.assert_close(two.values, alone.values, rtol=1e-5, atol=1e-6)
    assert max(step for step, _ in curve(runs, "more")) == 25


@pytest.mark.slow
def test_masks_of_every_epoch_are_stored_batch_by_batch(runs) -> None:
    masked = [f"{TERM}=null", "teacher.view=masked"]
    job = student(runs, *stored_in(runs, "none", *SOME), *EPOCHS, *masked)
    assert not predicts_by_example(job)
    assert batches_to_store(job, open_corpora(job.data)) == 12
    once = several_epochs(runs, "once")
    assert batches_to_store(once, open_corpora(once.data)) == 5
    older = dataclasses.replace(Manifest.load(runs / "once"), by_example=False)
    with pytest.raises(TrainingError, match=r"of every batch -> of each example once; .* `tandem"):
        require_written_for(older, once, open_corpora(once.data))


@pytest.mark.slow
def test_the_largest_stored_logits_teach_as_those_of_the_running_teacher(runs) -> None:
    running, reads = (curve(runs, name) for name in ("of_some", "reads_some"))
    assert reads == running


@pytest.mark.slow
def test_what_is_stored_are_the_logits_of_transformers_at_every_target_token(runs, corpus) -> None:
    """Of the first batch, from sequences that are masked here, one token at a time."""
    teacher = AutoModelForMaskedLM.from_pretrained(runs / "runs/two/exports/teacher").eval()
    job = student(runs, *stored_in(runs, "all", *ALL))
    vocabulary = TextEncoder(corpus / "tokenizer", 20).vocabulary
    texts = list(sequences(runs, corpus))
    split = ExampleSplit(Corpus.open(job.data.path), "train")
    first = ExampleStream(split, job.seed, BatchSizes.constant(8)).batch(0)
    stored, at = Shard(runs / "all" / Manifest.load(runs / "all").shards[0].file).step(0, 0, 1), 0
    assert len(stored.counts) == 8
    for number, count in zip(first.sample_ids.tolist(), stored.counts.tolist(), strict=True):
        ids, begin = texts[number]
        assert count == len(ids) - begin
        for place in range(begin, len(ids)):
            masked = [
                vocabulary.mask if one >= begin and (one - place) % 7 == 0 else token
                for one, token in enumerate(ids)
            ]
            segments = [0] * begin + [1] * (len(ids) - begin)
            with torch.no_grad():
                inputs = torch.tensor([masked]), torch.ones(1, len(ids)), torch.tensor([segments])
                logits = teacher(*inputs).logits[0, place]
            torch.testing.assert_close(stored.values[at], logits, rtol=1e-4, atol=1e-5)
            at += 1


def test_the_loss_is_that_of_the_original_code() -> None:
    """The teacher's 8 largest logits, T = 10; the student's log probabilities, T = 1."""
    drawn = torch.Generator().manual_seed(0)
    teacher, weight = (torch.randn(9, 20, generator=drawn), torch.randn(50, 20, generator=drawn))
    x, own = torch.randn(9, 6, generator=drawn), torch.randn(50, 6, generator=drawn)
    there = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1, 1])

    def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
        return [loss, *torch.autograd.grad(loss, inputs)]

    ours = x.clone().requires_grad_(), own.clone().requires_grad_()
    distribution = Distribution(Projection(5 * teacher, weight, None)).largest(8)
    rows = RowLoss(
        soft_cross_entropy, there, operands=lambda rows: (distribution.log_at(rows, 10.0),)
    )
    found = gradients(project_and_sum(ours[0], (ours[1], None), [rows])[0], *ours)
    theirs = x.clone().requires_grad_(), own.clone().requires_grad_()
    values, ids = (5 * teacher @ weight.t()).topk(8)
    log_p = F.log_softmax(theirs[0] @ theirs[1].t(), dim=-1)
    losses = -(log_p.gather(-1, ids) * F.softmax(values / 10.0, dim=-1)).sum(-1)
    torch.testing.assert_close(found, gradients((losses * there).sum(), *theirs))


@pytest.mark.slow
def test_teacher_and_student_may_learn_in_one_job(runs) -> None:
    run_distributed(in_one_job, 1, runs)
    found = curve(runs, "together")
    losses = [found[step, "teacher/loss"] for step in range(1, STEPS + 1)]
    assert losses[-1] < losses[0]
    assert all((step, "students/student/soft_cross_entropy") in found for step in (1, STEPS))


@pytest.mark.slow
def test_only_the_student_translates(runs) -> None:
    results = json.loads(RunFolder(runs / "runs" / "running").evaluation.read_text())["learners"]
    assert "bleu" not in results["teacher"]
    assert {"bleu", "loss", "accuracy"} <= results["students/student"].keys()
    assert 0 <= results["students/student"]["agreement"]["top_1"] <= 1
    tuned = runs / "runs" / "two" / "exports" / "teacher"
    assert not (tuned / "task.json").exists()
    assert "has no head of a task" in fails("predict", tuned, runs / "held_out.xx")


@pytest.mark.slow
def test_a_plan_counts_the_seven_sequences_and_what_is_stored(runs, corpus) -> None:
    some, every = (
        demands(fine_tuning(runs, f"teacher.view={view}")).learners[0].forward_flops
        for view in ("masked", "every_token")
    )
    assert 6 < every / some < 19  # seven times the layers, and a head at 19 tokens, not at some
    facts = demands(student(runs, *stored_in(runs, "some", *SOME)))
    assert facts.learners[0].forward_flops == 0
    mean = sum(len(ids) - begin for ids, begin in sequences(runs, corpus)) / PAIRS
    size = TOP_K * (4 + 2)
    assert facts.stored == StoredFacts(
        f"{TOP_K} of its logits in fp32 with their tokens",
        size,
        bytes=pytest.approx(size * mean * 8 * STEPS),
    )


@pytest.mark.slow
def test_another_view_of_the_teacher_is_another_folder(runs) -> None:
    stored = stored_in(runs, "some", *SOME)
    other = student(runs, *stored, f"{TERM}=null", "teacher.view=masked")
    with pytest.raises(TrainingError, match=r"teacher\.view: every_token -> masked"):
        require_same_order(other, open_corpora(other.data))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["teacher.view=default"],
            "teacher.view: a model of kind encoder has no decoder; set the view to masked or ev",
        ),
        (
            ["students.student.view=every_token"],
            "students.student.view: a model of kind seq2seq reads source and target separately",
        ),
        (
            ["teacher.view=masked"],
            "soft_cross_entropy: view masked of its teacher has other labels than view default; gi",
        ),
        (["teacher.view=all"], "teacher.view: the data have no view 'all'; there are: default, ma"),
        (
            [f"{TERM}.top_k=601"],
            "soft_cross_entropy.top_k: the vocabulary has 600 tokens; null reads all",
        ),
        (
            [
                f"students.student.model={{base: bert_tiny, vocab_size: {VOCABULARY}}}",
                "students.student.view=masked",
                "students.student.objective.soft_labels={}",
            ],
            "soft_labels: is about the head of a task, and a translation has none",
        ),
        (
            ["students.student.objective.hidden_mse={}"],
            "hidden_mse: compares states, so that its teacher must have the same view",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder, overrides, message) -> None:
    with pytest.raises(ConfigError) as failed:
        load("c_mlm_student", folder, "bert", *STUDENT, *overrides)
    assert message in str(failed.value)
