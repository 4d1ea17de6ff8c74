"""Replaced-token detection: samples, their labels, and the step, against `transformers`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import (
    DebertaV2ForMaskedLM,
    DebertaV2Model,
    ElectraForMaskedLM,
    ElectraForPreTraining,
)

import configs
from data_pipeline import MASKED
from model import save_pretrained
from tests.distributed import run_distributed
from tests.thorough import IS_THOROUGH
from tests.trainer import jobs, tiny
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.checkpoint.reader import intact
from trainer.errors import TrainingError
from trainer.evaluation import final_scores, finished
from trainer.evaluation.finished import SavedLearners
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.learners.module import build_module
from trainer.lifecycle.continuity import accepted_changes
from trainer.lifecycle.forking import fork
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.states import HiddenMSE
from trainer.replaced_tokens import REPLACED, replaced
from trainer.run_folder.folder import RunFolder
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling, ReplacedTokenDetection
from trainer.vocabulary_projection import Distribution, TopLogits

CPU = torch.device("cpu")
NARROW = {"embedding_size": 8, "embedding_projection": "sum", "pooler": "none"}
GENERATOR, FOLLOWER = "students/generator", "students/follower"


def predicted(logits: torch.Tensor) -> Distribution:
    """The predictions with these logits [P, V]."""
    return Distribution(TopLogits(logits, None, logits.shape[1]))


def micro_batch(rows: slice = slice(0, 8)):
    return to_device(tiny.random_batch(3).take(rows), CPU)


def test_samples_are_those_of_the_softmax():
    """Over the rows, with the same logits everywhere: within four standard errors."""
    rows = 4000
    batch = to_device(tiny.random_batch(0, rows), CPU)
    scores = torch.arange(tiny.VOCABULARY).remainder(7).float()
    view = replaced(batch, predicted(scores.expand(len(batch.masked_positions), -1)), seed=1)
    asked = batch.targets[MASKED].labels >= 0
    sampled = view.input_ids.flatten()[batch.masked_positions[asked]]
    shares = sampled.bincount(minlength=tiny.VOCABULARY) / len(sampled)
    expected = scores.softmax(0)
    error = (expected * (1 - expected) / len(sampled)).sqrt()
    assert ((shares - expected).abs() <= 4 * error).all()


def test_a_sample_depends_on_its_row_alone():
    torch.manual_seed(0)
    batch = micro_batch()
    logits = torch.randn(len(batch.masked_positions), tiny.VOCABULARY)
    together = replaced(batch, predicted(logits), seed=1).input_ids
    cut = replaced(micro_batch(slice(4, 8)), predicted(logits[4 * tiny.CAPACITY :]), seed=1)
    assert torch.equal(together[4:], cut.input_ids)
    assert not torch.equal(together, replaced(batch, predicted(logits), seed=2).input_ids)


def test_labels_say_where_a_token_is_not_the_original():
    batch = micro_batch()
    masked = batch.targets[MASKED]
    right = torch.nn.functional.one_hot(masked.labels.clamp(min=0), tiny.VOCABULARY).float()
    view = replaced(batch, predicted(100 * right), seed=1)  # a generator that is always right
    assert view.targets[REPLACED].labels[batch.attention_mask.flatten()].eq(0).all()
    wrong = torch.zeros_like(right)
    wrong[:, 4] = 100.0  # no label is less than 5
    view = replaced(batch, predicted(wrong), seed=1)
    labels = view.targets[REPLACED].labels
    asked = masked.positions[masked.labels >= 0].unique()
    assert torch.equal(labels.eq(1).nonzero()[:, 0], asked)
    assert torch.equal(labels.eq(-100).view_as(batch.attention_mask), ~batch.attention_mask)
    others = labels != 1
    assert torch.equal(view.input_ids.flatten()[others], batch.input_ids.flatten()[others])
    assert view.input_ids.flatten()[asked].eq(4).all()


def states_of_a_generator():
    """Three predictions of a generator with dropout, and whether it then has its dropout."""
    config = dataclasses.replace(learner_configs((0, 0, 0))[GENERATOR], dropout=0.3)
    generator = Learner(GENERATOR, config, config.model, StepShape(tiny.STEPS, tiny.SEED, 8, 1))
    batch, projection = micro_batch(), generator.output_projection()
    told = [generator.predictions(batch, projection).distributions[MASKED] for _ in range(3)]
    return [choices.teachers[0].x.clone() for choices in told], generator.model.training


def test_a_generator_predicts_without_its_dropout_and_keeps_it():
    ((first, *others), is_training) = run_distributed(states_of_a_generator, 1)[0]
    assert is_training
    assert all(torch.equal(first, states) for states in others)


def learner_configs(stages):
    """A discriminator, its generator, and a student of its states that reads the same text."""
    rtd = ReplacedTokenDetection(50.0)
    discriminator = tiny.encoder(**NARROW)
    reads = {"generator": "generator"}
    return {
        TEACHER: LearnerConfig(
            model=discriminator,
            objective=ObjectiveConfig(rtd=rtd),
            zero_stage=stages[0],
            embedding_sharing="disentangled",
            **reads,
        ),
        GENERATOR: LearnerConfig(
            model=tiny.encoder(hidden_size=16, **NARROW),
            objective=ObjectiveConfig(mlm=MaskedLanguageModelling()),
            zero_stage=stages[1],
        ),
        FOLLOWER: LearnerConfig(
            model=tiny.encoder(layers=2, **NARROW),
            objective=ObjectiveConfig(rtd=rtd, hidden_mse=HiddenMSE()),
            zero_stage=stages[2],
            **reads,
        ),
    }


STAGES = [(0, 0, 0), (1, 2, 3), *([(3, 3, 0)] if IS_THOROUGH else [])]


def trained(everyone, steps=3):
    """The terms of each step, of the first learner and the others."""
    rows = 8 // dist.get_world_size()
    step_shape = StepShape(tiny.STEPS, tiny.SEED, rows // 2, 2)
    teacher, *students = (
        Learner(name, config, everyone[TEACHER].model, step_shape)
        for name, config in everyone.items()
    )
    return [
        train_step(teacher, students, tiny.my_rows(tiny.random_batch(step)), step).terms
        for step in range(steps)
    ]


def reversed_roles():
    """The generator teaches, and its student detects its samples."""
    everyone = learner_configs((0, 0, 0))
    changes = {"generator": "teacher", "embedding_sharing": "none"}
    detector = dataclasses.replace(everyone[TEACHER], **changes)
    return {TEACHER: everyone[GENERATOR], GENERATOR: detector}


def at_stages(*stages):
    return [trained(learner_configs(chosen)) for chosen in stages]


def runs():
    by_stage = at_stages(STAGES[0])
    everyone = learner_configs((0, 0, 0))
    everyone[TEACHER] = dataclasses.replace(everyone[TEACHER], embedding_sharing="none")
    return by_stage, trained(reversed_roles(), steps=1), trained(everyone)


@pytest.fixture(scope="module")
def results():
    return run_distributed(runs, 1)[0]


@pytest.mark.slow
def test_the_step_is_the_same_at_every_stage_and_number_of_ranks(results):
    whole = results[0][0]
    for by_step in (
        by_step for ranks in (1, 2) for by_step in run_distributed(at_stages, ranks, *STAGES)[0]
    ):
        for ours, expected in zip(by_step, whole, strict=True):
            for learner, terms in expected.items():
                assert ours[learner] == pytest.approx(terms, rel=1e-5), learner


def modules(everyone):
    return {
        name: build_module(name, config, everyone[TEACHER].model, tiny.SEED).eval()
        for name, config in everyone.items()
    }


@torch.no_grad()
def detection_loss(folder: Path, discriminator, generator):
    """The loss of the first batch by the classes of `transformers`, from our exports."""
    for name, module in (("discriminator", discriminator), ("generator", generator)):
        assert save_pretrained(module.model, folder / name) == ""
    batch = to_device(tiny.random_batch(0), CPU)
    mask = batch.attention_mask.long()
    theirs = ElectraForMaskedLM.from_pretrained(folder / "generator").eval()
    logits = theirs(batch.input_ids, mask, batch.segment_ids).logits.flatten(0, 1)
    view = replaced(batch, predicted(logits[batch.masked_positions]), tiny.SEED)
    labels = view.targets[REPLACED].labels.view_as(mask)
    theirs = ElectraForPreTraining.from_pretrained(folder / "discriminator").eval()
    return theirs(view.input_ids, mask, batch.segment_ids, labels=labels).loss.item()


def test_the_loss_is_that_of_transformers_whoever_teaches(results, tmp_path):
    by_stage, other_way, _ = results
    built = modules(learner_configs((0, 0, 0)))
    shared = built[GENERATOR].model.embeddings.word.weight
    assert built[TEACHER].model.embeddings.word.weight.eq(0).all()
    built[TEACHER].model.embeddings.word.weight.data.copy_(shared)
    expected = detection_loss(tmp_path / "one", built[TEACHER], built[GENERATOR])
    assert by_stage[0][0][TEACHER]["rtd"] == pytest.approx(expected, rel=1e-5)
    built = modules(reversed_roles())
    expected = detection_loss(tmp_path / "other", built[GENERATOR], built[TEACHER])
    assert other_way[0][GENERATOR]["rtd"] == pytest.approx(expected, rel=1e-5)


def test_a_shared_embedding_leaves_the_generator_alone(results):
    by_stage, _, separate = results
    for ours, theirs in zip(by_stage[0], separate, strict=True):
        assert ours[GENERATOR] == theirs[GENERATOR]
        assert ours[TEACHER] != theirs[TEACHER]


ELECTRA = ("electra_small", "embedding_size: 8")
DEBERTA = ("deberta_v3_base", "position_buckets: 8")


def job(corpus, runs, *overrides, of=ELECTRA):
    """A shipped job at a size that a test can afford."""
    name, size = of
    sizes = f"hidden_size: 16, layers: 2, heads: 2, ffn_size: 32, {size}"
    small = f"{{{sizes}, vocab_size: 600, max_positions: 32}}"
    changes = [
        *(f"{who}.{key}" for who in ("teacher", "students.generator") for key in (
            f"model={small}", "precision=fp32", "schedule.warmup_steps=2")),
        "batch={size: 8, micro_batch: 4}", "data.sequence_length=32", "steps=8",
        "evaluation={every: 2, sequences: 8}", "checkpoint={every: 2}",
        "log={every: 1, wandb: disabled}",
    ]  # fmt: skip
    places = [f"data.path={corpus}", f"output_dir={runs}"]
    return configs.load(name, jobs.JobConfig, "job", [*places, *changes, *overrides])


def stopped_and_whole(corpus, runs, of):
    """An uninterrupted run, and the same run stopped and resumed. Collective."""
    stages = ["teacher.zero_stage=3", "students.generator.zero_stage=2"]
    whole = jobs.run(job(corpus, runs, "name=whole", *stages, of=of))
    jobs.run(job(corpus, runs, "name=resumed", *stages, of=of), stop_after=5)
    resumed = jobs.run(job(corpus, runs, "name=resumed", *stages, of=of))
    jobs.finish(resumed)
    return [str(folder.path) for folder in (whole, resumed)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "exported"),
    [
        (ELECTRA, (ElectraForPreTraining, ElectraForMaskedLM)),
        (DEBERTA, (DebertaV2Model, DebertaV2ForMaskedLM)),
    ],
    ids=["electra", "deberta"],
)
def test_a_resumed_job_has_the_same_bits_and_exports_both_models(of, exported, corpus, tmp_path):
    paths = run_distributed(stopped_and_whole, 2, corpus, tmp_path, of)[0]
    whole, resumed = (RunFolder(Path(path)) for path in paths)
    curve_of_teacher = jobs.curve(whole, "teacher")
    for learner in ("teacher", GENERATOR):
        curve = jobs.curve(whole, learner)
        scored = "rtd_f1" if learner == "teacher" else "/loss"
        assert any(key.endswith(scored) for _, key, _ in curve)
        assert jobs.curve(resumed, learner) == curve
    # The engines' scores, and those of the checkpoint's sum of two embeddings.
    result = json.loads((resumed.path / "evaluation.json").read_text())["learners"]["teacher"]
    last = [value for step, key, value in curve_of_teacher if key.endswith("/rtd_loss")][-1]
    assert result["rtd_loss"] == pytest.approx(last, rel=1e-5)
    exports = Path(paths[1]) / "exports"
    for learner, kind in zip(("teacher", GENERATOR), exported, strict=True):
        _, told = kind.from_pretrained(exports / Path(learner).name, output_loading_info=True)
        assert not told["missing_keys"], learner


def scored_at_its_best(corpus, runs):
    """The final score of a discriminator that is best at step 4, its generator at 8; the curve."""
    fast = "students.generator.optimizer.learning_rate=0.05"
    folder = jobs.run(job(corpus, runs, fast, "evaluation.final=best", "checkpoint.keep=9"))
    final_scores.SPEED_SECONDS = 0.0

    def best(checkpoints, ranking, report):
        return intact(checkpoints, 4 if ranking.learner == TEACHER else 8)

    with mock.patch.object(finished, "best_intact", best):
        results = final_scores.evaluate_run(SavedLearners(folder), TEACHER)
    return results["learners"][TEACHER]["rtd_loss"], jobs.curve(folder, TEACHER)


def test_a_discriminator_is_scored_beside_its_generator_of_that_step(corpus, tmp_path):
    ((score, curve),) = run_distributed(scored_at_its_best, 1, corpus, tmp_path)
    losses = {step: loss for step, name, loss in curve if name.endswith("/rtd_loss")}
    assert score == pytest.approx(losses[4], rel=1e-6)


SIZES = "hidden_size: 32, ffn_size: 64, vocab_size: 600, max_positions: 32, layers: 2, heads: 4"
SHARING = [
    "steps=2", "students=null", f"students.gen={{model: {{{SIZES}}}, objective: {{mlm: {{}}}}}}",
    f"students.disc={{model: {{{SIZES}, mlm_head: false}}, objective: {{rtd: {{}}}}, "
    "generator: gen, embedding_sharing: disentangled}",
]  # fmt: skip


def trained_with_a_table(corpus, runs):
    return str(jobs.run(jobs.tiny_job(corpus, runs, *SHARING)).path)


def test_a_table_stays_with_the_embedding_to_which_it_is_added(corpus, tmp_path):
    run = RunFolder(Path(run_distributed(trained_with_a_table, 1, corpus, tmp_path)[0]))
    assert not fork(run, 2, "longer", ["steps=4"]).begin_anew
    other = "students.disc.generator=teacher"
    assert fork(run, 2, "other", [other]).begin_anew == ["students/disc"]
    both = fork(run, 2, "narrow", ["students.gen.model.ffn_size=32"]).begin_anew
    assert {*both} == {"students/gen", "students/disc"}
    before, now = (jobs.tiny_job(corpus, tmp_path, *SHARING, *more) for more in ([], [other]))
    with pytest.raises(TrainingError, match=r"^students\.disc\.generator: .* would not fit"):
        accepted_changes(before, now, {}, {}, 2)


BESIDE = "students.other={model: {base: electra_small}, objective: %s, generator: %s}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.generator=null"], "teacher.objective.rtd: detects the samples of a generator"),
        (["teacher.generator=nobody"], "teacher.generator: no learner 'nobody'; there are: "),
        (["teacher.generator=teacher"], "teacher.generator: must be a learner that reads the mask"),
        (
            [BESIDE % ("{rtd: {}}", "generator"), "teacher.generator=other"],
            "teacher.generator: must be a learner that reads the masked text",
        ),
        (["students.generator.model.vocab_size=601"], "students.generator|vocab_size is 600"),
        (["students.generator.budget.steps=3"], "remove students.generator.budget"),
        (["students.generator.start.step=3"], "remove students.generator.start"),
        (
            ["students.generator.objective.soft_kl={}"],
            "teacher.generator: runs before the teacher; remove the terms",
        ),
        (
            [BESIDE % ("{hidden_mse: {}}", "null"), "students.other.model.vocab_size=600"],
            "students.other.objective.hidden_mse: compares states, .* the same generator",
        ),
        (["data.masking.rate=0"], "objective"),
        (["teacher.embedding_sharing=tied"], "teacher.embedding_sharing: .*none, disentangled"),
        (["teacher.objective.mlm={}"], "embedding_sharing: is for a learner that predicts no tok"),
        (["teacher.average={kind: ema}"], "teacher.average: needs an embedding of the learner"),
        (["teacher.init.tile=DIR"], "teacher.init.tile: needs an embedding of the learner's own"),
        (
            ["students.generator.embedding_sharing=disentangled"],
            "students.generator.embedding_sharing: is with a generator",
        ),
        (["students.generator.model.embedding_size=4"], "generator: shares its word vectors"),
        (
            [BESIDE % ("{mlm: {}}", "null"), "students.other.init.teacher_embeddings=true"],
            "students.other.init.teacher_embeddings: copies an embedding",
        ),
        (["stop.patience=3"], "stop.patience: may end a generator"),
        (["teacher.view=other"], "teacher.view: is for a learner that reads no samples"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(corpus, tmp_path, overrides, message):
    with pytest.raises(configs.ConfigError, match=message):
        job(corpus, tmp_path, *overrides)
