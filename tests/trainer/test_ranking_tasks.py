"""A dual encoder and a cross-encoder: from a collection's files to rankings, and their scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytrec_eval
import torch
from click.testing import CliRunner
from transformers import AutoModel, AutoTokenizer

import configs
import tandem
from data_pipeline import Corpus, DataError, ExampleSplit, TextEncoder
from data_pipeline.task_files.collection import Collection
from data_pipeline.task_files.retrieval import RetrievalText
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.footprint.footprint import footprints_and_passes
from trainer.job_data.examples import with_examples
from trainer.learner_names import TEACHER
from trainer.objectives.task import Part
from trainer.run_folder.folder import RunFolder
from trainer.scoring.ranking_metric import (
    PairRanking,
    RankingMetric,
    nearest_documents,
    with_others,
)
from trainer.tasks.retrieval import Retrieval, documents_of, relevant_of

JOB = """
name: {name}
steps: {steps}
output_dir: {folder}/runs
data:
  root: {folder}
  train: train.tsv
  files: {{documents: corpus.jsonl, queries: queries.jsonl}}
  sequence_length: 32
  tokenizer: {corpus}/tokenizer
batch: {{size: 8, micro_batch: 3}}
teacher:
  model: {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 32}}
  optimizer: {{learning_rate: 3.0e-3}}
  objective: {{{task}: {settings}}}
evaluation: {{every: 1000}}
checkpoint: {{every: 1000}}
log: {{every: 10, wandb: disabled}}
"""
SETTINGS = "{negatives: 1, query_prefix: 'that '}"
WORDS = ["the", "of", "and", "to", "in", "that", "is", "was", "for", "his", "with", "as"]
PAIRS = [(one, other) for n, one in enumerate(WORDS) for other in WORDS[n + 1 :]]  # 66


def documents() -> Iterator[tuple[str, str]]:
    """A document for each pair of words, which it repeats among others."""
    for number, (one, other) in enumerate(PAIRS):
        between = " ".join(WORDS[(number * step) % len(WORDS)] for step in (1, 5))
        yield f"d{number}", f"{one} {other} {between} {one} {other}"


def written(folder: Path, name: str, records: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(one)}\n" for one in records))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries are pairs of words, one of them wrong in some; the first ones are for training."""
    folder = tmp_path_factory.mktemp("collection")
    texts = [{"_id": name, "title": "", "text": text} for name, text in documents()]
    written(folder, "corpus.jsonl", [*texts, {"_id": "none", "title": "", "text": ""}])
    asked = [
        {"_id": f"q{n}", "text": f"{other} {WORDS[n % 12] if n % 3 else one}"}
        for n, (one, other) in enumerate(PAIRS)
    ]
    written(folder, "queries.jsonl", asked)
    rows = [f"q{n}\td{n}\t1\nq{n}\td{(n + 7) % 66}\t0\n" for n in range(66)]
    rows[3] = "q3\td3\t1\nq3\td4\t2\nq3\tnone\t1\n"
    (folder / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{''.join(rows[:50])}")
    (folder / "dev.tsv").write_text(f"query-id\tcorpus-id\tscore\n{''.join(rows[50:])}")
    return folder


def load(folder: Path, corpus: Path, task: str, steps: int, settings: str, *more: str) -> JobConfig:
    values = {"name": task, "task": task, "steps": steps, "settings": settings}
    text = JOB.format(folder=folder, corpus=corpus, **values)
    return with_examples(configs.load_text(text, JobConfig, "job", more, "job.yaml"))


def train(*job: Any) -> str:
    """Collective."""
    run = jobs.run(load(*job))
    jobs.finish(run)
    return str(run.path)


def predicted(*words: object) -> list[dict[str, Any]]:
    """What `tandem predict` prints."""
    ended = CliRunner().invoke(tandem.main, ["predict", *map(str, words)])
    assert ended.exit_code == 0, ended.output
    return [json.loads(line) for line in ended.stdout.splitlines()]


def trec_eval(folder: Path, found: list[dict[str, Any]], measure: str) -> float:
    """The mean of a measure over the queries of dev.tsv, by pytrec_eval itself."""
    relevance: dict[str, dict[str, int]] = {}
    for line in (folder / "dev.tsv").read_text().splitlines()[1:]:
        query, document, value = line.split("\t")
        relevance.setdefault(query, {})[document] = int(value)
    run = {one["query"]: {d["id"]: d["score"] for d in one["documents"]} for one in found}
    scores = pytrec_eval.RelevanceEvaluator(relevance, {measure}).evaluate(run)
    assert len(scores) == 16
    return sum(one[measure] for one in scores.values()) / len(scores)


@pytest.fixture(scope="module")
def finders(folder: Path, corpus: Path) -> tuple[RunFolder, dict[str, Any]]:
    job = folder, corpus, "retrieval", 20, SETTINGS, "data.validation=dev.tsv"
    run = RunFolder(Path(run_distributed(train, 2, *job)[0]))
    return run, json.loads(run.evaluation.read_text())["learners"]["teacher"]


def test_a_dual_encoder_is_scored_and_predicts_alike(folder, finders) -> None:
    from sentence_transformers import SentenceTransformer

    run, scores = finders
    exported = run.path / "exports" / "teacher"
    found = predicted(
        exported, folder / "queries.jsonl", "--documents", folder / "corpus.jsonl", "--top", 66
    )
    assert [one["query"] for one in found] == [f"q{n}" for n in range(66)]
    for name, measure in {"ndcg_10": "ndcg_cut_10", "map": "map"}.items():
        right = trec_eval(folder, found, measure)
        assert scores[f"retrieval_{name}"] == pytest.approx(right, abs=1e-3)
    assert 0.2 < scores["retrieval_ndcg_10"] < 1  # by chance: 0.07
    assert scores["retrieval_recall_100"] == 1.0
    vectors = predicted(exported, folder / "queries.jsonl")
    assert len(vectors[0]["vector"]) == 32
    theirs = AutoModel.from_pretrained(exported).eval()
    read = AutoTokenizer.from_pretrained(exported)("that of the", return_tensors="pt")
    with torch.no_grad():
        mean = theirs(**read).last_hidden_state.mean(dim=1)[0]
    torch.testing.assert_close(
        torch.tensor(vectors[0]["vector"]), mean / mean.norm(), atol=1e-5, rtol=1e-4
    )
    encoder = SentenceTransformer(str(exported), device="cpu")
    asked = [json.loads(line)["text"] for line in (folder / "queries.jsonl").open()]
    told = torch.from_numpy(encoder.encode(asked, prompt_name="query"))
    ours = torch.tensor([one["vector"] for one in vectors])
    torch.testing.assert_close(told, ours, rtol=0, atol=1e-6)


def test_a_cross_encoder_reranks_what_was_found(folder, corpus, finders) -> None:
    exported = finders[0].path / "exports" / "teacher"
    first = folder / "first.jsonl"
    asked = folder / "queries.jsonl", "--documents", folder / "corpus.jsonl"
    found = predicted(exported, *asked, "--top", 20)
    first.write_text("".join(f"{json.dumps(one)}\n" for one in found))
    settings = "{negatives: 2, depth: 10}"
    more = "data.validation=dev.tsv", "data.files.candidates=first.jsonl"
    job = folder, corpus, "reranking", 6, settings, *more
    run = RunFolder(Path(run_distributed(train, 2, *job)[0]))
    scores = json.loads(run.evaluation.read_text())["learners"]["teacher"]
    reranker = run.path / "exports" / "teacher"
    again = predicted(reranker, *asked, "--candidates", first, "--top", 10)
    some = folder / "some.jsonl"
    some.write_text("".join(f"{json.dumps(one)}\n" for one in found[1:]))
    alone, *others = predicted(reranker, *asked, "--candidates", some, "--top", 10)
    assert (alone["documents"], others) == ([], again[1:]), "a query without candidates vanished"
    right = trec_eval(folder, again, "ndcg_cut_10")
    assert scores["reranking_ndcg_10"] == pytest.approx(right, abs=1e-3)
    for before, after in zip(found, again, strict=True):
        ids = [[document["id"] for document in one["documents"]] for one in (before, after)]
        assert {*ids[0][:10]} == {*ids[1][:10]}
        assert ids[0][10:] == ids[1][10:]


def test_negatives_and_held_out_queries(folder, corpus) -> None:
    job = load(folder, corpus, "retrieval", 1, "{negatives: 2}", "data.validation_fraction=0.2")
    train_split = ExampleSplit(Corpus.open(job.data.path), "train")
    assert train_split.total == 40  # of 50 queries; q3, which has two documents, is held out
    batch = train_split.batch(*torch.zeros(2, 1, dtype=torch.int64).numpy())
    assert batch.input_ids.shape[1] == 4
    assert batch.targets[documents_of("retrieval")].labels[0, :2].tolist() == [0, 7]
    assert batch.targets[relevant_of("retrieval")].labels.tolist() == [[0]]
    scored = ExampleSplit(Corpus.open(job.data.path), "val")
    assert scored.total == 10 + 66
    queries = scored.labels("retrieval_query")
    assert queries[queries >= 0].tolist() == [
        number for number in range(50) if Part(True, 0.2).has(number)
    ]


def test_queries_are_cut_and_documents_have_their_prefix(corpus) -> None:
    task = Retrieval(query_length=2, query_prefix="the ", document_prefix="of the ")
    text, encoder = RetrievalText("", "1", "is was his"), TextEncoder(corpus / "tokenizer", 32)
    (query,) = task.query_sequence(text, encoder)
    (document,) = task.document_sequence(text, encoder)
    assert query.tolist() == encoder.encode("the is", "").ids
    assert document.tolist() == encoder.encode("of the is was his", "").ids


def test_a_document_without_a_token_is_not_searched(corpus) -> None:
    """It ended the job, or the search of `tandem predict`."""
    texts = [RetrievalText("", str(n), text) for n, text in enumerate(["of", "\u200b", "the"])]
    collection, encoder = Collection(texts, [], ("", "")), TextEncoder(corpus / "tokenizer", 32)
    examples = Retrieval().scored_examples(collection, {}, {}, encoder)
    assert [one.targets["retrieval_document"] for one in examples] == [0, 2]


@pytest.mark.parametrize(
    ("task", "settings", "more", "message"),
    [
        ("retrieval", "{}", ["data.files.other=x"], "data.files.other: retrieval does not read it"),
        ("retrieval", "{}", ["data.files.documents=no.jsonl"], "no.jsonl: cannot be read: No such"),
        ("retrieval", "{}", ["data.validation=dev.tsv", "data.max_scored=1"],
         "data.max_scored: retrieval reads whole files"),
        ("reranking", "{}", [], "data.files.candidates: must be set for reranking"),
        ("retrieval", "{numbered_by_order: true}", [], "train.tsv:2: "),
        ("retrieval", "{depth: 10}", [], "retrieval.depth: is for data.files.candidates; set that"),
        ("retrieval", "{}", ["data.validation_fraction=0.01"],
         "train.tsv: has too few queries to hold out some with relevant documents; set data.val"),
    ],
)  # fmt: skip
def test_files_that_do_not_serve(folder, corpus, task, settings, more, message) -> None:
    with pytest.raises(DataError) as error:
        load(folder, corpus, task, 1, settings, *more)
    assert message in str(error.value)


def test_negatives_that_must_be_there(folder, corpus) -> None:
    with pytest.raises(configs.ConfigError, match="negatives: must be 1 or more without in_batch"):
        load(folder, corpus, "retrieval", 1, "{in_batch: false}")


def test_exact_search_in_blocks(monkeypatch) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(7, 5), torch.randn(23, 5)
    scores, rows = (queries @ documents.t()).topk(4, dim=1)
    monkeypatch.setattr("trainer.scoring.ranking_metric.QUERIES", 3)
    monkeypatch.setattr("trainer.scoring.ranking_metric.DOCUMENTS", 6)
    found, places = nearest_documents(queries, documents, 4)
    assert torch.equal(places, rows)
    torch.testing.assert_close(found, scores)
    assert nearest_documents(queries, documents, 99)[1].shape == (7, 23)


@pytest.fixture
def some_without_text(folder: Path, tmp_path: Path) -> Path:
    """The collection, but the queries q10 and q12, which are judged, have no text."""
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    lines = (folder / "queries.jsonl").read_text().splitlines()
    queries = [json.loads(line) for line in lines]
    written(tmp_path, "queries.jsonl", [
        one | {"text": ""} if one["_id"] in ("q12", "q10") else one for one in queries
    ])  # fmt: skip
    candidates = [f"q{n} Q0 d{(n + k) % 66} 1 {9 - k} x\n" for n in range(66) for k in range(3)]
    (tmp_path / "run.txt").write_text("".join(candidates))
    return tmp_path


def perfect(metric: RankingMetric, split: ExampleSplit) -> dict[str, float]:
    """The scores where the examples that are read find document n for query n."""
    labels = [split.labels(name(metric.head)) for name in (metric.query, metric.document)]
    query, document = (torch.tensor(one).long() for one in labels)
    if isinstance(metric, PairRanking):
        said = (query == document).float()[:, None]
    else:
        said = torch.nn.functional.one_hot(torch.maximum(query, document), 100).float()
    return metric.finish(torch.cat([query[:, None].float(), document[:, None].float(), said], 1))


@pytest.mark.parametrize("task", ["retrieval", "reranking"])
@pytest.mark.parametrize(
    ("more", "queries", "without_text"),
    [
        ("data.validation=train.tsv", 50, 2),  # scored as a whole
        ("data.validation_fraction=0.2", 10, 1),  # q12, but not q10
    ],
)
def test_a_judged_query_without_text_counts_as_0(
    some_without_text, corpus, task, more, queries, without_text
) -> None:
    files = ["data.files.candidates=run.txt"] if task == "reranking" else []
    job = load(some_without_text, corpus, task, 1, "{negatives: 1}", more, *files)
    (metric,) = job.teacher.objective.task_terms()[task].own_metrics()
    found = perfect(metric, ExampleSplit(Corpus.open(job.data.path), "val"))
    assert found[f"{task}_mrr_10"] == pytest.approx(1 - without_text / queries)


def test_candidates_that_were_not_read_stay_below() -> None:
    whole = with_others({3: -2.0, 1: 4.0}, {1: 9.0, 2: 8.0, 3: 7.0, 4: 7.5})
    assert sorted(whole, key=lambda one: -whole[one]) == [1, 3, 2, 4]


def test_a_plan_knows_a_loss_over_the_whole_batch(folder, corpus) -> None:
    job = load(folder, corpus, "retrieval", 1, "{}")
    assert footprints_and_passes(job, "cpu", 32)[0][TEACHER].forward_flops > 0


TOGETHER = """
name: together
steps: 18
output_dir: {folder}/runs
data:
  sequence_length: 32
  tokenizer: {corpus}/tokenizer
  tasks:
    search: &files
      train: {folder}/train.tsv
      validation: {folder}/dev.tsv
      files:
        {{documents: {folder}/corpus.jsonl, queries: {folder}/queries.jsonl,
          candidates: {folder}/first.trec}}
    order: *files
    moods: {{train: {folder}/moods.tsv, validation: {folder}/moods.tsv}}
batch: {{size: 8, micro_batch: 2}}
teacher:
  model: {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 32}}
  optimizer: {{kind: adamax, learning_rate: 3.0e-3}}
  objective:
    tasks:
      search: {{retrieval: {{}}}}
      order: {{reranking: {{negatives: 2}}}}
      moods: {{single_sentence: {{dropout: 0.05}}}}
evaluation: {{every: 1000}}
checkpoint: {{every: 1000}}
log: {{every: 1, wandb: disabled}}
"""


def together(folder: Path, corpus: Path, runs: str, stop: int | None, *more: str) -> list[Any]:
    """The record of a job of three tasks, of which two rank, stopped at a step. Collective."""
    text = TOGETHER.format(folder=folder, corpus=corpus)
    words = [f"output_dir={runs}", *more]
    job = with_examples(configs.load_text(text, JobConfig, "job", words, "job.yaml"))
    if stop is not None:
        jobs.run(job, stop_after=stop)
    run = jobs.run(job)
    jobs.finish(run)
    return [str(run.path), jobs.curve(run)]


@pytest.mark.slow
def test_rankings_are_learnt_together_with_other_tasks(folder, corpus, tmp_path):
    """As MT-DNN learns relevance: the same on 1 and 2 ranks and micro-batches, and resumed."""
    first = "".join(
        f"q{n} Q0 d{(n + shift) % 66} {shift + 1} {10 - shift} x\n"
        for n in range(66)
        for shift in range(5)
    )
    (folder / "first.trec").write_text(first)
    moods = "".join(f"{one} {other}\t{n % 2}\n" for n, (one, other) in enumerate(PAIRS[:20]))
    (folder / "moods.tsv").write_text(f"text\tlabel\n{moods}")
    still = "teacher.objective.tasks.moods.single_sentence.dropout=0"
    path, single = run_distributed(together, 1, folder, corpus, f"{tmp_path}/1", None, still)[0]
    *_, several = run_distributed(
        together, 2, folder, corpus, f"{tmp_path}/2", None, still, "teacher.zero_stage=2"
    )[0]
    losses = [[one for one in curve if one[1].endswith("/loss")] for curve in (single, several)]
    assert [one[:2] for one in losses[0]] == [one[:2] for one in losses[1]]
    ours, theirs = ([one[2] for one in part] for part in losses)
    assert ours == pytest.approx(theirs, rel=1e-4)
    scores = json.loads(RunFolder(Path(path)).evaluation.read_text())["learners"]["teacher"]
    assert {"search_ndcg_10", "order_ndcg_10", "moods_accuracy"} <= scores.keys()
    dropped, resumed = (
        run_distributed(together, 1, folder, corpus, f"{tmp_path}/{name}", stop)[0][1]
        for name, stop in (("whole", None), ("again", 7))
    )
    assert dropped == resumed
    assert dropped != single
