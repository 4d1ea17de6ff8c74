"""`tandem predict` on questions, against the task's own evaluation and `transformers`."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from data_pipeline import Corpus, ExampleSplit, TextEncoder
from data_pipeline.task_files.questions import read_squad
from data_pipeline.tokenization.tokenizer import load as load_tokenizer
from data_pipeline.tokenization.training import train
from model import SPAN, TaskHeadConfig, build, from_pretrained, save_pretrained, with_task_head
from tests.conftest import REPOSITORY
from tests.trainer import test_token_tasks as token_tasks
from tests.trainer import tiny
from tests.trainer.test_prediction import predicted, refused
from trainer.batches import to_device
from trainer.learners.module import score
from trainer.objectives.task import Part, TaskFile
from trainer.scoring.span_metric import BestAnswer, SpanMetric, best_answers
from trainer.task_facts import TaskFacts, write_facts
from trainer.tasks.span import ReadQuestion, Span

LENGTH, LONGEST_ANSWER = 32, 5
SETTINGS = {"stride": 8, "longest_answer": LONGEST_ANSWER}


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spans")
    train([str(text)], "wordpiece", 300, str(folder / "tokenizer"))
    for part in ("train", "dev"):
        (folder / f"span_{part}").write_text(token_tasks.squad(20, 0, unanswerable=True))
    return folder


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """An untrained model, whose answers differ from window to window."""
    path, tokenizer = folder / "model", folder / "tokenizer"
    size = load_tokenizer(tokenizer)[1].vocab_size
    config = tiny.encoder(
        vocab_size=size, max_positions=LENGTH, mlm_head=False, initializer_range=0.3
    )
    model = build(with_task_head(config, "span", TaskHeadConfig(SPAN)), seed=4)
    save_pretrained(model, path, tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def evaluated(folder: Path, exported: Path) -> dict[str, BestAnswer]:
    """The answers by id, from the stored examples, decoded as for held-out scores."""
    settings = "{stride: 8, longest_answer: 5, unanswerable: true}"
    job = token_tasks.load(folder, folder, "span", 1, settings, f"data.sequence_length={LENGTH}")
    split = ExampleSplit(Corpus.open(job.data.path), "val")
    assert split.total > 20  # several windows of some
    batch = split.batch(np.arange(split.total), np.zeros(split.total, np.int64))
    metric = SpanMetric("span", ["answer_f1"], list, LONGEST_ANSWER, unanswerable=True)
    with torch.inference_mode():
        (rows,) = score(from_pretrained(exported), to_device(batch, torch.device("cpu")), (metric,))
    questions = list(read_squad(str(folder / "span_dev")))
    best = best_answers(rows.numpy(), [question.context for question in questions])
    return {questions[number].id: answer for number, answer in best.items()}


def test_answers_are_those_of_the_evaluation(folder, exported, evaluated) -> None:
    write_facts(exported, {"span": TaskFacts((), sequence_length=LENGTH, settings=SETTINGS)})
    found = predicted(exported, folder / "span_dev")
    assert [one["id"] for one in found] == [f"q{number}" for number in range(20)]
    for one in found:
        best = evaluated[one["id"]]
        assert (one["answer"], one["start"]) == (best.span.text, best.span.start)
        assert one["score"] == pytest.approx(best.score, abs=1e-4)
        assert "no_answer_score" not in one
    contexts = {one.id: one.context for one in read_squad(str(folder / "span_dev"))}
    for one in found:
        assert contexts[one["id"]][one["start"] :].startswith(one["answer"])
    assert predicted(exported, "-", given=(folder / "span_dev").read_text()) == found


def test_there_is_no_answer_above_the_threshold(
    folder, exported, evaluated, tmp_path, monkeypatch
) -> None:
    margins = sorted(answer.margin for answer in evaluated.values())
    threshold = np.mean(max(itertools.pairwise(margins), key=lambda two: two[1] - two[0])).item()
    settings = {**SETTINGS, "unanswerable": True}
    scores = {"span_null_threshold": threshold}
    write_facts(
        exported, {"span": TaskFacts((), sequence_length=LENGTH, settings=settings, scores=scores)}
    )
    found = predicted(exported, folder / "span_dev")
    for one in found:
        best = evaluated[one["id"]]
        assert one["no_answer_score"] == pytest.approx(best.no_answer, abs=1e-4)
        has_answer = best.margin <= threshold
        assert one["answer"] == (best.span.text if has_answer else None)
        assert one["start"] == (best.span.start if has_answer else None)
    assert {one["answer"] is None for one in found} == {True, False}
    monkeypatch.chdir(tmp_path)
    Path("answers.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in found))
    guide = (REPOSITORY / "docs" / "worth.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", guide, re.S | re.M)
    exec(code, {})
    predictions = json.loads(Path("predictions.json").read_text())
    assert predictions == {one["id"]: one["answer"] or "" for one in found}
    assert "" in predictions.values()


def test_the_best_span_of_a_short_passage_as_transformers_has_it(exported, tmp_path) -> None:
    require_best_span(exported, tmp_path, LENGTH)


def require_best_span(exported: Path, tmp_path: Path, length: int) -> None:
    """Raise AssertionError unless `predict` gives the best span that `transformers` has."""
    write_facts(exported, {"span": TaskFacts((), sequence_length=length, settings=SETTINGS)})
    question, context = "which is it", "It is Monday, and the list is of that class."
    asked = {"id": "a", "question": question}
    paragraph = {"context": context, "qas": [asked]}
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    read = AutoTokenizer.from_pretrained(exported)(
        question, context, return_tensors="pt", return_offsets_mapping=True
    )
    assert read.input_ids.shape[1] <= length
    places, segments = read.pop("offset_mapping")[0].tolist(), read.sequence_ids()
    with torch.no_grad():
        logits = AutoModelForQuestionAnswering.from_pretrained(exported).eval()(**read)
    tokens = [column for column, segment in enumerate(segments) if segment == 1]
    best, first, last = max(
        ((logits.start_logits[0, i] + logits.end_logits[0, j]).item(), i, j)
        for i in tokens
        for j in tokens
        if i <= j < i + LONGEST_ANSWER
    )
    (one,) = predicted(exported, path)
    assert one["score"] == pytest.approx(best, abs=1e-4)
    assert one["answer"] == context[places[first][0] : places[last][1]]
    assert one["start"] == places[first][0]


def test_questions_that_cannot_be_read(exported, tmp_path) -> None:
    def write(**changes: object) -> Path:
        asked = {"id": "a", "question": "why", **changes}
        paragraph = {"context": "It is.", "qas": [asked]}
        path = tmp_path / "dev.json"
        path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
        return path

    write_facts(exported, {"span": TaskFacts((), sequence_length=LENGTH, settings=SETTINGS)})
    assert "dev.json: id a: question: must be text" in refused(exported, write(question=7))
    (blank,) = predicted(exported, write(question=" "))
    assert blank["id"] == "a"
    assert {blank[key] for key in ("answer", "start", "score")} == {None}
    long = refused(exported, write(question="why " * 60))
    assert "dev.json: id a: a question of " in long
    assert "leaves no room for its passage" in long


@pytest.mark.parametrize(
    ("length", "size", "step"), [(5, 8, 3), (29, 8, 3), (40, 9, 9), (64, 12, 4)]
)
def test_an_answer_begins_where_its_token_has_the_most_context(
    length: int, size: int, step: int
) -> None:
    """The rule of BERT's run_squad.py: less of both sides, and a hundredth of the window's size."""
    places = np.arange(length)
    read = ReadQuestion([1], [*range(length)], places, places + 1, size, step, 3)
    windows = [(window.start, min(window.stop, length)) for window in read.windows]
    for token in range(length):
        scores = {
            first: min(token - first, last - 1 - token) + 0.01 * (last - first)
            for first, last in windows
            if first <= token < last
        }
        best = max(scores, key=lambda first: scores[first])
        for first, last in windows:
            if first <= token < last:
                begins = read.begins_in(slice(first, last))
                assert begins[token - first] == (token if first == best else -1)


def test_a_long_question_is_cut_so_that_its_passage_has_more_room(folder) -> None:
    encoder, file = TextEncoder(folder / "tokenizer", LENGTH), TaskFile(folder / "span_dev", {})

    def asked_and_read(task: Span) -> set[tuple[int, int]]:
        """The tokens of the question and of the passage, in the fullest window of each example."""
        examples = task.encode_part(file, encoder, Part(is_held_out=True))
        return {tuple(map(len, example.sequences[0])) for example in examples}  # type: ignore[misc]

    assert max(asked for asked, _ in asked_and_read(Span(unanswerable=True))) > 2
    cut = asked_and_read(Span(unanswerable=True, longest_question=2))
    assert {asked for asked, _ in cut} == {2}
    assert max(read for _, read in cut) == LENGTH - 2 - 3  # [CLS] and two [SEP]


def test_a_misplaced_answer_is_scored_and_not_trained_on(folder, tmp_path, caplog) -> None:
    document = json.loads(token_tasks.squad(8, 0))
    asked = document["data"][0]["paragraphs"][0]["qas"][0]
    asked["answers"][0]["answer_start"] += 1
    (path := tmp_path / "dev.json").write_text(json.dumps(document))
    encoder = TextEncoder(folder / "tokenizer", LENGTH)
    task, file = Span(), TaskFile(path, {})

    def asked_in(is_held_out: bool) -> set[object]:
        examples = task.encode_part(file, encoder, Part(is_held_out))
        return {example.targets[SpanMetric.question(task.head)] for example in examples}

    assert asked_in(True) - asked_in(False) == {0}
    assert (
        f"{path}: leaves out 1 misplaced answer; {path}: id {asked['id']}: the answer"
        in caplog.text
    )
