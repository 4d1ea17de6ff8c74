"""At any number of ranks and ZeRO stage, gradients and losses equal the full batch's.

The reference is plain torch in one process, without DeepSpeed. It has micro-batches only in 16 bit,
where rounding depends on them, and torch's own gradient scaler for float16.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

from configs.kinds import kinds_of
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.batches import to_micro_batches
from trainer.checkpoint.layout import FROZEN, layout
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.learners.module import AUTOCAST, Train, build_module
from trainer.objectives import terms as terms_of_ours
from trainer.objectives.objective import union
from trainer.objectives.term import registered_terms
from trainer.optimizers.config import OptimizerConfig, optimizer_config
from trainer.optimizers.gated import LossScaleConfig, build_optimizer
from trainer.schedules import factor
from trainer.step import train_step
from trainer.teacher_outputs import OutputProjection, detach

ROWS, RANKS, ACCUMULATION, STEPS = 8, 2, 2, tiny.STEPS
CLIPPING = 0.5
RATES = {**dict.fromkeys(kinds_of(OptimizerConfig), 1e-4), "lamb": 1e-3, "adadelta": 1e-1}
STUDENTS = ("distilbert", "tinybert", "distilbert", "tinybert")
# Relative: of losses, of the first gradients, and of the norms of all, at weights that have drifted
# apart where the stages round at other places, in 16 bit.
TOLERANCES = {"fp32": (1e-6, 1e-5, 1e-5), "bf16": (1e-3, 2e-2, 1e-1), "fp16": (1e-4, 2e-3, 1e-2)}
TOLERANCES["bf16_weights"] = TOLERANCES["fp8"] = TOLERANCES["bf16"]
LOSS_SCALE = LossScaleConfig(initial=2.0**19, growth_interval=3)  # overflows, and grows
SCALED = 8  # steps, within which it does both
CAUSE = "perhaps a term's loss is not a sum over examples, or its count is not its denominator"
ELSEWHERE = {  # terms that no learner of `tiny` has, and why
    "soft_cross_entropy": "tests/trainer/test_several_teachers.py compares it on two ranks",
    "uld": "tests/trainer/test_other_tokenizers.py compares it on two ranks",
    "from_student": "tests/trainer/test_two_way.py compares it on two ranks",
}
OFFLOAD = ("none", "optimizer", "optimizer", "parameters")  # the most there is at each stage


@dataclass(frozen=True)
class Company:
    """A teacher at a ZeRO stage, and a student at that stage and at those that follow it."""

    stage: int
    optimizer: str = "adamw"
    precision: str = "fp32"
    offload: bool = False
    steps: int = STEPS
    communication: str = "fp32"
    students: int = len(STUDENTS)

    @property
    def tolerances(self):
        return TOLERANCES["bf16" if self.communication == "bf16" else self.precision]

    def configs(self):
        """The students' objectives alternate, and depend on the stage of the teacher."""
        objectives = {TEACHER: TEACHER}
        objectives |= {
            student_key(f"{student}-{slot}"): student_key(student)
            for slot, student in enumerate(STUDENTS[: self.students])
        }
        stages = [self.stage, *((self.stage + slot) % 4 for slot in range(4))]
        return {
            name: dataclasses.replace(
                tiny.learner_configs((0, 0, 0))[objective],
                optimizer=optimizer_config(self.optimizer, learning_rate=RATES[self.optimizer]),
                gradient_clipping=CLIPPING,
                zero_stage=stage,
                precision=self.precision,
                communication=self.communication,
                loss_scale=LOSS_SCALE,
                offload=OFFLOAD[stage] if self.offload else "none",
            )
            for (name, objective), stage in zip(objectives.items(), stages, strict=False)
        }


QUICK = [
    Company(1, steps=2),
    *(Company(stage, steps=2, students=2) for stage in (0, 3)),
    Company(3, "lamb", offload=True, steps=2, students=1),
    Company(1, "muon", steps=2, students=1),
    Company(3, "adamw", "bf16_weights", steps=2, students=1),
    Company(1, "adamw", "fp16", steps=SCALED, students=1),
    Company(2, steps=2, communication="bf16", students=1),
]
# What autocast rounds is the same for optimizers; they update the masters of bf16 weights.
ROUNDED = ("adamw", "muon")
OPTIMIZERS = {"fp32": RATES, "bf16_weights": RATES, "bf16": ROUNDED, "fp16": ROUNDED}
ALL = {
    f"{precision}, {optimizer}": [
        Company(stage, optimizer, precision, offload, SCALED)
        for stage in range(4)
        for offload in (False, True)
    ]
    for precision, optimizers in OPTIMIZERS.items()
    for optimizer in optimizers
}
# At teachers of these stages there is a student at each.
ALL["fp8"] = [Company(stage, precision="fp8", steps=2) for stage in (1, 3)]


class Reference:
    """The result of `trained`, from plain torch, for as many steps as anybody has asked for."""

    def __init__(self, optimizer, precision, students, dtype):
        configs = Company(0, optimizer, precision, students=students).configs()
        self.models = {
            name: PlainModel(
                build_module(name, config, configs[TEACHER].model, tiny.SEED).to(dtype),
                config,
                tiny.STEPS,
            )
            for name, config in configs.items()
        }
        self.cuts = 1 if precision == "fp32" else RANKS * ACCUMULATION
        self.first, self.curve, self.norms, self.scales = {}, [], [], []

    def up_to(self, steps):
        for step in range(len(self.curve), steps):
            self.curve.append(losses_and_gradients(self.models, step, self.cuts))
            if not step:
                self.first = {name: gradients(model.masters) for name, model in self.models.items()}
            self.norms.append({name: model.update(step) for name, model in self.models.items()})
            self.scales.append({n: model.scaler.get_scale() for n, model in self.models.items()})
        return self.first, self.curve[:steps], self.norms[:steps], self.scales[:steps]


@lru_cache
def reference(optimizer, precision, students, dtype):
    return Reference(optimizer, precision, students, dtype)


def plain(optimizer, precision, steps, students=4, dtype=torch.float32):
    """The result of `trained`, from plain torch; weights and activations are of `dtype`."""
    return reference(optimizer, precision, students, dtype).up_to(steps)


class PlainModel:
    """A model in plain torch; where its weights are bfloat16 another one has their masters."""

    def __init__(self, module, config, steps):
        self.module, self.config, self.steps = module, config, steps
        self.masters = module
        if config.rounds_weights:
            self.masters = copy.deepcopy(module)
            module.round_weights()
        self.optimizer = build_optimizer(self.masters, config.optimizer, module.objective).inner
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=LOSS_SCALE.initial,
            growth_interval=LOSS_SCALE.growth_interval,
            enabled=config.precision == "fp16",
        )

    def __call__(self, program, batch):
        dtype = AUTOCAST[self.config.precision]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss, _, features = self.module(program, batch)
        self.scaler.scale(loss).backward()
        if self.masters is not self.module:
            for parameter, master in self.pairs():
                if parameter.grad is not None:
                    before = 0 if master.grad is None else master.grad
                    master.grad, parameter.grad = before + parameter.grad.float(), None
        return loss.item(), features

    def pairs(self):
        return zip(self.module.parameters(), self.masters.parameters(), strict=True)

    def update(self, step):
        """Clip, take the step, and return the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            rate = self.config.optimizer.learning_rate
            group["lr"] = rate * factor(self.config.schedule, step, self.steps)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), CLIPPING)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        for parameter, master in self.pairs():
            parameter.data.copy_(master.data)
        return norm.item()


def gradients(module):
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def losses_and_gradients(models, step, cuts):
    """Forward and backward of all learners on the whole batch, in this many micro-batches."""
    batch = tiny.random_batch(step)
    totals = tiny.totals_of(batch)
    students = dict(list(models.items())[1:])
    objectives = [model.module.objective for model in students.values()]
    capture = union(objective.source_capture(step) for objective in objectives)
    projection = OutputProjection(
        *(one.detach() for one in models[TEACHER].module.model.output_projection())
    )
    losses = dict.fromkeys(models, 0.0)
    for micro in to_micro_batches(batch, ROWS // cuts, torch.device("cpu")):
        loss, features = models[TEACHER](Train(totals, {}, capture, step), micro)
        losses[TEACHER] += loss
        with models[TEACHER].module.autocast(torch.device("cpu")):
            sources = {TEACHER: detach(features, projection)}
        for name, model in students.items():
            own = model.module.objective.student_capture(step)
            losses[name] += model(Train(totals, sources, own, step), micro)[0]
    return losses


def trained(company):
    """The first gradients; losses, gradient norms and loss scales of every step."""
    micro_batch = ROWS // dist.get_world_size() // ACCUMULATION
    step_shape = StepShape(STEPS, tiny.SEED, micro_batch, ACCUMULATION)
    configs = company.configs()
    learners = [
        Learner(name, config, configs[TEACHER].model, step_shape)
        for name, config in configs.items()
    ]
    first = {}
    # DeepSpeed has no whole gradients to show of what is offloaded, and float16's are scaled.
    if not company.offload and company.precision != "fp16":
        first = {learner.name: record_first_gradients(learner) for learner in learners}
    curve, norms, scales = [], [], []
    for step in range(company.steps):
        batch = tiny.my_rows(tiny.random_batch(step))
        curve.append(train_step(learners[0], learners[1:], batch, step).losses)
        norms.append({learner.name: learner.gradient_norm for learner in learners})
        scales.append({learner.name: learner.loss_scale.value for learner in learners})
    assert_steps_are_counted(learners, norms)
    return first, curve, norms, scales


def assert_steps_are_counted(learners, norms):
    for learner in learners:
        overflows = sum(not math.isfinite(one[learner.name]) for one in norms)
        counters = learner.counters
        assert (counters.overflows, counters.skipped_steps) == (overflows, 0)


def record_first_gradients(learner):
    """A dict that is filled with the full gradients in the learner's first step."""
    found, update = {}, learner.update

    def recording_update(*arguments):
        if not found:
            found.update(full_gradients(learner.engine))
        update(*arguments)

    learner.update = recording_update
    return found


def full_gradients(engine):
    from deepspeed.utils import safe_get_full_grad

    if engine.zero_optimization_stage() not in (1, 2):
        masters = getattr(engine.optimizer, "masters", {})
        read = {
            name: safe_get_full_grad(masters.get(parameter, parameter))
            for name, parameter in engine.module.named_parameters()
        }
        return {name: gradient.clone() for name, gradient in read.items() if gradient is not None}
    found = {}
    for piece in layout(engine):
        if piece.group != FROZEN:
            whole = found[piece.name] = torch.zeros(piece.total)
            parts = engine.optimizer.averaged_gradients[piece.group]  # DeepSpeed's own has several
            flat = torch.cat([part.flatten() for part in parts])
            whole[piece.start : piece.start + piece.numel] = piece.of(flat)
            dist.all_reduce(whole)
            found[piece.name] = whole.view(piece.shape)
    return found


def all_trained(companies):
    return [trained(company) for company in companies]


def test_every_term_is_compared_here_or_has_a_reason():
    sections = registered_terms().items()
    terms = {name for name, one in sections if one.__module__.startswith(terms_of_ours.__name__)}
    learners = tiny.learner_configs((0, 0, 0)).values()
    missing = terms - {name for one in learners for name in one.objective.terms()}
    assert missing == ELSEWHERE.keys(), "put a new term into tests/trainer/tiny.py"


@pytest.mark.parametrize(
    ("ranks", "companies"),
    [
        pytest.param(RANKS, QUICK, id="2 ranks"),
        pytest.param(4, QUICK[:4], id="4 ranks", marks=pytest.mark.slow),
        *[
            pytest.param(RANKS, companies, id=f"2 ranks, {what}", marks=pytest.mark.slow)
            for what, companies in ALL.items()
        ],
    ],
)
def test_every_pair_of_stages_equals_the_whole_batch(ranks, companies):
    for results in run_distributed(all_trained, ranks, companies, time_limit=900):
        for company, result in zip(companies, results, strict=True):
            expected = plain(company.optimizer, company.precision, company.steps, company.students)
            assert_equal(company, result, expected)


def assert_equal(company, result, expected):
    (first, curve, norms, scales), (expected_first, *expected_rest) = result, expected
    assert_gradients_equal(first, expected_first, company)
    close, _, near = company.tolerances
    for step, (losses, found, scale) in enumerate(zip(curve, norms, scales, strict=True)):
        expected_losses, expected_norms, expected_scale = (
            {name: rest[step][name] for name in losses} for rest in expected_rest
        )
        where = (company, step)
        assert losses == pytest.approx(expected_losses, rel=close), (*where, CAUSE)
        assert scale == expected_scale, where
        for learner, norm in found.items():
            if math.isfinite(expected_norms[learner]):
                assert norm == pytest.approx(expected_norms[learner], rel=near), where
                assert norm > CLIPPING, where  # clipping is put to the test
            else:
                assert not math.isfinite(norm), where


def assert_gradients_equal(found, expected, company):
    for learner, whole in found.items():
        for name, gradient in whole.items():
            if name not in expected[learner]:  # it has none: ZeRO sums zeros
                assert not gradient.any(), (company, learner, name)
            elif not name.endswith("key.bias"):  # whose true gradient is zero
                right = expected[learner][name]
                distance = (gradient - right).norm() / right.norm()
                assert distance < company.tolerances[1], (company, learner, name, CAUSE)
        assert whole.keys() >= expected[learner].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("adamw", SCALED),
        ("lamb", 4),
        *((name, STEPS) for name in RATES),
    ],
)
def test_rounding_decides_nothing_that_is_compared(optimizer, steps):
    """Otherwise the result would depend on the CPU, each of which adds in its own order.

    Key biases are compared too: their gradients are so far below Adam's epsilon that they have no
    effect.
    """
    exact = plain(optimizer, "fp32", steps, dtype=torch.float64)
    rounded = plain(optimizer, "fp32", steps)
    for ours, theirs in zip((*rounded[1], *rounded[2]), (*exact[1], *exact[2]), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCES["fp32"][0])


def test_the_reference_is_not_float32_in_disguise_and_its_scale_moves():
    (exact,) = plain("adamw", "fp32", 1, students=1)[1]
    for precision in ("bf16", "bf16_weights", "fp8", "fp16"):
        (rounded,) = plain("adamw", precision, 1, students=1)[1]
        assert all(rounded[name] != loss for name, loss in exact.items()), precision
    scales = [step[TEACHER] for step in plain("adamw", "fp16", SCALED, students=1)[3]]
    assert scales[0] < LOSS_SCALE.initial
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))
