"""Every family of encoders with every task: trained, scored, exported, predicted and reloaded."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import configs
import tandem
from model import ModelConfig, from_pretrained, import_folder
from tests.conftest import command_environment
from tests.distributed import run_distributed
from tests.trainer import jobs, told_by_transformers
from tests.trainer.test_joint_tasks import pairs
from tests.trainer.test_ranking_tasks import documents, written
from tests.trainer.test_sentence_tasks import lines
from tests.trainer.test_token_tasks import conll, dream, squad
from tests.trainer.told_by_transformers import CLASSES, TEXT, Told, told_by_export
from trainer.config import JobConfig
from trainer.evaluation.export import _settings
from trainer.job_data.examples import with_examples
from trainer.learner_life import InitConfig
from trainer.learners.first_weights import from_folder
from trainer.objectives.term import registered_terms

pytestmark = pytest.mark.slow
SIZES = "hidden_size: 16, layers: 3, heads: 2, ffn_size: 24, vocab_size: 600, max_positions: 66"
FAMILIES = {
    "bert": "base: bert_base",
    "roberta": "base: roberta_base, pad_token_id: 0",
    "distilbert": "base: distilbert",
    "albert": "base: albert_base, embedding_size: 8",
    "mobilebert": "base: mobilebert, embedding_size: 8, bottleneck_size: 8",
    "deberta": "base: deberta_v3_small, position_buckets: 8",
    "modernbert": "base: modernbert_base, pad_token_id: 0, local_window: 8, global_every: 2, "
    "global_rope_theta: 500.0, local_rope_theta: 20.0",
}
MODELS = {name: f"{start}, {SIZES}" for name, start in FAMILIES.items()}
MODELS["bilstm"] = "kind: bilstm, hidden_size: 16, pooled_size: 8, vocab_size: 600"
TASKS = {  # and their files
    "single_sentence": "texts.tsv",
    "sentence_pair": "pairs.tsv",
    "tagging": "words.txt",
    "span": "squad.json",
    "multiple_choice": "dream.json",
    "bi_encoder": "pairs.tsv",
    "retrieval": "qrels.tsv",
    "reranking": "qrels.tsv",
}
FILES = "data.files={documents: documents.jsonl, queries: queries.jsonl"
MORE = {
    "retrieval": [f"{FILES}}}"],
    "reranking": [f"{FILES}, candidates: candidates.jsonl}}"],
}


def job_text(data: str, objective: str, of_teacher: str = "") -> str:
    """A job whose teacher is BERT, with a student of every other family and a BiLSTM."""
    models = {name: f"model: {{{model}}}" for name, model in MODELS.items()}
    teacher = f"{models.pop('bert')}, objective: {{{objective}{of_teacher}}}"
    learns = f"objective: {{{objective}}}"
    students = ", ".join(f"{name}: {{{model}, {learns}}}" for name, model in models.items())
    return f"""
steps: 2
data: {{{data}}}
batch: {{size: 4, micro_batch: 2}}
teacher: {{{teacher}}}
students: {{{students}}}
evaluation: {{every: 2}}
checkpoint: {{every: 2}}
log: {{every: 1, wandb: disabled}}
"""


def write_examples(folder: Path) -> None:
    """The examples of every task, and a collection to search."""
    (folder / "texts.tsv").write_text("\n".join(["text\tlabel", *lines(16, 0)]) + "\n")
    (folder / "pairs.tsv").write_text(pairs(16, 0))
    made: dict[str, Callable[[int, int], str]] = {
        "tagging": conll, "span": squad, "multiple_choice": dream,
    }  # fmt: skip
    for task, make in made.items():
        (folder / TASKS[task]).write_text(make(16, 1))
    texts = [{"_id": name, "title": "", "text": text} for name, text in documents()][:12]
    written(folder, "documents.jsonl", texts)
    written(folder, "queries.jsonl", [{"_id": f"q{n}", "text": "of the"} for n in range(8)])
    rows = [f"q{n}\td{n}\t1\n" for n in range(8)]
    (folder / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{''.join(rows)}")
    found = [{"id": f"d{n}", "score": 1.0 / (n + 1)} for n in range(12)]
    written(folder, "candidates.jsonl", [{"query": f"q{n}", "documents": found} for n in range(8)])


def train_every_task(folder: Path, corpus: Path) -> None:
    """Train and finish a job of each task. Collective."""
    for task, file in TASKS.items():
        settings = "{target: number}" if task == "sentence_pair" else "{}"
        data = f"root: {folder}, train: {file}, validation: {file}, sequence_length: 48"
        text = job_text(f"{data}, tokenizer: {corpus}/tokenizer", f"{task}: {settings}")
        words = [f"name={task}", f"output_dir={folder}/runs", *MORE.get(task, [])]
        job = configs.load_text(text, JobConfig, "job", words, "job.yaml")
        jobs.finish(jobs.run(with_examples(job)))


def train_on_text(folder: Path, corpus: Path) -> None:
    """Train and finish a job whose teacher predicts the next sentence. Collective."""
    data = f"path: {corpus}, packing: segment_pair, sequence_length: 48"
    words = [f"name={TEXT}", f"output_dir={folder}/runs"]
    text = job_text(data, "mlm: {}", ", nsp: {}")
    jobs.finish(jobs.run(configs.load_text(text, JobConfig, "job", words, "job.yaml")))


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_examples(folder)
    run_distributed(train_every_task, 1, folder, corpus)
    run_distributed(train_on_text, 1, folder, corpus)
    return folder


def export_of(folder: Path, task: str, family: str) -> Path:
    return folder / "runs" / task / "exports" / ("teacher" if family == "bert" else family)


def mistakes_told(folder: Path, task: str, answers: list[dict[str, Any]]) -> int:
    """How many answers of `tandem predict` are wrong, by the files that are scored."""
    if task in MORE:
        return sum(one["documents"][0]["id"] != f"d{n}" for n, one in enumerate(answers))
    text = (folder / TASKS[task]).read_text()
    if task == "single_sentence":
        right = [line.rpartition("\t")[2] for line in text.splitlines()[1:]]
        return sum(one["label"] != label for one, label in zip(answers, right, strict=True))
    right = [record[1][0]["answer"] for record in json.loads(text)]
    return sum(one["answer"] != answer for one, answer in zip(answers, right, strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_every_family_learns_every_task_and_predicts(folder: Path, task: str) -> None:
    results = json.loads((folder / "runs" / task / "evaluation.json").read_text())
    for family in MODELS:
        learner = "teacher" if family == "bert" else f"students/{family}"
        assert results["learners"][learner][results["metric"]] is not None
        words = [str(export_of(folder, task, family)), str(folder / TASKS[task])]
        if task in ("retrieval", "reranking"):
            words[1:] = [str(folder / "queries.jsonl"), "--documents", f"{folder}/documents.jsonl"]
            words += ["--candidates", f"{folder}/candidates.jsonl"] * (task == "reranking")
        ended = CliRunner().invoke(tandem.main, ["predict", *words])
        assert ended.exit_code == 0, ended.output
        answers = [json.loads(line) for line in ended.stdout.splitlines()]
        assert len(answers) == (8 if task in MORE else 16)
        breakdown = results["learners"][learner]["breakdown"][task]
        if task in ("sentence_pair", "bi_encoder"):  # a number
            assert (len(breakdown["wrong"]), len(breakdown["points"])) == (16, 16)
        elif task == "span":
            exact = results["learners"][learner]["span_exact_match"]
            assert breakdown["wrong_examples"] == round(16 * (1 - exact))
        elif task != "tagging":
            assert breakdown["wrong_examples"] == mistakes_told(folder, task, answers)
            assert all(all(one.values()) for one in breakdown["wrong"])


def evaluated(*words: object) -> dict[str, Any]:
    """The JSON that `tandem evaluate` prints of a finished model."""
    ended = CliRunner().invoke(tandem.main, ["evaluate", *map(str, words), "--json"])
    assert ended.exit_code == 0, ended.output
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def require_equal_scores(
    found: Mapping[str, Any], results: Mapping[str, Any], learner: str
) -> None:
    """Raise AssertionError unless a model has the scores of the run that trained it."""
    assert found["metric"] == results["metric"]
    assert found["columns"] == results["columns"]
    for column, score in found["scores"].items():
        assert score == pytest.approx(results["learners"][learner].get(column), abs=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_an_export_has_the_scores_of_its_run(folder: Path, task: str) -> None:
    results = json.loads((folder / "runs" / task / "evaluation.json").read_text())
    for family in MODELS:
        learner = "teacher" if family == "bert" else f"students/{family}"
        keys = [f"data.root={folder}", f"data.validation={TASKS[task]}", *MORE.get(task, [])]
        keys.append("batch.micro_batch=2")  # sums are rounded as in the run
        found = evaluated(export_of(folder, task, family), *keys)
        require_equal_scores(found, results, learner)
        assert found["breakdown"] == results["learners"][learner]["breakdown"].get(task)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", sorted(TASKS.keys() - {"retrieval", "reranking", "bi_encoder"}))
def test_what_transformers_has_fine_tuned_is_scored_by_the_kind_of_its_head(
    folder: Path, tmp_path: Path, task: str, family: str
) -> None:
    given = fine_tuned_by_transformers(export_of(folder, task, family), tmp_path / "given")
    import_folder(given, tmp_path / "imported")
    key = f"data.validation={folder / TASKS[task]}"
    expected = evaluated(export_of(folder, task, family), key)["scores"]
    for model in (given, tmp_path / "imported"):
        found = evaluated(model, key, "data.sequence_length=48")
        assert [*found["scores"].values()] == pytest.approx([*expected.values()], abs=1e-6)


def test_every_family_learns_beside_a_teacher_of_the_next_sentence(folder: Path) -> None:
    results = json.loads((folder / "runs" / TEXT / "evaluation.json").read_text())
    for family in MODELS.keys() - {"bert"}:
        assert results["learners"][f"students/{family}"]["agreement"] is not None


def require_equal(exported: Path, task: str, told: Told) -> None:
    """Raise AssertionError unless our model says of the same ids what `transformers` says."""
    ours, read = from_pretrained(exported), told.read
    assert ("token_type_ids" in read) == ours.config.reads_segments
    with torch.no_grad():
        output = ours(read["input_ids"], read.get("token_type_ids"), read["attention_mask"])
    got = output.heads.get(task, output.logits)
    real = read["attention_mask"].bool() if got.ndim == 3 else slice(None)
    torch.testing.assert_close(got[real], told.output[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", CLASSES)
def test_an_export_reads_what_its_own_tokenizer_gives(folder: Path, task: str, family: str) -> None:
    exported = export_of(folder, task, family)
    require_equal(exported, task, told_by_export(exported, task))


def pasted(exported: Path, language: str) -> str:
    """What the code of a model card prints in the folder of the model."""
    card = (exported / "README.md").read_text()
    (code,) = re.findall(rf"## Use\n.*?```{language}\n(.*?)```\n", card, re.DOTALL)
    if language == "python":
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.chdir(exported)
            exec(code, {})
        return printed.getvalue()
    places = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = command_environment() | {"PATH": places}
    words = ["bash", "-ec", code]
    done = subprocess.run(words, cwd=exported, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", CLASSES)
def test_the_code_of_a_model_card_runs_as_pasted(folder: Path, task: str, family: str) -> None:
    printed = pasted(export_of(folder, task, family), "python")
    labels = {TEXT: "token_str", "single_sentence": "label", "sentence_pair": "label"}
    assert labels.get(task, "") in printed


@pytest.mark.parametrize("task", ["single_sentence", "sentence_pair", TEXT])
def test_the_code_of_a_model_card_of_our_own_format_runs(folder: Path, task: str) -> None:
    printed = pasted(export_of(folder, task, "bilstm"), "bash")
    if task != TEXT:
        assert {"label", "number"} & json.loads(printed).keys()
    assert printed


def test_a_card_names_the_data_and_no_internals(folder: Path) -> None:
    exported = export_of(folder, "single_sentence", "modernbert")
    card = (exported / "README.md").read_text()
    assert f"- Data: {folder.name}/texts.tsv\n" in card
    assert f"\n## Validation file {folder.name}/texts.tsv\n" in card
    assert re.search(r"^\| accuracy \| 0\.\d{4} \|$", card, re.MULTILINE)
    assert "| single_sentence | weight 1.0 |" in card
    for internal in (str(folder), "single_sentence_accuracy", "Held-out"):
        assert internal not in card


def test_the_settings_of_a_card_are_as_in_yaml() -> None:
    section = registered_terms()["soft_labels"](weight=0.5, tasks=["quality"])
    assert _settings(section) == "weight 0.5, tasks [quality]"


def fine_tuned_by_transformers(exported: Path, out: Path, **changes: object) -> Path:
    """The folder of an export, as if `transformers` had fine-tuned it, with changes of config.json.

    It names no task, and has no task.json.
    """
    shutil.copytree(exported, out)
    (out / "task.json").unlink()
    written = json.loads((out / "config.json").read_text())
    del written["finetuning_task"]
    (out / "config.json").write_text(json.dumps(written | changes))
    return out


def begun(folder: Path, config: ModelConfig) -> Mapping[str, torch.Tensor]:
    """The weights with which a model of `config` begins from a folder."""
    return from_folder("teacher", InitConfig(pretrained=str(folder)), config)


@pytest.fixture
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@pytest.mark.usefixtures("rank_zero")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", sorted(TASKS.keys() - {"retrieval", "bi_encoder"}))
def test_a_head_that_transformers_has_fine_tuned_is_kept_where_it_fits(
    folder: Path, tmp_path: Path, caplog, task: str, family: str
) -> None:
    exported = export_of(folder, task, family)
    ours = from_pretrained(exported)
    head = f"task_heads.{task}.linear.weight"
    kept = begun(fine_tuned_by_transformers(exported, tmp_path / "same"), ours.config)
    assert all(torch.equal(kept[name], given) for name, given in ours.state_dict().items())
    labels = ours.config.task_heads[task].labels
    if not labels:
        return
    count = range(len(labels))
    turned = {"id2label": {n: labels[-1 - n] for n in count}}
    unnamed = {"id2label": {n: f"LABEL_{n}" for n in count}}
    for number, (change, rows) in enumerate([(turned, ours.state_dict()[head].flip(0)),
                                             (unnamed, ours.state_dict()[head])]):  # fmt: skip
        given = fine_tuned_by_transformers(exported, tmp_path / str(number), **change)
        assert torch.equal(begun(given, ours.config)[head], rows)
    (said,) = caplog.messages
    assert f"{given}: the labels of its head have no names: LABEL_0, " in said
    caplog.clear()
    other = fine_tuned_by_transformers(
        exported, tmp_path / "o", id2label={n: f"x{n}" for n in count}
    )
    assert head not in begun(other, ours.config)
    (said,) = caplog.messages
    assert said.startswith(f"{other}: its head ({ours.config.task_heads[task].kind} of x0, x1")
    assert said.endswith("which begins with a new one")


def fine_tune(folder: Path, corpus: Path, pretrained: Path) -> None:
    """Train on single sentences from a folder, at a rate that changes nothing. Collective."""
    text = f"""
base: single_sentence
name: again
epochs: null
steps: 1
data: {{root: {folder}, train: texts.tsv, validation: texts.tsv, sequence_length: 48}}
teacher: {{init: {{pretrained: {pretrained}}}, optimizer: {{learning_rate: 1.0e-12}}}}
output_dir: {folder}/runs
log: {{wandb: disabled}}
"""
    job = configs.load_text(text, JobConfig, "task", [], "job.yaml")
    jobs.finish(jobs.run(with_examples(job)))


def test_fine_tuning_goes_on_from_the_head_of_transformers(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    exported = export_of(folder, "single_sentence", "bert")
    given = fine_tuned_by_transformers(exported, tmp_path / "given")
    run_distributed(fine_tune, 1, folder, corpus, given)
    tuned = from_pretrained(folder / "runs" / "again" / "exports" / "teacher").state_dict()
    for name, tensor in from_pretrained(exported).state_dict().items():
        torch.testing.assert_close(tuned[name], tensor, rtol=0.0, atol=1e-9)


def environment(folder: Path, requirement: str) -> Path:
    """The Python of a new environment with this package and, below it, those of the tests."""
    python = folder / "bin" / "python"
    for words in (
        [sys.executable, "-m", "venv", folder],
        [python, "-m", "pip", "install", "--quiet", requirement],
    ):
        done = subprocess.run([*map(str, words)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{requirement} cannot be installed here: {done.stderr.strip()[-200:]}")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.slow
@pytest.mark.parametrize("version", ["==4.57.*", ">=5"])
def test_exports_are_right_in_other_versions(folder: Path, tmp_path: Path, version: str) -> None:
    python = environment(tmp_path / "environment", f"transformers{version}")
    program, out = Path(told_by_transformers.__file__), tmp_path / "told.pt"
    subprocess.run([python, program, folder / "runs", out], check=True, env=command_environment())
    told = torch.load(out)
    assert len(told) == len(FAMILIES) * len(CLASSES)
    for name, given in told.items():
        task, _, learner = name.partition("/")
        require_equal(folder / "runs" / task / "exports" / learner, task, Told(*given))
