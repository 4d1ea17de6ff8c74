"""`tandem submit` without SLURM: dry runs, refusals, and the folder of a submission."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import configs
import tandem
from cluster import LaunchError, commands, slurm
from cluster.config import ClusterConfig
from cluster.script import PARTS
from cluster.slurm import SOURCE
from commands.job_configs import changes_since_run
from configs.errors import UserError
from tests.cluster.conftest import install
from trainer.config import JobConfig
from trainer.tasks import load_plugins

pytestmark = pytest.mark.usefixtures("slurm_programs")


def test_dry_run_touches_nothing(tmp_path, capsys):
    options = ["--nodes", "4", "--gpus-per-node", "8", "--partition", "p q"]
    commands.submit("demo", Path("runs/demo"), "a: 1\n", "gpu", options, dry_run=True)
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    for line in ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "partition='p q'"):
        assert f"#SBATCH --{line}\n" in text
    assert not (tmp_path / "runs").exists()


def test_submission_folder(tmp_path, capsys):
    commands.submit("demo", Path("runs/demo"), "steps: 3\n")
    folder = tmp_path / "runs/demo/submissions/001"
    assert (folder / "config.yaml").read_text() == "steps: 3\n"
    assert (folder / "jobs").read_text() == "41\n"
    assert (folder / "code/cluster/ranks.py").is_file()
    assert (
        "supervisor=$submission/code/cluster/supervisor.sh\n" in (folder / "job.sbatch").read_text()
    )
    parts = [folder / "code/cluster" / part.name for part in PARTS]
    assert not any(
        part.is_symlink() or part.samefile(SOURCE / "cluster" / part.name) for part in parts
    )
    assert (folder / "code/configs/cluster/gpu.yaml").is_file()
    assert not list(folder.rglob("__pycache__"))
    said = capsys.readouterr().out
    assert "job 41" in said
    assert "expects it to start at 2026-05-01 12:00:00" in said
    commands.submit("demo", Path("runs/demo"), "steps: 4\n")
    assert (folder / "config.yaml").read_text() == "steps: 3\n"
    assert (folder.with_name("002") / "config.yaml").read_text() == "steps: 4\n"


def test_a_submission_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        commands.submit("demo", Path("runs/demo"), "")
    finally:
        os.umask(before)
    written = [*(tmp_path / "runs/demo").rglob("*")]
    assert len(written) > 300
    for path in written:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


def test_a_submission_has_its_own_copies_of_plugins(tmp_path, monkeypatch):
    """Also of two of one name; a plugin that is edited afterwards changes no queued job."""
    long = "a folder " * 20
    for folder in (".", long):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "plug.py").write_text(f"PLACE = {folder!r}\n")
    job = configs.load("demo", JobConfig, "job", ["data.path=c", "name=demo", "license=1e-4"])
    job = dataclasses.replace(job, plugins=["plug.py", f"{long}/plug.py"])
    commands.submit("demo", Path("runs/demo"), configs.dump(job))
    Path("plug.py").write_text("raise ValueError('edited')\n")
    for name in [name for name in sys.modules if name.startswith("tandem_plugin")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "runs/demo/submissions/001"
    submitted = configs.load(str(folder / "config.yaml"), JobConfig, "job")
    assert submitted.plugins == [str(folder / f"plugins/{number}/plug.py") for number in (1, 2)]
    assert dataclasses.replace(submitted, plugins=job.plugins) == job
    assert [Path(path).read_text() for path in submitted.plugins] == [
        f"PLACE = {folder!r}\n" for folder in (".", long)
    ]
    load_plugins(job.plugins)  # as of an earlier start's config: the copies stand for them
    assert changes_since_run(job) == []
    Path("runs/demo/config.yaml").write_text(configs.dump(submitted))
    assert changes_since_run(dataclasses.replace(job, plugins=["plug.py", "plug.py"])) == []
    changed = changes_since_run(dataclasses.replace(job, plugins=["plug.py"]))
    assert [one.key for one in changed] == ["plugins"]


def test_seeds(tmp_path, capsys):
    commands.submit("demo", Path("runs/demo"), "", seeds=[3, 4])
    assert (tmp_path / "runs/demo/submissions/001/seeds").read_text() == "3\n4\n"
    assert "demo-seedN/logs" in capsys.readouterr().out


def test_words_of_the_job_and_words_of_sbatch(capsys):
    """In any order; a word that is neither is refused, with the nearest key."""
    words = ["demo", "steps=7", "--export", "A=1", "--exclusive", "seed=3", "--time=1:00:00"]
    words += ["--comment=a=b", "--partition", "demo"]  # called as the job is
    said = CliRunner().invoke(tandem.main, ["submit", *words, "--dry-run"])
    assert said.exit_code == 0, said.output
    for option in ("export=A=1", "exclusive", "time=1:00:00", "comment=a=b", "partition=demo"):
        assert f"#SBATCH --{option}\n" in said.output
    uneven = CliRunner().invoke(tandem.main, ["submit", "demo", "--nodes", "3", "--dry-run"])
    assert "16 sequences do not divide over 3 x 1 ranks" in uneven.output
    wrong = CliRunner().invoke(tandem.main, ["submit", "demo", "--nodes", "2", "stpes=10"])
    assert (wrong.exit_code, wrong.output.count("\n")) == (1, 1)
    assert "did you mean steps" in wrong.output
    assert CliRunner().invoke(tandem.main, ["submit", "--nodes", "2", "demo"]).exit_code == 2


def test_chain(tmp_path):
    commands.submit("demo", Path("runs/demo"), "", chain=3)
    calls = (tmp_path / "bin/sbatch.calls").read_text().splitlines()
    assert ["--dependency=afterany:41" in call for call in calls] == [False, True, True]


def test_slurm_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(LaunchError, match="sbatch is not installed here"):
        commands.submit("demo", Path("runs/demo"), "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"chain": 2, "seeds": [1]}, "cannot be combined with --seeds"),
        (
            {"batches": [64, 96], "options": ["--nodes=2-4"]},
            r"64 sequences .* 3 x 1 ranks; .* \(2-4\)",
        ),
        ({"options": ["--nodes=4-2"]}, "nodes: 4-2"),
    ],
)
def test_a_submission_that_cannot_work_is_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        commands.submit("demo", Path("runs/demo"), "", **arguments)


@pytest.mark.parametrize("command", ["submit", "finetune", "evaluate"])
@pytest.mark.parametrize(
    ("seeds", "words"), [("3,03", "name each seed once"), ("1" * 5000, "must be numbers")]
)
def test_seeds_that_cannot_be(command, seeds, words):
    ended = CliRunner().invoke(tandem.main, [command, "demo", "--seeds", seeds])
    assert ended.exit_code == 2
    assert words in ended.stderr


def test_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(LaunchError, match=r"runs/demo.*: Not a directory"):
        commands.submit("demo", Path("runs/demo"), "")


REFUSED = 'echo "sbatch: error: Batch job submission failed: Invalid account" >&2; exit 1'
UNKNOWN = """
echo "sbatch: unrecognized option '--partitionn=p'
Try \\"sbatch --help\\" for more information" >&2"""
LOST = 'echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1'
SECOND_REFUSED = f"""
case "$*" in *--dependency*) {REFUSED};; *) echo 41;; esac"""


@pytest.mark.parametrize(
    ("programs", "chain", "cancelled"),
    [
        ({"sbatch": REFUSED}, 1, ""),
        ({"sbatch": SECOND_REFUSED}, 3, "41\n"),
        ({"squeue": "echo '41|41|PENDING|QOSMaxNodePerJobLimit|x'"}, 1, "41\n"),
        ({"sbatch": LOST, "squeue": "echo '40|40|RUNNING|None|x'"}, 1, ""),
    ],
)
def test_a_refused_submission_leaves_nothing_behind(tmp_path, programs, chain, cancelled):
    cancel = 'echo "$*" >>"$0.calls"'
    install(tmp_path, scancel=cancel, **programs)
    (tmp_path / "bin/scancel.calls").touch()
    with pytest.raises(LaunchError, match=r"Invalid account|--nodes is more than|Socket timed out"):
        commands.submit("demo", Path("runs/demo"), "", chain=chain)
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "bin/scancel.calls").read_text() == cancelled


def test_a_refused_submission_leaves_the_run_as_it_was(tmp_path):
    commands.submit("demo", Path("runs/demo"), "steps: 3\n")
    before = sorted(tmp_path.glob("runs/**/*"))
    install(tmp_path, sbatch=REFUSED)
    with pytest.raises(LaunchError, match="Invalid account"):
        commands.submit("demo", Path("runs/demo"), "steps: 4\n")
    assert sorted(tmp_path.glob("runs/**/*")) == before


def test_a_job_whose_acceptance_got_lost_is_found_in_the_queue(tmp_path, capsys):
    """Once the controller responds again."""
    script = tmp_path / "runs/demo/submissions/001/job.sbatch"
    queue = f"""[ -e {script} ] || exit 0
    [ -e "$0.asked" ] || {{ touch "$0.asked"; echo "squeue: error: Socket timed out" >&2; exit 1; }}
    echo '7|7|RUNNING|None|/elsewhere/job.sbatch'
    echo '43|43|PENDING|Priority|{script}'"""
    install(tmp_path, sbatch=LOST, squeue=queue)
    commands.submit("demo", Path("runs/demo"), "steps: 3\n")
    assert "as job 43." in capsys.readouterr().out
    assert (script.parent / "jobs").read_text() == "43\n"
    with pytest.raises(LaunchError, match="job 43 of this run is pending"):
        commands.submit("demo", Path("runs/demo"), "steps: 3\n")


def test_where_the_queue_does_not_answer_either_nothing_is_forgotten(tmp_path):
    script = tmp_path / "runs/demo/submissions/001/job.sbatch"
    install(tmp_path, sbatch=LOST, squeue=f"[ ! -e {script} ]")
    with pytest.raises(LaunchError, match=r"Socket timed out; squeue .* squeue --name demo"):
        commands.submit("demo", Path("runs/demo"), "steps: 3\n")
    assert script.is_file()


def test_two_submissions_at_once_do_not_harm_each_other(tmp_path):
    job = slurm.plan_job("demo", Path("runs/demo"), ClusterConfig())
    slurm.submit(job, ClusterConfig(), "steps: 3\n")
    with pytest.raises(LaunchError, match="another submission took this number"):
        slurm.submit(job, ClusterConfig(), "steps: 4\n")
    assert (job.submission / "config.yaml").read_text() == "steps: 3\n"


def test_options_that_only_the_sites_sbatch_knows(capsys):
    options = ["--site-disk", "5", "--new-flag"]
    commands.submit("demo", Path("runs/demo"), "", options=options, dry_run=True)
    assert "#SBATCH --site-disk=5\n#SBATCH --new-flag\n" in capsys.readouterr().out


def test_paths_of_options_are_expanded_as_in_yaml(monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/me")
    options = ["--venv=~/env", "--python=$HOME/bin/python"]
    commands.submit("demo", Path("runs/demo"), "", options=options, dry_run=True)
    text = capsys.readouterr().out
    assert "must '. /home/me/env/bin/activate'" in text
    assert "train=(/home/me/bin/python " in text


def test_a_range_of_nodes_without_end_is_read_at_once(capsys):
    options = ["--nodes", f"1-{10**26}"]
    commands.submit("demo", Path("runs/demo"), "", options=options, dry_run=True)
    assert f"#SBATCH --nodes=1-{10**26}\n" in capsys.readouterr().out
    with pytest.raises(LaunchError, match="batch: 8 sequences do not divide over 3 x 1 ranks"):
        commands.submit("demo", Path("runs/demo"), "", options=options, batches=[8])


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_misspelt_option_is_refused_in_sbatchs_words(tmp_path, dry_run):
    install(tmp_path, sbatch=f"{UNKNOWN}; exit 1")
    arguments = {"options": ["--partitionn", "p"], "dry_run": dry_run}
    with pytest.raises(LaunchError, match=r"^sbatch: unrecognized option '--partitionn=p'$"):
        commands.submit("demo", Path("runs/demo"), "", **arguments)
    assert not (tmp_path / "runs").exists()


def test_variables_of_a_site_do_not_overrule_the_script(tmp_path, monkeypatch):
    """sbatch prefers SBATCH_* to the lines of a script: for a site's account, but not for tasks."""
    for name in ("WAIT", "GPUS", "NTASKS_PER_GPU", "ARRAY_INX", "ACCOUNT", "EXPORT"):
        monkeypatch.setenv(f"SBATCH_{name}", "1")
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv | grep ^SBATCH_ | sort >{tmp_path}/seen\necho 41\n")
    commands.submit("demo", Path("runs/demo"), "")
    assert (tmp_path / "seen").read_text() == "SBATCH_ACCOUNT=1\nSBATCH_EXPORT=1\n"


def test_a_job_that_submits_hands_on_nothing_of_its_own(tmp_path, monkeypatch):
    of_the_job = {"JOB_ID": "3", "ARRAY_JOB_ID": "3", "RESTART_COUNT": "2", "EXPORT_ENV": "NONE"}
    for name, text in of_the_job.items():
        monkeypatch.setenv(f"SLURM_{name}", text)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv | grep ^SLURM_ >{tmp_path}/seen\necho 41\n")
    commands.submit("demo", Path("runs/demo"), "")
    assert (tmp_path / "seen").read_text() == "SLURM_CONF=/etc/slurm.conf\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("if true; then", "syntax error"),
        ("}; evil() {", "syntax error"),
        ("echo 'a", "unexpected EOF"),
        ("cat <<END", "here-document"),
    ],
)
@pytest.mark.parametrize("key", ["before", "after"])
def test_a_line_that_breaks_the_script_is_named(tmp_path, key, line, words):
    site = tmp_path / "site.yaml"
    site.write_text(json.dumps({key: ["echo fine", line]}))
    with pytest.raises(LaunchError, match=words) as error:
        commands.submit("demo", Path("runs/demo"), "", str(site), dry_run=True)
    assert str(error.value).startswith(f"{key}[1]: {line!r}: ")
    assert "\n" not in str(error.value)


def test_a_line_may_be_a_whole_paragraph(tmp_path, capsys):
    site = tmp_path / "site.yaml"
    site.write_text("before:\n- |\n  for n in 1 2; do\n    echo $n\n  done\n")
    commands.submit("demo", Path("runs/demo"), "", str(site), dry_run=True)
    assert "must 'for n in 1 2; do\n  echo $n\ndone\n'" in capsys.readouterr().out
