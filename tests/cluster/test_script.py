"""The sbatch script: the golden text of its head, and hostile values that stay plain values."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from cluster import LaunchError
from cluster.config import ClusterConfig, with_options
from cluster.script import Job, build
from cluster.slurm import SOURCE, plan_job
from configs.errors import UserError

GOLDEN = Path(__file__).parent / "golden/job.sbatch"
HOSTILE = """a b"c'd $(touch pwned) `touch pwned` ; touch pwned # \\ %j * é"""
HOSTILE_PATH = HOSTILE.replace("\\", "").replace("%", "")


def job(**changes) -> Job:
    values = {
        "name": "large",
        "run": Path("/scratch/runs/large"),
        "submission": Path("/scratch/runs/large/submissions/001"),
        "directory": Path("/home/me"),
        "python": "python",
        "seeds": (1, 2, 5),
    }
    return Job(**(values | changes))


def test_golden():
    cluster = ClusterConfig(
        nodes="2-4",
        gpus_per_node="8",
        sbatch={"time": "24:00:00", "partition": "long", "exclusive": "", "overcommit": "false"},
        srun={"cpu-bind": "cores"},
        modules=["cuda/12.4", "nccl"],
        venv="/home/me/venv",
        container=["apptainer", "exec", "--nv", "my image.sif"],
        interface="ib0",
        variables={"NCCL_DEBUG": "WARN"},
        before=["nvidia-smi", "df -h"],
    )
    text = build(job(), cluster)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("name", ["gpu", "container", "cpu"])
def test_shipped_configs_build(name):
    text = build(job(), configs.load(name, ClusterConfig, "cluster"))
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0
    assert ("#SBATCH --mem=0\n" in text) == (name != "cpu")
    alone = build(job(seeds=()), configs.load(name, ClusterConfig, "cluster"))
    comments = re.findall(r"^(?:#[ !].*|)$", alone, re.MULTILINE)
    assert len(alone.splitlines()) - len(comments) <= 55, "it can be read at a glance"


def test_what_the_guide_binds_can_be_submitted(tmp_path):
    page = (SOURCE / "docs/binding.md").read_text()
    (tmp_path / "site.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    text = build(job(), configs.load(str(tmp_path / "site.yaml"), ClusterConfig, "cluster"))
    assert "srun=(--wait=300 --cpu-bind=cores --mem-bind=local --distribution=block:block)" in text


def test_the_comment_is_left_to_the_site():
    assert "--comment" not in build(job(), ClusterConfig())
    noted = build(job(), ClusterConfig(sbatch={"comment": "for the paper"}))
    assert "#SBATCH --comment='for the paper'\n" in noted


@pytest.mark.parametrize("name", ["true", "false", "no", "007"])
def test_a_name_is_never_taken_for_a_flag(name):
    text = build(job(name=name), ClusterConfig(sbatch={"exclusive": "true"}))
    for line in (f"--job-name={name}", "--exclusive"):
        assert f"#SBATCH {line}\n" in text


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(sbatch={"comment": "a\n#SBATCH --wrap=evil"}),
        ClusterConfig(variables={"A": "b\nc"}),
        ClusterConfig(modules=["a\rb"]),
    ],
)
def test_line_breaks_are_refused_with_the_key(cluster):
    with pytest.raises(LaunchError, match=r"^(sbatch.comment|variables.A|modules): "):
        build(job(), cluster)


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(variables={"WANDB_API_KEY": "0123"}),
        ClusterConfig(before=["export WANDB_API_KEY=0123"]),
        ClusterConfig(sbatch={"export": "ALL,WANDB_API_KEY=0123"}),
    ],
)
def test_a_key_does_not_get_into_the_script(cluster):
    with pytest.raises(LaunchError, match=r"^WANDB_API_KEY: .*wandb login") as error:
        build(job(), cluster)
    assert "0123" not in str(error.value)


def test_line_break_in_the_name_is_refused():
    with pytest.raises(LaunchError, match=r"^name: "):
        build(job(name="a\nb"), ClusterConfig())


def test_hostile_values_reach_the_ranks_as_they_are(tmp_path):
    """Run the script with bash; a stand-in for `srun` shows its arguments."""
    run = tmp_path / HOSTILE_PATH
    cluster = ClusterConfig(
        preflight=False,
        srun={"comment": HOSTILE},
        container=["env", "--", f"A={HOSTILE}"],
        variables={"WORD": HOSTILE},
    )
    submission = run / "submissions/001"
    submission.mkdir(parents=True)
    (submission / "code").symlink_to(SOURCE)
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$WORD" "$@"\n')
    srun.chmod(0o755)
    text = build(job(name=HOSTILE, run=run, submission=submission), cluster)
    env = os.environ | {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_ARRAY_TASK_ID": "2",
    }
    result = subprocess.run(
        ["bash"], input=text, text=True, capture_output=True, env=env, cwd=tmp_path, timeout=60
    )
    assert not result.stderr
    (log,) = (tmp_path / f"{run.name}-seed5/logs").iterdir()  # of this seed's own run
    lines = log.read_text().splitlines()
    assert lines[0] == HOSTILE
    assert f"--comment={HOSTILE}" in lines
    assert lines[lines.index("python") - 1] == f"A={HOSTILE}"
    trained = lines.index("train")
    assert lines[trained : trained + 4] == [
        "train",
        f"{submission}/config.yaml",
        "seed=5",
        configs.assignment("name", f"{HOSTILE}-seed5"),
    ]
    assert not list(tmp_path.rglob("pwned"))
    assert (tmp_path / f"{run.name}-seed5/slurm.jsonl").exists()


def test_chained_jobs_are_not_requeued():
    text = build(job(chained=True), ClusterConfig())
    assert "#SBATCH --no-requeue" in text
    assert "may_requeue=no" in text


def test_command_line_options():
    arguments = [
        "--nodes",
        "4",
        "--gpus-per-node=8",
        "--partition",
        "p",
        "--exclusive",
        "--time=1:00",
    ]
    config = with_options(
        ClusterConfig(sbatch={"partition": "old"}), [*arguments, "--preflight", "false"]
    )
    assert (config.nodes, config.gpus_per_node, config.preflight) == ("4", "8", False)
    assert config.sbatch == {"partition": "p", "exclusive": "", "time": "1:00"}


def test_gpus_of_one_kind_and_a_job_to_wait_for():
    options = ["--gpus-per-node", "a100:4", "--dependency", "afterok:12"]
    text = build(job(), with_options(ClusterConfig(), options))
    for line in ("gpus-per-node=a100:4", "ntasks-per-node=4", "dependency=afterok:12"):
        assert f"#SBATCH --{line}\n" in text
    assert "\ngpus=4\n" in text


def test_options_without_a_value_in_a_file(tmp_path):
    """As in YAML; false removes an option of the base."""
    file = tmp_path / "site.yaml"
    file.write_text("base: gpu\ngpus_per_node: 4\nsbatch: {exclusive: false, contiguous: true}\n")
    text = build(job(), configs.load(str(file), ClusterConfig, "cluster"))
    assert "#SBATCH --contiguous\n" in text
    assert "--exclusive" not in text


def test_a_container_image_is_for_the_ranks():
    """Options of NVIDIA's Pyxis: the script itself runs outside the container, beside SLURM."""
    config = with_options(ClusterConfig(), ["--container-image", "a.sqsh", "--qos", "high"])
    assert config.srun == {"container-image": "a.sqsh"}
    assert config.sbatch == {"qos": "high"}
    assert plan_job("demo", Path("runs/demo"), config).python == "python"
    assert plan_job("demo", Path("runs/demo"), ClusterConfig()).python == sys.executable


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["partition"], "'partition' is not an option"),
        (["--nodes", "many"], "--nodes: must be a number, or a range such as 2-4, not 'many'"),
        (["--gpus-per-node", "x"], "--gpus-per-node: must be a number, or one of a kind"),
        (["--warning-seconds", "x"], "--warning-seconds x: must be a number"),
        (["--cpus-per-task", "x"], "--cpus-per-task: must be a number, not 'x'"),
        (["--output", "x"], "--output: cannot be set: the log goes to the run folder"),
        (["--outp", "x"], "--outp: cannot be set: the log goes to the run folder"),
        (["--gpus", "8"], "--gpus: cannot be set: use gpus_per_node"),
        (["--gpus-per-task=1"], "--gpus-per-task: cannot be set: use gpus_per_node"),
        (["--ntasks-per-gpu", "1"], "--ntasks-per-gpu: cannot be set: use gpus_per_node"),
        (["--gres", "gpu:a100:x"], "--gres: 'gpu:a100:x' is not a number of GPUs"),
        (["--gres", "gpu:2", "--gpus-per-node", "2"], "--gres: gpus_per_node requests GPUs"),
        (["--wrap", "x"], "--wrap: cannot be set"),
        (["--wait"], "--wait: cannot be set"),
        (["--parsable"], "--parsable: cannot be set"),
        (["--clusters", "x"], "--clusters: cannot be set"),
        (["--Bad_name", "x"], "must be the long name of an option, not 'Bad_name'"),
        (["--requeue", "maybe"], "true or false"),
    ],
)
def test_bad_options_are_one_line(arguments, words):
    with pytest.raises(UserError, match=words) as error:
        with_options(ClusterConfig(), arguments)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2", 2),
        ("gpu", 1),
        ("gpu:a100", 1),
        ("gpu:a100:4", 4),
        ("gpu:a100:1,gpu:h100:2", 3),
        ("lustre:1,gres/gpu:2", 2),
    ],
)
def test_a_rank_for_each_gpu_that_gres_asks_for(gres, gpus):
    """For sites without --gpus-per-node."""
    text = build(job(), with_options(ClusterConfig(ranks_per_node=7), ["--gres", gres]))
    for line in (f"#SBATCH --gres={gres}", f"#SBATCH --ntasks-per-node={gpus}", f"gpus={gpus}"):
        assert f"\n{line}\n" in text
    assert "gpus-per-node" not in text


def test_gres_that_are_no_gpus():
    assert with_options(ClusterConfig(), ["--gres", "lustre:1"]).ranks == 1
    assert ClusterConfig(gpus_per_node="8", sbatch={"gres": "lustre:1"}).ranks == 8


@pytest.mark.parametrize(
    ("section", "name"),
    [
        *(("variables", name) for name in ("RANK", "WORLD_SIZE", "SLURM_NNODES", "UID")),
        *(("srun", name) for name in ("ntasks", "nodes", "gpus-per-task", "multi-prog")),
        *(("srun", name) for name in ("export", "export-file")),
    ],
)
def test_what_the_launcher_sets_is_left_to_it(section, name):
    with pytest.raises(ValueError, match=rf"^{section}\.{name}: "):
        ClusterConfig(**{section: {name: "1"}})


@pytest.mark.parametrize("name", ["run", "submission", "train", "code", "verdict", "seeds"])
def test_variables_of_the_script_are_its_own(name):
    with pytest.raises(LaunchError, match=rf"^variables\.{name}: "):
        build(job(), ClusterConfig(variables={name: "1"}))


def test_a_time_needs_no_quotes(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("sbatch:\n  time: 24:00:00\n")
    assert configs.load(str(file), ClusterConfig, "cluster").sbatch == {"time": "24:00:00"}


def test_bash_compares_the_caps_as_whole_numbers():
    caps = {"gpus_per_node": "8", "max_requeues": 1_000_000, "max_gpu_hours": 2_500_000.5}
    lines = build(job(), ClusterConfig(**caps)).splitlines()
    assert "max_requeues=1000000" in lines
    assert "max_gpu_seconds=9000001800" in lines


@pytest.mark.parametrize("name", ["base", "exp #2", "a: b", "it's", "50%", "1e5"])
def test_each_seed_has_a_run_of_its_name(name):
    text = build(job(name=name, seeds=(4, 7)), ClusterConfig())
    (line,) = [line for line in text.splitlines() if line.startswith("train+=")]
    script = f"seed=7; train=(); {line}; printf '%s\\n' \"${{train[@]}}\""
    words = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert configs.assigned(words.stdout.splitlines()) == {"seed": "7", "name": f"{name}-seed7"}
