"""Mistakes of users: one line that says what to change, exit code 1, and no traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tandem as command_line
from commands.errors import one_line as one_line_for
from commands.prediction import new_file
from configs import ConfigError
from data_pipeline import DataError
from model import ModelError
from tests.conftest import TINY_JOB, tandem
from tests.distributed import run_distributed
from tests.failing import fails, one_line
from tests.mounting import mounted
from tests.trainer import jobs
from trainer.errors import TrainingError

ROOT = Path(__file__).parents[1]


def test_an_unknown_key_names_the_nearest():
    line = fails("train", TINY_JOB, "teacher.optimizer.learning_rat=1")
    assert "teacher.optimizer.learning_rat" in line
    assert "did you mean learning_rate" in line


def test_a_value_of_the_wrong_type_names_its_key():
    assert "steps" in fails("train", TINY_JOB, "steps=many")


def test_a_missing_config_names_the_nearest():
    assert "did you mean demo" in fails("train", "demoo")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["finetune", "pkd", "--model", "."], "task config; did you mean pkd_task?"),
        (["data", "augment", "pkd", "--model", ".", "--out", "x"], "task config; did you mean pkd"),
        (["data", "perturb", "tang", "--out", "x", "--replace", "0"], "task config; did you mean"),
        (["train", "single_sentense"], "task config; did you mean single_sentence?"),
        (["submit", "single_sentense"], "task config; did you mean single_sentence?"),
        (["plan", "single_sentense"], "task config; did you mean single_sentence?"),
        (["data", "show", "single_sentense"], "task config; did you mean single_sentence?"),
        (["model", "single_sentense"], "task config; did you mean single_sentence?"),
        (["model", "bert_bsae"], "model config; did you mean bert_base?"),
        (["train", "xyz"], "job config; there are: albert, "),
    ],
)
def test_a_mistyped_name_gets_the_nearest_of_what_the_command_reads(words, meant):
    assert f"no such {meant}" in fails(*words)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    file, text = tmp_path / "f", tmp_path / "text"
    for path in (file, text):
        path.write_text("Here it is.\n")
    model = f"{file}: is a file; a model is a folder"
    needed = f"{file}: is a file, where a folder is needed"
    sizes = ("--kind", "wordpiece", "--vocab-size", "300")
    assert f"{file}: is a file; a corpus is a folder" in fails("data", "check", file)
    assert model in fails("import", file, "--out", tmp_path / "out")
    assert model in fails("embed", file, "hello")
    assert "bert-base: no such folder; name the fol" in fails("embed", "bert-base", "hello")
    assert needed in fails("tokenizer", "train", text, *sizes, "--out", file)
    trained = tandem("tokenizer", "train", text, *sizes, "--out", tmp_path / "tokenizer")
    assert trained.returncode == 0, trained.stderr
    tokenizer = ("--tokenizer", tmp_path / "tokenizer")
    assert needed in fails("data", "build", text, *tokenizer, "--out", file)


def test_models_of_a_run_are_looked_for_in_its_exports(tmp_path):
    (tmp_path / "exports").mkdir()
    line = fails("embed", tmp_path, "hello")
    assert f"the models of this run are in {tmp_path / 'exports'}" in line


def test_a_missing_text_file_is_named(tmp_path):
    sizes = ["--kind", "wordpiece", "--vocab-size", "100"]
    missing = tmp_path / "no.txt"
    assert str(missing) in fails("tokenizer", "train", missing, *sizes, "--out", tmp_path / "t")


def test_an_empty_text_file_is_named(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    sizes = ["--kind", "wordpiece", "--vocab-size", "100"]
    assert str(empty) in fails("tokenizer", "train", empty, *sizes, "--out", tmp_path / "t")


def test_a_run_that_is_not_there_is_named(tmp_path):
    assert str(tmp_path) in fails("evaluate", tmp_path)
    assert str(tmp_path) in fails("export", tmp_path, "--learner", "x", "--out", tmp_path / "out")


def test_a_run_that_was_never_trained_cannot_be_synced(tmp_path):
    (tmp_path / "config.yaml").write_text(TINY_JOB.read_text())
    assert "never trained" in fails("sync", tmp_path)


def test_a_message_quotes_a_screen_of_a_damaged_file_at_most():
    said = one_line_for(DataError(f"a.tsv: no column 'text'; there are: {'[' * 20_000}; name one"))
    assert said.startswith("a.tsv: no column 'text'; there are: [[[")
    assert said.endswith("[[[; name one")
    assert len(said) < 2100
    short = "a.tsv: " + "m" * 1900
    assert one_line_for(DataError(short)) == short


def test_wrong_usage_exits_2():
    assert CliRunner().invoke(command_line.main, ["train"]).exit_code == 2
    assert CliRunner().invoke(command_line.main, ["trian"]).exit_code == 2
    for words in ("plan bert --mfu", "data build x --shard-mb", "stop x --wait"):
        done = CliRunner().invoke(command_line.main, [*words.split(), "nan"])
        assert (done.exit_code, "nan is not a number" in done.output) == (2, True), done.output


def test_the_class_of_an_error_decides_its_exit_code():
    """A message that begins with an option is of a class for options, and no other decides."""
    done = CliRunner().invoke(command_line.main, ["data", "check", "--", "--nothing-here"])
    assert done.output.startswith("tandem: --nothing-here")
    assert done.exit_code == 1
    for folder in ("commands", "trainer", "cluster", "data_pipeline", "model", "configs"):
        for file in (ROOT / folder).rglob("*.py"):
            raised = re.findall(r'(\w+)\(\s*f?"--[a-z-]+[: ]', file.read_text())
            errors = {name for name in raised if name.endswith("Error")}
            assert errors <= {"OptionError", "UsageError"}, file


def test_what_the_system_refuses_is_one_line_with_its_path(tmp_path):
    for error, line in {
        OSError(errno.EIO, "Input/output error", "a/file"): "a/file: Input/output error",
        OSError(errno.EXDEV, "Invalid link", "a", None, "b"): "a to b: Invalid link",
        FileExistsError(errno.EEXIST, "File exists", tmp_path): f"{tmp_path}: File exists",
        MemoryError(): "out of memory: the machine has too little",
        MemoryError("Unable to allocate 8 EiB"): "out of memory: Unable to allocate 8 EiB",
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 "
            "GiB. Of the allocated memory 5.00 GiB is allocated by PyTorch"
        ): "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 "
        "GiB; end what else computes on that GPU, or set CUDA_VISIBLE_DEVICES to another one, or "
        "to nothing for the CPU",
    }.items():
        assert one_line_for(error) == line
    assert one_line_for(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None
    assert one_line_for(KeyError("a bug")) is None


PLAN_AND_SUBMIT = [
    pytest.param(["plan", "--json"], marks=pytest.mark.slow),
    ["submit", "--dry-run"],
]


@pytest.mark.parametrize("command", PLAN_AND_SUBMIT)
def test_what_the_steps_do_not_reach_is_a_warning_of_plan_and_submit(command):
    words = [command[0], str(TINY_JOB), "profile.steps=20:22", "data.path=corpus", *command[1:]]
    done = CliRunner().invoke(command_line.main, words)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert (done.exit_code, "profile.steps (20); fine for a trial run" in line) == (0, True)
    assert line not in done.stdout


@pytest.mark.parametrize("command", PLAN_AND_SUBMIT)
def test_a_model_that_is_not_here_is_a_warning_of_plan_and_submit(command):
    words = [command[0], str(TINY_JOB), "teacher.init.pretrained=gone", "data.path=corpus"]
    done = CliRunner().invoke(command_line.main, [*words, *command[1:]])
    (line,) = [line for line in done.stderr.splitlines() if "init.pretrained" in line]
    assert done.exit_code == 0
    assert line.startswith("warning: teacher.init.pretrained: gone: no such folder on this machine")
    assert line not in done.stdout


def test_scores_that_are_not_finite_are_null_in_json(tmp_path, monkeypatch):
    scores = {"learners": {"teacher": {"loss": math.nan, "accuracy": 0.5, "corpora": [math.inf]}}}
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("trainer.evaluation.finished.SavedLearners", lambda folder: folder)
    monkeypatch.setattr("trainer.evaluation.final_scores.evaluate_run", lambda *_: scores)
    done = CliRunner().invoke(command_line.main, ["evaluate", str(tmp_path), "--json"])
    (found,) = json.loads(done.output, parse_constant=pytest.fail)["learners"].values()
    assert found == {"loss": None, "accuracy": 0.5, "corpora": [None]}


LEARNERS = ("teacher", "students.distilbert", "students.tinybert")


def of_length(length: int) -> list[str]:
    """Overrides for sequences of this length that fit the models."""
    rooms = [f"{learner}.model.max_positions={length}" for learner in LEARNERS]
    return [f"data.sequence_length={length}", *rooms]


JOBS = {
    "no corpus": (["data.path=nowhere"], "nowhere"),
    "not one full sequence": (of_length(32768), "less than one full sequence"),
    "too few positions": (["data.sequence_length=64"], "teacher.model.max_positions"),
    "another vocabulary": (
        [f"{learner}.model.vocab_size=100" for learner in LEARNERS],
        "vocab_size 100",
    ),
    "an objective that does not fit": (
        ["students.tinybert.model.heads=2"],
        "students.tinybert.objective.attention_mse: ",
    ),
    "layers that are not there": (
        ["students.distilbert.init.teacher_layers=[0,9]", "students.distilbert.start=null"],
        "teacher_layers",
    ),
}


def failure(corpus, runs, overrides):
    with pytest.raises((ConfigError, DataError, ModelError, TrainingError)) as error:
        jobs.run(jobs.tiny_job(corpus, runs, *overrides))
    return str(error.value)


def on_one_rank(corpus, runs):
    """The messages of jobs that cannot run, and the output of jobs with few learners."""
    reasons = {name: failure(corpus, runs, overrides) for name, (overrides, _) in JOBS.items()}
    shutil.copytree(corpus, damaged := runs / "damaged")
    (damaged / "word_starts.npy").write_bytes(b"")
    reasons["a damaged corpus"] = failure(damaged, runs, [])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jobs.run(jobs.tiny_job(corpus, runs, "name=nobody", "steps=2", "students=null"))
        later = "students.distilbert.start.step=100"
        jobs.run(jobs.tiny_job(corpus, runs, "name=nobody-yet", "steps=2", later))
    return reasons, printed.getvalue()


@pytest.fixture(scope="module")
def said(corpus, tmp_path_factory):
    return run_distributed(on_one_rank, 1, corpus, tmp_path_factory.mktemp("runs"))[0]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_run_says_why(name, said):
    assert JOBS[name][1] in one_line(said[0][name])


def test_a_job_refuses_a_damaged_corpus_by_the_file(said):
    assert "damaged/word_starts.npy: 0 bytes instead of" in one_line(said[0]["a damaged corpus"])


def test_no_students_is_plain_pre_training(said):
    assert "no students" in said[1]


def test_a_student_that_never_joins_is_named(said):
    assert "students/distilbert never joined" in said[1]


def test_ranks_that_fail_alike_say_it_once(corpus, tmp_path):
    paths = [f"data.path={corpus}", f"output_dir={tmp_path}", "batch.size=7"]
    failed = tandem("train", TINY_JOB, *paths, "--nproc", 2)
    assert failed.returncode == 1
    assert "7 rows cannot be split among 2 ranks" in one_line(failed.stderr)


def test_more_ranks_than_samples(tmp_path):
    """Two short documents make at most three samples: too few for four ranks."""
    text = tmp_path / "short.txt"
    text.write_text("\n\n".join(f"Document {n} has few words to offer. " * 4 for n in "ABCD"))
    sizes = ["--kind", "wordpiece", "--vocab-size", "60"]
    folder = tmp_path / "data"
    assert tandem("tokenizer", "train", text, *sizes, "--out", tmp_path / "t").returncode == 0
    options = ["--tokenizer", tmp_path / "t", "--val-fraction", "0.5", "--out", folder]
    assert tandem("data", "build", text, *options).returncode == 0
    paths = [f"data.path={folder}", f"output_dir={tmp_path}", *of_length(64)]
    failed = tandem("train", TINY_JOB, *paths, "--nproc", 4)
    assert failed.returncode == 1
    assert "too few for 4 ranks" in one_line(failed.stderr)


def test_a_full_disk_is_one_line(corpus, tmp_path):
    with mounted(tmp_path, "size=700k"):
        failed = tandem("train", TINY_JOB, f"data.path={corpus}", f"output_dir={tmp_path}")
        file = tmp_path / "full.yaml"
        (tmp_path / "rest").write_bytes(bytes(shutil.disk_usage(tmp_path).free))
        line = fails("init", file, "--for", "pretrain", "--data", corpus, "--hardware", "cpu")
        assert f"{file}: No space left on device; free some space" in line
        with pytest.raises(OSError, match=r"full\.npy"), new_file(tmp_path / "full.npy") as path:
            path.write_bytes(bytes(100_000))
        assert not file.exists()
    assert failed.returncode == 1
    assert "space" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


def test_advice_fits_the_error_of_the_system():
    advice = {
        errno.ENOSPC: "free some space, or choose another folder",
        errno.EROFS: "choose another folder",
        errno.EACCES: "change its permissions, or choose another folder",
    }
    for number, words in advice.items():
        line = one_line_for(OSError(number, "no", "runs/r/config.yaml"))
        assert line == f"runs/r/config.yaml: no; {words}"
