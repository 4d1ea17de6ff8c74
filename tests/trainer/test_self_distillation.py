"""FastBERT: the task first, then branches that learn from the last one; and refused configs."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional as F

import configs
import tandem as tandem_command
from benchmarks import early_leaving
from configs import ConfigError
from data_pipeline import DEFAULT_VIEW
from model import (
    EncoderConfig,
    TaskHeadConfig,
    build,
    from_pretrained,
    save_pretrained,
    with_task_head,
)
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_sentence_tasks import LABELS, job_of_moods, lines  # noqa: F401 - a fixture
from tests.trainer.tiny import encoder
from trainer.batches import MicroBatch, MicroTarget
from trainer.checkpoint.folder import step_name
from trainer.checkpoint.reader import intact
from trainer.config import JobConfig
from trainer.denominators import Totals
from trainer.evaluation.finished import SavedLearners
from trainer.evaluation.held_out import trained_heads
from trainer.job_data.examples import with_examples
from trainer.learner_config import LearnerConfig
from trainer.learners.module import Train, build_module, build_objective
from trainer.learners.state import LearnerState
from trainer.objectives import ObjectiveConfig
from trainer.objectives.objective_config import KindOfTask
from trainer.objectives.stages import TaskFirstConfig
from trainer.objectives.task import TaskFile
from trainer.prediction import fine_tuned
from trainer.prediction.fine_tuned import FineTuned
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.tasks.branches import Branches
from trainer.tasks.sentences import SingleSentence

TASK = SingleSentence(labels=["a", "b", "c"])
FIRST = 6  # steps of the task, of 12


def learner(**branches: str) -> LearnerConfig:
    objective = ObjectiveConfig(single_sentence=TASK, branches=Branches(**branches))
    first = TaskFirstConfig(steps=FIRST, learning_rate=0.5)
    return LearnerConfig(
        model=encoder(initializer_range=0.3), objective=objective, task_first=first
    )


def batch() -> MicroBatch:
    """Three texts, the last of them without a label, and a row that could not be read."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 97, (4, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor([7, 4, 5, 0])[:, None]
    targets = {"single_sentence": MicroTarget(torch.tensor([0, 2, -100, -100]))}
    return MicroBatch(ids, torch.zeros_like(ids), mask, int(mask.sum()), targets)


def totals_of(**counts: float) -> Totals:
    return {(DEFAULT_VIEW, name): torch.tensor(value) for name, value in counts.items()}


def said(config: LearnerConfig, step: int):
    """The loss of a step, the module with its gradients, and all branches' logits."""
    module = build_module("teacher", config, config.model, 0)
    read = batch()
    capture = module.objective.student_capture(step)
    totals = totals_of(single_sentence=2.0, rows=3.0)
    loss, _, _ = module(Train(totals, {}, capture, step), read)
    loss.backward()
    with torch.no_grad():
        states = module.model(
            read.input_ids, read.segment_ids, read.attention_mask.sum(1), output_hidden_states=True
        ).hidden_states[1:]
        pairs = zip(module.model.task_heads["single_sentence"], states, strict=True)
        logits = [branch(one, read.attention_mask.sum(1)) for branch, one in pairs]
    return loss.detach(), module, logits


def with_gradient(module) -> set[str]:
    return {
        name
        for name, one in module.named_parameters()
        if one.grad is not None and one.grad.abs().sum() > 0
    }


def test_the_task_is_learnt_first_by_everything_but_the_branches() -> None:
    loss, module, logits = said(learner(), FIRST - 1)
    wanted = F.cross_entropy(logits[-1][:2], torch.tensor([0, 2]))
    torch.testing.assert_close(loss, wanted)
    trained = with_gradient(module)
    assert not any(".branches." in name for name in trained)
    assert {"model.embeddings.word.weight", "model.task_heads.single_sentence.last.dense.bias"} < (
        trained
    )


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(softmax(p) || softmax(q)) of the rows that were read, their mean."""
    chances = [torch.distributions.Categorical(logits=one[:3]) for one in (p, q)]
    return torch.distributions.kl_divergence(*chances).mean()


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_branches_learn_what_the_last_one_says(kind) -> None:
    loss, module, (*earlier, last) = said(learner(divergence=kind), FIRST)
    pairs = [(last, one) if kind == "forward" else (one, last) for one in earlier]
    torch.testing.assert_close(loss, torch.stack([divergence(*pair) for pair in pairs]).sum())
    assert all(".branches." in name for name in with_gradient(module))


def test_each_of_several_tasks_has_branches() -> None:
    tasks = {name: KindOfTask(single_sentence=TASK) for name in ("one", "other")}
    config = LearnerConfig(encoder(), ObjectiveConfig(tasks=tasks, branches=Branches()))
    module = build_module("teacher", config, config.model, 0)
    read = dataclasses.replace(batch(), targets={"one": batch().targets["single_sentence"]})
    totals = totals_of(one=2.0, rows=3.0)
    capture = module.objective.student_capture(0, read.targets)
    module(Train(totals, {}, capture), read)[0].backward()
    heads = {
        name.partition("task_heads.")[2].rpartition(".branches.")[0]
        for name in with_gradient(module)
    }
    assert heads == {"", "one"}
    number = KindOfTask(single_sentence=SingleSentence(target="number"))
    numbers = ObjectiveConfig(tasks={**tasks, "other": number}, branches=Branches())
    with pytest.raises(
        ValueError, match=r"objective\.branches: is for tasks with classes, and other has"
    ):
        LearnerConfig(encoder(), numbers)


def test_each_stage_has_its_groups_its_rate_and_its_trained_heads() -> None:
    config = learner()
    objective = build_objective(config, config.model, seed=1)
    for name, is_branch in (
        ("model.task_heads.single_sentence.branches.0.dense.weight", True),
        ("model.task_heads.single_sentence.last.dense.weight", False),
        ("model.embeddings.word.weight", False),
    ):
        group = objective.group(name)
        assert [objective.factor(group, step) for step in (0, FIRST - 1, FIRST, 11)] == (
            [0.0, 0.0, 1.0, 1.0] if is_branch else [1.0, 1.0, 0.0, 0.0]
        )
    assert [step for step in range(12) if objective.stages.begins(step)] == [FIRST]
    assert [trained_heads(config, LearnerState(0), step) for step in (0, 1)] == [
        set(), {"single_sentence"},
    ]  # fmt: skip


STAGES = {"small": 2, "cut": 3}
BRANCHED = (
    "objective: {single_sentence: {}, branches: {}}, task_first: {fraction: 0.5, from_best: false}"
)
SIZE = (
    "hidden_size: 16, layers: 3, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12, "
    "initializer_range: 0.1"
)
WORDS = (
    "students=null", "teacher.model.initializer_range=0.1",
    *(
        f"students.{name}={{model: {{{SIZE}}}, zero_stage: {stage}, {BRANCHED}, "
        "optimizer: {learning_rate: 3.0e-3}}"
        for name, stage in STAGES.items()
    ),
    "teacher.objective.branches={}",
    "teacher.task_first={fraction: 0.5, learning_rate: 1.0e-3, from_best: false}",
    "teacher.schedule.warmup_fraction=0.5", "steps=12", "checkpoint.every=3", "evaluation.every=3",
)  # fmt: skip
EVERYONE = ("teacher", "students/small", "students/cut")


def job_of(job: Path, runs: Path) -> JobConfig:
    return with_examples(configs.load(str(job), JobConfig, "job", [f"output_dir={runs}", *WORDS]))


def in_parts(job: Path, runs: Path) -> tuple[list, dict]:
    """The curve, and all weights after 1, 6 and 12 steps, at which it stops. Collective."""
    weights = {}
    for stop in (1, FIRST, None):
        folder = jobs.run(job_of(job, runs), stop_after=stop)
        saved = SavedLearners(folder)
        weights[stop or 12] = {name: saved.weights(name) for name in EVERYONE}
    return jobs.curve(folder), weights


@pytest.fixture(scope="module")
def of_two(job, tmp_path_factory) -> tuple[list, dict]:
    return run_distributed(in_parts, 2, job, tmp_path_factory.mktemp("two"))[0]


@pytest.mark.slow
def test_what_is_frozen_in_a_stage_stays_to_the_last_bit(of_two) -> None:
    for name in EVERYONE:
        begun, half, done = (of_two[1][step][name] for step in (1, FIRST, 12))
        for key in begun:
            if ".branches." in key:
                assert torch.equal(begun[key], half[key]), key
                assert not torch.equal(half[key], done[key]) or key.endswith("key.bias"), key
            else:
                assert torch.equal(half[key], done[key]), key
        assert not torch.equal(begun["embeddings.word.weight"], half["embeddings.word.weight"])


BEST = (
    "students=null", "teacher.task_first.from_best=true", "teacher.task_first.learning_rate=0.3",
    "evaluation.every=2", "checkpoint.every=100",
)  # fmt: skip


FIRST_BEST = 2  # the step of the first evaluation, which counts as the best


def to_the_best(job: Path, runs: Path, stop: int | None) -> tuple[str, list]:
    """A run whose first stage ends worse than it was; it may stop where that ends. Collective."""
    config = with_examples(
        configs.load(str(job), JobConfig, "job", [f"output_dir={runs}", *WORDS, *BEST])
    )
    with falling_scores():
        if stop:
            jobs.run(config, stop_after=stop)
        folder = jobs.run(config)
    return str(folder.path), jobs.curve(folder)


def falling_scores():
    record = LearnerState.record_score
    return mock.patch.object(
        LearnerState,
        "record_score",
        lambda state, ranking, score, step: record(state, ranking, 1 / step, step),
    )


@pytest.mark.slow
def test_branches_learn_beside_the_best_weights_of_the_first_stage(job, tmp_path) -> None:
    path, curve = run_distributed(to_the_best, 2, job, tmp_path / "once", None)[0]
    column = "val/single_sentence/teacher/single_sentence_accuracy"
    scores = {step: value for step, name, value in curve if name == column}
    checkpoints = RunFolder(Path(path)).checkpoints
    begun, done = (intact(checkpoints, step).master_weights("teacher") for step in (FIRST_BEST, 12))
    for name, tensor in begun.items():
        if not name.endswith("key.bias"):  # whose gradient is rounding alone
            assert torch.equal(tensor, done[name]) == (".branches." not in name), name
    assert {value for step, value in scores.items() if step > FIRST} == {scores[FIRST_BEST]}
    again = run_distributed(to_the_best, 2, job, tmp_path / "again", FIRST)[0][1]
    assert again == curve


def to_a_damaged_best(job: Path, runs: Path) -> str:
    """A run that stops where its first stage ends, and whose best checkpoint loses a byte then."""
    config = with_examples(
        configs.load(str(job), JobConfig, "job", [f"output_dir={runs}", *WORDS, *BEST])
    )
    with falling_scores():
        folder = jobs.run(config, stop_after=FIRST)
        best = folder.checkpoints / step_name(FIRST_BEST)
        (damaged,) = (best / "teacher").glob("rank-*")
        damaged.write_bytes(damaged.read_bytes()[:-1])
        jobs.run(config)
    return str(folder.path)


def test_branches_learn_beside_the_last_weights_where_the_best_are_damaged(
    job, tmp_path, capfd
) -> None:
    (path,) = run_distributed(to_a_damaged_best, 1, job, tmp_path)
    told = capfd.readouterr()
    assert "teacher continues from its last weights" in told.out + told.err
    folder = RunFolder(Path(path)).checkpoints
    begun, done = (intact(folder, step).master_weights("teacher") for step in (FIRST, 12))
    for name, tensor in begun.items():
        assert torch.equal(tensor, done[name]) or ".branches." in name, name


def without_a_stop(job: Path, runs: Path) -> list:
    return jobs.curve(jobs.run(job_of(job, runs)))


@pytest.mark.slow
def test_two_ranks_in_parts_train_as_one_does_at_once(of_two, job, tmp_path) -> None:
    alone = run_distributed(without_a_stop, 1, job, tmp_path)[0]
    ours = {(step, name): value for step, name, value in alone}
    losses = 0
    for step, name, value in of_two[0]:
        if name.endswith(("/loss", "/single_sentence", "/branches")):
            assert ours[step, name] == pytest.approx(value, rel=1e-4, abs=1e-7), (step, name)
            losses += value > 1e-2
    assert losses > 60


@pytest.mark.slow
def test_rates_of_both_stages_follow_the_schedule(of_two) -> None:
    rates = [value for _, name, value in of_two[0] if name == "teacher/lr"]
    shape = [1 / 3, 2 / 3, 1.0, 1.0, 2 / 3, 1 / 3]
    assert rates == pytest.approx([*(1e-3 * x for x in shape), *(3e-3 * x for x in shape)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["teacher.objective={branches: {}, single_sentence: null}"], "needs a term beside it"),
        (
            ["teacher.objective.branches={}", "teacher.objective.single_sentence.target=number"],
            "teacher.objective.branches: is for tasks with classes, and single_sentence has",
        ),
        (
            ["teacher.objective.branches={}", "teacher.objective.single_sentence.layers=[1]"],
            "teacher.objective.branches: reads every layer; remove layers of single_sentence",
        ),
        (
            ["teacher.objective.branches={}", "teacher.objective.single_sentence.activation=relu"],
            "teacher.objective.branches: activation: is for a head of one output layer",
        ),
        (
            ["teacher.objective.branches={}", "teacher.model.layers=1"],
            "teacher.objective.branches: needs a model of two layers or more",
        ),
        (["students.lstm.objective.branches={}"], "bilstm cannot let examples leave after an"),
        (["teacher.task_first.steps=3"], "task_first: objective must have a task, and branches"),
        (["teacher.task_first={}"], "task_first.fraction: set either this or steps"),
        (
            [
                "teacher.objective.branches={}",
                "teacher.task_first.steps=3",
                "evaluation.final=best",
            ],
            "evaluation.final: must be last: the best of teacher may be of before its branches",
        ),
        (
            [
                "teacher.objective.branches={}",
                "teacher.task_first.steps=3",
                "checkpoint.keep_best=0",
            ],
            "checkpoint.keep_best: must be 1 or more, or teacher.task_first.from_best false",
        ),
        (
            ["teacher.objective.branches={}", "teacher.task_first.steps=3", "stop.patience=2"],
            "stop.patience: no score gets better while branches learn; remove it, or teacher.task",
        ),
        (
            [
                "teacher.objective.branches={}",
                "teacher.task_first.steps=3",
                "teacher.budget.patience=2",
            ],
            "teacher.budget.patience: no score gets better while branches learn",
        ),
    ],
)
def test_what_cannot_have_branches_is_refused(job, words, message) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.load(str(job), JobConfig, "job", words)


@pytest.fixture(scope="module")
def finetuned(corpus, tmp_path_factory) -> RunFolder:
    """The shipped YAML, run by the command line on a file some of whose rows have no label."""
    folder = tmp_path_factory.mktemp("fastbert")
    rows = [
        one if n % 2 else one.replace(f"\t{LABELS[0]}", "\t") for n, one in enumerate(lines(24, 0))
    ]
    (folder / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    (folder / "dev.tsv").write_text("\n".join(["sentence\tlabel", *lines(9, 400)]) + "\n")
    size = EncoderConfig(
        vocab_size=600, hidden_size=16, layers=3, heads=2, ffn_size=32, max_positions=12,
        initializer_range=0.3,
    )  # fmt: skip
    save_pretrained(build(size, seed=1), folder / "model", corpus / "tokenizer")
    done = tandem(
        "finetune", "fastbert_sst2", "--model", folder / "model", f"data.root={folder}",
        "data.train=train.tsv", "data.validation=dev.tsv", "data.sequence_length=12",
        "teacher.objective.single_sentence.unlabelled=true", f"output_dir={folder}", "name=run",
        "epochs=8", "batch={size: 12, micro_batch: 12}", "log={every: 1, wandb: disabled}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return RunFolder(folder / "run")


@pytest.mark.slow
def test_fastbert_runs_as_shipped(finetuned) -> None:
    rows = [row for row in metrics.read(finetuned.metrics) if "teacher/branches" in row]
    assert [row["teacher/single_sentence"] > 0 for row in rows] == [True] * 6 + [False] * 10
    assert [row["teacher/branches"] > 0 for row in rows] == [False] * 6 + [True] * 10
    exported = finetuned.path / "exports" / "teacher"
    assert (exported / "task.json").exists()


def test_the_exits_of_a_finished_run_are_those_that_predictions_take(finetuned) -> None:
    facts = json.loads(finetuned.evaluation.read_text())["learners"]["teacher"]
    exits = facts["breakdown"]["single_sentence"]["by_exit"]
    assert [*exits] == [*(f"layer {n}" for n in (1, 2, 3)),
                        *(f"speed {speed}" for speed in (0.1, 0.3, 0.5, 0.8))]  # fmt: skip
    assert exits["layer 3"]["accuracy"] == facts["single_sentence_accuracy"]
    exported = finetuned.path / "exports" / "teacher"
    rows = (finetuned.path.parent / "dev.tsv").read_text().splitlines()[1:]
    for speed in (0.5, 0.8):
        told = predicted(exported, finetuned.path.parent / "dev.tsv", "--speed", speed)
        right = [
            row["label"] == line.rpartition("\t")[2] for row, line in zip(told, rows, strict=True)
        ]
        found = exits[f"speed {speed}"]
        assert found["accuracy"] == pytest.approx(sum(right) / len(rows))
        assert found["layers"] == pytest.approx(sum(row["layer"] for row in told) / len(rows))


@pytest.mark.slow
def test_fastbert_of_pairs_runs_as_shipped(finetuned, tmp_path) -> None:
    model = finetuned.path.parent / "model"
    rows = [f"{text}\t{line}" for line in lines(24, 0) for text in ("the of", "to was")]
    (tmp_path / "pairs.tsv").write_text("\n".join(["text_a\ttext_b\tlabel", *rows]) + "\n")
    done = tandem(
        "finetune", "fastbert_pair", "--model", model, f"data.train={tmp_path}/pairs.tsv",
        f"output_dir={tmp_path}", "name=pairs", "epochs=null", "steps=8", "data.sequence_length=12",
        "batch={size: 12, micro_batch: 12}", "log={every: 1, wandb: disabled}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = predicted(tmp_path / "pairs" / "exports" / "teacher", tmp_path / "pairs.tsv")
    assert {row["label"] for row in told} <= {*LABELS}


@pytest.mark.slow
def test_branches_alone_learn_from_text_without_labels(finetuned, tmp_path) -> None:
    folder, before = finetuned.path.parent, finetuned.path / "exports" / "teacher"
    texts = [line.rpartition("\t")[0] for line in lines(24, 50)]
    (tmp_path / "texts.tsv").write_text(
        "\n".join(["sentence\tlabel", *(f"{one}\t" for one in texts)])
    )
    done = tandem(
        "finetune", "fastbert_sst2", "--model", before, f"data.train={tmp_path}/texts.tsv",
        f"data.validation={folder}/dev.tsv", "data.sequence_length=12", f"output_dir={tmp_path}",
        "teacher.task_first={steps: 0, fraction: null}", "name=more", "epochs=2",
        "teacher.objective.single_sentence={unlabelled: true, labels: [bright, dull]}",
        "batch={size: 12, micro_batch: 12}", "log={every: 1, wandb: disabled}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = from_pretrained(tmp_path / "more" / "exports" / "teacher").state_dict()
    for name, one in from_pretrained(before).state_dict().items():
        if not name.endswith("key.bias"):  # whose gradient is rounding alone
            assert torch.equal(one, after[name]) == (".branches." not in name), name


def test_a_missing_label_must_be_expected(finetuned, tmp_path) -> None:
    folder = finetuned.path.parent
    done = tandem(
        "finetune", "fastbert_sst2", "--model", folder / "model", f"data.root={folder}",
        "data.train=train.tsv", "data.validation=dev.tsv", f"output_dir={tmp_path}",
        "teacher.objective.single_sentence.labels=[bright, dull]",
    )  # fmt: skip
    assert done.returncode == 1
    assert "label: '' is not one of the labels: bright, dull" in done.stderr


def predicted(*words: object) -> list[dict]:
    ended = CliRunner().invoke(tandem_command.main, ["predict", *map(str, words)])
    assert ended.exit_code == 0, ended.output
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_predictions_tell_the_layer_at_which_an_example_left(finetuned, monkeypatch) -> None:
    exported, file = finetuned.path / "exports" / "teacher", finetuned.path.parent / "dev.tsv"
    whole, slow = predicted(exported, file), predicted(exported, file, "--speed", "0")
    assert [one["label"] for one in slow] == [one["label"] for one in whole]
    assert {one.pop("layer") for one in slow} == {3}
    assert slow == whole
    at_once = predicted(exported, file, "--speed", "1")
    assert {one["layer"] for one in at_once} == {1}
    sure = sorted(map(entropy, at_once))
    _, middle = max((b - a, (a + b) / 2) for a, b in pairwise(sure))  # in the widest gap
    monkeypatch.setattr(fine_tuned, "tokens_per_pass", lambda device: 20)
    some = predicted(exported, file, "--speed", middle)
    assert [one["layer"] == 1 for one in some] == [entropy(one) < middle for one in at_once]
    for one, early, late in zip(some, at_once, whole, strict=True):
        if one["layer"] in (1, 3):
            wanted = early if one["layer"] == 1 else late
            assert one["probabilities"] == pytest.approx(wanted["probabilities"], rel=1e-5)


def entropy(answer: dict) -> float:
    return -sum(p * math.log2(p) for p in answer["probabilities"].values())


def test_the_curve_of_accuracy_and_flops(finetuned) -> None:
    tuned = FineTuned.open(finetuned.path / "exports" / "teacher", torch.device("cpu"))
    file = TaskFile(finetuned.path.parent / "dev.tsv", {"text": "sentence"})
    sequences, labels = early_leaving.encoded(tuned, file)
    speeds = [None, 0.0, 1.0]
    whole, slow, fast = points = early_leaving.curve(tuned, sequences, labels, speeds, rounds=2)
    assert [one.layer for one in points] == [3, 3, 1]
    assert whole.accuracy == slow.accuracy
    assert fast.flops < whole.flops < slow.flops == pytest.approx(3 * fast.flops)
    assert len([*early_leaving.table(points, len(labels))]) == 5


def test_speed_is_for_models_with_branches(finetuned, corpus, tmp_path) -> None:
    head = TaskHeadConfig(labels=["a", "b"])
    model = build(with_task_head(encoder(vocab_size=600, mlm_head=False), "task", head), seed=4)
    save_pretrained(model, tmp_path, corpus / "tokenizer")
    file = finetuned.path.parent / "dev.tsv"
    words = ["predict", tmp_path, file, "--column", "text=sentence", "--speed", "0.5"]
    ended = CliRunner().invoke(tandem_command.main, [*map(str, words)])
    assert ended.exit_code == 1
    assert f"{tmp_path}: --speed: the model has no branches" in ended.stderr
