"""Every shipped study runs through its runner, and its table shows the runs' scores."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

import configs
from benchmarks import study
from benchmarks.studies import results
from benchmarks.studies.jobs import Sources, StudyJob, digest, in_order
from configs.studies import StudyConfig
from data_pipeline import Corpus
from model import EncoderConfig, build, save_pretrained
from tests.benchmarks.made_studies import result, two_arms
from tests.configs.run_jobs import run_jobs
from tests.fork_server import REPOSITORY
from trainer.config import JobConfig

SHIPPED = sorted(path.stem for path in Path(configs.__file__).parent.glob("study/*.yaml"))
OF_TASKS = [name for name in SHIPPED if study.load(name).task]
OF_TEXT = [name for name in SHIPPED if name not in OF_TASKS]
TINY = [
    "steps=2", "batch.size=2", "batch.micro_batch=2", "data.sequence_length=32",
    "evaluation.sequences=4", "log.every=1",
]  # fmt: skip
TINY_TASK = [
    "epochs=null", "steps=4", "batch.size=4", "batch.micro_batch=4",
]  # fmt: skip
SIZES = {"vocab_size": 600, "sequence_length": 64}  # of models that stand for pre-trained ones
PAIR = {
    "sentence_good": "this is a text",
    "sentence_bad": "text a is this",
    "UID": "order",
    "linguistics_term": "order",
}


def run_study(*arguments: object) -> None:
    study.main([str(one) for one in arguments], standalone_mode=False)


def at_once(job: Path) -> list[str]:
    """Overrides that let every student of the job join before the first step."""
    students = configs.load(str(job), JobConfig, "job").students
    return study.all_at_once(students)


def jobs(name: str, runs: Path) -> list[StudyJob]:
    return study.jobs_of(name, study.load(name), runs, seeds=[1])


@pytest.fixture(scope="module")
def sources(corpus, tmp_path_factory) -> Sources:
    """A tiny teacher of 6 layers and one of 3, as exports are, and phrases as GLUE and Multi30k."""
    folder = tmp_path_factory.mktemp("sources")
    for name, layers in (("teacher", 6), ("half", 3)):
        config = EncoderConfig(
            vocab_size=600, hidden_size=16, layers=layers, heads=2, ffn_size=32, max_positions=64
        )
        save_pretrained(build(config, seed=layers), folder / name, corpus / "tokenizer")
        (folder / name / "model.yaml").write_text(configs.dump(config))
    texts = [(f"the {word} of {word} was in the {word}", n % 2) for n, word in enumerate("abc" * 9)]
    files = {
        "SST-2": ["sentence\tlabel", *(f"{text}\t{label}" for text, label in texts)],
        "CoLA": [f"x\t{label}\t\t{text}" for text, label in texts],
        "STS-B": [
            "sentence1\tsentence2\tscore",
            *(f"{text}\t{text}\t{label}" for text, label in texts),
        ],
    }
    for task, rows in files.items():
        (folder / "data/glue" / task).mkdir(parents=True)
        for split in ("train", "dev"):
            (folder / "data/glue" / task / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (folder / "data/seq2seq").mkdir()
    for split in ("train", "val", "test_2016_flickr"):
        for language in ("de", "en"):
            path = folder / "data/seq2seq" / f"{split}.{language}.gz"
            path.write_bytes(gzip.compress("".join(f"{text}\n" for text, _ in texts).encode()))
    (folder / "data/ner").mkdir()
    for split in ("train", "testa"):
        tagged = "".join(f"{text.split()[1]} NN B-NP B-PER\nwas VB B-VP O\n\n" for text, _ in texts)
        (folder / "data/ner" / f"eng.{split}").write_text(tagged)
    of_family_long = ("family-1", "alone-1", "first-1", "distilled-1")
    for run in (*of_family_long, "rtd", "demo", "mlm_30-1", "rtd_1-1"):
        (folder / run).mkdir()
        (folder / run / "exports").symlink_to(folder / "exports")
    (folder / "exports").mkdir()
    for learner in ("teacher", "w96", "w64", "w48", "w32", "generator"):
        (folder / "exports" / learner).symlink_to(folder / "teacher")
    return Sources(corpus, folder / "data", folder)


def load_shrunk(name: str, load=study.load) -> StudyConfig:
    """A shipped study with the `SIZES` of the models in `sources`."""

    def shrunk(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {key: SIZES.get(key, shrunk(value)) for key, value in tree.items()}

    config = load(name)
    arms = {key: dataclasses.replace(arm, job=shrunk(arm.job)) for key, arm in config.arms.items()}
    return dataclasses.replace(config, job=shrunk(config.job), arms=arms)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TASKS)
def test_every_job_of_a_study_of_tasks_is_one_that_can_run(name, sources, tmp_path):
    """Its teacher stands for what an earlier job leaves."""
    config = load_shrunk(name)
    for job in study.jobs_of(name, config, tmp_path, seeds=[1], sources=sources):
        for needed in job.needed():
            (needed.run / "exports").mkdir(parents=True, exist_ok=True)
            (needed.run / "exports/teacher").symlink_to(sources.models / "teacher")
        loaded = configs.load(str(job.write()), JobConfig, "job", job.words)
        assert {*config.arms[job.arm].learners} <= {"teacher", *loaded.students}
        assert Path(loaded.teacher.init.pretrained).exists()
        shutil.rmtree(job.folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TASKS)
def test_a_study_of_tasks_runs_and_has_its_rows(name, sources, tmp_path, monkeypatch, capsys):
    """Files that it names are made first, and every row has a score."""
    monkeypatch.setattr(study, "load", load_shrunk)
    config, told = study.load(name), {}
    overrides = tuple(TINY_TASK)
    found = study.jobs_of(name, config, tmp_path, (), [1], overrides, sources)
    for job in found:
        told |= {words[-1]: words for words in job.missing_files()}
        told[job.run.name] = ["train", str(job.write()), *job.words]
    for one, (code, output) in run_jobs(told, tmp_path).items():
        assert code == 0, (one, output)
    monkeypatch.setattr(study, "tandem", lambda words: pytest.fail("it has finished"))
    places = ["--data", sources.data, "--models", sources.models, "--results", tmp_path / "kept"]
    for _ in range(2):
        run_study(name, "--runs", tmp_path, "--seed", 1, *places, *overrides)
        table = capsys.readouterr().out.splitlines()
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
        rows = [row for row in cells if len(row) > 2 and row[2] == "1"]
        arms = config.arms.values()
        assert len(rows) == sum(len(arm.learners) + len(arm.speeds) for arm in arms)
        assert all(row[3] and row[2 + len(config.scores)] for row in rows), table
    kept = results.read(tmp_path / "kept" / f"{name}.jsonl")
    assert [one.arm for one in kept] == [*config.arms]
    if name == "fastbert":
        fast = kept[-1].scores
        assert fast["speed 0.1"]["flops_ratio"] <= fast["speed 0.9"]["flops_ratio"] <= 6.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--models", "there"], "fastbert: reads tasks; name their folder by --data"),
        (["--data", "there"], "fastbert: begins with pre-trained models; name their folder by"),
    ],
)
def test_a_study_of_tasks_needs_its_sources(given, said, tmp_path):
    told = ["fastbert", "--runs", str(tmp_path), "--results", str(tmp_path), *given]
    outcome = CliRunner().invoke(study.main, told)
    assert (outcome.exit_code, said in outcome.output) == (1, True), outcome.output


def test_results_of_other_data_or_models_are_not_the_users(sources, tmp_path, monkeypatch):
    """Neither those of shipped results, which do not say of what they are."""
    monkeypatch.setattr(study, "load", load_shrunk)
    shutil.copytree(sources.data, tmp_path / "data")
    shutil.copytree(sources.models / "teacher", tmp_path / "models/teacher")
    here = Sources(Path("corpus"), tmp_path / "data", tmp_path / "models")
    config = study.load("fastbert")
    (job,) = study.jobs_of("fastbert", config, tmp_path, ["plain"], [1], (), here)
    kept = tmp_path / "fastbert.jsonl"
    recorded = result(config, "plain", 1, teacher=0.5)
    words = ["--seed", 1, "--arm", "plain", "--runs", tmp_path, "--results", tmp_path]
    places = ["--data", here.data, "--models", here.models]

    def outcome() -> str:
        kept.write_text(json.dumps(dataclasses.asdict(recorded)) + "\n")
        told = [str(word) for word in ("fastbert", *words, *places)]
        return CliRunner().invoke(study.main, told).output

    refusal = "fastbert.jsonl: its results are not known to be of your data and models"
    assert refusal in outcome()
    recorded = result(config, "plain", 2, teacher=0.5)
    assert refusal in outcome(), "another seed stands in the same table"
    recorded = result(config, "fastbert", 2, teacher=0.5)
    assert refusal in outcome(), "so does another arm"
    recorded = result(config, "plain", 1, teacher=0.5)
    recorded = dataclasses.replace(recorded, sources=job.sources_digest())
    assert refusal not in outcome()
    for path in (tmp_path / "data/glue/SST-2/dev.tsv", tmp_path / "models/teacher/config.json"):
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert refusal in outcome()
        path.write_bytes(before)
    path.unlink()
    places[1] = "/nowhere"
    assert "/nowhere" in outcome()


def test_each_seed_may_begin_with_models_of_its_own(sources, tmp_path):
    for seed in (1, 2):
        shutil.copytree(sources.models / "teacher", tmp_path / f"models/of-{seed}")
    (tmp_path / "models/of-2/config.json").open("a").write("\n")
    here = Sources(Path("corpus"), sources.data, tmp_path / "models")
    config = study.load("fastbert")
    arm = config.arms["plain"]
    arm.job["teacher"] = {"init": {"pretrained": "$models/of-$seed"}}
    config.job.pop("teacher", None)
    first, second = study.jobs_of("fastbert", config, tmp_path, ["plain"], [1, 2], (), here)
    assert first.sources_digest() != second.sources_digest()
    kept = tmp_path / "kept.jsonl"
    recorded = dataclasses.replace(
        result(config, "plain", 1, teacher=0.5), sources=first.sources_digest()
    )
    results.append(kept, recorded)
    assert (results.is_recorded(first, kept), results.is_recorded(second, kept)) == (True, False)
    (tmp_path / "models/of-1/config.json").open("a").write("\n")
    with pytest.raises(click.ClickException, match="not known to be of your data and models"):
        results.is_recorded(second, kept)


def test_files_are_made_once_and_a_change_of_their_command_is_another_arm(tmp_path):
    config = two_arms()
    config.files["more.tsv"] = ["data", "perturb", "sst2"]
    before = digest(config, "first")
    config.arms["first"].job["data"] = {"train": "$runs/more.tsv"}
    config.task = "sst2"
    sources = Sources(tmp_path, tmp_path / "data")
    job, other = study.jobs_of("why", config, tmp_path, seeds=[1], sources=sources)
    path = tmp_path / "why" / "more.tsv"
    root = f'data.root="{tmp_path}/data"'
    assert job.missing_files() == [["data", "perturb", "sst2", root, "--out", str(path)]]
    assert other.missing_files() == []
    path.parent.mkdir()
    path.write_text("")
    assert job.missing_files() == []
    with_file = digest(config, "first")
    config.files["more.tsv"].append("--copies")
    assert len({before, with_file, digest(config, "first")}) == 3


@pytest.mark.parametrize("name", OF_TEXT)
def test_every_job_of_a_shipped_study_is_one_that_can_run(name, tmp_path):
    """The strict loader accepts it, and an earlier job creates what it starts from."""
    before: list[str] = []
    for job in jobs(name, tmp_path):
        config = configs.load(str(job.write()), JobConfig, "job")
        start = config.teacher.init.pretrained
        start = start and start.removesuffix(".average")  # which stands beside the weights
        left = [f"{tmp_path}/{name}/{one}/exports/teacher" for one in before]
        assert start is None or start in left
        needed = [str(one.run / "exports/teacher") for one in job.needed()]
        assert needed[-1:] == ([] if start is None else [start])
        before.append(config.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TEXT)
def test_a_shipped_study_runs_and_has_its_rows(name, corpus, tmp_path, monkeypatch, capsys):
    """The runner would start one process per job; here a single process runs them all."""
    read = shutil.copytree(corpus, tmp_path / "corpus")
    (read / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n", encoding="utf-8")
    told = {}
    for job in jobs(name, tmp_path):
        file = job.write()
        told[file.stem] = ["train", str(file), f"data.path={read}", *TINY, *at_once(file)]
    for job, (code, output) in run_jobs(told, tmp_path).items():
        assert code == 0, (job, output)
    monkeypatch.setattr(study, "train", lambda job, overrides: pytest.fail("it has finished"))
    places = ["--corpus", read, "--runs", tmp_path, "--results", tmp_path / "kept"]
    for _ in range(2):
        run_study(name, "--seed", 1, *places)
        rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if "| 1 |" in row]
        assert len(rows) == sum(len(arm.learners) for arm in study.load(name).arms.values())
    found = results.read(tmp_path / "kept" / f"{name}.jsonl")
    assert [one.arm for one in found] == [*study.load(name).arms]
    for one in found:
        assert one.flops.keys() == one.scores.keys()
        assert min(one.flops.values()) > 0
        scored = [name for name, scores in one.scores.items() if "minimal_pairs" in scores]
        shown = study.load(name).arms[one.arm].learners
        assert sorted(scored) == sorted(shown if study.load(name).minimal_pairs else [])
    ElementTree.parse(tmp_path / "kept" / f"{name}.svg")


def test_without_arguments_the_studies_are_listed():
    """By the program, as a newcomer starts it."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [sys.executable, "benchmarks/study.py"]
    done = subprocess.run(program, cwd=REPOSITORY, env=given, capture_output=True, text=True)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == SHIPPED, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "nosuch: no such study config"),
        (["online", "--arm", "nosuch"], "online has no arm 'nosuch'; there are: alone, online"),
    ],
)
def test_unknown_names_are_refused(arguments, said):
    result = CliRunner().invoke(study.main, arguments)
    assert (result.exit_code > 0, said in result.output) == (True, True), result.output


def test_missing_minimal_pairs_are_named_before_anything_runs(tmp_path):
    config = two_arms()
    config.minimal_pairs = "pairs.jsonl"
    jobs = study.jobs_of("why", config, tmp_path)
    with pytest.raises(click.ClickException, match=r"why: minimal_pairs: corpus/pairs.jsonl does"):
        study.run_missing(jobs, tmp_path)


def test_results_of_another_corpus_are_not_taken_for_those_of_this_one(tmp_path, corpus):
    config = two_arms()
    results.append(tmp_path / "why.jsonl", result(config, "first", 1))  # of 100 tokens
    jobs = study.jobs_of("why", config, tmp_path, sources=Sources(Path(corpus)))
    with pytest.raises(click.ClickException, match=r"held-out tokens, and .* had 100; keep yours"):
        study.run_missing(jobs, tmp_path)
    old = two_arms(steps=9)  # whose results are of other arms
    none = study.jobs_of("why", old, tmp_path, sources=Sources(Path(corpus)))
    assert not results.is_recorded(none[0], tmp_path / "why.jsonl")


def test_results_of_text_are_of_a_corpus_by_its_content(tmp_path, corpus):
    """Also where as many tokens are held out; old results do not say of what they are."""
    config = two_arms()
    job = study.jobs_of("why", config, tmp_path, sources=Sources(Path(corpus)))[0]
    tokens = Corpus.open(str(corpus)).split("val").index.tokens
    old = dataclasses.replace(result(config, "first", 1), held_out_tokens=tokens)
    for sources, said in (("", None), (job.sources_digest(), None), ("0a1b", "is not the corpus")):
        (tmp_path / "why.jsonl").unlink(missing_ok=True)
        results.append(tmp_path / "why.jsonl", dataclasses.replace(old, sources=sources))
        if said is None:
            assert results.is_recorded(job, tmp_path / "why.jsonl")
        else:
            with pytest.raises(click.ClickException, match=said):
                results.is_recorded(job, tmp_path / "why.jsonl")
    nowhere = dataclasses.replace(job, sources=Sources(Path("/nowhere")))
    assert results.is_recorded(nowhere, tmp_path / "why.jsonl"), "a table needs no corpus"


def test_an_arm_is_another_when_it_or_one_that_it_begins_with_changes():
    now, changed = two_arms(), two_arms()
    assert digest(now, "second") == digest(changed, "second")
    assert digest(now, "second", ["steps=2"]) != digest(now, "second")
    changed.arms["first"].job["steps"] = 2
    assert digest(now, "second") != digest(changed, "second")
    changed.arms["first"].job.clear()
    changed.arms["second"].learners.clear()  # what the table shows
    assert digest(now, "second") == digest(changed, "second")


def test_one_seed_of_everything_comes_first(tmp_path):
    one, other = (
        study.jobs_of(name, two_arms(), tmp_path, seeds=seeds)
        for name, seeds in {"one": [1, 2], "other": [3]}.items()
    )
    ordered = [(job.name, job.arm, job.seed) for job in in_order([one, other])]
    assert ordered == [
        *[("one", "first", 1), ("one", "second", 1), ("other", "first", 3), ("other", "second", 3)],
        *[("one", "first", 2), ("one", "second", 2)],
    ]


def test_what_is_recorded_is_not_run_and_what_it_needs_is(tmp_path, monkeypatch):
    """A failure does not stop the others; an earlier arm's run is not mistaken for this one's."""
    config, asked = two_arms(), []
    jobs = study.jobs_of("why", config, tmp_path)

    def train(file: Path, overrides: list[str]) -> bool:
        asked.append(file.stem)
        (tmp_path / "why" / file.stem).mkdir()
        return file.stem != "second-1"

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(results, "of_run", lambda job, _: result(config, job.arm, job.seed))
    for seed in (1, 2):
        results.append(tmp_path / "why.jsonl", result(config, "first", seed))
    failed = study.run_missing(jobs, tmp_path)
    assert failed == [f"{tmp_path}/why/second-1"]
    assert asked == ["first-1", "second-1", "first-2", "second-2"]
    assert f"init: {tmp_path}/why/first-2\n" in (tmp_path / "why/second-2.yaml").read_text()
    assert len(results.read(tmp_path / "why.jsonl")) == 3
    other = study.jobs_of("why", two_arms(steps=9), tmp_path)[1]
    with pytest.raises(click.ClickException, match="second-1: was made by an earlier second"):
        other.write()


def test_a_file_that_is_no_record_is_named(tmp_path):
    (tmp_path / "online.jsonl").write_text('{"arm": "alone"}\n', encoding="utf-8")
    told = ["online", "--table", "--results", str(tmp_path)]
    outcome = CliRunner().invoke(study.main, told)
    assert (outcome.exit_code, "online.jsonl:1: is no result" in outcome.output) == (1, True)


@pytest.fixture
def timed(monkeypatch) -> Callable[[list[dict[str, float]]], None]:
    """Stands for the short runs that are timed: each logs these rows."""

    def use(rows: list[dict[str, float]]) -> None:
        def train(file: Path, overrides: list[str]) -> bool:
            run = Path(configs.assigned(overrides)["output_dir"], file.stem)
            run.mkdir()
            text = "".join(json.dumps({"seconds": 9.0, **row}) + "\n" for row in rows)
            (run / "metrics.jsonl").write_text(text)
            return True

        monkeypatch.setattr(study, "train", train)

    return use


def seconds_told(table: str) -> dict[str, str]:
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert all(float(row[2]) > 0 for row in rows)
    return {row[1]: row[3].strip(" |") for row in rows}


def a_step(name: str, **parts: float) -> dict[str, float]:
    return {f"{name}/seconds_{part}": taken for part, taken in parts.items()}


@pytest.mark.slow
def test_what_an_arm_costs(timed, tmp_path, capsys):
    """Seconds per step, times the number of steps that the learner takes part in."""
    timed(
        [
            a_step(name, forward=0.25, backward=0.125, step=0.125)
            for name in ("teacher", "students/student")
        ]
    )
    run_study("online", "--arm", "delayed", "--cost", 5, "--runs", tmp_path)
    told = seconds_told(capsys.readouterr().out)
    assert told == {"teacher": "400.0", "student": "300.0"}


@pytest.mark.slow
def test_what_a_teacher_costs_that_finishes_first(timed, tmp_path, capsys):
    """Its 600 steps of training in full, then a forward in each of 600 steps."""
    student = a_step("students/narrow", forward=0.25, backward=0.25)
    timed(
        [
            a_step("teacher", forward=0.5, backward=1.5) | student,
            a_step("teacher", forward=0.25) | student,
        ]
    )
    run_study("cotraining", "--arm", "finished_1", "--cost", 5, "--runs", tmp_path)
    told = seconds_told(capsys.readouterr().out)
    assert told == {"teacher": "1350.0", "narrow": "300.0"}


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "halved"), [("finished_1", True), ("joint_1", False)])
def test_both_steps_of_a_teacher_that_finishes_first_are_timed(arm, halved, tmp_path, monkeypatch):
    overrides: list[str] = []
    monkeypatch.setattr(study, "train", lambda file, more: overrides.extend(more))
    run_study("cotraining", "--arm", arm, "--cost", 5, "--runs", tmp_path)
    assert (study.HALF in overrides) == halved
