"""The plan's formulas against published values, and its choices."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re

import pytest
from click.testing import CliRunner

from cluster import LaunchError
from cluster.planning.failures import best_interval, expect, simulate
from cluster.planning.machine import Machine, collective, step_time
from cluster.planning.memory import (
    at_stages,
    choose,
    host_memory,
    job_memory,
    learner_memory,
    options,
)
from cluster.planning.plan import make_plan
from cluster.planning.text import describe
from configs.devices import device_named
from configs.errors import OptionError
from configs.plan_facts import CacheFacts, JobFacts, StoredFacts
from tandem import main
from tests.cluster.plans import H100, TEACHER
from tests.conftest import tandem

STUDENT = dataclasses.replace(TEACHER, name="tiny", parameters=500_000, trained=500_000)
JOB = JobFacts("job", 1000, 64, 128, 8, 100, (TEACHER, STUDENT))


def test_states_are_those_of_the_zero_paper():
    """float32 throughout: 16 bytes for a parameter, of which stage 3 leaves its share of 20.

    Rajbhandari et al., arXiv 1910.02054, section 3.1, with DeepSpeed's float32 master copy beside
    the float32 parameters at stages 1 to 3. The bucket is left out. Without accumulation nothing of
    the whole gradients stays at stage 1 either.
    """
    ranks, size = 8, TEACHER.trained
    held = []
    for stage in range(4):
        one = dataclasses.replace(TEACHER, zero_stage=stage, bucket=0)
        for accumulates in (False, True):
            memory = learner_memory(one, ranks, 1, accumulates, overlaps=True)
            held.append((memory.states + memory.gradients) / size)
    expected = [(16, 16), (4 + 16 / 8, 8 + 12 / 8), (4 + 16 / 8,) * 2, (20 / 8,) * 2]
    assert held == pytest.approx([bytes_ for pair in expected for bytes_ in pair])


def test_students_work_one_after_another():
    machine = Machine(H100, overlaps=False)
    both = job_memory(JOB, machine).peak
    longer = dataclasses.replace(JOB, learners=(TEACHER, STUDENT, STUDENT))
    states = 16 * STUDENT.trained
    assert job_memory(longer, machine).peak - both == pytest.approx(states + 8 * 1e5)


def test_a_frozen_teacher_has_parameters_only():
    frozen = dataclasses.replace(TEACHER, trained=0)
    memory = learner_memory(frozen, 8, 8, accumulates=False, overlaps=True)
    assert (memory.states, memory.gradients) == (4 * TEACHER.parameters, 0)
    job = dataclasses.replace(JOB, learners=(frozen, STUDENT))
    others = dataclasses.replace(JOB, learners=(TEACHER, frozen))
    assert at_stages(others, 3, 1).learners[1].zero_stage == 0
    assert step_time(job, Machine(H100, nodes=2)).learners["teacher"].communication == 0


def test_an_all_reduce_moves_twice_its_bytes_over_the_slower_way():
    """As the bus bandwidth of NVIDIA's nccl-tests: 2 (n - 1) / n bytes per byte reduced."""
    size, exact = 1e9, {"busy_bandwidth": 1.0, "latency": 0.0}
    within = collective(size, 2, Machine(H100, 1, 8, **exact))
    assert within == pytest.approx(2 * 7 / 8 * size / 450e9)
    between = collective(size, 2, Machine(H100, 64, 1, **exact))
    assert between == pytest.approx(2 * 63 / 64 * size / 50e9)
    assert collective(0.0, 2, Machine(H100, 4, 8)) == pytest.approx(2 * 3 * 15e-6)


@pytest.mark.parametrize(("stage", "share"), [(0, 1 / 2), (1, 3 / 4), (2, 2 / 3), (3, 1 / 2)])
def test_in_bf16_gradients_and_what_stage_3_gathers_take_half_the_bytes(stage, share):
    """Two passes a step, so that stage 2 reduces twice; updated parameters stay float32."""
    machine = Machine(H100, 2, 2)
    usual, low = (
        dataclasses.replace(TEACHER, zero_stage=stage, exchanged=exchanged) for exchanged in (4, 2)
    )
    of_usual, of_low = (
        step_time(dataclasses.replace(JOB, learners=(one,)), machine).learners["teacher"]
        for one in (usual, low)
    )
    assert of_low.sent == pytest.approx(share * of_usual.sent)
    assert of_low.communication < of_usual.communication


@pytest.mark.parametrize(("stage", "share"), [(0, 1), (1, 3 / 4), (2, 5 / 6), (3, 4 / 6)])
def test_of_bf16_weights_half_the_bytes_are_gathered(stage, share):
    """Two passes a step: gradients go once or twice, weights once, or at stage 3 4 times."""
    machine = Machine(H100, 2, 2)
    usual, low = (
        dataclasses.replace(TEACHER, zero_stage=stage, weight_bytes=size) for size in (4, 2)
    )
    of_usual, of_low = (
        step_time(dataclasses.replace(JOB, learners=(one,)), machine).learners["teacher"]
        for one in (usual, low)
    )
    assert of_low.sent == pytest.approx(share * of_usual.sent)


def test_bf16_weights_need_masters_at_every_stage_and_half_of_the_parameters():
    """1M parameters with two states, on one rank, in bytes for each parameter."""
    for stage in range(4):
        learners = (
            dataclasses.replace(TEACHER, zero_stage=stage, weight_bytes=size) for size in (4, 2)
        )
        usual, low = (learner_memory(learner, 1, 1, False, False) for learner in learners)
        assert (usual.parameters, low.parameters) == (4e6, 2e6)
        assert low.optimizer - usual.optimizer == (0 if stage else 4e6), stage


def test_what_each_stage_sends_and_how_long_that_takes():
    """4 ranks, 3 passes, 2 buckets; 2 MB of bf16 gradients or parameters, 4 MB as float32.

    Of each byte, an all-reduce sends 2 * 3/4 and a gather or scatter 3/4. Between the nodes 1/2
    of a byte goes over 2 adapters of 0.25 GB/s each, so 2 MB take 2 ms, twice that reduced. A
    call's latency is 4 us, which is 3 us over log2(2) + log2(2) / 3 hops; twice that reduced.
    Stage 0: one all-reduce, in one call.
    Stage 1: one scatter, and a gather of float32 parameters, in 2 calls.
    Stage 2: three scatters, and the same gather.
    Stage 3: three scatters of gradients and six gathers of parameters, in bf16.
    """
    device = dataclasses.replace(H100, link_bandwidth=1.0, network_bandwidth=0.25)
    machine = Machine(device, 2, 2, busy_bandwidth=1.0, latency=3e-6)
    megabytes = [2 * 2, 2 + 4, 3 * 2 + 4, 3 * 2 + 6 * 2]
    gather, latency = 4 + 2 * 0.004, 0.004
    milliseconds = [
        4 + 2 * latency,
        2 + latency + gather,
        3 * (2 + latency) + gather,
        (3 + 6) * (2 + 2 * latency),
    ]
    for stage in range(4):
        learner = dataclasses.replace(TEACHER, zero_stage=stage, bucket=500_000, exchanged=2)
        job = dataclasses.replace(JOB, rows=12, micro_batch=1, learners=(learner,))
        time = step_time(job, machine).learners["teacher"]
        assert time.sent == pytest.approx(0.75e6 * megabytes[stage]), stage
        assert time.communication == pytest.approx(1e-3 * milliseconds[stage]), stage


def test_a_step_takes_its_flops_at_the_mfu():
    time = step_time(JOB, Machine(H100, 1, 1, mfu=0.5, launch=0.0))
    computing = sum(one.forward + one.backward for one in time.learners.values())
    assert computing == pytest.approx(64 * 2 * 3e9 / (989.4e12 * 0.5))
    assert time.exposed == 0
    held_up = step_time(JOB, Machine(H100, 1, 1, launch=1.0))
    assert held_up.learners["teacher"].forward == pytest.approx(8 / 3)  # 8 passes of one kernel


def test_reductions_hide_behind_the_backward_pass_once_there_are_several_buckets():
    machine = Machine(H100, 8, 8, launch=1e-3)
    whole = dataclasses.replace(TEACHER, zero_stage=1, offloaded=True)
    cut = dataclasses.replace(whole, bucket=250_000)
    for learner, share in ((whole, 0.0), (cut, 0.75)):
        job = dataclasses.replace(JOB, learners=(learner,))
        time = step_time(job, machine).learners["teacher"]
        reduce = time.communication - collective(4e6, 1, machine, 4 if share else 1)
        assert time.hidden == pytest.approx(share * reduce)
        on_gpu = dataclasses.replace(learner, offloaded=False)
        job = dataclasses.replace(JOB, learners=(on_gpu,))
        assert step_time(job, machine).learners["teacher"].hidden == 0


def test_the_best_interval_is_young_s_and_daly_s():
    assert best_interval(60, 0, 24 * 3600) == pytest.approx(math.sqrt(2 * 60 * 86400) - 60)
    assert best_interval(60, 0, 100) == 100  # Daly: where a checkpoint costs more than half of M
    assert best_interval(1, 7200, 24 * 3600) == 7200


@pytest.mark.parametrize(("mtbf", "restart"), [(20_000, 0), (5_000, 300), (2_000, 600)])
def test_simulated_time_is_daly_s_closed_form(mtbf, restart):
    """``M exp(R/M) (exp((t + d)/M) - 1) W/t``: Daly 2006, equation 20; restarts may fail too."""
    work, interval, stall = 400_000.0, 1000.0, 50.0
    closed = mtbf * math.exp(restart / mtbf) * (math.exp((interval + stall) / mtbf) - 1)
    generator = random.Random(0)
    runs = [simulate(work, interval, stall, 0.0, mtbf, restart, generator)[0] for _ in range(200)]
    assert sum(runs) / len(runs) == pytest.approx(closed * work / interval, rel=0.02)


def test_a_run_that_fails_all_the_time_takes_daly_s_mean_or_never_ends():
    """A simulation would never end. Up to this limit, both methods agree."""
    common = {"stall": 50.0, "write": 200.0, "mtbf": 5000.0, "restart": 300.0}
    long, short = (expect(work, 1000.0, **common) for work in (4e7, 6e6))
    assert long.effective_p5 == long.effective == pytest.approx(short.effective, rel=0.02)
    assert long.failures == pytest.approx(short.failures * 4e7 / 6e6, rel=0.02)
    for hopeless in ({"restart": 5e6}, {"write": 5e6}, {"mtbf": 1e-3}):
        assert expect(1e6, 1000.0, **(common | hopeless)).effective == 0
    plan = make_plan(JOB, Machine(H100, nodes=8, gpus_per_node=1, node_mtbf_hours=1e-9))
    assert "so that the run never ends" in describe(plan)
    assert json.loads(plan.to_json())["scaling"][0]["days"] is None


def test_meta_s_run_trains_as_much_of_the_time_as_reported():
    """Llama 3: more than 90% effective with 16,384 GPUs, one failure every three hours."""
    work, mtbf = 54 * 86400.0, 54 * 86400 / 419
    taken, failures = simulate(work, 600.0, 1.0, 60.0, mtbf, 300.0, random.Random(0))
    assert 0.9 < work / taken < 0.97
    assert failures == pytest.approx(419, rel=0.2)


def test_the_smallest_stages_that_leave_room_are_recommended():
    roomy = choose(JOB, Machine(H100))
    assert (roomy.option.teacher_stage, roomy.option.student_stage) == (0, 0)
    assert roomy.option.micro_batch == 8
    big = dataclasses.replace(TEACHER, parameters=12_000_000_000, trained=12_000_000_000)
    tight = choose(dataclasses.replace(JOB, learners=(big, STUDENT)), Machine(H100, 8, 8))
    assert (tight.option.teacher_stage, tight.option.student_stage) == (3, 0)
    assert tight.memory.needed < 80e9
    huge = dataclasses.replace(big, trained=400_000_000_000, parameters=400_000_000_000)
    assert choose(dataclasses.replace(JOB, learners=(huge,)), Machine(H100)) is None


def test_memory_and_time_follow_the_states_of_the_optimizer():
    machine, leaner = Machine(H100), dataclasses.replace(TEACHER, states=1.0)
    two, single = (learner_memory(one, 1, 8, False, True) for one in (TEACHER, leaner))
    assert two.optimizer - single.optimizer == 4 * TEACHER.trained
    jobs = [dataclasses.replace(JOB, learners=(one,)) for one in (TEACHER, leaner)]
    updates = [step_time(job, machine).learners["teacher"].update for job in jobs]
    assert updates[1] == pytest.approx(5 / 7 * updates[0])


def test_what_is_recommended_for_a_frozen_teacher_can_be_set():
    frozen = dataclasses.replace(TEACHER, trained=0, zero_stage=0)
    job = dataclasses.replace(JOB, learners=(frozen, STUDENT))
    there = {(one.teacher_stage, one.student_stage) for one in options(job, Machine(H100))}
    assert there == {(teacher, student) for teacher in (0, 3) for student in range(4)}
    offloaded = dataclasses.replace(frozen, zero_stage=3, offloaded=True)
    job = dataclasses.replace(JOB, learners=(offloaded, STUDENT))
    assert {one.teacher_stage for one in options(job, Machine(H100))} == {3}


def test_a_plan_scales_to_thousands_of_gpus():
    cache = CacheFacts(shard_bytes=2**26, limit_gb=50)
    teacher = dataclasses.replace(JOB.learners[0], name="teacher" * 8)
    learners = (teacher, *JOB.learners[1:])
    job = dataclasses.replace(JOB, rows=8192, steps=10**8, cache=cache, learners=learners)
    plan = make_plan(job, Machine(H100, nodes=2, price=2.0))
    assert plan.scaling[-1].gpus == 4096
    assert plan.cost == pytest.approx(2 * plan.gpu_hours)
    assert plan.gpu_hours == pytest.approx(16 * 24 * plan.days)
    assert plan.scaling[-1].effective < plan.scaling[0].effective
    with pytest.raises(LaunchError, match=r"batch: 8192 sequences .* 24 GPUs"):
        make_plan(job, Machine(H100, nodes=3))
    text = describe(plan)
    assert "zero_stage 0" in text
    assert "each of its 4,096 sequences of a step, 275 GB (data.cache_gb: 50)" in text
    assert all(len(line) <= 130 for line in text.splitlines())
    assert "…" not in text, "a long name cuts off numbers"


def test_a_device_is_known_by_the_name_torch_gives_it():
    assert device_named("NVIDIA H100 80GB HBM3") == H100
    assert device_named("NVIDIA GeForce RTX 4090").memory_gb == 24
    assert device_named("NVIDIA GeForce RTX 4090 Laptop GPU") is None  # another chip
    assert device_named("AMD EPYC") is None


def test_the_command_plans_a_job_and_names_what_is_wrong():
    keys = ["batch.size=64", "steps=1000", "batch.growth=[{step: 900, size: 128}]"]
    budgets = ["students.tinybert.budget.steps=100", "students.distilbert.start.step=850"]
    keys += ["data.path=pipe:ssh host cat {}", "data.cache_gb=2"]
    done = tandem("plan", "demo", "--nodes", 2, *keys, *budgets, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {"teacher", "distilbert", "tinybert"} == plan["by_stage"].keys()
    assert plan["fits"]
    active = {one["name"]: one["active"] for one in plan["job"]["learners"]}
    assert active == {"teacher": 1, "distilbert": 0.15, "tinybert": 0.1}
    assert plan["job"]["assumed"] == [
        "no student waits for the teacher's quality",
        "the global batch is the size of most steps",
        "attention within documents takes as many products as over whole rows",
    ]
    assert plan["job"]["cache"] == {"shard_bytes": 2**26, "limit_gb": 2}
    uneven = tandem("plan", "demo", "--nodes", 2, *keys, "batch.growth[0].size=136")
    assert uneven.returncode == 0
    assert "warning: batch: 136 sequences do not divide over 16 GPUs; choose" in uneven.stderr
    wrong = tandem("plan", "demo", "--device", "h101")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "did you mean h100" in wrong.stderr or "h100" in wrong.stderr
    short = tandem("plan", "demo", "data.path=corpus", "teacher.model.max_positions=64")
    assert short.returncode == 1
    assert short.stderr.startswith("tandem: teacher.model.max_positions: must be at least 128, the")


AT_HOME = [
    "cpu",
    *(
        pytest.param(f"rtx{kind}", marks=pytest.mark.slow)
        for kind in ("4090", "3090", "4070_laptop")
    ),
]


@pytest.mark.parametrize("device", AT_HOME)
def test_a_plan_for_a_machine_at_home(device):
    done = tandem("plan", "demo", "--device", device)
    assert done.returncode == 0, done.stderr
    unit = "CPU" if device == "cpu" else "GPU"
    assert f"1.0M tokens, on 1 {unit}\n" in done.stdout
    assert ("GPU" in done.stdout) == (device != "cpu")
    assert not re.search(r"\b0\.00? GB|\b0\.0B|\b0\.0 hours|\b0 [CG]PU-hours", done.stdout)
    assert "it fits" in done.stdout


def test_a_cpu_has_no_gpus():
    refused = tandem("plan", "demo", "--device", "cpu", "--gpus-per-node", 2)
    assert refused.returncode == 2
    assert "--gpus-per-node: --device cpu has none" in refused.stderr


@pytest.mark.parametrize(
    "option",
    [
        "--mfu=0",
        "--mfu=1e-320",
        "--node-mtbf-hours=0",
        "--restart-seconds=-1",
        "--store-gbs=0",
        "--price=-1",
    ],
)
def test_machines_that_cannot_be(option):
    assert CliRunner().invoke(main, ["plan", "demo", option]).exit_code == 2


def test_a_device_needs_the_rate_that_every_precision_falls_back_to():
    with pytest.raises(ValueError, match=r"^tflops: .*fp32"):
        dataclasses.replace(H100, tflops={"bf16": 100.0})


def test_waiting_is_weighted_as_the_time_is_by_when_a_learner_is_there():
    seldom = dataclasses.replace(STUDENT, active=0.05)
    machine = Machine(H100, 2, 8, overlaps=False)
    time = step_time(dataclasses.replace(JOB, learners=(TEACHER, *[seldom] * 4)), machine)
    teacher, student = (time.learners[name].exposed for name in ("teacher", "tiny"))
    assert time.exposed == pytest.approx(teacher + 4 * 0.05 * student)
    assert time.exposed < time.seconds


def test_a_time_limit_makes_starts():
    """Every start loses the warning and its set-up, and the last one may be shorter."""
    machine = Machine(H100, mfu=1e-6, restart_seconds=400, node_mtbf_hours=1e9)
    work = make_plan(JOB, machine).time.seconds * JOB.steps
    limit = math.ceil(work / 3) + 700  # a little more than a third of the run
    plan = make_plan(JOB, dataclasses.replace(machine, time_limit=limit))
    assert plan.starts is not None
    assert (plan.starts.count, plan.starts.training) == (3, limit - 700)
    assert plan.starts.overhead == pytest.approx(
        400 + plan.reliability.stall + plan.reliability.write
    )
    hours = plan.starts.overhead * 3 / 3600
    assert ": 3 starts of " in describe(plan)
    assert f"starting and saving, all of them {hours:.3g} hours, besides" in describe(plan)
    assert json.loads(plan.to_json())["starts"]["count"] == 3
    less = make_plan(JOB, dataclasses.replace(machine, time_limit=limit - 2))
    assert less.starts is not None
    assert less.starts.count == 4
    assert make_plan(JOB, machine).starts is None
    with pytest.raises(OptionError, match=r"^--time: 700 s leave no time to train"):
        make_plan(JOB, dataclasses.replace(machine, time_limit=700))


def test_what_a_time_limit_makes_impossible_is_said():
    slow = Machine(H100, mfu=1e-6, time_limit=701, restart_seconds=400, store_gbs=1e-5)
    text = describe(make_plan(JOB, slow))
    assert " failures, that is more than max_requeues allows (100 by default)" in text
    failing = dataclasses.replace(slow, time_limit=10**6, node_mtbf_hours=0.5, store_gbs=2.0)
    plan = make_plan(JOB, failing)
    assert plan.starts is not None
    assert plan.starts.count < 100 < plan.starts.count + plan.reliability.failures
    assert " failures, that is more than max_requeues allows" in describe(plan)
    assert "longer than the 300 s of warning; set warning_seconds higher" in text


def test_host_memory_is_that_of_a_nodes_ranks():
    """12 bytes of a checkpoint for each trained parameter, and 16 more where it is offloaded."""
    machine = Machine(H100, nodes=2, gpus_per_node=4, host_gb=2.0)
    trained = TEACHER.trained + STUDENT.trained
    assert host_memory(JOB, machine) == pytest.approx(8e9 + 12 * trained / 2)
    offloaded = dataclasses.replace(TEACHER, offloaded=True, zero_stage=1)
    job = dataclasses.replace(JOB, learners=(offloaded, STUDENT))
    more = host_memory(job, machine) - host_memory(JOB, machine)
    assert more == pytest.approx(16 * TEACHER.trained / 2)
    stored = dataclasses.replace(JOB, stored=StoredFacts("8 logits", 32, 1e9))
    waiting = host_memory(stored, machine) - host_memory(JOB, machine)
    assert waiting == pytest.approx(4 * 4 * TEACHER.parameters), "each rank has the teacher's"
    text = describe(make_plan(JOB, machine))
    assert "Host memory of each node: 8.01 GB; sbatch: --mem=8G." in text


@pytest.mark.parametrize("text", ["soon", "", "1:2:3:4"])
def test_a_time_limit_that_is_none(text):
    ended = CliRunner().invoke(main, ["plan", "bert_large_cluster", "--time", text])
    assert (ended.exit_code, "must be a time such as 24:00:00" in ended.stderr) == (2, True)
