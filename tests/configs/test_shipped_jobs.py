"""Every shipped job trains two steps, at tiny widths, through the real command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import configs
from model import EncoderConfig, build, save_pretrained
from tests.configs.run_jobs import run_jobs
from tests.conftest import REPOSITORY
from trainer.config import JobConfig
from trainer.run_folder import metrics

JOBS = sorted(path.stem for path in (REPOSITORY / "configs" / "job").glob("*.yaml"))
AT_ONCE = "{step: 0, fraction: null, teacher: null}"
VOCABULARY, LENGTH = 600, 32  # of the corpus that all tests share
BATCH = "{size: 4, tokens: null, growth: [], micro_batch: 2}"
# Jobs whose teacher another of them has trained, and where that leaves it.
TEACHERS = {"mobilebert": "ib_bert/exports/teacher"}
# Those that begin from a model which their user names, or read a corpus in each phase.
GAPS = {"continue": ["teacher.init.pretrained=model"], "modernbert_large": ["teacher.init.tile=x"]}
LARGE = (  # most of all layers
    *("bert_large_cluster", "ettin_family", "modernbert_large"),
    *("modernbert_base", "ib_bert", "mobilebert"),
)
OF_THREE_CORPORA = ("ettin_family", "modernbert_base", "modernbert_large")
# Those whose predictions nothing trains: never, and not before layers have been transferred.
UNTRAINED = {"tinybert": ["students/tinybert"], "mobilebert": ["students/mobilebert"]}


def narrow(config: EncoderConfig) -> EncoderConfig:
    """The same architecture and depth, as narrow as its heads allow."""
    width = 2 * config.heads
    return dataclasses.replace(
        config,
        vocab_size=VOCABULARY,
        hidden_size=width,
        ffn_size=16,
        embedding_size=8 if config.word_size != config.hidden_size else 0,
        bottleneck_size=width if config.bottleneck_size else 0,
        pad_token_id=min(config.pad_token_id, 1),
    )


def changes(section: str, config: EncoderConfig) -> list[str]:
    """Overrides that make a section's model `narrow`."""
    small = dataclasses.asdict(narrow(config))
    return [
        f"{section}.model.{key}={small[key]}"
        for key, value in dataclasses.asdict(config).items()
        if small[key] != value
    ]


def arguments(name: str, corpus: Path, folder: Path) -> list[str]:
    """The arguments for `tandem`; a frozen teacher's checkpoint is made here."""
    of_three = ["data.mixture=null", "data.phases=[]"]
    text = of_three if name in OF_THREE_CORPORA else []
    job = configs.load(name, JobConfig, "job", ["data.path=anything", *text, *GAPS.get(name, [])])
    teacher = narrow(job.teacher.model)
    finished = TEACHERS.get(name, name)  # the folder of a frozen teacher
    is_given = job.teacher.frozen or name == "continue"
    if is_given and name not in TEACHERS:
        save_pretrained(build(teacher, seed=1), folder / name, corpus / "tokenizer")
    sizes = [
        *changes("teacher", job.teacher.model),
        *(c for key, one in job.students.items() for c in changes(f"students.{key}", one.model)),
    ]
    return [
        *("train", name, *sizes, f"output_dir={folder}", "steps=2", f"data.path={corpus}", *text),
        *(f"data.sequence_length={LENGTH}", "data.phases=[]", "log={every: 1, wandb: disabled}"),
        *(f"batch={BATCH}", "evaluation={every: 2, sequences: 4}"),
        *(f"students.{key}.start={AT_ONCE}" for key in job.students),
        *([f"teacher.init.pretrained={folder / finished}"] if is_given else []),
        *(["teacher.init.tile=null"] if name == "modernbert_large" else []),
        *(["teacher.stacking.steps=[1]"] if job.teacher.stacking.steps else []),  # it grows once
    ]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory, request):
    """The folder of the run of every job that is tested, and name -> (exit code, output)."""
    folder = tmp_path_factory.mktemp("jobs")
    tested = [item for item in request.session.items if item.module is request.module]
    names = {item.callspec.params["name"] for item in tested}
    names |= {Path(TEACHERS[name]).parts[0] for name in names & TEACHERS.keys()}
    told = {name: arguments(name, corpus, folder / "teachers") for name in sorted(names)}
    return folder / "teachers", run_jobs(told, folder)


@pytest.mark.parametrize(
    "name", [pytest.param(job, marks=[pytest.mark.slow] * (job in LARGE)) for job in JOBS]
)
def test_a_shipped_job_trains(runs, name):
    folder, outcomes = runs
    code, output = outcomes[name]
    assert code == 0, output
    job = configs.load(str(folder / name / "config.yaml"), JobConfig, "job")
    rows = metrics.read(folder / name / "metrics.jsonl")
    last = [row for row in rows if row["step"] == 2]
    trained = {f"students/{key}": one for key, one in job.students.items()}
    if not job.teacher.frozen:
        trained["teacher"] = job.teacher
    for learner, config in trained.items():
        for term in config.objective.terms():
            assert any(f"{learner}/{term}" in row for row in last), (learner, term)
        loss = "loss" if config.architecture.mlm_head else "rtd_loss"
        is_scored = any(f"val/data/{learner}/{loss}" in row for row in last)
        assert is_scored == (learner not in UNTRAINED.get(name, ()))
        assert (folder / name / "exports" / learner.removeprefix("students/")).is_dir()
    pairs = job.teacher.architecture.pair_head
    assert any("val/data/teacher/pair_accuracy" in row for row in last) == pairs
    results = json.loads((folder / name / "evaluation.json").read_text(encoding="utf-8"))
    assert (results["learners"]["teacher"].get("pair_accuracy") is not None) == pairs


@pytest.mark.parametrize("name", ["tinybert", pytest.param("mobilebert", marks=pytest.mark.slow)])
def test_nothing_is_claimed_of_a_head_that_nothing_has_trained(runs, name):
    folder, outcomes = runs
    results = json.loads((folder / name / "evaluation.json").read_text(encoding="utf-8"))
    rows = metrics.read(folder / name / "metrics.jsonl")
    columns = 3 if "pair_accuracy" in results["learners"]["teacher"] else 2
    for learner in UNTRAINED[name]:
        facts = results["learners"][learner]
        scores = [*facts["corpora"].values(), facts]
        assert all(one[key] is None for one in scores for key in ("loss", "accuracy"))
        assert facts["retention"] is facts["agreement"] is None
        assert facts["tokens_per_second"] > 0
        assert not any(f"val/data/{learner}/accuracy" in row for row in rows)
        short = learner.removeprefix("students/")
        (line,) = [one for one in outcomes[name][1].splitlines() if one.startswith(f"{short} ")]
        assert line.count("not trained") == columns
        card = (folder / name / "exports" / short / "README.md").read_text(encoding="utf-8")
        assert "head is not trained" in card
        assert "accuracy" not in card.replace("pair_accuracy", "")
    assert results["learners"]["teacher"]["accuracy"] is not None
    report = (folder / name / "report.html").read_text(encoding="utf-8")
    assert report.count("<td>not trained</td>") == columns
