"""Pairs of texts, in every task, as the tokenizer of the model's family puts them together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, pipeline

from data_pipeline import Batch, Corpus, EncodedExample, ExampleSplit, TextEncoder
from data_pipeline.examples.storing import store_examples
from data_pipeline.task_files.questions import read_multiple_choice, read_squad
from data_pipeline.tokenization.tokenizer import install
from model import CLASSIFICATION, SPAN, TaskHeadConfig, build, save_pretrained, with_task_head
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.test_tokenizer_folders import FOLDERS, make_vocabularies
from tests.trainer import tiny
from tests.trainer.test_families import write_examples
from tests.trainer.test_prediction import predicted
from tests.trainer.test_span_prediction import require_best_span
from trainer.objectives.task import Part, TaskConfig, TaskFile
from trainer.scoring.span_metric import SpanMetric
from trainer.task_facts import TaskFacts, write_facts
from trainer.tasks.multiple_choice import MultipleChoice
from trainer.tasks.reranking import Reranking
from trainer.tasks.sentences import SentencePair
from trainer.tasks.span import Span, last_token

LENGTH, STRIDE = 40, 5
FORMS = {
    "bert": "bert by its model_type",
    "roberta": "roberta, files",
    "roberta, tokenizer.json": "roberta, files",
    "xlm-roberta": "xlm-roberta",
    "camembert": "camembert",
    "albert": "albert, only spiece.model",
}
PAIRS = [
    ("the list", "of Monday"),
    ("a", "It is " + "this or that class " * 20),
    ("Is it this or that class? " * 20, "no"),
    ("Is it this or that class? " * 20, "It is " + "the other one " * 20),
    ("of the list " * 20, "of the list " * 20),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of every form, and examples of every task."""
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "text").write_text("\n\n".join(make_documents(300)) + "\n")
    (folder / "vocabularies").mkdir()
    make_vocabularies(folder / "text", folder / "vocabularies")
    for form, name in FORMS.items():
        FOLDERS[name](folder / "vocabularies", folder / form)
    AutoTokenizer.from_pretrained(folder / "roberta").save_pretrained(
        folder / "roberta, tokenizer.json"
    )
    write_examples(folder)
    rows = [f"{a}\t{b}\t{number % 2}\n" for number, (a, b) in enumerate(PAIRS)]
    (folder / "pairs.tsv").write_text("text_a\ttext_b\tlabel\n" + "".join(rows))
    return folder


def length_of(form: str) -> int:
    """A length whose room for texts is odd: of two equal ones the second keeps a token more."""
    return LENGTH + (form not in ("bert", "albert"))


def encoded(
    folder: Path, form: str, task: TaskConfig, file: TaskFile, length: int | None = None
) -> Batch:
    """All examples of a file, as they are stored and read again."""
    encoder = TextEncoder(folder / form, length or length_of(form))
    examples: list[EncodedExample] = [*task.encode_part(file, encoder, Part(is_held_out=True))]
    out = folder / "stored" / form / task.name
    out.parent.mkdir(parents=True, exist_ok=True)
    store_examples(out, encoder, folder / form, {}, {"train": examples, "val": examples})
    split = ExampleSplit(Corpus.open(str(out)), "val")
    return split.batch(np.arange(split.total), np.zeros(split.total, np.int64))


def sequences(batch: Batch) -> Iterator[list[int]]:
    """The ids of each sequence, without padding."""
    length = batch.input_ids.shape[-1]
    masks = batch.attention_mask.reshape(-1, length).astype(bool)
    for ids, mask in zip(batch.input_ids.reshape(-1, length), masks, strict=True):
        yield ids[mask].tolist()


def read_by_theirs(folder: Path, form: str, pairs: list[tuple[str, str]]) -> list[list[int]]:
    """The ids of pairs by the tokenizer of a form, the longer text of each cut."""
    theirs = AutoTokenizer.from_pretrained(folder / form)
    first, second = map(list, zip(*pairs, strict=True))
    read = theirs(first, second, truncation="longest_first", max_length=length_of(form))
    return list(read["input_ids"])


@pytest.mark.parametrize("form", FORMS)
def test_pairs_have_the_form_of_their_tokenizer(folder: Path, form: str) -> None:
    batch = encoded(
        folder, form, SentencePair(labels=["0", "1"]), TaskFile(folder / "pairs.tsv", {})
    )
    assert [*sequences(batch)] == read_by_theirs(folder, form, PAIRS)


@pytest.mark.parametrize("form", FORMS)
def test_choices_have_the_form_of_their_tokenizer(folder: Path, form: str) -> None:
    path = folder / "dream.json"
    texts = [
        question.texts_with(choice)
        for question in read_multiple_choice(str(path))
        for choice in question.choices
    ]
    theirs = AutoTokenizer.from_pretrained(folder / form)
    right = [
        theirs(passage, question)["input_ids"]
        + theirs(choice, add_special_tokens=False)["input_ids"]
        + [theirs.sep_token_id]
        for passage, question, choice in texts
    ]
    batch = encoded(folder, form, MultipleChoice(), TaskFile(path, {}), length=200)
    assert [*sequences(batch)] == right


@pytest.mark.parametrize("form", FORMS)
def test_queries_and_documents_have_the_form_of_their_tokenizer(folder: Path, form: str) -> None:
    names = "documents", "queries", "candidates"
    file = TaskFile(folder / "qrels.tsv", {}, {name: folder / f"{name}.jsonl" for name in names})
    lines = (folder / "documents.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    batch = encoded(folder, form, Reranking(), file)
    right = read_by_theirs(folder, form, [("of the", text) for text in texts])
    assert [*sequences(batch)] == right * (len(batch.input_ids) // len(texts))


@pytest.mark.parametrize("form", FORMS)
def test_windows_have_the_form_of_their_tokenizer_and_hold_the_answer(
    folder: Path, form: str
) -> None:
    path, theirs = folder / "squad.json", AutoTokenizer.from_pretrained(folder / form)
    batch = encoded(folder, form, Span(stride=STRIDE), TaskFile(path, {}))
    ours, row, found = [*sequences(batch)], 0, set()
    for number, one in enumerate(read_squad(str(path))):
        asked = len(theirs.tokenize(one.question)) + theirs.num_special_tokens_to_add(pair=True)
        read: Any = theirs(
            one.question, one.context, truncation="only_second", max_length=length_of(form),
            stride=length_of(form) - asked - STRIDE, return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )  # fmt: skip
        for ids, offsets in zip(read["input_ids"], read["offset_mapping"], strict=True):
            assert ours[row] == ids
            first = int(batch.targets["span"].labels[row])
            last = int(batch.targets[last_token("span")].labels[row])
            if first:
                (answer,) = one.answers
                given = one.context[offsets[first][0] : offsets[last][1]]
                assert answer.text in given
                assert len(given) < len(answer.text) + 8
                found.add(number)
            row += 1
    assert row == len(ours)
    assert len(found) == 16
    assert set(batch.targets[SpanMetric.question("span")].labels.tolist()) == found


MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # its tokenizer, and what it is
    "bert": ("bert", {}),
    "roberta": ("roberta", {"segment_types": 1, "positions": "learned_after_padding"}),
    "xlm-roberta": ("xlm-roberta", {"segment_types": 1, "positions": "learned_after_padding"}),
    "albert": ("albert", {}),
    "bert, with the tokenizer of roberta": ("roberta", {}),
    "bert, with the tokenizer.json of roberta": ("roberta, tokenizer.json", {}),
}


def exported(folder: Path, model: str, head: TaskHeadConfig, out: Path) -> Path:
    """A model with a head of a task, whose tokenizer went through a corpus as in a job."""
    form, changes = MODELS[model]
    install(folder / form, out / "tokenizer")
    vocabulary = TextEncoder(out / "tokenizer", LENGTH).vocabulary
    config = tiny.encoder(
        vocab_size=vocabulary.vocab_size, max_positions=132, mlm_head=False, initializer_range=0.3,
        pad_token_id=vocabulary.pad, **changes,
    )  # fmt: skip
    save_pretrained(
        build(with_task_head(config, "task" if head.labels else "span", head), seed=4),
        out / "model",
        out / "tokenizer",
    )
    return out / "model"


@pytest.mark.parametrize("model", MODELS)
def test_predictions_of_pairs_are_those_of_a_pipeline(
    folder: Path, tmp_path: Path, model: str
) -> None:
    head = TaskHeadConfig(CLASSIFICATION, ["no", "perhaps", "yes"])
    path = exported(folder, model, head, tmp_path)
    write_facts(path, {"task": TaskFacts(("text_a", "text_b"), sequence_length=LENGTH)})
    theirs = pipeline("text-classification", str(path), top_k=None)
    for (first, second), one in zip(PAIRS, predicted(path, folder / "pairs.tsv"), strict=True):
        scores = theirs({"text": first, "text_pair": second}, truncation=True, max_length=LENGTH)
        right = {score["label"]: pytest.approx(score["score"], abs=1e-5) for score in scores}
        assert one["probabilities"] == right


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_the_best_spans_of_transformers(
    folder: Path, tmp_path: Path, model: str
) -> None:
    require_best_span(exported(folder, model, TaskHeadConfig(SPAN), tmp_path), tmp_path, 128)
