"""Loading a config reads configs alone; data are read and written when a job is prepared."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from configs import loading
from model import EncoderConfig, build, save_pretrained
from tests.conftest import TINY_JOB
from tests.distributed import run_distributed
from tests.forked_commands import Case, run
from tests.trainer import jobs
from tests.trainer.jobs import tiny_job
from trainer.config import JobConfig
from trainer.errors import TrainingError

COUNTS = "sequences-*.npy"


def resumes(corpus: Path, folder: Path) -> None:
    jobs.run(tiny_job(corpus, folder, "name=stopped"), stop_after=2)
    built, check = [], JobConfig.__post_init__

    def counted(job: JobConfig) -> None:
        built.append(job)
        check(job)

    with (
        patch.object(JobConfig, "__post_init__", counted),
        patch.object(loading, "validate", wraps=loading.validate) as validate,
    ):
        jobs.run(tiny_job(corpus, folder, "name=stopped"))
    (folder / "counted").write_text(f"{validate.call_count} {len(built)}")


def test_a_resume_reads_its_config_once(corpus: Path, tmp_path: Path) -> None:
    run_distributed(resumes, 1, corpus, tmp_path)
    assert (tmp_path / "counted").read_text() == "1 1"


def is_refused(corpus: Path, folder: Path) -> None:
    job = tiny_job(corpus, folder, "teacher.init.pretrained=/nowhere", "name=refused")
    with pytest.raises(TrainingError, match="no such folder; name the folder of a model: none is"):
        jobs.run(job)


def test_a_job_that_is_refused_writes_nothing_to_its_corpus(corpus: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "corpus"
    shutil.copytree(corpus, fresh, ignore=shutil.ignore_patterns(COUNTS))
    run_distributed(is_refused, 1, fresh, tmp_path)
    assert not [*fresh.rglob(COUNTS)]


def test_a_dry_run_of_a_task_writes_no_file(corpus: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "heads": 2, "ffn_size": 8, "max_positions": 32}
    model = build(EncoderConfig(vocab_size=600, layers=1, **sizes), seed=0)
    save_pretrained(model, tmp_path / "model", corpus / "tokenizer")
    rows = [f"{'good' if row % 2 else 'bad'}\tmovie {row}" for row in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    before = {*tmp_path.rglob("*")}
    words = ["data.sequence_length=16", f"data.train={tmp_path}/train.tsv"]
    places = [f"teacher.init.pretrained={tmp_path}/model", f"output_dir={tmp_path}/runs"]
    ended = run(Case(["submit", "single_sentence", *words, *places, "--dry-run"]))
    assert (ended.code, ended.fault) == (0, ""), ended.errors
    assert "#SBATCH" in ended.output
    assert {*tmp_path.rglob("*")} == before


def test_a_null_in_place_of_a_model_leaves_the_one_in_the_folder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "heads": 2, "ffn_size": 8, "max_positions": 64}
    save_pretrained(build(EncoderConfig(vocab_size=600, layers=3, **sizes), seed=0), tmp_path)
    words = [f"teacher.init.pretrained={tmp_path}", "students=null", "teacher.model=null"]
    model = tiny_job(tmp_path, tmp_path, *words).teacher.model
    assert (model.vocab_size, model.layers, model.hidden_size) == (600, 3, 8)


def test_the_tree_of_a_job_is_composed_without_a_change_to_it() -> None:
    task = {"data": {}, "teacher": {"init": {}}, "students": {"a": {"objective": {}}, "b": None}}
    tree = {**loading.load_tree(str(TINY_JOB), JobConfig, "job"), **task, "tasks": {"sst2": "sst2"}}
    before = copy.deepcopy(tree)
    composed = JobConfig.compose(tree)
    assert tree == before
    assert [*composed["students"]["a"]["objective"]["tasks"]] == ["sst2"]
    assert composed["data"]["tasks"]["sst2"]["train"] == "glue/SST-2/train.tsv"
