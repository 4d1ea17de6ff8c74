"""Every way to start Tandem, from a folder that holds modules with the names of its packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TINY_JOB, command_environment

PACKAGES = ("cluster", "commands", "configs", "data_pipeline", "model", "trainer")
SCRIPT = Path(sys.executable).with_name("tandem")
ENTRIES = {
    "console script": [SCRIPT],
    "module": [sys.executable, "-m", "tandem"],
    "file": [sys.executable, REPOSITORY / "tandem.py"],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=1",
        "-m",
        "tandem",
    ],
}
IN_PYTHON = """
import tandem, commands.data
print(commands.data.__file__)
"""


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    """A project of the user's, whose modules must not be imported."""
    return write_user_folder(tmp_path / "project")


def write_user_folder(folder: Path) -> Path:
    """Write packages and modules with the names of Tandem's, which fail when they are imported."""
    for name in PACKAGES[:4]:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("1 / 0  # the user's\n")
    for name in PACKAGES[4:]:
        (folder / f"{name}.py").write_text("1 / 0  # the user's\n")
    return folder


def run(command: list[object], folder: Path, umask: int = -1) -> str:
    """The output of a process that starts in `folder`, without this repository on its path.

    A `umask` of -1 is that of the tests.
    """
    environment = command_environment()
    del environment["PYTHONPATH"]
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" not in done.stderr
    return done.stdout


QUICK = ("console script",)


@pytest.mark.parametrize(
    "entry", [pytest.param(e, marks=() if e in QUICK else pytest.mark.slow) for e in ENTRIES]
)
def test_an_entry_imports_its_own_packages(entry: str, user_folder: Path) -> None:
    shown = run([*ENTRIES[entry], "model", "bert_tiny", "--json"], user_folder)
    assert json.loads(shown)["parameters"] == 4_385_920


def test_the_name_in_a_usage_is_that_of_the_command() -> None:
    words = [*ENTRIES["module"], "train"]
    wrong = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: tandem train [OPTIONS]")
    assert "'tandem train --help'" in wrong.stderr


def test_python_imports_the_packages_beside_tandem(user_folder: Path) -> None:
    shown = run([sys.executable, "-c", IN_PYTHON], user_folder)
    assert Path(shown.strip()).parent == REPOSITORY / "commands"


def test_a_module_that_was_imported_under_a_package_s_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    program = [sys.executable, "-c", "import model, tandem"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {tmp_path}/model.py has the name of a package of Tandem, `model`: "
        "import tandem before it, or rename it"
    )


@pytest.mark.slow
def test_processes_that_a_command_starts_do_too(user_folder: Path, corpus: Path) -> None:
    """The workers of a build, a run's ranks, its trackers' processes, its report and its exports.

    What they write follows the umask.
    """
    text = user_folder / "text.txt"
    text.write_text("\n\n".join(f"Sentence {k} of a text. It is short." for k in range(3000)))
    tokenizer = corpus.parent / "tokenizer"
    build = ["data", "build", text, "--tokenizer", tokenizer, "--out", "corpus", "--workers", 2]
    entry = ENTRIES["file"]
    run([*entry, *build], user_folder, umask=0o027)
    job = ["train", TINY_JOB, f"data.path={corpus}", "output_dir=runs", "--nproc", 2]
    run([*entry, *job, "log.wandb=offline", "log.trackers=[tensorboard]"], user_folder, 0o027)
    logs = "".join(path.read_text() for path in user_folder.glob("runs/tiny/logs/*"))
    assert "ZeroDivisionError" not in logs
    assert list(user_folder.glob("runs/tiny/wandb/offline-run-*"))
    assert (user_folder / "runs/tiny/report.html").exists()
    written = [*user_folder.glob("corpus/**/*"), *user_folder.glob("runs/tiny/**/*")]
    assert len(written) > 40
    for path in written:
        if (
            not path.is_symlink() and "staging" not in path.parts
        ):  # where W&B keeps copies to itself
            assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
