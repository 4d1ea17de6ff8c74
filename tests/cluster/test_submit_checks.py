"""What `tandem submit` knows at submission: limits of partitions, and how the run stands."""

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import configs
import tandem
from cluster import LaunchError, commands
from cluster.config import ClusterConfig, with_options
from cluster.slurm import seconds
from configs.errors import OptionError
from tests.cluster.conftest import install
from tests.conftest import TINY_JOB
from trainer.checkpoint.attempts import Attempt

pytestmark = pytest.mark.usefixtures("slurm_programs")

PARTITIONS = """cat <<END
PartitionName=short Default=YES MaxNodes=2 MaxTime=1-00:00:00 MinNodes=0 TotalNodes=16
PartitionName=wide Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=4 TotalNodes=16
END"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nodes 3", "nodes: 3 requested, but partition short allows at most 2"),
        ("--nodes 3-4", "nodes: 3-4 requested, but partition short allows at most 2"),
        ("--nodes 2-4", ""),
        ("--nodes 3 --qos large", ""),
        ("--nodes 17 --qos large", "nodes: 17 requested, but partition short has 16"),
        ("--nodes 2 --partition wide", "partition wide requires at least 4"),
        ("--nodes 4 --partition short,wide --time 7-0", ""),
        (
            "--time 1-00:00:01",
            "sbatch.time: 1-00:00:01 requested, but partition short allows at most",
        ),
        ("--time 24:00:00", ""),
        ("--time infinite", "sbatch.time: infinite requested, but partition short allows"),
        ("--time 48:00:00 --time-min 12:00:00", ""),
        ("--partition nowhere --nodes 99", ""),
    ],
)
def test_what_a_partition_never_grants_is_said_at_once(tmp_path, options, words):
    install(tmp_path, scontrol=PARTITIONS)
    if not words:
        commands.submit("demo", Path("runs/demo"), "", options=options.split())
        return
    with pytest.raises(LaunchError, match=re.escape(words)):
        commands.submit("demo", Path("runs/demo"), "", options=options.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("1-2:03:04", 93784),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_times_of_sbatch(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["-5", "1:-30:00", "1:2:3:4", "1-2:3:4:5", "1_0", "1-", "", "x"])
def test_other_texts_are_no_times(text):
    with pytest.raises(ValueError, match="is no time"):
        seconds(text)


DEFAULTS = PARTITIONS.replace("MaxTime=1-", "DefaultTime=00:05:00 MaxTime=1-").replace(
    "MaxTime=UNLIMITED", "DefaultTime=NONE MaxTime=UNLIMITED"
)


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ("--time 2:00", "2:00 (sbatch.time)"),
        ("--time 2", "2 (sbatch.time)"),
        ("--time 2:01", ""),
        ("--time 0 --nodes 4 --partition wide", ""),
        ("--time 4:00:00 --time-min 1", "1 (sbatch.time)"),
        ("--time 5 --warning-seconds 300", "5 (sbatch.time)"),
        ("--warning-seconds 300", "00:05:00 (partition short)"),
        ("--warning-seconds 299", ""),
        ("--warning-seconds 300 --partition short,wide", ""),
        ("--warning-seconds 65535 --nodes 4 --partition wide", ""),
    ],
)
def test_a_time_limit_without_time_to_train_is_refused(tmp_path, monkeypatch, options, source):
    """Whether the command line, the cluster's file, the environment or the partition sets it."""
    install(tmp_path, scontrol=DEFAULTS)
    Path("site.yaml").write_text("warning_seconds: 120\n")

    def submit(*words):
        commands.submit("demo", Path("runs/demo"), "", cluster="site.yaml", options=words)

    if not source:
        submit(*options.split())
        return
    with pytest.raises(LaunchError, match=rf"^warning_seconds: .*{re.escape(source)}, before"):
        submit(*options.split())
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1:30")
    with pytest.raises(LaunchError, match=r"^warning_seconds: .* limit of 1"):
        submit(*options.split())
    assert not (tmp_path / "runs").exists()


def test_a_warning_longer_before_the_limit_than_sbatch_can_give_is_refused_by_its_option():
    with pytest.raises(OptionError, match=r"^--warning-seconds: must be .*65535"):
        with_options(ClusterConfig(), ["--warning-seconds", "65536"])


@pytest.mark.parametrize("name", ["cpu", "gpu", "container"])
def test_every_shipped_cluster_warns_in_time(name):
    site = configs.load(name, ClusterConfig, "cluster")
    assert seconds(site.sbatch["time"]) > site.warning_seconds


def submit_tiny(corpus, *words):
    places = [f"data.path={corpus}", f"output_dir={Path('runs').resolve()}"]
    return CliRunner().invoke(tandem.main, ["submit", str(TINY_JOB), *places, *words])


def refused(said, words):
    assert (said.exit_code, said.output.count("\n")) == (1, 1), said.output
    assert words in said.output
    assert not list(Path("runs").glob("*/submissions"))


def test_how_the_run_stands_is_known_at_submission(corpus, finished):
    """A finished run, one that trains elsewhere, and one that cannot resume with this config."""
    shutil.copytree(finished[0], "runs/tiny")
    refused(submit_tiny(corpus), "runs/tiny: finished; for another run")
    assert submit_tiny(corpus, "--dry-run").exit_code == 0
    refused(submit_tiny(corpus, "steps=9", "seed=5"), "seed: 1 -> 5: the order of the data")
    refused(
        submit_tiny(corpus, "steps=9", "students.tinybert.model.hidden_size=24"),
        "students.tinybert.model.hidden_size",
    )
    Attempt.begin(Path("runs/tiny"))  # by this process
    refused(submit_tiny(corpus, "steps=9"), "runs/tiny: this run is already running (process ")
    assert submit_tiny(corpus, "steps=9", "seed=5", "--no-check").exit_code == 0


def test_a_task_is_submitted_with_the_model_that_it_fine_tunes():
    words = ["submit", str(TINY_JOB), "data.path=c", "--model", "models/bert", "--dry-run"]
    said = CliRunner().invoke(tandem.main, words)
    assert said.exit_code == 0, said.output
    assert "#SBATCH --job-name=tiny_job-bert\n" in said.output
    named = CliRunner().invoke(tandem.main, [*words, "name=other"])
    assert "#SBATCH --job-name=other\n" in named.output


@pytest.mark.parametrize(
    ("option", "word", "key"),
    [
        ("--seeds", "1,2", "seed=5"),
        ("--model", "models/bert", "teacher.init.pretrained=models/other"),
        ("--model", "models/bert", "teacher.init={pretrained: models/other}"),
    ],
)
def test_a_key_that_an_option_sets_is_wrong_usage(option, word, key):
    words = ["submit", str(TINY_JOB), "data.path=c", option, word, key, "--dry-run"]
    said = CliRunner().invoke(tandem.main, words)
    assert said.exit_code == 2
    name = "seed" if option == "--seeds" else "teacher.init.pretrained"
    assert f"{name}: {option} sets this; give only one of the two" in said.output


def test_an_array_is_refused_where_every_seed_has_finished(corpus, finished):
    for seed in (1, 2):
        shutil.copytree(finished[0], f"runs/tiny-seed{seed}")
    refused(submit_tiny(corpus, "--seeds", "1,2"), "tiny-seed2: finished")
    Attempt.begin(Path("runs/tiny-seed2"))
    refused(submit_tiny(corpus, "steps=9", "--seeds", "1,2"), "seed2: this run is already running")
    assert submit_tiny(corpus, "--seeds", "1,2,3").exit_code == 0


@pytest.mark.parametrize("path", [None, "https://h/c"])
def test_stored_logits_are_looked_for_at_submission(corpus, path):
    frozen = ["objective", "optimizer", "schedule"]
    stored = [*(f"teacher.{key}=null" for key in frozen), "teacher.frozen=true"]
    stored += ["teacher.zero_stage=0", "teacher.init.pretrained=t", "teacher.stored.path=logits"]
    student = "{model: {base: demo_tinybert, vocab_size: 600}, objective: {soft_kl: {}, mlm: {}}}"
    stored += ["students=null", f"students.one={student}"]
    said = submit_tiny(path or corpus, *stored)
    refused(said, "logits: no stored predictions there; write them with `tandem store`")


def test_what_a_job_reads_is_looked_for_at_submission(tmp_path):
    def submit(*words):
        said = CliRunner().invoke(tandem.main, ["submit", "demo", *words])
        assert (said.exit_code == 0) == (tmp_path / "runs").exists(), said.output
        return said

    for words, message in {
        ("data.path=gone",): "gone: no such corpus",
        ("data.path=https://h/c", "teacher.init.pretrained=nowhere"): "nowhere",
    }.items():
        said = submit(*words)
        assert (said.exit_code, said.output.count("\n")) == (1, 1)
        assert message in said.output
    assert submit("data.path=gone", "--no-check").exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--partitionn", "p"], "sbatch: unrecognized option '--partitionn=p'"),
        (["--time", "2-00:00:00"], "sbatch.time: 2-00:00:00 requested, but partition short allows"),
    ],
)
def test_options_are_refused_before_the_data_is_prepared(tmp_path, monkeypatch, options, words):
    unknown = "echo \"sbatch: unrecognized option '--partitionn=p'\" >&2; exit 1"
    sbatch = f'case "$(cat)" in *partitionn*) {unknown};; esac'
    install(tmp_path, sbatch=sbatch, scontrol=PARTITIONS)
    monkeypatch.setattr("commands.runs.prepare", lambda job: pytest.fail("data was prepared"))
    ended = CliRunner().invoke(tandem.main, ["submit", str(TINY_JOB), *options])
    assert ended.exit_code == 1
    assert words in ended.stderr
    assert not (tmp_path / "runs").exists()
