"""A model that `transformers` has fine-tuned as the frozen teacher of a task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

import configs
import tandem
from configs import ConfigError
from data_pipeline.tokenization.training import train
from model import build, import_folder
from tests.trainer.test_sentence_tasks import LABELS, lines, write
from tests.trainer.test_token_tasks import conll
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.examples import with_examples
from trainer.learners.first_weights import from_folder

SIZES = {
    "vocab_size": 600, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 48, "initializer_range": 0.5,
}  # fmt: skip
CLASSES = {
    "single_sentence": transformers.BertForSequenceClassification,
    "sentence_pair": transformers.BertForSequenceClassification,
    "tagging": transformers.BertForTokenClassification,
}
FILES = {"single_sentence": "texts.tsv", "sentence_pair": "pairs.tsv", "tagging": "words.txt"}
Saved = Callable[..., Path]


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_of_600(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tokenizer"
    train([str(text)], "wordpiece", 600, str(folder))
    return folder


@pytest.fixture(name="hub")
def saved_by_transformers(tokenizer: Path, tmp_path: Path) -> Saved:
    """``hub(task, labels)``: the folder of a fine-tuned model; labels None: it names none."""

    def save(task: str = "single_sentence", labels: list[str] | None = None) -> Path:
        names = {} if labels is None else {"id2label": dict(enumerate(labels))}
        torch.manual_seed(3)
        config = transformers.BertConfig(**SIZES, num_labels=len(labels or LABELS), **names)
        theirs = CLASSES[task](config)
        shutil.copytree(tokenizer, tmp_path / "hub", dirs_exist_ok=True)
        theirs.save_pretrained(tmp_path / "hub")
        return tmp_path / "hub"

    return save


@pytest.fixture(name="tables")
def examples(tmp_path: Path) -> Path:
    write(tmp_path / "texts.tsv", lines(20, 0))
    pairs = [line.replace("\t", "\tthe end\t") for line in lines(20, 0)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["text_a\ttext_b\tlabel", *pairs]) + "\n")
    (tmp_path / "words.txt").write_text(conll(20, 1))
    return tmp_path


def job(tables: Path, teacher: Path, *words: str, task: str = "single_sentence") -> JobConfig:
    given = [f"data.train={tables / FILES[task]}", f"teacher.init.pretrained={teacher}"]
    given += ["data.sequence_length=32", f"output_dir={tables}/runs"]
    given += ["students.small.init.layers=[1,3]", *words]
    return with_examples(configs.load(f"distil_{task}", JobConfig, "task", given))


def agree(job: JobConfig, hub: Path, task: str, order: list[int]) -> None:
    """The job's teacher says what `transformers` says, with its labels in this order."""
    config = job.teacher.architecture
    model = build(config, seed=1).eval()
    missing = model.load_state_dict(from_folder("teacher", job.teacher.init, config), strict=False)
    assert missing == ([], [])
    theirs = CLASSES[task].from_pretrained(hub).eval()
    ids = torch.randint(5, 600, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, got = theirs(ids).logits, model(ids).heads[task]
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted[..., order], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("task", CLASSES)
def test_the_only_head_is_found_by_its_kind(hub, tables, caplog, task, is_imported) -> None:
    labels = LABELS[::-1]
    if task == "tagging":
        words = (tables / FILES[task]).read_text().splitlines()
        labels = sorted({line.split()[-1] for line in words if line}, reverse=True)
    theirs = given = hub(task, labels)
    if is_imported:
        given = tables / "imported"
        import_folder(theirs, given)
    made = job(tables, given, task=task)
    head = made.teacher.architecture.task_heads[task]
    assert [*made.teacher.architecture.task_heads] == [task]
    assert made.primary_column.name.startswith(f"{task}_")
    agree(made, theirs, task, [labels.index(label) for label in head.labels])
    assert not caplog.messages


def test_labels_without_names_are_in_the_order_of_the_examples(hub, tables, caplog) -> None:
    theirs = hub()
    agree(job(tables, theirs), theirs, "single_sentence", [0, 1])
    (line,) = caplog.messages
    assert line.startswith(f"{theirs}: the labels of its head have no names: LABEL_0, LABEL_1 are ")
    assert "LABEL_1 are bright, dull" in line
    assert line.endswith("teacher.init.labels names others")
    turned = job(tables, theirs, f"students.small.objective.single_sentence.labels={LABELS[::-1]}")
    assert turned.teacher.architecture.task_heads["single_sentence"].labels == LABELS[::-1]
    agree(turned, theirs, "single_sentence", [0, 1])


def test_other_names_of_labels_are_given_by_a_key(hub, tables) -> None:
    theirs = hub(labels=["POSITIVE", "NEGATIVE"])
    with pytest.raises(TrainingError) as refused:
        job(tables, theirs)
    assert str(refused.value) == (
        "teacher.init.pretrained: its head predicts POSITIVE, NEGATIVE, but the labels of the "
        "examples are bright, dull; list these in the order of the head's: "
        "teacher.init.labels=[...]"
    )
    named = job(tables, theirs, "teacher.init.labels=[dull,bright]")
    agree(named, theirs, "single_sentence", [1, 0])
    student = named.students["small"]
    begun = from_folder("students.small", student.init, student.architecture)
    weight = "task_heads.single_sentence.linear.weight"
    kept = from_folder("teacher", named.teacher.init, named.teacher.architecture)
    assert torch.equal(begun[weight], kept[weight])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("[a,b,c]", "teacher.init.labels: lists 3 for the 2 labels of the head"),
        ("[a,a]", "teacher.init.labels: must name at least two labels, each once"),
        ("[bright,b]", "teacher.init.pretrained: its head predicts bright, b, but the labels"),
    ],
)
def test_wrong_names_of_labels_are_refused(hub, tables, labels, message) -> None:
    with pytest.raises((ConfigError, TrainingError), match=message):
        job(tables, hub(), f"teacher.init.labels={labels}")


def test_an_export_says_which_task_it_is_for(hub, tables) -> None:
    """Its head is not taken for another's."""
    theirs = hub(labels=LABELS)
    facts = {"fields": ["text"], "settings": {"task": "single_sentence"}}
    (theirs / "task.json").write_text(json.dumps(facts))
    written = json.loads((theirs / "config.json").read_text())
    named = {**written, "finetuning_task": "single_sentence"}
    (theirs / "config.json").write_text(json.dumps(named))
    job(tables, theirs)
    with pytest.raises(TrainingError, match="it has no head for sentence_pair, but for single_"):
        job(tables, theirs, task="sentence_pair")


def test_a_head_of_another_kind_is_not_taken(hub, tables) -> None:
    with pytest.raises(TrainingError, match="it has no head for tagging, but for classification"):
        job(tables, hub(), task="tagging")


def test_its_attention_is_analysed_on_the_task(hub, tables) -> None:
    words = ["data.train=texts.tsv", "data.validation=texts.tsv", f"data.root={tables}"]
    words += ["data.sequence_length=32", f"output_dir={tables}/runs"]
    words += ["--out", str(tables / "analysis"), "--json"]
    ended = CliRunner().invoke(tandem.main, ["analyze", str(hub()), "single_sentence", *words])
    assert ended.exit_code == 0, ended.output
    told = json.loads((tables / "analysis" / "analysis.json").read_text())
    assert told["scored"] == "20 validation examples"
