"""Forks of a task's run to other examples: no step is made, only what a fork stores is checked."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import configs
from data_pipeline import DataError, contents
from data_pipeline.tokenization.training import train
from tests.trainer.test_sentence_tasks import lines, write
from trainer.checkpoint.folder import write_json
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.reader import Checkpoint
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.examples import with_examples
from trainer.lifecycle.continuity import accepted_changes
from trainer.lifecycle.forking import Fork, fork
from trainer.run_folder.folder import RunFolder

STEP = 2
TEACHER = """
teacher:
  model: {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
  objective: {objective}
batch: {{size: 8, micro_batch: 8}}
steps: 4
log: {{wandb: disabled}}
output_dir: {folder}/runs
"""
ONE = """
name: one
data: {{root: {folder}, train: a.tsv, sequence_length: 12, tokenizer: {corpus}/tokenizer}}
"""
SEVERAL = """
name: several
tasks: {{moods: single_sentence, others: single_sentence}}
data:
  root: {folder}
  tokenizer: {corpus}/tokenizer
  sequence_length: 12
  tasks: {{moods: {{train: a.tsv}}, others: {{train: b.tsv}}}}
"""


@pytest.fixture(name="folder")
def folder_of_examples(corpus: Path, tmp_path: Path) -> Path:
    for name, shift in (("a", 0), ("b", 7), ("c", 13)):
        write(tmp_path / f"{name}.tsv", lines(40, shift))
    jobs = {"one": (ONE, "{single_sentence: {}}"), "several": (SEVERAL, "{}")}
    for name, (text, objective) in jobs.items():
        whole = (text + TEACHER).format(folder=tmp_path, corpus=corpus, objective=objective)
        (tmp_path / f"{name}.yaml").write_text(whole)
    return tmp_path


def load(path: Path, *overrides: str) -> JobConfig:
    return with_examples(configs.load(str(path), JobConfig, "job", overrides))


def begun(job: JobConfig) -> RunFolder:
    """A run with a checkpoint that contains only the trainer's own state."""
    run = RunFolder.of(job)
    checkpoint = run.checkpoints / f"step-{STEP:09d}"
    checkpoint.mkdir(parents=True)
    state = {"config": configs.dump(job), "corpora": contents(job.data)}
    files = [write_json(checkpoint, "trainer.json", {"state": state})]
    (checkpoint / "manifest.json").write_bytes(Manifest(STEP, 1, files, {}).encode())
    run.config.write_text(state["config"])
    return run


def started(made: Fork) -> JobConfig:
    """The config with which the fork starts, which its own checkpoint accepts."""
    found = load(made.folder.config)
    state = Checkpoint(made.folder.checkpoints, STEP).trainer_state
    before = configs.load_text(state["config"], JobConfig, "job", [], "checkpoint")
    assert accepted_changes(before, found, state["corpora"], contents(found.data), STEP) == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train=c.tsv"],
        ["data.train=c.tsv", "data.path=''"],
        ["data.train=c.tsv", "data.path={folder}/mine"],
        ["data.sequence_length=8"],
        ["data.validation=c.tsv"],
        ["teacher.objective.single_sentence.unlabelled=true"],
    ],
)
@pytest.mark.parametrize("own_path", [[], ["data.path={folder}/named"]])
def test_a_fork_to_other_examples_starts_with_them(folder, overrides, own_path) -> None:
    overrides, own_path = (
        [one.format(folder=folder) for one in of] for of in (overrides, own_path)
    )
    job = load(folder / "one.yaml", *own_path)
    found = started(fork(begun(job), STEP, "forked", overrides))
    assert found == load(folder / "one.yaml", *overrides, "name=forked")
    assert found.data.path != job.data.path


@pytest.mark.parametrize("own_path", [[], ["data.path={folder}/named"]])
def test_a_fork_to_the_same_examples_keeps_their_folder(folder, own_path) -> None:
    job = load(folder / "one.yaml", *(one.format(folder=folder) for one in own_path))
    assert started(fork(begun(job), STEP, "forked", ["steps=8"])).data == job.data


def test_a_fork_after_its_file_has_changed_reads_what_is_there_now(folder) -> None:
    job = load(folder / "one.yaml")
    run = begun(job)
    write(folder / "a.tsv", lines(44, 3))
    now = load(folder / "one.yaml")
    with pytest.raises(
        TrainingError, match=r"^data\.path: .* not what the run has read"
    ) as refused:
        accepted_changes(job, now, contents(job.data), contents(now.data), STEP)
    assert started(fork(run, STEP, "NEW", advice(refused))).data == now.data


def test_a_path_that_is_named_at_the_fork_has_to_hold_the_examples(folder) -> None:
    job = load(folder / "one.yaml")
    run = begun(job)
    with pytest.raises(DataError, match=r"^data\.path: .* holds other examples; name another"):
        fork(run, STEP, "forked", ["data.train=c.tsv", f"data.path={job.data.path}"])
    assert not (folder / "runs" / "forked").exists()


def test_a_fork_reads_no_tokens_of_another_tokenizer(folder) -> None:
    run = begun(load(folder / "one.yaml"))
    (folder / "text.txt").write_text("another text\n")
    train([str(folder / "text.txt")], "bpe", 261, str(folder / "other"))
    with pytest.raises(DataError, match=r"than the model's .* a fork keeps its tokenizer"):
        fork(run, STEP, "forked", [f"data.tokenizer={folder}/other"])
    assert not (folder / "runs" / "forked").exists()


@pytest.mark.slow
def test_of_several_tasks_only_the_examples_that_differ_are_others(folder) -> None:
    job = load(folder / "several.yaml")
    found = started(fork(begun(job), STEP, "forked", ["data.tasks.moods.train=c.tsv"]))
    assert found.data == load(folder / "several.yaml", "data.tasks.moods.train=c.tsv").data
    assert found.data.tasks["others"] == job.data.tasks["others"]


def advice(refused: pytest.ExceptionInfo[TrainingError]) -> list[str]:
    """The changes with which the refusal says that one should fork."""
    words = shlex.split(str(refused.value).partition("tandem fork ")[2])
    assert words[1:4] == ["--step", str(STEP), "--name"]
    return words[5:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "keys"),
    [
        ("one", ["data.train=c.tsv", "steps=8"], ["data.train", "steps"]),
        ("one", ["data.train=c.tsv", "data.test=b.tsv"], ["data.train", "data.test"]),
        ("one", ["data.train=c.tsv", "data.path={folder}/mine"], ["data.train"]),
        ("one", ["data.sequence_length=8"], ["data.sequence_length"]),
        ("several", ["data.tasks.moods.train=c.tsv"], ["data.tasks.moods.train"]),
    ],
)
def test_the_fork_that_a_refusal_offers_reads_the_other_examples(
    folder, name, overrides, keys
) -> None:
    """It names the files and settings that changed, not the folder that follows from them."""
    job = load(folder / f"{name}.yaml")
    run = begun(job)
    now = load(folder / f"{name}.yaml", *(one.format(folder=folder) for one in overrides))
    with pytest.raises(TrainingError) as refused:
        accepted_changes(job, now, contents(job.data), contents(now.data), STEP)
    assert str(refused.value).startswith(f"{keys[0]}: ")
    words = advice(refused)
    assert {word.partition("=")[0] for word in words} == {*keys}
    assert contents(started(fork(run, STEP, "NEW", words)).data) == contents(now.data)
