"""Students of a task that read its examples by another tokenizer than their teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

import configs
from configs import ConfigError
from data_pipeline import BatchSizes, Corpus, DataError, ExampleSplit, ExampleStream, open_corpora
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_views import rows, write
from trainer.config import JobConfig
from trainer.job_data.examples import views_of, with_examples
from trainer.job_data.fit import require_fit, require_pretrained
from trainer.run_folder.folder import RunFolder

JOB = """
name: pairs
steps: 6
output_dir: {folder}/runs
data: {{root: {folder}, train: train.tsv, validation: held_out.tsv, sequence_length: 48}}
batch: {{size: 8, micro_batch: 2}}
teacher: {{frozen: true, init: {{pretrained: {folder}/wordpiece}}}}
teachers:
  second: {{frozen: true, tokenizer: {folder}/bpe, init: {{pretrained: {folder}/bpe}}}}
students:
  same:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 48}}
    objective: {{sentence_pair: {{}}, soft_labels: {{teacher: mean}}}}
  other:
    tokenizer: {folder}/bpe
    init: {{pretrained: {folder}/bpe}}
    objective: {{sentence_pair: {{}}, soft_labels: {{temperature: 2.0}}}}
evaluation: {{every: 3}}
checkpoint: {{every: 3}}
log: {{every: 1, wandb: disabled}}
"""


def load(folder: Path, *overrides: str) -> JobConfig:
    text = JOB.format(folder=folder)
    return configs.load_text(text, JobConfig, "job", overrides, "job.yaml")


def run(folder: Path, *overrides: str, stop_after: int | None = None) -> RunFolder:
    return jobs.run(with_examples(load(folder, *overrides)), stop_after=stop_after)


@pytest.fixture(scope="module")
def folder(corpus, text, tmp_path_factory) -> Path:
    """Two classifiers by `transformers` whose tokenizers share nothing but special tokens."""
    folder = write(tmp_path_factory.mktemp("tokenizers"))
    made = tandem(
        *("tokenizer", "train", text, "--kind", "bpe", "--vocab-size", 400),
        *("--out", folder / "bpe"),
    )
    assert made.returncode == 0, made.stderr
    (folder / "job.yaml").write_text(JOB.format(folder=folder))
    shutil.copytree(corpus / "tokenizer", folder / "wordpiece")
    torch.manual_seed(3)
    for name, vocab_size in (("wordpiece", 600), ("bpe", 400)):
        config = BertConfig(
            vocab_size=vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=48, initializer_range=0.5,
            id2label={0: "0", 1: "1"}, label2id={"0": 0, "1": 1},
        )  # fmt: skip
        BertForSequenceClassification(config).save_pretrained(folder / name)
    return folder


def trained(folder: Path) -> list[str]:
    """Folders of a whole run, of one that stops and resumes, and of one without the student."""
    whole = run(folder, "name=whole")
    jobs.finish(whole)
    run(folder, "name=resumed", stop_after=2)
    resumed = run(folder, "name=resumed")
    alone = run(folder, "name=alone", "students.other=null")
    return [str(made.path) for made in (whole, resumed, alone)]


def texts_of(numbers: list[int]) -> tuple[list[str], list[str]]:
    read = [line.split("\t") for line in rows(40, 0)[1:]]
    return [read[number][0] for number in numbers], [read[number][1] for number in numbers]


def test_each_form_holds_what_its_tokenizer_makes_of_the_same_texts(folder) -> None:
    job = with_examples(load(folder))
    corpus = Corpus.open(job.data.path)
    split = ExampleSplit(corpus, "train", views=views_of(job, "", job.seed))
    numbers = [5, 0, 31]
    batch = split.batch(np.array(numbers), np.zeros(3, np.int64))
    for name, form in (("wordpiece", "default"), ("bpe", job.students["other"].form)):
        theirs = AutoTokenizer.from_pretrained(folder / name)(*texts_of(numbers), padding=True)
        read = batch.view(form)
        assert read.input_ids.tolist() == theirs["input_ids"]
        assert read.attention_mask.tolist() == theirs["attention_mask"]
        labels = [target.targets["sentence_pair"].labels.tolist() for target in (read, batch)]
        assert labels[0] == labels[1] == [1, 0, 0]
    assert tandem("data", "check", job.data.path).returncode == 0


def soft_labels(folder: Path) -> float:
    """The term of the first step by `transformers` alone."""
    job = with_examples(load(folder))
    stream = ExampleStream(
        ExampleSplit(Corpus.open(job.data.path), "train"), job.seed, BatchSizes.constant(8)
    )
    texts = texts_of(stream.batch(0).sample_ids.tolist())
    logs = []
    for name in ("wordpiece", "bpe"):
        model = AutoModelForSequenceClassification.from_pretrained(folder / name).eval()
        read = AutoTokenizer.from_pretrained(folder / name)(
            *texts, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            logs.append((model(**read).logits / 2).log_softmax(-1))
    theirs, ours = logs
    return 4 * float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.slow
def test_it_learns_from_the_teacher_and_is_exported_with_its_tokenizer(folder, tmp_path) -> None:
    paths = run_distributed(trained, 2, folder)[0]
    whole, resumed, alone = (RunFolder(Path(path)) for path in paths)
    curve = jobs.curve(whole)
    assert curve == jobs.curve(resumed)
    assert jobs.curve(whole, "students/same") == jobs.curve(alone, "students/same")
    first = next(value for _, name, value in curve if name == "students/other/soft_labels")
    assert first == pytest.approx(soft_labels(folder), rel=1e-4)
    single = tandem("train", whole.config, f"output_dir={tmp_path}", "--nproc", 1)
    assert single.returncode == 0, single.stderr
    assert jobs.assert_same_losses(RunFolder(tmp_path / "whole"), curve)
    change = f"students.other.tokenizer={folder}/wordpiece"
    moved = tandem("train", folder / "job.yaml", "name=whole", "steps=8", change)
    assert moved.returncode == 1
    assert "students.other.tokenizer: " in moved.stderr
    assert "the order of the data would change" in moved.stderr
    export = whole.path / "exports" / "other"
    texts = texts_of([*range(12)])
    read = AutoTokenizer.from_pretrained(export)(*texts, padding=True, return_tensors="pt")
    theirs = AutoTokenizer.from_pretrained(folder / "bpe")(*texts, padding=True)
    assert read["input_ids"].tolist() == theirs["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(export)
    held_out = [line.split("\t") for line in rows(13, 100)[1:]]
    pairs = AutoTokenizer.from_pretrained(export)(
        *zip(*((first, second) for first, second, _ in held_out), strict=True),
        padding=True,
        return_tensors="pt",
    )
    right = model(**pairs).logits.argmax(-1) == torch.tensor([int(row[2]) for row in held_out])
    results = json.loads(whole.evaluation.read_text())["learners"]["students/other"]
    assert results["sentence_pair_accuracy"] == pytest.approx(float(right.float().mean()))


QUESTION = {"question": "When?", "choice": ["noon", "at the lake"], "answer": "noon"}
DREAM = [[["We met at noon.", "It was cold."], [QUESTION], str(number)] for number in range(16)]


@pytest.mark.parametrize("task", ["bi_encoder", "multiple_choice"])
def test_examples_of_several_sequences_are_read_by_each_tokenizer(folder, task, tmp_path) -> None:
    """And the teacher's outputs are compared, which a label about the whole example allows."""
    files = {"bi_encoder": "train.tsv", "multiple_choice": str(tmp_path / "dream.json")}
    (tmp_path / "dream.json").write_text(json.dumps(DREAM))
    sizes = (
        "{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 48}"
    )
    job = load(
        folder, "teachers=null", "students.same=null", f"output_dir={tmp_path}",
        f"data.train={files[task]}", f"data.validation={files[task]}", "teacher.frozen=false",
        "teacher.init=null", "data.tokenizer=" + str(folder / "wordpiece"),
        f"teacher.model={sizes}", "teacher.objective={" + task + ": {}}",
        "students.other.objective.sentence_pair=null", f"students.other.objective.{task}={{}}",
    )  # fmt: skip
    job = with_examples(job)
    corpus = Corpus.open(job.data.path)
    split = ExampleSplit(corpus, "train", views=views_of(job, "", job.seed))
    batch = split.batch(np.arange(6), np.zeros(6, np.int64))
    read = batch.view(job.students["other"].form)
    assert batch.input_ids.shape[:2] == read.input_ids.shape[:2] == (6, 2)
    np.testing.assert_array_equal(read.targets[task].labels, batch.targets[task].labels)
    tokens = [AutoTokenizer.from_pretrained(folder / name) for name in ("wordpiece", "bpe")]
    for ours, theirs in zip(
        batch.input_ids.reshape(12, -1), read.input_ids.reshape(12, -1), strict=True
    ):
        texts = (
            t.decode(ids, skip_special_tokens=True)
            for t, ids in zip(tokens, (ours, theirs), strict=True)
        )
        words, others = ("".join(text.lower().split()) for text in texts)
        assert words == others


def test_commands_read_the_form_of_a_learner(folder) -> None:
    job = folder / "job.yaml"
    for learner, name in (("same", "wordpiece"), ("other", "bpe")):
        shown = tandem("data", "show", job, "--learner", learner)
        assert shown.returncode == 0, shown.stderr
        tokens = AutoTokenizer.from_pretrained(folder / name)
        number = int(shown.stdout.split("\nexample ")[1].split("\n")[0])
        ids = tokens(*(part[0] for part in texts_of([number])))["input_ids"]
        assert " ".join(tokens.convert_ids_to_tokens(ids)) in shown.stdout
    planned = tandem("plan", job, "--device", "cpu", "--json")
    assert planned.returncode == 0, planned.stderr


OTHER = "students.other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"{OTHER}.objective.hidden_mse={{}}",
            f"{OTHER}.objective.hidden_mse: compares states, so that its teacher must have the same"
            " tokenizer",
        ),
        (
            "students.same.objective.hidden_mse.teacher=second",
            "students.same.objective.hidden_mse: compares states, so that its teacher must have",
        ),
        (
            "students.same.tokenizer=any students.same.init.teacher_layers=[0]",
            "students.same.init.teacher_layers: copies the teacher's embeddings, which are of",
        ),
        (
            "teacher.tokenizer=any students.same.objective.hidden_mse={}",
            "students.same.objective.hidden_mse: compares states",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(folder, override, message) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(folder, *override.split())
    assert "\n" not in str(refused.value)


def test_a_folder_with_another_tokenizer_is_refused_by_naming_the_key(folder) -> None:
    job = with_examples(load(folder, "students.other.tokenizer=null"))
    corpora = open_corpora(job.data)
    with pytest.raises(DataError, match=r"or name the model's tokenizer in students.other.token"):
        require_fit(job, corpora)
    padded = with_examples(load(folder, "teachers.second.tokenizer=null"))
    padded.teachers["second"].model.vocab_size = 600
    with pytest.raises(DataError, match=r"; name the model's in teachers.second.tokenizer, or in"):
        require_pretrained(padded, corpora, set())


def test_labels_of_tokens_are_refused() -> None:
    why = "tokenizer: is for text and tasks with labels of whole examples, not for"
    given = ["data.train=train.txt", "teacher.tokenizer=any", "teacher.init.pretrained=any"]
    with pytest.raises(ConfigError, match=f"teacher.{why} tagging"):
        configs.load("tagging", JobConfig, "task", given)
