"""The labels in a task's training file, and pairs that are ranked by them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import pytrec_eval

import configs
from configs import ConfigError
from data_pipeline import Corpus, DataError, ExampleSplit, TextEncoder
from data_pipeline.task_files.collection import Collection
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.job_data.examples import with_examples
from trainer.objectives.labels import labels_among
from trainer.objectives.task import Part, TaskConfig, TaskFile
from trainer.run_folder.folder import RunFolder
from trainer.tasks.bi_encoder import BiEncoder
from trainer.tasks.sentences import SingleSentence
from trainer.tasks.span import Span
from trainer.tasks.tagging import Tagging
from trainer.tasks.translation import Translation


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "a.tsv:3: label: is empty; give one"),
        ("???", "a.tsv:3: label: '???' is a placeholder or has a control character"),
        ("t\x92", "a.tsv:3: label: 't\\x92' is a placeholder or has a control character"),
        ("NaN", "a.tsv:3: label: is NaN; give one"),
        ("dull", "a.tsv: has only one label, 'dull'; a task needs two"),
    ],
)
def test_labels_that_no_task_can_have(label: str, message: str) -> None:
    file, rows = TaskFile(Path("a.tsv"), {}), [("a.tsv:2", "dull"), ("a.tsv:3", label)]
    with pytest.raises(DataError) as refused:
        labels_among(file, rows)
    assert str(refused.value).startswith(message)


def test_labels_that_are_numbers_are_in_their_order() -> None:
    def among(*labels: str) -> list[str]:
        rows = [(f"a.tsv:{line}", label) for line, label in enumerate(labels, 2)]
        return labels_among(TaskFile(Path("a.tsv"), {}), rows)

    assert among("10", "9", "-1", "2.5", "9") == ["-1", "2.5", "9", "10"]
    assert among("10", "9", "none") == ["10", "9", "none"]
    with pytest.raises(DataError, match=r"a\.tsv:3: label: 1\.0 is 1 elsewhere; write them alike"):
        among("1", "1.0", "2")


@pytest.mark.parametrize(
    ("labels", "warned"),
    [
        ("3.25 5 0.5 5", "a.tsv: its labels are 3 numbers such as 5, and each becomes a class; to"),
        ("0,5 1,0", "set objective.single_sentence.target=number of every learner"),
        ("1 2 3", ""),
        ("1.0 2.0", ""),
        ("0.5 none", ""),
    ],
)
def test_labels_that_are_measured_numbers_are_warned_of(
    labels: str, warned: str, tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"the\t{label}\n" for label in labels.split())
    Path("a.tsv").write_text(f"text\tlabel\n{rows}")
    SingleSentence().with_labels_of(TaskFile(Path("a.tsv"), {}))
    assert warned in caplog.text
    assert bool(warned) == bool(caplog.records)


@pytest.mark.parametrize(
    ("task", "given"),
    [
        (SingleSentence(labels=["0", "1"]), "text,label\nthe,0\n\n ,\nof,1\n"),
        (BiEncoder(highest=1.0), "text_a,text_b,label\nthe,of,0\n\n ,,\nof,the,1\n"),
    ],
)
def test_blank_rows_are_counted(
    task: TaskConfig, given: str, tmp_path: Path, corpus: Path, caplog
) -> None:
    (path := tmp_path / "a.csv").write_text(given)
    examples = [*task.encode(TaskFile(path, {}), TextEncoder(corpus / "tokenizer", 16))]
    assert [example.targets[task.head] for example in examples] == [0.0, 1.0]
    assert f"{path}: leaves out 2 blank rows; {path}:3; {path}:4" in caplog.text


def test_a_null_label_is_told_like_an_empty_one(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": None}, {"text": "c", "label": "y"}]
    (path := tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = r"a\.jsonl:2: label: is empty; give one, or set unlabelled: true"
    with pytest.raises(DataError, match=told):
        SingleSentence().with_labels_of(TaskFile(path, {}))


def test_only_a_task_that_has_unlabelled_is_told_of_it(tmp_path: Path) -> None:
    (path := tmp_path / "a.conll").write_text("the B-X\nof -100\n")
    with pytest.raises(DataError) as refused:
        Tagging().with_labels_of(TaskFile(path, {}))
    assert str(refused.value).endswith("a.conll:1: label: is -100; give one")


SENTENCE = '{"tokens": ["the", "of"], "tags": ["A", "B"]}\n'
QUESTION = (
    '{"id": "%d", "question": "who?", "context": "the of",'
    ' "answers": {"text": ["of"], "answer_start": [4]}}\n'
)


@pytest.mark.parametrize(
    ("task", "given"),
    [
        (Tagging(labels=["A", "B"], metrics=["accuracy"]), SENTENCE + "\n{}\n" + SENTENCE),
        (Span(), QUESTION % 1 + '\n{"id": null, "context": null}\n' + QUESTION % 2),
        (Translation(), '{"source": "the", "target": "of"}\n\n{"source": null, "target": null}\n'),
    ],
)
def test_blank_records_are_counted(
    task: TaskConfig, given: str, tmp_path: Path, corpus: Path, caplog
) -> None:
    (path := tmp_path / "a.jsonl").write_text(given)
    file = TaskFile(path, {})
    examples = [*task.encode(file, TextEncoder(corpus / "tokenizer", 16))]
    compared = task.references(file, Part(is_held_out=True))
    assert len(examples) == (2 if compared is None else len(compared)) == given.count("the")
    assert f"{path}: leaves out 2 blank rows; {path}:2; {path}:3" in caplog.text


def test_blank_queries_and_documents_are_counted(tmp_path: Path, caplog) -> None:
    (path := tmp_path / "a.jsonl").write_text(
        '{"id": "a", "text": "x"}\n\n{"id": "b", "text": "y"}'
    )
    read = Collection.read(str(path), str(path), numbered_by_order=True)
    assert [one.id for one in read.documents] == ["a", "b"]
    assert [one.id for one in read.queries] == ["1", "2"]
    assert caplog.text.count(f"{path}: leaves out 1 blank row; {path}:2") == 2


WORDS = ["the", "of", "and", "to", "in", "that", "was"]
RANKED = """
name: ranked
steps: 12
output_dir: {folder}/runs
data: {{root: {folder}, train: train.txt, columns: {{text_a: 1, text_b: 2, label: 3}},
  sequence_length: 12, tokenizer: {corpus}/tokenizer}}
batch: {{size: 8, micro_batch: 3}}
teacher:
  model: {{hidden_size: 32, layers: 1, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 12}}
  optimizer: {{learning_rate: 3.0e-3}}
  objective: {{sentence_pair: {{metrics: [map, mrr, accuracy]}}}}
evaluation: {{every: 1000}}
checkpoint: {{every: 1000}}
log: {{every: 10, wandb: disabled}}
"""


def ranked_pairs() -> list[tuple[str, str, str]]:
    """Seven answers to each of ten questions, of which one in three is right, in mixed order."""
    asked = itertools.product(range(7), range(10))  # the questions take turns
    return [
        (
            f"{WORDS[q % 7]} his {WORDS[q * q % 5]} {WORDS[q // 7]}",
            WORDS[a],
            str(int(a % 3 == q % 4)),
        )
        for a, q in asked
    ]


def ranked_job(folder: Path, corpus: Path, *words: str) -> JobConfig:
    text = RANKED.format(folder=folder, corpus=corpus)
    return with_examples(configs.load_text(text, JobConfig, "job", words, "job.yaml"))


def train_ranked(*job: object) -> str:
    """Collective."""
    run = jobs.run(ranked_job(*job))  # type: ignore[arg-type]
    jobs.finish(run)
    return str(run.path)


@pytest.fixture(scope="module", name="pairs")
def folder_of_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked")
    rows = "".join("\t".join(row) + "\n" for row in ranked_pairs())
    for name in ("train.txt", "dev.txt"):
        (folder / name).write_text(rows)
    return folder


@pytest.mark.slow
def test_pairs_are_ranked_by_their_first_text(pairs: Path, corpus: Path) -> None:
    """The scores of two ranks are pytrec_eval's of what the export says of each pair."""
    job = pairs, corpus, "data.validation=dev.txt"
    run = RunFolder(Path(run_distributed(train_ranked, 2, *job)[0]))
    evaluation = json.loads(run.evaluation.read_text())
    assert evaluation["metric"] == "sentence_pair_map"
    relevance: dict[str, dict[str, int]] = {}
    found: dict[str, dict[str, float]] = {}
    for number, (row, said) in enumerate(zip(ranked_pairs(), answers(run), strict=True)):
        relevance.setdefault(row[0], {})[str(number)] = int(row[2])
        found.setdefault(row[0], {})[str(number)] = said
    judged = {q: ones for q, ones in relevance.items() if any(ones.values())}
    assert len(judged) == 8 < len(relevance)
    scores = pytrec_eval.RelevanceEvaluator(judged, {"map", "recip_rank"}).evaluate(found)
    facts = evaluation["learners"]["teacher"]
    for name, measure in (("map", "map"), ("mrr", "recip_rank")):
        mean = sum(one[measure] for one in scores.values()) / len(judged)
        assert facts[f"sentence_pair_{name}"] == pytest.approx(mean, abs=1e-6)
    assert 0 < facts["sentence_pair_accuracy"] < 1


def answers(run: RunFolder) -> list[float]:
    """The probability of the second label, by the exported model."""
    from transformers import pipeline

    model = pipeline("text-classification", str(run.path / "exports" / "teacher"), top_k=None)
    asked = [{"text": a, "text_pair": b} for a, b, _ in ranked_pairs()]
    return [
        next(label["score"] for label in labels if label["label"] == "1") for labels in model(asked)
    ]


def test_a_question_is_held_out_with_all_its_pairs(pairs: Path, corpus: Path) -> None:
    job = ranked_job(pairs, corpus, "data.validation_fraction=0.2")
    whole = Corpus.open(job.data.path)
    assert [ExampleSplit(whole, split).total for split in ("train", "val")] == [56, 14]


def test_single_texts_are_in_no_group(pairs: Path, corpus: Path) -> None:
    words = ["teacher.objective={single_sentence: {metrics: [map]}}"]
    with pytest.raises(ConfigError, match="metrics: with target: classes, choose from accuracy"):
        ranked_job(pairs, corpus, *words)
