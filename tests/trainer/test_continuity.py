"""The changes of its config with which a run can resume."""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import configs
from data_pipeline import BuildOptions, Corpus, build, contents, open_corpora
from tests.conftest import TINY_JOB
from tests.distributed import run_distributed
from tests.trainer.jobs import tiny_job
from trainer.checkpoint.attempts import Owner
from trainer.checkpoint.folder import write_json
from trainer.checkpoint.manifest import Manifest
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.lifecycle import continuity
from trainer.lifecycle.continuity import require_same_stage
from trainer.lifecycle.start import Resumption, accept, changes_since_checkpoint, start_run
from trainer.run_folder.folder import RunFolder

accepted_changes = partial(continuity.accepted_changes, read={}, present={}, step=4)


def job(*overrides: str) -> JobConfig:
    return configs.load(str(TINY_JOB), JobConfig, "job", ["data.path=corpus", *overrides])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("steps=20", "steps: 8 -> 20"),
        ("log.every=2", "log.every: 1 -> 2"),
        ("teacher.optimizer.learning_rate=0.5", "teacher.optimizer.learning_rate: 0.003 -> 0.5"),
        ("batch.micro_batch=2", "batch.micro_batch: 4 -> 2"),
        ("students.tinybert.zero_stage=2", "students.tinybert.zero_stage: 0 -> 2"),
        ("data.cache_gb=1.0", "data.cache_gb: 50.0 -> 1.0"),
        ("data.stage=/local", "data.stage: null -> /local"),
        ("teacher.model.attention_dropout=0.2", "teacher.model.attention_dropout: 0.0 -> 0.2"),
        (
            "students.tinybert.model.initializer_range=0.1",
            "students.tinybert.model.initializer_range: 0.05 -> 0.1",
        ),
        ("checkpoint.keep_best=0", "checkpoint.keep_best: 1 -> 0"),
        ("log.notes=mine", 'log.notes: "" -> mine'),
        ("deterministic=true", "deterministic: false -> true"),
    ],
)
def test_a_harmless_change_is_accepted_and_told(override, line):
    assert accepted_changes(job(), job(override)) == [line]


def test_a_change_of_how_a_learner_begins_says_where_it_comes_too_late():
    words = ["teacher.init.seed=3", "students.tinybert.start.step=2"]
    now = job(*words, "students.distilbert.start.step=2")
    lines = accepted_changes(job(), now, begun=["teacher", "students/tinybert"])
    late = "; without effect, since the learner has begun"
    assert sorted(lines) == [
        "students.distilbert.start.step: 0 -> 2",
        f"students.tinybert.start.step: 0 -> 2{late}",
        f"teacher.init.seed: null -> 3{late}",
    ]


def test_an_unchanged_config_has_no_changes():
    assert accepted_changes(job(), job()) == []


def test_students_may_come_and_go():
    both, one = job(), job()
    del one.students["tinybert"]
    assert [line.split(":")[0] for line in accepted_changes(both, one)] == ["students.tinybert"]
    (line,) = accepted_changes(one, both)
    assert line.startswith("students.tinybert: (none) -> {model: {")
    assert len(line) < 300, "a whole student fills no screen"


def test_a_term_may_come_and_go_but_not_its_projection():
    less = "students.tinybert.objective.soft_kl=null"
    (change,) = accepted_changes(job(), job(less))
    assert change.startswith("students.tinybert.objective.soft_kl: {")
    with pytest.raises(TrainingError, match=r"objective\.hidden_mse: .* not fit"):
        accepted_changes(job(), job("students.tinybert.objective.hidden_mse=null"))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=2", "seed"),
        ("batch.size=16", "batch.size"),
        ("data.path=other", "data.path"),
        ("data.sequence_length=16", "data.sequence_length"),
        ("data.masking.rate=0.3", "data.masking.rate"),
        ("data.phases=[{from_step: 4, sequence_length: 16}]", "data.phases"),
        ("students.tinybert.model.layers=1", "students.tinybert.model.layers"),
    ],
)
def test_what_breaks_the_order_or_a_shape_is_refused_and_a_fork_offered(override, key):
    with pytest.raises(TrainingError) as refused:
        accepted_changes(job(), job(override))
    line = str(refused.value)
    assert line.startswith(f"{key}: ")
    assert f"tandem fork runs/tiny --step 4 --name tiny-2 {key}=" in line.replace("'", "")


def test_the_fork_that_is_offered_makes_every_change(tmp_path):
    """As it stands: with a step, a name that is free, and changes that a resumed run may make."""
    removed = "students.tinybert.objective.hidden_mse=null"
    (tmp_path / "tiny-2").mkdir()
    for words in (["data.phases=[{from_step: 4, sequence_length: 16}]", "seed=2"], [removed]):
        changed = job(f"output_dir={tmp_path}", "steps=9", "log.tags=['a b', \"c's\"]", *words)
        with pytest.raises(TrainingError) as refused:
            accepted_changes(job(), changed)
        offered = shlex.split(str(refused.value).partition("tandem fork ")[2])
        assert offered[:5] == [f"{tmp_path}/tiny", "--step", "4", "--name", "tiny-3"]
        assert job(*offered[5:]) == changed


def test_what_has_optimizer_states_is_not_frozen_on_the_way():
    learned = "students.tinybert.model.positions=learned"
    with pytest.raises(TrainingError, match=r"^students\.tinybert\.freeze_positions: .* not fit"):
        accepted_changes(job(learned), job(learned, "students.tinybert.freeze_positions=true"))


def test_another_shape_of_the_teacher_is_another_run():
    longer, learned = "teacher.model.max_positions=64", "teacher.model.positions=learned"
    alone = ["students=null", learned]
    with pytest.raises(TrainingError, match=r"^teacher\.model\.max_positions: .* name=tiny-2 "):
        accepted_changes(job(*alone), job(*alone, longer))
    accepted_changes(job(), job(longer, "teacher.model.global_rope_theta=1e6"))  # it is rotary


def test_a_model_whose_folder_is_gone_is_not_refused_as_a_change_of_it(tmp_path):
    gone = ["students=null", f"teacher.init.pretrained={tmp_path / 'gone'}", "output_dir=out"]
    with pytest.raises(TrainingError) as refused:
        accepted_changes(job(*gone), job("teacher=null", "teacher.objective.mlm={}", *gone))
    assert str(refused.value) == (
        f"teacher.init.pretrained: {tmp_path / 'gone'}: no such folder; put it back, or resume "
        "with out/tiny/config.yaml, which has the model"
    )


MIXTURE = ("data.path=''", "data.mixture={a: {path: here}, b: {path: there}}")


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ((), ("data.path=other",), "data.path"),
        (MIXTURE, (*MIXTURE, "data.mixture.b.path=other"), "data.mixture.b.path"),
    ],
)
def test_a_corpus_may_move_but_not_become_another(before, now, key):
    both, elsewhere = job(*before), job(*now)
    read = {key: "0123"}
    (line,) = accepted_changes(both, elsewhere, read=read, present=read)
    assert line.startswith(f"{key}: ")
    assert line.endswith(" -> other")
    for job_now in (both, elsewhere):
        with pytest.raises(TrainingError, match=rf"^{key}: .* tandem fork runs/tiny --step 4"):
            accepted_changes(both, job_now, read=read, present={key: "4567"})


def test_the_corpora_of_a_mixture_keep_their_places():
    mixed, read = job(*MIXTURE), {"data.mixture.a.path": "0", "data.mixture.b.path": "1"}
    assert accepted_changes(mixed, mixed, read=read, present=read) == []
    with pytest.raises(TrainingError, match=r"^data\.mixture: the order of the data would change"):
        accepted_changes(mixed, mixed, read=read, present=dict(reversed(read.items())))


STAGED = (
    "students.tinybert.objective={soft_kl: {}, hidden_mse: {}}",
    "students.tinybert.intermediate.fraction=0.5",
)


def test_a_term_may_come_beside_a_stage_that_is_a_fraction():
    now = job(*STAGED, "students.tinybert.objective.mlm.weight=0.5")
    changes = accepted_changes(job(*STAGED), now)
    assert any(line.startswith("students.tinybert.objective.mlm") for line in changes), changes


@pytest.mark.parametrize(
    ("made", "override", "refusal"),
    [
        (7, "steps=20", "would begin again after 7 steps, with 10 steps in place of 5"),
        (
            7,
            "students.tinybert.intermediate.fraction=0.9",
            "would begin again after 7 steps, with 9 steps",
        ),
        (4, "students.tinybert.intermediate.fraction=0.3", "would be over after 4 steps, with 3"),
        (3, "students.tinybert.intermediate.fraction=0.3", None),
        (3, "students.tinybert.intermediate=null", None),
        (3, "steps=20", None),
        (7, "steps=12", None),
        (7, "students.tinybert.intermediate=null", None),
    ],
)
def test_no_learner_goes_back_into_a_first_stage_or_skips_its_end(made, override, refusal):
    before, now = job("steps=10", *STAGED), job("steps=10", *STAGED, override)
    started = {"started_at": 2, "finished_at": None}
    state = {"step": 2 + made, "learners": {"students/tinybert": started, "students/gone": started}}
    reason = f"students.tinybert.intermediate: {refusal}"
    with pytest.raises(TrainingError, match=reason) if refusal else nullcontext():
        require_same_stage(before, now, state)


@pytest.mark.parametrize(
    ("made", "refusal"),
    [
        (10, "would be over after 10 steps, with 9 steps in place of 12"),
        (9, None),
    ],
)
def test_no_learner_skips_a_stage_between_the_first_and_the_last(made, refusal):
    layer_by_layer = "students.tinybert.progressive={steps_per_layer: %d}"
    before, now = (job("steps=30", layer_by_layer % steps) for steps in (4, 3))
    learners = {"students/tinybert": {"started_at": 0, "finished_at": None}}
    with pytest.raises(TrainingError, match=refusal) if refusal else nullcontext():
        require_same_stage(before, now, {"step": made, "learners": learners})


def resume_in_stages(runs: Path) -> list[tuple[int, int]]:
    """Resume a run, with a first stage of 3 steps, with longer ones; from step 4 or 2, or not."""
    places = f"output_dir={runs}", STAGED[0], "steps=12"
    staged = "students.tinybert.intermediate={steps: %d}"
    before = job(*places, staged % 3)
    student = {"students/tinybert": {"started_at": 0, "finished_at": None}}
    for step in (2, 4, 6):
        state = {"step": step, "learners": student, "rolled_back": []}
        save(RunFolder.of(before), step, config=configs.dump(before), **state)
    found = []
    for checkpoint, stage in ((6, 6), (4, 4), (2, 12)):
        back = f"rollback=[{{checkpoint: {checkpoint}}}]"
        resumption = Resumption.find(job(*places, staged % stage, back))
        resumption.require_same_stage()
        found.append((resumption.checkpoint.step, stage))
    for checkpoint, stage in ((6, 7), (4, 5)):
        back, made = f"rollback=[{{checkpoint: {checkpoint}}}]", f"after {checkpoint} steps"
        with pytest.raises(TrainingError, match=f"again {made}, with {stage} steps in place of 3"):
            Resumption.find(job(*places, staged % stage, back)).require_same_stage()
    return found


def test_a_first_stage_is_judged_by_the_checkpoint_that_a_rollback_names(tmp_path):
    found = run_distributed(resume_in_stages, 1, tmp_path)[0]
    assert found == [(6, 6), (4, 4), (2, 12)]


def save(folder: RunFolder, at: int = 2, **state: object) -> None:
    """A checkpoint that contains only the trainer's own state."""
    checkpoint = folder.checkpoints / f"step-{at:09d}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    files = [write_json(checkpoint, "trainer.json", {"state": {"step": at, **state}})]
    (checkpoint / "manifest.json").write_bytes(Manifest(at, 1, files, {}).encode())


def changes_of(config: JobConfig) -> list[str]:
    return changes_since_checkpoint(config, open_corpora(config.data))


def test_a_run_notices_what_has_become_of_its_corpus(corpus, text, tmp_path):
    """Moved; then rebuilt from the same text with another held-out fraction."""
    there = tmp_path / "there"
    before = tiny_job(corpus, tmp_path)
    folder, after = RunFolder.of(before), tiny_job(there, tmp_path)
    start_run(before, Owner.here())
    accept(before)
    save(folder, corpora=contents(before.data))
    shutil.copytree(corpus, there)
    assert changes_of(after) == [f"data.path: {corpus} -> {there}"]
    accept(after)
    shutil.rmtree(there)
    tokenizer = str(Corpus.open(str(corpus)).tokenizer_dir)
    build(BuildOptions([str(text)], tokenizer, val_fraction=0.3), str(there))
    with pytest.raises(TrainingError, match=r"^data\.path: the corpus there is not what the run"):
        changes_of(after)
    save(folder)  # by an older version
    assert changes_of(after) == []


def test_a_refused_start_leaves_the_config_alone_and_a_missing_or_edited_one_hides_nothing(
    corpus, tmp_path
):
    before, other = tiny_job(corpus, tmp_path), tiny_job(corpus, tmp_path, "seed=2")
    folder = RunFolder.of(before)
    start_run(before, Owner.here())
    assert not folder.config.exists(), "nothing has accepted it yet"
    accept(before)
    save(folder, config=configs.dump(before), corpora=contents(before.data))
    os.utime(folder.config, (0, 0))
    start_run(before, Owner.here())
    assert folder.config.stat().st_mtime > 0, "status takes it for a sign of progress"
    text = folder.config.read_text()
    for in_the_folder in (text, None, text.replace("seed: 1", "seed: 2")):
        folder.config.unlink()
        if in_the_folder:
            folder.config.write_text(in_the_folder)
        with pytest.raises(TrainingError, match=r"^seed: 1 -> 2: the order of the data"):
            changes_of(other)
        assert (folder.config.read_text() if folder.config.exists() else None) == in_the_folder
        if in_the_folder is None:
            accept(before)
    damaged = folder.checkpoints / "step-000000002" / "trainer.json"
    damaged.write_text(damaged.read_text().replace("seed: 1", "seed: 3"))
    assert changes_of(before) == [], "whoever verifies checkpoints says it"
