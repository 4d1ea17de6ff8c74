"""The comparison of two revisions to the last bit, even if keys and metrics were renamed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from benchmarks.compare_revisions import shown
from benchmarks.revisions import results, tiny_jobs, tiny_tasks
from benchmarks.revisions.differences import differences
from benchmarks.revisions.names import Names
from tests.conftest import REPOSITORY

NAMES = Names(
    config={"runs": "output_dir", "guard.tolerate": "guard.max_consecutive_skips"},
    metrics={"soft": "soft_kl"},
    tensors={"terms.soft": "terms.soft_kl"},
    defaults={"mlm_head": True},
)


def run_folder(
    folder: Path, *, term: str = "soft", loss: float = 0.5, cuts: int = 1, **config: object
) -> Path:
    """A run folder: one step's metrics, moments in `cuts` fragments, and an export."""
    learner = folder / "checkpoints" / "step-000000001" / "teacher"
    export = folder / "exports" / "teacher"
    for made in (learner, export):
        made.mkdir(parents=True)
    row = {"step": 1, f"students/a/{term}": loss, "teacher/grad_norm": 1.0, "seconds": 3.2}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "evaluation.json").write_text(json.dumps({"loss": 0.25, "machine": str(folder)}))
    moments = np.arange(8, dtype=np.float32).reshape(cuts, -1)
    for rank, part in enumerate(moments):
        name = f"terms.{term}.weight|exp_avg|{rank * part.size}"
        save_file({name: part}, learner / f"rank-{rank}.safetensors")
    save_file({"norm.weight": moments.reshape(2, 4)}, export / "model.safetensors")
    (export / "config.json").write_text(json.dumps({"layers": 2, **config}))
    (export / "README.md").write_text(f"made in {folder}")
    np.savez(folder / "batches.npz", step=np.array([0, 0]), labels=np.array([[1, -100], [2, 3]]))
    return folder


def read(folder: Path) -> results.Results:
    return results.read(folder, [folder / "batches.npz"], 1, NAMES)


def test_what_differs_on_purpose_can_be_left_out(tmp_path: Path) -> None:
    sides = [read(run_folder(tmp_path / name, loss=loss)) for name, loss in (("a", 1), ("b", 2))]
    assert [one.place.name for one in differences(*sides)] == ["students/a/soft_kl"]
    rest = [results.leave_out(one, re.compile("soft|norm")) for one in sides]
    assert differences(*rest) == []
    assert len(sides[0]) > len(rest[0]) > 0


def test_results_are_the_same_in_other_files_and_under_other_names(tmp_path: Path) -> None:
    old = read(run_folder(tmp_path / "old"))
    new = read(run_folder(tmp_path / "new", term="soft_kl", cuts=2, mlm_head=True))
    assert differences(old, new) == []
    assert {place.kind for place in old} >= {"batches", "metrics", "checkpoint", "export"}


def test_the_last_bit_of_a_result_is_shown(tmp_path: Path, capsys) -> None:
    old = read(run_folder(tmp_path / "old"))
    folder = run_folder(tmp_path / "new", loss=float(np.nextafter(0.5, 1)))
    (path,) = folder.glob("checkpoints/*/*/*.safetensors")
    moments = np.arange(8, dtype=np.float32)
    moments[[0, 5]] = -0.0, np.nextafter(np.float32(5), np.float32(6))
    save_file({"terms.soft.weight|exp_avg|0": moments}, path)
    assert not shown("a job", old, read(folder))
    first, *listed = capsys.readouterr().out.splitlines()
    assert first == "a job: 2 results differ (9 compared)"
    assert [line.strip() for line in listed] == [
        "step 1, checkpoint, teacher terms.soft_kl.weight exp_avg: "
        "0.0 | -0.0 (element 0; 2 of 8 differ)",
        "step 1, metrics, students/a/soft_kl: 0.5 | 0.5000000000000001",
    ]


def test_what_only_one_revision_makes_differs(tmp_path: Path) -> None:
    old = read(run_folder(tmp_path / "old"))
    new = read(run_folder(tmp_path / "new", depth=3))
    (found,) = differences(old, new)
    assert str(found) == "step 1, export, teacher/config.json depth: absent | 3"


def test_a_config_key_is_given_by_the_name_that_a_revision_accepts() -> None:
    asked = []

    def accepts(override: str) -> bool:
        asked.append(override)
        return override.startswith(("runs=", "teacher.guard.tolerate="))

    assert NAMES.spoken("output_dir=here", accepts) == "runs=here"
    key = "teacher.guard.max_consecutive_skips"
    assert NAMES.spoken(f"{key}=2", accepts) == "teacher.guard.tolerate=2"
    assert NAMES.spoken("log.every=1", accepts) == "log.every=1"
    assert "log.every=1" not in asked


SHIPPED = tiny_jobs.load_all(REPOSITORY)


def test_every_shipped_job_task_and_task_of_a_suite_is_compared() -> None:
    files = [path for kind in ("job", "task") for path in (REPOSITORY / "configs" / kind).iterdir()]
    assert len(SHIPPED) > len(files) > 50
    suites = {name.split("/")[1] for name in SHIPPED if name.startswith("suite/")}
    assert suites == {path.stem for path in (REPOSITORY / "configs" / "suite").iterdir()}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_job_is_made_tiny(name: str) -> None:
    job = SHIPPED[name]
    tiny = tiny_jobs.overrides(job, Path("data"), Path("runs"), 3)
    learners = tiny_jobs.learners(job.section)
    for place, section in learners.items():
        if "heads" in section.get("model", {}):
            assert tiny[f"{place}.model.hidden_size"] == 2 * section["model"]["heads"]
    for key, value in tiny.items():
        assert yaml.safe_load(tiny_jobs.as_override(key, value).partition("=")[2]) == value
    if tiny_jobs.is_frozen(learners["teacher"]):
        trainer = SHIPPED[tiny_jobs.trainer_of(name, SHIPPED)]
        assert not tiny_jobs.is_frozen(trainer.section["teacher"])
        if not job.is_task:
            assert width(trainer) == width(job)


def width(job: tiny_jobs.Shipped) -> int:
    return job.section["teacher"]["model"]["hidden_size"]


TASKS = {
    name: job for name, job in SHIPPED.items() if job.is_task and "train" in job.section["data"]
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_examples_where_its_file_names_them(name: str, tmp_path: Path) -> None:
    task = TASKS[name].section
    tiny_tasks.write(tmp_path, task, tiny_tasks.sentences(tiny_jobs.text()))
    files = tiny_tasks.places(task)
    assert files.keys() >= {"train"}
    assert all((tmp_path / place).exists() for place in files.values())


def test_results_within_a_tolerance_agree(tmp_path: Path) -> None:
    old = read(run_folder(tmp_path / "old"))
    folder = run_folder(tmp_path / "new", loss=0.5 + 1e-7)
    (path,) = folder.glob("checkpoints/*/*/*.safetensors")
    moments = np.arange(8, dtype=np.float32)
    moments[5] += 1e-5  # 8e-7 of the norm
    save_file({"terms.soft.weight|exp_avg|0": moments}, path)
    new = read(folder)
    assert differences(old, new, within=1e-6) == []
    assert len(differences(old, new, within=5e-7)) == 1
    assert len(differences(old, new)) == 2
    (place,) = (one for one in old if one.name == "students/a/soft_kl")
    for value in (0.6, float("nan"), 1, None):
        assert len(differences(old, {**old, place: value}, within=1e-6)) == 1


def git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def compare(repository: Path, new: str) -> subprocess.CompletedProcess[str]:
    """The output of a repository's own script for HEAD~2 and another revision."""
    options = [
        "--jobs",
        "demo",
        "task/cola",
        "task/tang_mrpc",
        "--world-size",
        "2",
        "--stages",
        "1",
    ]
    script = repository / "benchmarks" / "compare_revisions.py"
    return subprocess.run(
        [sys.executable, script, "HEAD~2", new, *options],
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_identical_revisions_agree_and_a_changed_constant_is_found(tmp_path: Path) -> None:
    """Equal trees agree; a temperature that differs in its eighth digit does not."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs the project's git repository")
    git(tmp_path, "clone", "--quiet", "--shared", str(REPOSITORY), "clone")
    clone = tmp_path / "clone"
    git(clone, "commit", "--allow-empty", "--message", "Nothing")
    job = clone / "configs" / "job" / "demo.yaml"
    job.write_text(job.read_text().replace("temperature: 2.0", "temperature: 2.0000002"))
    git(clone, "commit", "--all", "--message", "Another temperature")
    done = compare(clone, "HEAD~1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "Nothing differs"), done
    done = compare(clone, "HEAD")
    assert done.returncode == 1, done
    assert "demo, 2 ranks, stage 1: " in done.stdout
    assert "step 1, checkpoint, students/distilbert " in done.stdout
    assert "teacher " not in done.stdout  # nobody taught it otherwise
