"""Jobs that store predictions, compare models or score a run, by the batch script and by status."""

import json
import signal

import pytest
from click.testing import CliRunner

import configs
import tandem
from cluster import commands
from cluster.ranks import reported
from cluster.scheduler import QueuedJob
from cluster.script import Work
from cluster.status import read_run, read_runs
from configs.suites import SuiteConfig
from tests.cluster.batch_script import Run, wait_for
from tests.cluster.conftest import install
from tests.conftest import TINY_JOB
from tests.waiting import SECONDS

STORE, EVALUATE = Work(("store",), "targets"), Work(("evaluate",), suite="glue")
BOTH = Work(("store", "train"), "targets")

STORES = """
case "$*" in
*"tandem.py store"*) echo stored >>"$CALLS.store"; touch "$TANDEM_OUTCOME"; exit 0 ;;
esac
"""


@pytest.mark.parametrize("work", [STORE, EVALUATE])
def test_the_proof_of_an_end_is_what_the_command_leaves(tmp_path, work):
    """Not the exit code of srun, and not the records of another attempt."""
    run = Run(tmp_path, work=work)
    assert run.end("attempt ', \"finished\": true'; exit 0")[:2] == ("requeue", 70)
    assert run.end('touch "$TANDEM_OUTCOME"; kill -9 $$', 1) == ("done", 0, "finished")
    assert run.end("touch started; exit 1", 2) == ("done", 0, "finished")
    assert not (tmp_path / "run/started").exists()


def test_a_stop_is_told_without_an_exit_code_that_slurm_counts_as_a_failure(tmp_path):
    run = Run(tmp_path)
    stops = 'touch "$TANDEM_OUTCOME.stopped"; exit 0'
    assert run.end(f"step 1; {stops}")[:2] == ("requeue", 0)
    assert run.end("step 2; exit 0", 1)[:2] == ("requeue", 70), "that of the start before is gone"


@pytest.mark.parametrize(
    ("code", "rank", "exits", "written"),
    [
        (0, "0", 0, ["train"]),
        (75, "0", 0, ["train.stopped"]),
        (75, "1", 0, []),
        (1, "0", 1, []),
    ],
)
def test_a_process_reports_its_end_to_the_batch_script(tmp_path, code, rank, exits, written):
    env = {"TANDEM_OUTCOME": str(tmp_path / "train"), "SLURM_PROCID": rank}
    assert reported(code, env) == exits
    assert [path.name for path in tmp_path.iterdir()] == written
    assert reported(code, {}) == code


def test_predictions_are_stored_once_and_then_read(tmp_path):
    run = Run(tmp_path, work=BOTH)
    assert run.end(f"{STORES} step 5; kill -9 $$")[0] == "requeue"
    assert run.end(f"{STORES} step 6; finish", 1) == ("done", 0, "finished")
    assert (tmp_path / "calls.store").read_text() == "stored\n"


def test_a_store_that_fails_trains_nothing(tmp_path):
    run = Run(tmp_path, work=BOTH)
    event, code, why = run.end("touch train-$((++n)); echo tandem: no corpus; exit 1")
    assert (event, code, why) == ("final", 1, "the ranks failed: no corpus")
    assert [path.name for path in (tmp_path / "run").glob("train-*")] == ["train-1"]


@pytest.mark.parametrize("asked", ["signal", "request"])
def test_what_is_asked_while_it_stores_ends_it_before_it_trains(tmp_path, asked):
    run = Run(tmp_path, work=BOTH)
    waits = "trap 'exit 75' USR1; touch ready; while [ ! -e go ]; do sleep 0.05; done"
    train = f"case $* in *' train '*) touch started ;; esac; {waits}; {STORES}"
    process = run.start(train)
    wait_for(tmp_path / "run/ready")
    if asked == "signal":
        process.send_signal(signal.SIGUSR1)
    else:
        (tmp_path / "run/requests").mkdir()
        (tmp_path / "run/requests/stop.json").touch()
        (tmp_path / "run/go").touch()
    process.communicate(timeout=SECONDS)
    ends = {"signal": ("requeue", 0, "the time limit"), "request": ("final", 75, "stopped on")}
    event, code, why = run.last(process.returncode)
    assert (event, code, why[: len(ends[asked][2])]) == ends[asked]
    assert not (tmp_path / "run/started").exists()


def test_an_evaluation_is_one_process_with_the_cpus_of_all_ranks(tmp_path):
    given = {"nodes": "1", "ranks_per_node": 4, "sbatch": {"cpus-per-task": "3"}}
    run = Run(tmp_path, work=EVALUATE, **given)
    env = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "3"}
    run.end('echo "$*" >words; touch "$TANDEM_OUTCOME"', **env)
    words = (tmp_path / "run/words").read_text()
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=12 " in words
    config = f"{run.submission}/glue.yaml"
    assert f"tandem.py evaluate --suite {config} --nproc 4" in words


@pytest.mark.parametrize(
    ("work", "does"),
    [
        (STORE, 'mkdir -p "$OLDPWD/targets"; touch "$OLDPWD/targets/logits-{}"; kill -9 $$'),
        (EVALUATE, "mkdir -p runs/t-{0}; cd runs/t-{0}; step {0}; kill -9 $$"),
    ],
)
def test_what_is_done_of_a_stage_is_progress(tmp_path, work, does):
    run = Run(tmp_path, work=work, max_requeues_without_progress=0)
    for restart in range(3):
        assert run.end(does.format(restart + 1), restart)[0] == "requeue"
    assert run.end("kill -9 $$", 3)[0] == "final"


def tell(folder, *events):
    for event in events:
        note = {"event": event, "code": 0, "reason": "", "job": "41"}
        with (folder / "slurm.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")


@pytest.mark.parametrize("work", [STORE, EVALUATE])
@pytest.mark.usefixtures("slurm_programs")
def test_status_of_what_is_no_run(tmp_path, work):
    folder = tmp_path / "runs/demo-store"
    options = ["--nodes", "1"]
    commands.submit("demo-store", folder, "a: 1\n", options=options, work=work)
    job = QueuedJob("41", "41", "PENDING", "Priority")
    assert [row.state for row in read_runs(tmp_path / "runs", [job])] == ["queued"]
    tell(folder, "start")
    running = read_run(folder, [QueuedJob("41", "41", "RUNNING", "None")])
    assert (running.state, running.step, running.steps) == ("running", 0, None)
    assert (running.attempts, running.finished_runs) == (1, None)
    tell(folder, "done")
    assert read_run(folder, []).state == "finished"
    commands.submit("demo-store", folder, "a: 1\n", options=options, work=work)
    tell(folder, "start", "final")
    assert read_run(folder, []).state == "failed"


@pytest.mark.usefixtures("slurm_programs")
def test_status_of_a_suite_counts_its_finished_runs(tmp_path, monkeypatch):
    folder = tmp_path / "runs/glue"
    commands.submit("glue", folder, "a: 1\n", options=["--nodes", "1"], work=EVALUATE)
    tell(folder, "start")
    for name in ("cola-big-seed1", "rte-big-seed1"):
        (folder / "runs" / name).mkdir(parents=True)
    (folder / "runs/cola-big-seed1/evaluation.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(tandem.main, ["status", "glue"]).output
    assert "1 run " in said, said


@pytest.mark.usefixtures("slurm_programs")
def test_what_is_no_run_is_stopped_by_slurm(tmp_path, monkeypatch):
    folder = tmp_path / "runs/demo-store"
    commands.submit("demo-store", folder, "a: 1\n", work=STORE)
    install(
        tmp_path,
        squeue=f"echo '41|41|RUNNING|None|{folder}/submissions/001/job.sbatch'",
        scancel='echo "$*" >>"$0.calls"',
    )
    said = CliRunner().invoke(tandem.main, ["stop", str(folder)])
    assert (said.exit_code, said.output) == (
        0,
        f"{folder}: cancelled job 41; what it has done stays\n",
    )
    assert (tmp_path / "bin/scancel.calls").read_text() == "41\n"


FROZEN = [f"teacher.{key}=null" for key in ("objective", "optimizer", "schedule")]
FROZEN += ["teacher.frozen=true", "teacher.zero_stage=0", "teacher.init.pretrained=t"]
FROZEN += ["students=null", "teacher.stored.path=logits"]
FROZEN += [
    "students.one={model: {base: demo_tinybert, vocab_size: 600}, "
    "objective: {soft_kl: {}, mlm: {}}}",
]


def submit(*words):
    said = CliRunner().invoke(tandem.main, ["submit", *map(str, words)])
    return said.exit_code, said.output


def test_predictions_are_submitted_alone_or_before_training():
    job = [TINY_JOB, "data.path=c", *FROZEN, "--dry-run"]
    code, script = submit("store", *job)
    assert code == 0, script
    for line in ("stages=(store)", "#SBATCH --job-name=tiny-store", "stored=logits"):
        assert f"{line}\n" in script
    assert "/runs/tiny-store/submissions/001/code/tandem.py store " in script
    code, script = submit(*job, "--store")
    assert code == 0, script
    for line in ("stages=(store train)", "#SBATCH --job-name=tiny"):
        assert f"{line}\n" in script
    code, message = submit("store", TINY_JOB, "data.path=c", "--dry-run")
    assert (code, message) == (
        1,
        "tandem: teacher.stored: must be set: a path, top_k and precision\n",
    )


@pytest.mark.usefixtures("slurm_programs")
def test_predictions_that_are_stored_first_need_not_be_there(corpus, finished, tmp_path):
    teacher = finished[0] / "exports/teacher"
    job = [TINY_JOB, f"data.path={corpus}", *FROZEN, f"teacher.init.pretrained={teacher}"]
    assert "write them with `tandem store`" in submit(*job)[1]
    code, output = submit(*job, "--store")
    assert code == 0, output
    assert len(list(tmp_path.glob("runs/tiny/submissions/001/config.yaml"))) == 1


def test_a_suite_is_submitted_with_its_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("big", "a=b"):
        (tmp_path / name).mkdir()
    words = ["big", "a=b", "data.root=d", "--seeds", "1,2", "--time", "1:00:00", "--untrained"]
    code, script = submit("evaluate", "--suite", "demo", *words, "epochs=2", "--dry-run")
    assert code == 0, script
    (line,) = [line for line in script.splitlines() if line.startswith("evaluate=")]
    suite = tmp_path / "runs/suites/demo/submissions/001/demo.yaml"
    assert f"evaluate --suite {suite} big a=b data.root=d epochs=2 --out runs/suites/demo" in line
    assert line.endswith("--seeds 1,2 --untrained --nproc 1)")
    assert "#SBATCH --time=1:00:00\n" in script
    told = submit("evaluate", "--suite", "demo", "big", "--nodes", "2", "--dry-run")
    assert told == (1, "tandem: nodes: 2: an evaluation runs on one node; add --nodes 1\n")


def test_the_copy_of_a_suite_is_the_suite(tmp_path):
    for name in ("demo", "glue_mini", "other_heads"):
        suite = configs.load(name, SuiteConfig, "suite")
        (tmp_path / "suite.yaml").write_text(configs.dump(suite))
        assert configs.load(str(tmp_path / "suite.yaml"), SuiteConfig, "suite") == suite


def test_a_run_is_scored_by_a_job_of_its_own(finished):
    code, script = submit("evaluate", finished[0], "--dry-run")
    assert code == 0, script
    assert f"evaluate {finished[0]})\n" in script
    assert f"run={finished[0]}-evaluate\n" in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["store", "demo", "--seeds", "1,2"], "--seeds does not go with `tandem submit store`"),
        (["demo", "--suite", "demo"], "--suite does not go with `tandem submit train`"),
        (["evaluate", "demo", "--store"], "--store does not go with `tandem submit evaluate`"),
        (["demo", "--store", "--seeds", "1,2"], "--store: does not go with --seeds"),
        (["evaluate", "--suite", "demo"], "name a CONFIG"),
        (["--nodes", "2", "demo"], "--nodes: put CONFIG before the options of sbatch"),
        (["demo", "-C", "a=1", "--dry-run"], "'-C' is not an option; write --name value"),
    ],
)
def test_options_that_do_not_go_together(words, message):
    code, output = submit(*words)
    assert (code, message in output) == (2, True), output
