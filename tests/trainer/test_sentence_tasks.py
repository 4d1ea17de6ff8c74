"""A sentence task from its files to its exports: trained, distilled, resumed, scored, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import configs
from configs import ConfigError
from data_pipeline import DataError
from model import from_pretrained
from tests.distributed import run_distributed
from tests.failing import one_line
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.examples import with_examples
from trainer.lifecycle.start import Resumption
from trainer.objectives.task import TaskConfig
from trainer.objectives.term import registered_terms
from trainer.report.page import write_report
from trainer.report.table import student_table
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.scoring.task_metrics import NumberMetric
from trainer.tasks.tagging import Tagging

LABELS = ["bright", "dull"]
JOB = """
name: moods
steps: 40
output_dir: {runs}
data:
  {{root: {folder}, train: train.tsv, validation: held_out.tsv, test: test.tsv,
  sequence_length: 12, tokenizer: {corpus}/tokenizer}}
batch: {{size: 16, micro_batch: 4}}
teacher:
  model: &model
    {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 12}}
  optimizer: &optimizer {{learning_rate: 3.0e-3}}
  objective: {{single_sentence: {{}}}}
students:
  small:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
    optimizer: *optimizer
    objective:
      {{single_sentence: {{weight: 2.0}}, soft_labels: {{temperature: 2.0}},
      hidden_mse: {{embedding: false}}}}
  lstm:
    model:
      {{kind: bilstm, hidden_size: 16, pooled_size: 8, vocab_size: 600, initializer_range: 0.1}}
    optimizer: {{learning_rate: 2.0e-2}}
    schedule: {{warmup_steps: 0}}
    objective: {{single_sentence: {{}}, hidden_mse: {{embedding: false}}}}
evaluation: {{every: 20}}
checkpoint: {{every: 20}}
log: {{every: 1, wandb: disabled}}
"""


def lines(count: int, shift: int) -> list[str]:
    """Labelled texts: those with "was" are bright, those with "his" dull."""
    words = ["the", "of", "and", "to", "in"]
    rows = []
    for number in range(shift, shift + count):
        text = " ".join(words[(number * step) % 5] for step in range(1, 2 + number % 5))
        bright = number // 2 % 2
        rows.append(
            f"{text} {'was' if bright else 'his'} {words[number % 5]}\t{LABELS[1 - bright]}"
        )
    return rows


TEST = [line.partition("\t")[0] + "\tdull" for line in lines(12, 700)]  # half of them wrong


def write(path: Path, rows: list[str]) -> None:
    path.write_text("\n".join(["text\tlabel", *rows]) + "\n")


@pytest.fixture(scope="module", name="job")
def job_of_moods(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("moods")
    write(folder / "train.tsv", lines(80, 0))
    write(folder / "held_out.tsv", lines(21, 400))
    write(folder / "test.tsv", TEST)
    path = folder / "job.yaml"
    path.write_text(JOB.format(runs=folder / "runs", corpus=corpus, folder=folder))
    return path


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "training"),
        (["teacher.init.pretrained=base"], "fine-tuning"),
        (["teacher.init.pretrained=base", "teacher.init.random=true"], "training"),
    ],
)
def test_a_teacher_alone_is_fine_tuned_only_where_its_weights_are_given(job, words, what) -> None:
    config = configs.load(job, JobConfig, "job", ["students=null", *words])
    started = [*Resumption(config, None, None).lines()]
    assert started == [f"no students: plain {what} of the teacher"]


@pytest.fixture(scope="module")
def run_of_two(job) -> RunFolder:
    return RunFolder(Path(run_distributed(jobs.finished_run, 2, job)[0]))


def test_a_task_is_trained_distilled_scored_and_exported(run_of_two) -> None:
    last = [row for row in metrics.read(run_of_two.metrics) if row["step"] == 40]
    results = json.loads(run_of_two.evaluation.read_text())["learners"]
    score = "single_sentence_accuracy"
    for learner in ("teacher", "students/small"):
        assert any(f"{learner}/single_sentence" in row for row in last)
        column = f"val/single_sentence/{learner}/{score}"
        assert [row[column] for row in last if column in row] == [results[learner][score]]
    assert results["teacher"][score] > 0.9
    texts = [line.rpartition("\t")[0] for line in lines(21, 400)]
    for learner, name in (("teacher", "teacher"), ("students/small", "small")):
        exported = run_of_two.path / "exports" / name
        theirs = AutoModelForSequenceClassification.from_pretrained(exported).eval()
        assert theirs.config.id2label == dict(enumerate(LABELS))
        read = AutoTokenizer.from_pretrained(exported)(texts, return_tensors="pt", padding=True)
        ours = SavedLearners(run_of_two).load(learner)
        with torch.no_grad():
            got = ours(read.input_ids, None, read.attention_mask).heads["single_sentence"]
            told = theirs(read.input_ids, attention_mask=read.attention_mask).logits
        torch.testing.assert_close(got, told)
        wanted = torch.tensor([LABELS.index(line.rpartition("\t")[2]) for line in lines(21, 400)])
        accuracy = (told.argmax(-1) == wanted).float().mean().item()
        assert accuracy == pytest.approx(results[learner][score])


def test_a_labelled_test_file_is_scored_beside_the_validation_file(run_of_two) -> None:
    results = json.loads(run_of_two.evaluation.read_text())
    name = "test_single_sentence_accuracy"
    assert results["metric"] == "single_sentence_accuracy"
    read = AutoTokenizer.from_pretrained(run_of_two.path / "exports" / "teacher")
    ids = read([line.partition("\t")[0] for line in TEST], return_tensors="pt", padding=True)
    for learner, facts in results["learners"].items():
        with torch.no_grad():
            found = SavedLearners(run_of_two).load(learner)(ids.input_ids, None, ids.attention_mask)
        dull = found.heads["single_sentence"].argmax(-1) == LABELS.index("dull")
        assert facts[name] == pytest.approx(dull.float().mean().item())
    heading, teacher = student_table(results).splitlines()[:2]
    assert " test " in heading
    assert f"{results['learners']['teacher'][name]:.1%}" in teacher
    page = write_report(run_of_two.path).read_text(encoding="utf-8")
    assert "<th>test " in page
    assert "of 16 examples of at most 12 tokens" in page
    assert "<dt>examples</dt><dd>80</dd>" in page
    assert "<dt>masked</dt>" not in page


def test_a_bad_test_file_is_named_before_training(job, tmp_path) -> None:
    rows = tmp_path / "test.tsv"
    write(rows, ["fine\tgrey"])
    with pytest.raises(DataError, match=r"test\.tsv:2: label: 'grey' is not one of the labels"):
        jobs.load(job, f"data.test={rows}")


def test_a_student_that_learns_states_only_is_exported_as_an_encoder(job, corpus, tmp_path) -> None:
    tree = yaml.safe_load(job.read_text())
    small = {**tree["students"]["small"], "objective": {"hidden_mse": {"embedding": False}}}
    path = tmp_path / "job.yaml"
    changes = {"steps": 2, "output_dir": str(tmp_path), "students": {"small": small}}
    path.write_text(yaml.safe_dump({**tree, **changes}))
    run = RunFolder(Path(run_distributed(jobs.finished_run, 1, path)[0]))
    assert not from_pretrained(run.path / "exports" / "small").config.task_heads
    assert not (run.path / "exports" / "small" / "task.json").exists()
    assert (run.path / "exports" / "teacher" / "task.json").exists()
    results = json.loads(run.evaluation.read_text())["learners"]["students/small"]
    assert results["retention"] is None


def test_another_kind_of_model_learns_the_task_too(run_of_two) -> None:
    results = json.loads(run_of_two.evaluation.read_text())["learners"]
    assert results["students/lstm"]["single_sentence_accuracy"] > 0.9
    exported = from_pretrained(run_of_two.path / "exports" / "lstm")
    assert exported.config.task_heads["single_sentence"].labels == LABELS
    ids = torch.arange(1, 9)[None]
    ours = SavedLearners(run_of_two).load("students/lstm")
    assert torch.equal(exported(ids).heads["single_sentence"], ours(ids).heads["single_sentence"])


def test_two_ranks_train_as_one_does(run_of_two, job, tmp_path) -> None:
    alone = run_distributed(jobs.curve_in, 1, job, tmp_path)[0]
    assert jobs.assert_same_losses(run_of_two, alone) >= 80


@pytest.mark.slow
def test_a_run_that_was_stopped_resumes_to_the_last_bit(run_of_two, job, tmp_path) -> None:
    whole = jobs.curve(run_of_two)
    assert len(whole) > 300
    assert run_distributed(jobs.stopped_and_resumed, 2, job, tmp_path)[0] == whole


def losses_of_both_ways(job: Path, runs: Path) -> list[list[float]]:
    """The losses of a teacher whose last layer computes all tokens, or only the first ones."""
    found = []
    for narrow in ("false", "true"):
        words = [f"output_dir={runs}", f"name=narrow-{narrow}", "students=null", "steps=3"]
        folder = jobs.run(jobs.load(job, *words, f"teacher.masked_only={narrow}"))
        found.append([row["teacher/loss"] for row in metrics.read(folder.metrics)])
    return found


def test_a_teacher_may_compute_the_first_tokens_only(job, tmp_path) -> None:
    (found,) = run_distributed(losses_of_both_ways, 1, job, tmp_path)
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-5)


NO_FILES = ["data.train=''", "data.validation=''", "data.test=''"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.objective.single_sentence.labels=[a]"], "labels: must name at least two labels"),
        (["teacher.objective.single_sentence.head_name=training"], "head_name: that name is taken"),
        (["data.train=''"], "is for a task's examples; set train too"),
        (NO_FILES, "data.root: is for a task's examples; set train too"),
        ([*NO_FILES, "data.root=''"], "data.tokenizer: is for a task's examples; set train too"),
        (["data.packing=contiguous"], "data.packing: is for text, and the job reads a task's"),
        (["data.masking.rate=0.3"], "data.masking: is for text, and the job reads a task's"),
        (["data.cache_dir=/cache"], "data.cache_dir: is for text, and the job reads a task's"),
        (
            [*NO_FILES, "data.tokenizer=null", "data.root=''"],
            r"data\.train: must name the examples",
        ),
        (["teacher.objective.mlm={}"], "objective.mlm: is about text, but the job reads the"),
        (["students.small.objective.sentence_pair={}"], "one task must read it"),
        (["students.small.objective.single_sentence=null"], "soft_labels: needs the task beside"),
        (
            ["teacher.objective.single_sentence.weight=0"],
            "teacher.objective.single_sentence.weight: must not be 0 at every step, since nothing",
        ),
        (["students.small.objective.soft_labels.loss=mse"], "temperature: has no part in mse"),
        (["epochs=2"], "epochs: steps is set too; set epochs to null, or steps to 0"),
        (["data.validation=''", "data.max_scored=5"], "max_scored: is for a task that names its v"),
        (["data.validation=''", "data.max_trained=5"], "max_trained: is for a task that names its"),
        (["students.small.objective.single_sentence.target=number"], "must have the settings of"),
        (["batch.tokens=100", "batch.size=null"], "a task's batch has one size"),
        (["data.validation=''", "data.validation_fraction=1e-7"], "validation_fraction: must be"),
    ],
)
def test_what_does_not_fit_is_refused(job, overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        jobs.load(job, *overrides)


def test_keys_of_a_head_encode_no_examples_anew() -> None:
    tasks = [entry for entry in registered_terms().values() if issubclass(entry, TaskConfig)]
    lacking = {task.name: {*TaskConfig.not_encoded} - {*task.not_encoded} for task in tasks}
    assert {name for name, keys in lacking.items() if keys} == {"sentence_pair"}
    assert lacking["sentence_pair"] == {"metrics"}, "a ranking holds out whole groups"
    assert "crf" in Tagging.not_encoded


@pytest.mark.parametrize("name", ["txet", "q"])
def test_a_misspelt_field_is_named(job, name) -> None:
    with pytest.raises(DataError, match=rf"^data.columns.{name}: no such.*here are: text, label$"):
        jobs.load(job, f"data.columns.{name}=review")


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        (["fine\tdull", "x\tbright", "y\tgrey"], ["labels=[dull, bright]"],
         "train.tsv:4: label: 'grey' is not one of the labels"),
        (["fine\tdull", "x\tdull"], [], "has only one label, 'dull'; a task needs two"),
        (["fine\t1", "x\tmuch"], ["target=number"], "'much' is not a number"),
        (["fine\tdull", "\tbright"], [], "train.tsv:3: a text is empty"),
        ([], [], "train.tsv: holds no rows"),
        (["a\t1", "b\t2", "c\t3"], ["metrics=[f1]"], "f1 needs two labels, and there are 1, 2, 3"),
    ],
)  # fmt: skip
def test_bad_examples_are_named(job, tmp_path, rows, overrides, message) -> None:
    write(tmp_path / "train.tsv", rows)
    keys = [f"teacher.objective.single_sentence.{one}" for one in overrides]
    keys += [f"data.root={tmp_path}", "data.validation=''", "data.test=''", "students=null"]
    with pytest.raises(DataError) as refused:
        jobs.load(job, *keys)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_epochs_labels_and_a_held_out_part_follow_from_the_file(job) -> None:
    found = jobs.load(job, "steps=0", "epochs=2.5", "data.validation=''")
    assert found.steps == -(-180 // 16)  # 72 of 80 examples, 2.5 times
    few = jobs.load(job, "steps=0", "epochs=1.1", "data.max_trained=50", "batch.size=5")
    assert few.steps == 11  # in floats, 1.1 times 50 is more than 55
    assert found.teacher.objective.single_sentence.labels == LABELS
    assert found.students["small"].objective.single_sentence.weight == 2.0
    assert jobs.load(job).data.path == jobs.load(job, "name=other").data.path != found.data.path
    again = configs.load_text(configs.dump(found), JobConfig, "job", [], "config.yaml")
    assert again == found == with_examples(again)
    with pytest.raises(DataError, match=r"data\.path: .* holds other examples"):
        jobs.load(job, f"data.path={found.data.path}")


@pytest.mark.slow
def test_a_frozen_teacher_of_the_task_teaches_its_labels(run_of_two, job, tmp_path) -> None:
    teacher = run_of_two.path / "exports" / "teacher"
    frozen = ["teacher=null", f"teacher.init.pretrained={teacher}", "teacher.frozen=true"]
    student = "students.small.objective={single_sentence: {weight: 0}, soft_labels: {}}"
    rate = "students.small.optimizer.learning_rate=1e-2"
    words = (*frozen, student, rate, f"output_dir={tmp_path}", "steps=20")
    run = RunFolder(Path(run_distributed(train_with, 1, job, words)[0]))
    results = json.loads(run.evaluation.read_text())["learners"]
    assert results["teacher"]["single_sentence_accuracy"] > 0.9
    assert results["students/small"]["single_sentence_accuracy"] is not None
    terms = [one for one in metrics.read(run.metrics) if "students/small/soft_labels" in one]
    assert terms[-1]["students/small/soft_labels"] < terms[0]["students/small/soft_labels"]
    labels = "objective.single_sentence.labels=[bright, dull, grey]"
    other = (f"students.small.{labels}", f"students.lstm.{labels}")
    with pytest.raises(TrainingError, match="its head predicts bright, dull, but the labels"):
        jobs.load(job, *words, *other)


def test_a_frozen_teacher_is_scored_by_the_task_of_its_students(job) -> None:
    """A number has no accuracy, and a teacher without an objective has no task of its own."""
    head = "{kind: regression, pooling: pooler, transform: none}"
    model = f"teacher.model.task_heads={{single_sentence: {head}}}"
    frozen = ["teacher.objective=null", "teacher.optimizer=null", "teacher.frozen=true",
              "teacher.init.pretrained=x", "teacher.model.mlm_head=false", model]  # fmt: skip
    number = "{single_sentence: {target: number, metrics: [spearman]}}"
    words = [f"students.{name}.objective={number}" for name in ("small", "lstm")]
    found = configs.load(str(job), JobConfig, "job", [*frozen, *words])
    assert found.primary_column.name == "single_sentence_spearman"
    (metric,) = found.metrics_of(found.teacher)
    assert isinstance(metric, NumberMetric)
    states = "{single_sentence: null, soft_labels: null, hidden_mse: {}}"
    words = [f"students.{name}.objective={states}" for name in ("small", "lstm")]
    text = [*NO_FILES, "data.root=''", "data.tokenizer=null", "data.path=x"]
    with pytest.raises(ConfigError, match="teacher: has no head that could be scored"):
        configs.load(str(job), JobConfig, "job", [*frozen, *words, *text])


def train_with(job: Path, words: tuple[str, ...]) -> str:
    folder = jobs.run(jobs.load(job, *words))
    jobs.finish(folder)
    return str(folder.path)


SHIPPED = {path.stem for path in (configs.SHIPPED / "task").iterdir()}
# With frozen teachers, which have no objective.
DISTILLED = {
    name
    for name in SHIPPED
    if name.startswith(("tinybert_", "pkd_", "mt_dnn_kd", "tang_", "distil_"))
}

# With a head over the vocabulary.
TRANSLATING = {name for name in SHIPPED if name.startswith(("translation", "multi30k", "c_mlm"))}


@pytest.mark.parametrize("name", sorted(SHIPPED - DISTILLED - TRANSLATING))
def test_a_shipped_task_has_its_head(name: str) -> None:
    words = ["teacher.model=bert_tiny", "teacher.init.pretrained=x", "data.root=somewhere"]
    given = ["data.train=a", "data.validation=b"]
    own = SEVERAL_TASKS.get(name, [] if name in TASKS_WITH_FILES else given)
    job = configs.load(name, JobConfig, "task", [*words, *own])
    assert job.teacher.architecture.task_heads


SEVERAL_TASKS = {"multi_task": ["tasks.sst2=sst2"], "mt_dnn": []}
TASKS_WITH_FILES = {
    "sst2", "cola", "mrpc", "rte", "qnli", "stsb", "wikiqa", "conll", "squad", "dream",
    "squadshifts", "mnli", "qqp", "race", "stsb_bi_encoder",
}  # fmt: skip


@pytest.mark.parametrize(
    "layout", [["index\tsentence", "0\tfine"], ["text\tlabel", "fine\t-1"]], ids=["glue", "minus 1"]
)
def test_a_test_file_without_labels_is_refused_before_training(job, tmp_path, layout) -> None:
    (tmp_path / "test.tsv").write_text("\n".join(layout) + "\n")
    with pytest.raises(DataError) as refused:
        jobs.load(job, f"data.test={tmp_path / 'test.tsv'}", "data.columns.text=text")
    assert "or leave data.test out: `tandem predict` reads files without labels" in str(
        refused.value
    )
    assert str(tmp_path / "test.tsv") in one_line(str(refused.value))


def test_too_few_examples_to_hold_some_out_need_a_validation_file(job, tmp_path) -> None:
    write(tmp_path / "few.tsv", lines(6, 0))
    given = [f"data.train={tmp_path / 'few.tsv'}", 'data.validation=""', 'data.test=""']
    with pytest.raises(DataError) as refused:
        jobs.load(job, *given)
    assert "data.validation: must be set; " in str(refused.value)
    assert "few.tsv has too few examples to hold some of them out" in str(refused.value)
    assert jobs.load(job, *given, "data.validation_fraction=0.5").steps


def test_texts_that_are_cut_are_counted_once(job, tmp_path, caplog) -> None:
    for _ in range(2):
        jobs.load(job, "data.sequence_length=8", f"output_dir={tmp_path}", 'data.test=""')
    (said,) = [one.getMessage() for one in caplog.records if "cuts" in one.getMessage()]
    assert said.startswith("data.sequence_length: 8 cuts ")
