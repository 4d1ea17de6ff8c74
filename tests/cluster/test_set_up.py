"""What the batch script does before the ranks: its set-up, and the check of the nodes."""

import os
import signal
import sys

import pytest

from tests.cluster.batch_script import Run, wait_for
from tests.waiting import SECONDS

MODULES_3 = """module() {
    [ $2 = gcc/9 ] ||
        echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$2'" >&2
    true
}"""


def test_commands_around_the_ranks(tmp_path):
    run = Run(tmp_path, before=["echo before"], after=["false || exec 3<nowhere", "echo after"])
    assert run.end("echo ranks; finish")[0] == "done"
    said = ["before", "ranks", "tandem: false || exec 3<nowhere failed on n1", "after"]
    lines = [line for line in run.output.splitlines() if "No such file" not in line]
    assert lines[:4] == said


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ({"modules": ["gcc/9", "cuda/12.4"]}, "module load cuda/12.4"),
        ({"venv": "/no/venv"}, ". /no/venv/bin/activate"),
        ({"conda": "my env"}, "conda activate 'my env'"),
        ({"before": ["true", "false"]}, "false"),
        ({"before": ["(exit 3)"]}, "(exit 3)"),
        ({"before": ["exit 0"]}, "exit 0"),  # or the job would have ended well
    ],
)
def test_a_set_up_that_fails_starts_no_ranks(tmp_path, cluster, line):
    run = Run(tmp_path, **cluster)
    defined = "module() { [ $2 = gcc/9 ]; }"
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text(defined)
    found = {"MODULESHOME": str(tmp_path)}
    assert run.end("touch started", **found) == ("final", 1, f"{line} failed on n1")
    assert not (tmp_path / "run/started").exists()
    assert run.requeued == 0


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ({"modules": ["gcc/9", "gone/1"]}, "module load gone/1"),
        (
            {"before": ["set -eu -o pipefail", "module load gone/1 && true"]},
            "module load gone/1 && true",
        ),
        ({"before": ["module load gone/1 || true", "module load gcc/9"]}, ""),
    ],
)
def test_a_missing_module_is_one_where_the_answer_is_0(tmp_path, cluster, line):
    """As Environment Modules 3.2 answers, which says so on its standard error only."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text(MODULES_3)
    ended = Run(tmp_path, **cluster).end("finish", MODULESHOME=str(tmp_path))
    assert ended == (("final", 1, f"{line} failed on n1") if line else ("done", 0, "finished"))


def test_a_set_up_line_may_allow_its_own_failure(tmp_path):
    run = Run(tmp_path, before=["no-such-command || true", "set -eu", "export WORD=it"])
    assert run.end('echo "$WORD reached the ranks"; finish')[0] == "done"
    assert "it reached the ranks" in run.output


def test_a_set_up_line_that_changes_the_folder_leaves_the_ranks_in_theirs(tmp_path):
    run = Run(tmp_path, before=["mkdir -p unpacked", "cd unpacked", "touch here"])
    assert run.end('echo "in $OLDPWD"; finish')[0] == "done"
    assert f"in {tmp_path}\n" in run.output
    assert (tmp_path / "unpacked/here").exists()


def test_module_is_there_for_a_line_of_ones_own(tmp_path):
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text('module() { echo "module $*"; false; }')
    run = Run(tmp_path, before=["module load tools || true"])
    assert run.end("finish", MODULESHOME=str(tmp_path))[0] == "done"
    assert run.output.startswith("module load tools\n")


def test_a_venv_without_python_is_none(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    why = Run(tmp_path, venv=str(tmp_path / "venv")).end("finish")[2]
    assert why == f"[ -x {tmp_path}/venv/bin/python ] failed on n1"


def test_cancelled_while_it_is_set_up(tmp_path):
    run = Run(tmp_path, before=["sleep 30 & touch ready; wait $!"])
    process = run.start("touch started")
    wait_for(tmp_path / "ready")
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert run.last(process.returncode)[0] == "ended"
    assert not (tmp_path / "run/started").exists()


def test_warning_during_preflight_starts_no_ranks_and_blames_no_node(tmp_path):
    run = Run(tmp_path, preflight=True)
    process = run.start("touch started", PREFLIGHT="echo ok n1; touch $CALLS.ready; sleep 1")
    wait_for(tmp_path / "calls.ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=SECONDS)
    assert run.last(process.returncode)[:2] == ("requeue", 0)
    assert not [call for call in run.calls if "ExcNodeList" in call]
    assert not (tmp_path / "run/started").exists()


def test_a_bad_node_is_named_and_excluded(tmp_path):
    run = Run(tmp_path, preflight=True)
    words = "echo ok n1; echo 'bad n2: 3 of 4 GPUs found'"
    event, code, why = run.end("touch started", PREFLIGHT=words, EXCLUDED="n9")
    assert (event, code) == ("requeue", 69)
    assert "bad node n2: 3 of 4 GPUs found" in why
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n2,n9"
    assert not (tmp_path / "run/started").exists()


@pytest.mark.parametrize(
    "words",
    [
        "echo ok n1",
        "echo ok n1; echo 'srun: error: Task launch for StepId=4.0 failed on node n2: lost' >&2",
    ],
)
def test_a_silent_node_is_bad(tmp_path, words):
    run = Run(tmp_path, preflight=True)
    assert "bad node n2" in run.end("exit 0", PREFLIGHT=words)[2]
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n2"


@pytest.mark.parametrize(
    "words", ["echo 'ModuleNotFoundError'", "for n in 1 2; do echo bad n$n: full; done"]
)
def test_a_fault_of_all_nodes_excludes_none(tmp_path, words):
    run = Run(tmp_path, preflight=True)
    assert run.end("exit 0", PREFLIGHT=words)[:2] == ("requeue", 69)
    assert not any("ExcNodeList" in call for call in run.calls)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_fault_that_no_other_node_would_cure_is_said_once(tmp_path, nodes):
    run = Run(tmp_path, preflight=True)
    words = "echo 'wrong n1: PyTorch has no CUDA'; [ $SLURM_NNODES = 1 ] || echo ok n2"
    ended = run.end("touch started", PREFLIGHT=words, SLURM_NNODES=nodes)
    assert ended == ("final", 69, "PyTorch has no CUDA")
    assert not any("requeue" in call or "ExcNodeList" in call for call in run.calls)
    assert not (tmp_path / "run/started").exists()


def test_a_failure_on_a_bad_node_is_the_nodes(tmp_path):
    """Exit code 1 without progress is final, unless the node is to blame."""
    run = Run(tmp_path, preflight=True)
    words = "echo ok n1; [ -e $CALLS.broken ] && echo bad n2: GPU 0 is gone || echo ok n2"
    event, code, why = run.end("touch $CALLS.broken; exit 1", PREFLIGHT=words)
    assert (event, code) == ("requeue", 1)
    assert "GPU 0 is gone" in why
    assert run.calls[-1] == "update jobid=7 ExcNodeList=n2"


def test_a_users_folder_cluster_does_not_hide_the_check(tmp_path):
    """In a container the check may start in any folder."""
    (tmp_path / "mine/cluster").mkdir(parents=True)
    (tmp_path / "mine/cluster/__init__.py").write_text("raise SystemExit('not Tandem')")
    run = Run(tmp_path, preflight=True, nodes="1", container=["env"], min_free_gb=0.0)
    words = f'cd mine; while [ "$1" != python ]; do shift; done; shift; {sys.executable} "$@"'
    alone = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}
    assert run.end("finish", PREFLIGHT=words, **alone) == ("done", 0, "finished"), run.output


def test_preflight_runs_where_the_ranks_do(tmp_path):
    """For example in the container that an option of srun names."""
    run = Run(tmp_path, preflight=True, srun={"container-image": "my image", "output": "x"})
    words = 'printf "%s\\n" "$@" >$CALLS.check; echo ok n1; echo ok n2'
    assert run.end("finish", PREFLIGHT=words)[0] == "done"
    given = (tmp_path / "calls.check").read_text().splitlines()
    assert "--container-image=my image" in given
    assert not any("output" in word for word in given)  # the script reads what the nodes say
