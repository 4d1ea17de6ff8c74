"""Distillation on a task, as TinyBERT and PKD do it, against plain torch and end to end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from configs import ConfigError, load, validate
from model import Capture, EncoderConfig, build, save_pretrained
from model.kinds.bilstm import BiLSTMConfig
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_sentence_tasks import job_of_moods  # noqa: F401 - a fixture
from trainer.batches import MicroBatch, MicroTarget
from trainer.checkpoint.folder import Ranking
from trainer.config import JobConfig
from trainer.evaluation.finished import SavedLearners
from trainer.evaluation.held_out import trained_heads
from trainer.job_data.examples import with_examples
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER
from trainer.learners.first_weights import from_folder
from trainer.learners.module import build_objective
from trainer.learners.state import LearnerState
from trainer.objectives.term import LossInputs
from trainer.run_folder import metrics
from trainer.tasks.sentences import SentencePair, SingleSentence
from trainer.tasks.soft_labels import first_choice_cross_entropy
from trainer.teacher_outputs import detach

ROWS, LENGTH, LABELS = 3, 7, ["a", "b", "c"]


def plain(layers: int, width: int) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=600, hidden_size=width, layers=layers, heads=2, ffn_size=2 * width,
        max_positions=12, initializer_range=0.3,
    )  # fmt: skip


def config(layers: int, width: int) -> EncoderConfig:
    return SingleSentence(labels=LABELS).equip(plain(layers, width)).without_mlm_head()


def batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 600, (ROWS, LENGTH), generator=generator)
    labels = MicroTarget(torch.tensor([0, 2, 1]))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return MicroBatch(ids, torch.zeros_like(ids), mask, mask.numel(), {"single_sentence": labels})


def task_of(name: str, student: str) -> LearnerConfig:
    """A shipped student's section, of single sentences."""
    others = ["tinybert"] if student == "tinybert" else ["skip", "last"]
    given = ["teacher", *(f"students.{one}" for one in others)]
    words = ["data.train=x", *(f"{section}.init.pretrained=x" for section in given)]
    section = load(name, JobConfig, "task", words).students[student]
    terms = section.objective.terms()
    pair = terms.pop("sentence_pair")
    terms["single_sentence"] = SingleSentence(labels=LABELS, weight=pair.weight)
    terms["soft_labels"] = dataclasses.replace(terms["soft_labels"], tasks=["single_sentence"])
    objective = type(section.objective)(**terms)
    return dataclasses.replace(section, objective=objective, init=InitConfig())


def ours(section: LearnerConfig, teacher, student, step: int):
    """Loss, gradients and projection of the objective at a step of ten."""
    learner = dataclasses.replace(section, model=student.config).in_steps(10)
    objective = build_objective(learner, teacher.config, seed=1)
    read, said = batch(), None
    with torch.no_grad():
        captured = objective.source_capture(step)
        features = teacher.features(read.input_ids, read.segment_ids, None, None, captured)
        said = detach(features, None)
    capture = objective.student_capture(step)
    features = student.features(read.input_ids, read.segment_ids, None, None, capture)
    counts = {
        "attended": ROWS * LENGTH, "attended_pairs": ROWS * LENGTH**2, "rows": ROWS,
        "single_sentence": ROWS,
    }  # fmt: skip
    totals = {key: torch.tensor(float(counts[key[1]])) for key in objective.denominators}
    loss, _ = objective(LossInputs(read, features, None, {TEACHER: said}, step), totals)
    student.zero_grad()
    loss.backward()
    names = ["embeddings.word.weight", "task_heads.single_sentence.linear.weight"]
    gradients = [student.get_parameter(name).grad for name in names]
    return loss.detach(), gradients, objective


def saved(tmp_path: Path, corpus: Path, name: str, model):
    save_pretrained(model, tmp_path / name, corpus / "tokenizer")
    return AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval()


def scores(layer, states: torch.Tensor, heads: int = 2) -> torch.Tensor:
    """Attention scores before the softmax, of the states that a layer of `transformers` reads."""
    q, k = (
        part(states).view(ROWS, LENGTH, heads, -1).transpose(1, 2)
        for part in (layer.attention.self.query, layer.attention.self.key)
    )
    return q @ k.transpose(2, 3) / q.shape[-1] ** 0.5


def test_the_teachers_first_choice_is_a_label_too():
    """The loss of castorini/d-bert: the squared error of its logits, and cross-entropy."""
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (torch.randn(5, 3, generator=generator) for _ in range(2))
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    loss, count = first_choice_cross_entropy(ours, [theirs], weights)
    kept = weights.bool()
    expected = F.cross_entropy(ours[kept], theirs[kept].argmax(dim=1))
    torch.testing.assert_close(loss / count, expected)


def test_tangs_student_learns_logits_and_first_choices(models):
    teacher, _, *_ = models
    section = load(
        "tang_task", JobConfig, "task", ["data.train=x", "teacher.init.pretrained=x"]
    ).students["bilstm"]
    lstm = SingleSentence(labels=LABELS).equip(
        BiLSTMConfig(vocab_size=600, hidden_size=8, pooled_size=6)
    )
    student = build(lstm.without_mlm_head(), seed=4).eval()
    loss, _, _ = ours(section, teacher, student, step=5)
    read = batch()
    with torch.no_grad():
        logits, wanted = (
            one.features(
                read.input_ids, read.segment_ids, None, None, Capture(heads=("single_sentence",))
            ).heads["single_sentence"]
            for one in (student, teacher)
        )
    choice = F.cross_entropy(logits, wanted.argmax(dim=1))
    torch.testing.assert_close(loss, F.mse_loss(logits, wanted) + choice)


@pytest.fixture
def models(tmp_path, corpus):
    """A teacher and a student, with the same two in `transformers`."""
    teacher, student = build(config(4, 16), seed=1).eval(), build(config(2, 16), seed=2).eval()
    theirs = [saved(tmp_path, corpus, *one) for one in (("t", teacher), ("s", student))]
    return teacher, student, *theirs


def compare(found, wanted: torch.Tensor, theirs) -> None:
    loss, gradients, _ = found
    theirs.zero_grad()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    told = theirs.bert.embeddings.word_embeddings.weight.grad, theirs.classifier.weight.grad
    for got, expected in zip(gradients, told, strict=True):
        if expected is None:
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


def both(their_teacher, their_student):
    ids = batch().input_ids
    with torch.no_grad():
        told = their_teacher(ids, output_hidden_states=True)
    return told, their_student(ids, output_hidden_states=True)


def test_tinybert_compares_layers_and_then_predictions(models) -> None:
    teacher, student, their_teacher, their_student = models
    section = task_of("tinybert_task", "tinybert")
    found = ours(section, teacher, student, step=7)  # of 10, the last of the first stage
    projection = found[2].terms["hidden_mse"].projection.requires_grad_(False)
    told, got = both(their_teacher, their_student)
    wanted = sum(
        F.mse_loss(projection(got.hidden_states[i]), told.hidden_states[2 * i]) for i in range(3)
    )
    for i in range(2):
        layers = their_student.bert.encoder.layer[i], their_teacher.bert.encoder.layer[2 * i + 1]
        states = got.hidden_states[i], told.hidden_states[2 * i + 1]
        wanted = wanted + F.mse_loss(*map(scores, layers, states))
    compare(found, wanted, their_student)
    told, got = both(their_teacher, their_student)
    wanted = (-F.softmax(told.logits, -1) * F.log_softmax(got.logits, -1)).mean()
    compare(ours(section, teacher, student, step=8), wanted, their_student)


@pytest.mark.parametrize(("form", "layers"), [("skip", [2]), ("last", [3])])
def test_pkd_learns_from_labels_predictions_and_first_tokens(models, form, layers) -> None:
    teacher, student, their_teacher, their_student = models
    told, got = both(their_teacher, their_student)
    soft = F.kl_div(F.log_softmax(got.logits / 10, 1), F.softmax(told.logits / 10, 1)) * 100
    hard = F.cross_entropy(got.logits, torch.tensor([0, 2, 1]))
    mine = torch.stack([got.hidden_states[1][:, 0]])
    theirs = torch.stack([told.hidden_states[layer][:, 0] for layer in layers])
    patient = F.mse_loss(F.normalize(mine, dim=2), F.normalize(theirs, dim=2))
    wanted = 0.5 * soft + 0.5 * hard + 100.0 * patient
    compare(ours(task_of("pkd_task", form), teacher, student, step=0), wanted, their_student)


def test_heads_rest_and_count_as_untrained_in_the_first_stage() -> None:
    section = dataclasses.replace(task_of("tinybert_task", "tinybert"), model=config(2, 16))
    learner = section.in_steps(10)
    objective = build_objective(learner, config(4, 16), seed=1)
    for name, rests in (
        ("model.pooler.dense.weight", True),
        ("model.task_heads.single_sentence.linear.weight", True),
        ("model.embeddings.word.weight", False),
        ("objective.terms.hidden_mse.projection.weight", False),
    ):
        group = objective.group(name)
        assert (objective.factor(group, 7) == 0.0) == rests, name
        assert (objective.factor(group, 8) == 0.0) == name.startswith("objective."), name
    assert [objective.stages.begins(step) for step in (0, 7, 8, 9)] == [0, 0, 1, 0]
    assert [trained_heads(learner, LearnerState(0), made) for made in (8, 9)] == [
        set(), {"single_sentence"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"fraction": 0.5, "steps": 3}, "fraction: set either this or steps"),
        ({}, "fraction: set either this or steps"),
        ({"fraction": 1.0}, "fraction: "),
    ],
)
def test_how_long_the_first_stage_is_must_be_told_once(section, message) -> None:
    tree = {"intermediate": section, "objective": {"hidden_mse": {}, "mlm": {}}}
    with pytest.raises(ConfigError, match=message):
        validate(tree, LearnerConfig, "job")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"objective": {"mlm": {}}}, "intermediate: objective must have terms about states"),
        ({"objective": {"cosine": {}}}, "others for afterwards"),
        (
            {"objective": {"hidden_mse": {}, "mlm": {}}, "progressive": {}},
            "intermediate: set either this or progressive",
        ),
        (
            {"objective": {"hidden_mse": {}, "mlm": {}}, "encoder": "frozen"},
            "objective.hidden_mse: compares states, and encoder is frozen; remove it",
        ),
    ],
)
def test_two_stages_need_terms_for_both(tree, message) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({"intermediate": {"steps": 3}, **tree}, LearnerConfig, "job")


STUDENT = (
    "students.small={model: {hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, "
    "max_positions: 12}, intermediate: {fraction: 0.5, learning_rate: 1.0e-3}, objective: "
    "{single_sentence: {weight: 0}, soft_labels: {loss: cross_entropy, mean_over_labels: true}, "
    "hidden_mse: {}, attention_mse: {}}}"
)


def staged(job: Path, runs: Path) -> tuple[list, list, str]:
    """A run whose teacher learns beside a student in two stages, whole and resumed. Collective."""
    words = [f"output_dir={runs}", "students=null", STUDENT, "steps=12", "checkpoint.every=4",
             "evaluation.every=6"]  # fmt: skip

    def job_of(*more: str) -> JobConfig:
        return with_examples(load(str(job), JobConfig, "job", [*words, *more]))

    whole = jobs.run(job_of("name=whole"))
    jobs.run(job_of("name=again"), stop_after=7)
    again = jobs.run(job_of("name=again"))
    jobs.finish(whole)
    return jobs.curve(whole), jobs.curve(again), str(whole.path)


@pytest.mark.slow
def test_the_two_stages_are_one_job_that_resumes(job, tmp_path) -> None:
    whole, again, folder = run_distributed(staged, 2, job, tmp_path)[0]
    assert whole == again
    rows = metrics.read(Path(folder) / "metrics.jsonl")
    by_step = {row["step"]: row for row in rows if "students/small/loss" in row}
    first, second = by_step[6], by_step[7]
    assert first["students/small/hidden_mse"] > 0
    assert first["students/small/soft_labels"] == 0 == second["students/small/hidden_mse"]
    assert second["students/small/soft_labels"] > 0
    assert first["students/small/lr"] == 1e-3


def impatient(corpus: Path, runs: Path) -> int:
    """The step at which a student ends that joins at step 1 with heads and never gets better."""
    words = ["students.tinybert=null", "evaluation.every=1"]
    stages = [
        "students.distilbert.intermediate={steps: 4}",
        "students.distilbert.budget.patience=2",
    ]
    record = LearnerState.record_score

    def first_is_best(state: LearnerState, ranking: Ranking, score: float, step: int) -> None:
        record(state, ranking, 1 / step, step)

    with mock.patch.object(LearnerState, "record_score", first_is_best):
        folder = jobs.run(jobs.tiny_job(corpus, runs, *words, *stages))
    return SavedLearners(folder).state.learners["students/distilbert"].finished_at


def test_patience_is_for_the_last_stage(corpus, tmp_path) -> None:
    assert run_distributed(impatient, 1, corpus, tmp_path) == [1 + 4 + 2]


PAIRS = [("the water was", "his word", 0), ("of the", "and the", 1), ("in to", "was his", 1)]
MRPC, STSB = "Quality\t#1 String\t#2 String", "score\tsentence1\tsentence2"


@pytest.fixture(scope="module")
def shipped(corpus, tmp_path_factory) -> Path:
    """Files of both tasks, toy teachers with their heads, and a toy student."""
    folder = tmp_path_factory.mktemp("shipped")
    for name, header in (("mrpc", MRPC), ("stsb", STSB)):
        rows = [f"{label}\t{one}\t{two}" for one, two, label in PAIRS * 4]
        (folder / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    tasks = {"mrpc": SentencePair(labels=["0", "1"]), "stsb": SentencePair(target="number")}
    for name, task in tasks.items():
        teacher = task.equip(plain(4, 16)).without_mlm_head()
        save_pretrained(build(teacher, seed=1), folder / f"teacher-{name}", corpus / "tokenizer")
    save_pretrained(build(plain(2, 8), seed=2), folder / "student", corpus / "tokenizer")
    return folder


def trained(shipped: Path, runs: Path, name: str, *words: str) -> list[dict]:
    """The rows of metrics of a shipped YAML, run for 4 steps by the command line."""
    task = name.partition("_")[2]
    files = [f"data.{split}={shipped / task}.tsv" for split in ("train", "validation")]
    done = tandem(
        "train", name, *files, *words, f"teacher.init.pretrained={shipped}/teacher-{task}",
        f"output_dir={runs}", "epochs=null", "steps=4", "batch={size: 4, micro_batch: 4}",
        "data.sequence_length=12", "log={every: 1, wandb: disabled}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [
        row
        for row in metrics.read(runs / name / "metrics.jsonl")
        if any("/loss" in key for key in row)
    ]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("tinybert_mrpc", "soft_labels"),
        pytest.param("tinybert_stsb", "sentence_pair", marks=pytest.mark.slow),
    ],
)
def test_tinyberts_task_stage_runs_as_shipped(shipped, tmp_path, name, last) -> None:
    student = f"students.tinybert.init.pretrained={shipped}/student"
    half = "students.tinybert.intermediate.fraction=0.5"
    rows = trained(shipped, tmp_path, name, student, half)
    terms = {key: [row[f"students/tinybert/{key}"] for row in rows] for key in ("hidden_mse", last)}
    assert [value > 0 for value in terms["hidden_mse"]] == [True, True, False, False]
    assert [value > 0 for value in terms[last]] == [False, False, True, True]
    found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / name / "exports" / "tinybert"
    )
    assert found.config.num_hidden_layers == 2


@pytest.mark.slow
def test_both_forms_of_pkd_run_as_shipped(shipped, tmp_path) -> None:
    sizes = {"hidden_size": 16, "ffn_size": 32, "heads": 2, "vocab_size": 600, "max_positions": 12,
             "layers": 2}  # fmt: skip
    words = [
        f"students.{form}.{key}"
        for form in ("skip", "last")
        for key in (*(f"model.{k}={v}" for k, v in sizes.items()), "init.layers=[0, 1]")
    ]
    words += [
        f"students.{form}.init.pretrained={shipped}/teacher-mrpc" for form in ("skip", "last")
    ]
    rows = trained(shipped, tmp_path, "pkd_mrpc", *words)
    for term in ("pkd", "soft_labels", "sentence_pair"):
        assert rows[0][f"students/skip/{term}"] > 0
    assert rows[0]["students/skip/pkd"] != rows[0]["students/last/pkd"]


@pytest.mark.parametrize("heads", ["new", "loaded"])
def test_a_student_begins_as_layers_of_a_folder(shipped, heads, monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    folder = shipped / "teacher-mrpc"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    config = SentencePair(labels=["0", "1"], head_name="sentence_pair").equip(plain(2, 16))
    init = InitConfig(pretrained=str(folder), layers=[1, 3], heads=heads)
    weights = from_folder("students.skip", init, config)
    for ours, layer in enumerate((1, 3)):
        query = theirs.bert.encoder.layer[layer].attention.self.query.weight
        assert torch.equal(weights[f"encoder.attention.{ours}.query.weight"], query)
    assert torch.equal(weights["pooler.dense.weight"], theirs.bert.pooler.dense.weight)
    head = weights.get("task_heads.sentence_pair.linear.weight")
    assert head is None if heads == "new" else torch.equal(head, theirs.classifier.weight)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "init.layers=[0,9]",
            "students.skip.init.layers: there is no layer 9; the model has 0 to 3; name some",
        ),
        ("init.layers=[0]", "students.skip.init.layers: lists 1 for the model's 2 layers"),
        ("init.pretrained=null", "students.skip.init.layers: is for pretrained; set that"),
    ],
)
def test_layers_that_a_folder_does_not_have_are_refused(
    shipped, tmp_path, words, complaint
) -> None:
    sizes = "hidden_size: 16, ffn_size: 32, heads: 2, vocab_size: 600, max_positions: 12, layers: 2"
    files = [f"data.{split}={shipped}/mrpc.tsv" for split in ("train", "validation")]
    failed = tandem(
        "train", "pkd_mrpc", *files,
        f"teacher.init.pretrained={shipped}/teacher-mrpc", f"output_dir={tmp_path}",
        *(f"students.{form}.model={{{sizes}}}" for form in ("skip", "last")),
        "students.last.init.layers=[0, 1]", "data.sequence_length=12",
        *(f"students.{form}.init.pretrained={shipped}/teacher-mrpc" for form in ("skip", "last")),
        f"students.skip.{words}",
    )  # fmt: skip
    assert failed.returncode == 1
    assert complaint in failed.stderr
    assert not [path for path in tmp_path.iterdir() if path.name != "examples"]
