"""`tandem init`: the job that it writes can be loaded and trained, whatever it is for."""

from __future__ import annotations

import shlex

import pytest
import yaml
from click.testing import CliRunner

import configs
from commands import starting
from commands.job_texts import HARDWARE, TASKS
from model import EncoderConfig, TaskHeadConfig, build, save_pretrained
from tandem import main
from tests.conftest import tandem
from trainer.config import JobConfig

SMALL = [
    *("steps=4", "batch.size=4", "batch.micro_batch=2", "evaluation={every: 2, sequences: 4}"),
    *("checkpoint.every=2", "log={every: 1, wandb: disabled}", "data.sequence_length=16"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus):
    """The folder of a classifier of four layers."""
    folder = tmp_path_factory.mktemp("model") / "classifier"
    head = TaskHeadConfig(labels=["bad", "good"], pooling="first", transform="tanh")
    sizes = {"hidden_size": 32, "ffn_size": 64, "heads": 4, "max_positions": 128}
    config = EncoderConfig(vocab_size=600, layers=4, task_heads={"quality": head}, **sizes)
    save_pretrained(build(config, seed=0), folder, corpus.parent / "tokenizer")
    return folder


@pytest.fixture
def examples(tmp_path):
    path = tmp_path / "my reviews.csv"
    path.write_text("text,label\n" + "a fine film,good\na waste of time,bad\n" * 20)
    return path


def written(path, *options) -> JobConfig:
    done = tandem("init", path, *options)
    assert done.returncode == 0, done.stderr
    return configs.load(str(path), JobConfig, "job")


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_job_that_pretrains_and_distils(tmp_path, hardware):
    path = tmp_path / "mine.yaml"
    job = written(path, "--for", "pretrain", "--data", "text", "--hardware", hardware)
    assert job.name == "mine"
    assert job.data.path == "corpora/mine"
    assert job.teacher.objective.mlm is not None
    assert len(job.students) == len(HARDWARE[hardware].students)
    comments = [line for line in path.read_text().splitlines() if "#" in line]
    assert len(comments) > 5


def test_a_student_of_the_teachers_width_begins_with_its_layers(tmp_path):
    words = ("--for", "pretrain", "--data", "text", "--teacher", "bert_base")
    path = tmp_path / "my models" / "tiny.yaml"
    path.parent.mkdir()
    path.write_text("base: bert_tiny\n")
    names = ("distilbert", "bert_small", str(path))
    students = [word for name in names for word in ("--student", name)]
    job = written(tmp_path / "mine.yaml", *words, *students, "--output-dir", "/scratch/my runs")
    assert job.students["distilbert"].init.teacher_layers == [0, 2, 4, 6, 8, 10]
    assert job.students["bert_small"].init.teacher_layers is None
    assert job.output_dir == "/scratch/my runs"


def test_a_corpus_that_is_built_gives_the_size_of_the_vocabulary(tmp_path, corpus):
    path = tmp_path / "mine.yaml"
    done = tandem("init", path, "--for", "pretrain", "--data", corpus, "--hardware", "cpu")
    job = configs.load(str(path), JobConfig, "job")
    assert job.data.path == str(corpus)
    assert job.teacher.architecture.vocab_size == 600
    assert "data build" not in done.stdout
    assert "not here yet" not in done.stderr


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("purpose", ["finetune", "distil"])
def test_a_job_of_a_task(tmp_path, examples, model, purpose, task):
    words = ("--for", purpose, "--data", examples, "--model", model, "--task", task)
    job = written(tmp_path / "mine.yaml", *words)
    assert job.data.train == str(examples)
    assert job.teacher.frozen is (purpose == "distil")
    if purpose == "distil":
        assert job.students["small"].init.layers == [0, 2]


@pytest.mark.parametrize(
    ("header", "comment"),
    [
        ('review,"the\nsentiment"', r"name the file's columns: 'review', 'the\nsentiment'"),
        ("id,label,text", "name the file's columns, if they differ"),
        ("\x00", r"name the file's columns: '\x00'"),
    ],
)
def test_the_columns_of_the_examples_are_named_where_they_differ(tmp_path, model, header, comment):
    (tmp_path / "mine.csv").write_text(f"{header}\na,b\n")
    path = tmp_path / "mine.yaml"
    written(path, "--for", "finetune", "--data", tmp_path / "mine.csv", "--model", model)
    (line,) = [line for line in path.read_text().splitlines() if "# columns:" in line]
    assert line.partition("  # ")[2].endswith(comment)


def test_a_job_that_continues_a_model(tmp_path, model):
    path = tmp_path / "mine.yaml"
    done = tandem("init", path, "--for", "continue", "--data", "text", "--model", model)
    job = configs.load(str(path), JobConfig, "job")
    assert job.teacher.init.pretrained == str(model)
    assert f"--tokenizer {model}" in done.stdout
    assert "tokenizer train" not in done.stdout


def test_what_it_writes_is_trained_by_the_commands_that_it_prints(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    words = ("--teacher", "bert_tiny", "--student", "bert_tiny", "--hardware", "cpu")
    done = tandem("init", "mine.yaml", "--for", "pretrain", "--data", text, *words)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line, comments=True) for line in done.stdout.splitlines()[1:]]
    assert [command[1] for command in commands] == ["tokenizer", "data", "train"]
    for command in commands:
        small = SMALL if command[1] == "train" else []
        done = tandem(*command[1:], *small)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/exports/bert_tiny/config.json").exists()


def test_a_fine_tuning_job_trains(tmp_path, monkeypatch, examples, model):
    monkeypatch.chdir(tmp_path)
    words = ("--for", "finetune", "--data", examples, "--model", model, "--hardware", "cpu")
    assert tandem("init", *words).returncode == 0
    done = tandem("train", "job.yaml", "epochs=1", "log.wandb=disabled", "data.sequence_length=32")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_a_file_is_overwritten_by_force_only(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    words = ("init", path, "--for", "pretrain", "--data", "text")
    refused = tandem(*words)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert path.read_text() == "name: mine\n"
    overwritten = tandem(*words, "--force")
    assert overwritten.returncode == 0
    assert overwritten.stderr == "--data text: not here yet, and taken for text\n"
    assert "teacher" in yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "text"], "--for: must be given, one of pretrain, finetune, distil, continue"),
        (["--for", "pretrain"], "--data: must be given"),
        (["--for", "finetune", "--data", "nothing.csv"], "nothing.csv: no such file"),
        (["--for", "continue", "--data", "text", "--model", "x"], "x: no folder of a model"),
        (["--for", "pretrain", "--data", "text", "--model", "x"], "--model: does not go with"),
        (["--for", "continue", "--task", "tagging"], "--task: does not go with --for continue"),
        (["--for", "distil", "--teacher", "x"], "with --for distil; --model is the teacher"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    refused = tandem("init", *words)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not (tmp_path / "job.yaml").exists()


def test_an_unknown_model_is_told_with_the_nearest(tmp_path):
    words = ("--for", "pretrain", "--data", "text", "--teacher", "bert_bas")
    refused = tandem("init", tmp_path / "mine.yaml", *words)
    assert refused.returncode == 1
    assert "bert_base" in refused.stderr
    assert not (tmp_path / "mine.yaml").exists()


def test_a_terminal_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "_is_asked", lambda: True)
    path = tmp_path / "mine.yaml"
    answers = "pretrain\nmy texts\ncpu\nbert_tiny\nbert_tiny\n\n"
    done = CliRunner().invoke(main, ["init", str(path)], input=answers)
    assert done.exit_code == 0, done.output
    assert "fine-tune a model on labelled examples" in done.output
    assert "tandem tokenizer train 'my texts'" in done.output
    job = configs.load(str(path), JobConfig, "job")
    assert job.device == "cpu"
    assert [*job.students] == ["bert_tiny"]
