"""Numbers of a table beside its texts: trained on, distilled, resumed, predicted, exported."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import configs
import tandem
from configs import ConfigError
from data_pipeline import Corpus, DataError, ExampleSplit
from model import Capture, from_pretrained
from model.onnx_export import export_onnx
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.augmentation.augmenting import Row, augment
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.examples import with_examples
from trainer.learner_life import InitConfig
from trainer.learners.first_weights import from_folder
from trainer.objectives.task import Part
from trainer.prediction.fine_tuned import FineTuned
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

JOB = """
name: prices
steps: 60
output_dir: {folder}/runs
data:
  {{root: {folder}, train: train.tsv, validation: held_out.tsv, sequence_length: 12,
  tokenizer: {corpus}/tokenizer}}
batch: {{size: 16, micro_batch: 4}}
teacher:
  model:
    {{hidden_size: 16, layers: 2, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
  optimizer: &optimizer {{learning_rate: 2.0e-2}}
  objective: &objective {{single_sentence: {{numbers: [price, weight]}}}}
students:
  small:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
    optimizer: *optimizer
    objective:
      {{single_sentence: {{numbers: [price, weight]}}, soft_labels: {{}}, hidden_mse: {{}}}}
  lstm:
    model:
      {{kind: bilstm, hidden_size: 16, pooled_size: 8, vocab_size: 600, initializer_range: 0.1}}
    optimizer: {{learning_rate: 4.0e-2}}
    objective: *objective
evaluation: {{every: 30}}
checkpoint: {{every: 30}}
log: {{every: 1, wandb: disabled}}
"""
WORDS = ["the", "of", "and", "to", "in"]
SCORE = "single_sentence_accuracy"


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Texts that say nothing of their label, which is dear where the price is above 1000."""
    draw = random.Random(seed)
    prices = [round(draw.gauss(1000, 300), 2) for _ in range(count)]
    return [
        {
            "text": " ".join(draw.choices(WORDS, k=4)),
            "price": price,
            "weight": round(draw.random(), 3),
            "label": "dear" if price > 1000 else "cheap",
        }
        for price in prices
    ]


def write(path: Path, table: list[dict[str, object]]) -> None:
    lines = ["\t".join(table[0]), *("\t".join(map(str, row.values())) for row in table)]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module", name="job")
def job_of_prices(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prices")
    write(folder / "train.tsv", rows(160, 1))
    write(folder / "held_out.tsv", rows(60, 2))
    path = folder / "job.yaml"
    path.write_text(JOB.format(folder=folder, corpus=corpus))
    return path


@pytest.fixture(scope="module", name="run")
def run_of_two(job) -> RunFolder:
    return RunFolder(Path(run_distributed(jobs.finished_run, 2, job)[0]))


@pytest.fixture(scope="module", name="export")
def export_of_the_student(run) -> Path:
    return run.path / "exports" / "small"


def scores(run: RunFolder) -> dict[str, float]:
    learners = json.loads(run.evaluation.read_text())["learners"]
    return {name: facts[SCORE] for name, facts in learners.items()}


def predicted(*words: object, given: str | None = None) -> list[dict]:
    ended = CliRunner().invoke(tandem.main, ["predict", *map(str, words)], input=given)
    assert ended.exit_code == 0, ended.output
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_a_label_that_depends_on_a_number_is_learnt_with_it_alone(run, job, tmp_path) -> None:
    assert min(scores(run).values()) > 0.95
    without = [f"{of}.objective.single_sentence.numbers=[]" for of in
               ("teacher", "students.small", "students.lstm")]  # fmt: skip
    blind = RunFolder(
        Path(
            run_distributed(
                jobs.finished_run, 1, job, *without, f"output_dir={tmp_path}", "steps=20"
            )[0]
        )
    )
    assert max(scores(blind).values()) < 0.7


@pytest.mark.slow
def test_two_ranks_train_as_one_does(run, job, tmp_path) -> None:
    alone = run_distributed(jobs.curve_in, 1, job, tmp_path)[0]
    assert jobs.assert_same_losses(run, alone) >= 180


@pytest.mark.slow
def test_a_run_that_was_stopped_resumes_to_the_last_bit(run, job, tmp_path) -> None:
    assert run_distributed(jobs.stopped_and_resumed, 2, job, tmp_path)[0] == jobs.curve(run)


@pytest.mark.slow
def test_the_statistics_are_those_of_the_rows_that_are_trained_on(job, run, export) -> None:
    columns = np.array([[row["price"], row["weight"]] for row in rows(160, 1)], np.float64)
    task = jobs.load(job).teacher.objective.single_sentence
    assert task.means == pytest.approx(columns.mean(axis=0), rel=1e-12)
    assert task.deviations == pytest.approx(columns.std(axis=0), rel=1e-12)
    head = from_pretrained(export).config.task_heads["single_sentence"]
    facts = json.loads((export / "task.json").read_text())["settings"]
    assert head.means == facts["means"] == task.means
    assert head.deviations == facts["deviations"] == task.deviations
    held = jobs.load(
        job, "data.validation=''", "data.validation_fraction=0.25", "steps=0", "epochs=2"
    )
    assert held.steps == 15  # 120 rows, twice
    trained = columns[[n for n in range(160) if Part(False, 0.25).has(n)]]
    assert held.teacher.objective.single_sentence.means == pytest.approx(trained.mean(axis=0))
    again = configs.load_text(configs.dump(held), JobConfig, "job", [], "config.yaml")
    assert again == held == with_examples(again)


@pytest.mark.slow
def test_predictions_are_those_of_a_computation_by_hand(export, tmp_path) -> None:
    table = rows(9, 3)
    write(tmp_path / "rows.tsv", table)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table))
    answers = predicted(export, tmp_path / "rows.tsv")
    assert predicted(export, tmp_path / "rows.jsonl") == answers
    plain = "".join(f"{row['text']}\t{row['price']}\t{row['weight']}\n" for row in table)
    assert predicted(export, "-", given=plain) == answers
    assert tandem.predict(export, table) == tandem.predict(export, tmp_path / "rows.tsv")
    listed = [(row["text"], row["price"], row["weight"]) for row in table]
    assert tandem.predict(export, listed) == tandem.predict(export, table)
    tuned = FineTuned.open(export, torch.device("cpu"))
    head = tuned.model.task_heads["single_sentence"]
    for row, answer in zip(table, answers, strict=True):
        ids, _ = tuned.encoder.vocabulary.with_special(tuned.encoder.sequence([row["text"]], ""))
        tokens = torch.from_numpy(np.array(ids, np.int64))[None]
        raw = torch.tensor([row["price"], row["weight"]], dtype=torch.float64)
        scaled = (raw - torch.tensor(head.head.means)) / torch.tensor(head.head.deviations)
        with torch.no_grad():
            states = tuned.model.features(
                tokens, capture=Capture(last_hidden_state=True)
            ).last_hidden_state
            pooled = torch.tanh(states[:, 0] @ tuned.model.pooler.dense.weight.T
                                + tuned.model.pooler.dense.bias)  # fmt: skip
            read = torch.cat([pooled[0], scaled.float()])
            chances = (head.linear.weight @ read + head.linear.bias).softmax(0)
            called = tuned.model(tokens, numbers=raw[None]).heads["single_sentence"].softmax(-1)
        assert list(answer["probabilities"].values()) == pytest.approx(chances.tolist(), abs=1e-5)
        assert called[0].tolist() == pytest.approx(chances.tolist(), abs=1e-5)


@pytest.mark.slow
def test_a_row_with_a_bad_number_is_answered_with_null_and_counted(
    export, tmp_path, caplog
) -> None:
    bad: list[object] = [None, "much", math.nan, math.inf, True, [1], "", {"a": 1}]
    table = [{"text": "of the", "price": 900, "weight": 0.5}]
    table += [{"text": "of the", "price": value, "weight": 0.5} for value in bad]
    table += [{"text": "of the", "weight": 0.5}, table[0]]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table))
    answers = predicted(export, tmp_path / "rows.jsonl")
    assert [row["label"] is None for row in answers] == [False, *[True] * 9, False]
    assert "rows.jsonl: rows without a text or a number, whose answers are null: 9" in caplog.text
    given = "of the\t900\t0.5\nof the\t\t0.5\n\t900\t0.5\nof the\tinf\t0.5\n"
    answers = predicted(export, "-", given=given)
    assert [row["label"] is None for row in answers] == [False, True, True, True]
    assert "whose answers are null: 3" in caplog.text


@pytest.mark.parametrize("value", ["", "NaN", "inf", "much", "1e300"])
def test_a_bad_number_in_training_is_named(job, tmp_path, value) -> None:
    table = [*rows(20, 1), {"text": "of the", "price": value, "weight": 1, "label": "dear"}]
    write(tmp_path / "bad.tsv", table)
    with pytest.raises(DataError, match=r"bad\.tsv:22: price: ") as refused:
        jobs.load(job, f"data.train={tmp_path / 'bad.tsv'}")
    assert "\n" not in str(refused.value)
    records = [json.dumps(row) for row in [*rows(20, 1), {"text": "of", "label": "dear"}]]
    (tmp_path / "bad.jsonl").write_text("\n".join(records))
    with pytest.raises(DataError, match=r"bad\.jsonl:21: price: '' is not a number"):
        jobs.load(job, f"data.train={tmp_path / 'bad.jsonl'}")


def of_all(setting: str) -> list[str]:
    learners = ("teacher", "students.small", "students.lstm")
    return [f"{of}.objective.single_sentence.{setting}" for of in learners]


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ("numbers=[prise]", DataError, r"train\.tsv: columns\.prise: no column 'prise'.*price"),
        ("numbers=[label]", ConfigError, "numbers: label is a text or the label; remove it"),
        ("numbers=[price, price]", ConfigError, "numbers: must name each column once"),
        ("means=[1]", ConfigError, "means: must be one for each of the 2 numbers, or empty"),
    ],
)
def test_columns_that_do_not_fit_are_refused(job, setting, error, message) -> None:
    with pytest.raises(error, match=message):
        jobs.load(job, *of_all(setting))


def test_a_column_that_is_always_the_same_is_refused(job, tmp_path) -> None:
    write(tmp_path / "same.tsv", [{**row, "weight": 7} for row in rows(20, 1)])
    with pytest.raises(DataError, match=r"numbers: weight is the same in every row that is train"):
        jobs.load(job, f"data.train={tmp_path / 'same.tsv'}")


@pytest.mark.slow
def test_what_reads_no_numbers_says_so(job, run, tmp_path) -> None:
    head = "single_sentence: {numbers: [price]}"
    tasks = f"{{tasks: {{a: {{{head}}}, b: {{single_sentence: {{}}}}}}}}"
    with pytest.raises(ConfigError, match=r"tasks\.a\.single_sentence\.numbers: are for a job of"):
        jobs.load(job, "students=null", f"teacher.objective={tasks}")
    with pytest.raises(ConfigError, match="reads no numbers beside the text; remove numbers"):
        jobs.load(job, "teacher.objective.branches={}")
    teacher = run.path / "exports" / "teacher"
    frozen = ["teacher=null", f"teacher.init.pretrained={teacher}", "teacher.frozen=true"]
    words = [*frozen, f"output_dir={tmp_path}"]
    with pytest.raises(TrainingError, match=r"its head reads the numbers price, weight beside"):
        jobs.load(job, *words, *(word for word in of_all("numbers=[price]") if "students" in word))
    assert jobs.load(job, *words).teacher.frozen


@pytest.mark.slow
def test_a_finished_model_is_scored_on_a_file(run, export, job) -> None:
    file = job.parent / "held_out.tsv"
    ended = CliRunner().invoke(
        tandem.main, ["evaluate", str(export), f"data.validation={file}", "--json"]
    )
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["scores"][SCORE] == scores(run)["students/small"]


def test_the_numbers_are_shown_and_dumped(job, tmp_path) -> None:
    shown = CliRunner().invoke(tandem.main, ["data", "show", str(job)])
    assert shown.exit_code == 0, shown.output
    assert "price: " in shown.stdout
    assert "weight: 0." in shown.stdout
    out = tmp_path / "rows.npz"
    words = [str(job), "--steps", "0:2", "--world-size", "1", "--rank", "0", "--out", str(out)]
    dumped = CliRunner().invoke(tandem.main, ["data", "dump", *words])
    assert dumped.exit_code == 0, dumped.output
    read = {row["price"]: row["weight"] for row in rows(160, 1)}
    numbers = np.load(out)["numbers"]
    assert numbers.shape == (32, 2)
    assert all(read[price] == weight for price, weight in numbers.tolist())


@pytest.mark.slow
def test_an_onnx_file_reads_the_numbers_as_they_stand(export, tmp_path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    given = from_pretrained(export).eval()
    export_onnx(given, tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    ids = torch.randint(5, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    numbers = torch.tensor([[900.0, 0.1], [1200.0, 0.7], [1000.0, 0.4]])
    read = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0,
            "numbers": numbers}  # fmt: skip
    names = {one.name for one in session.get_inputs()}
    assert names == read.keys()
    (got,) = session.run(None, {name: value.numpy() for name, value in read.items()})
    with torch.no_grad():
        ours = given(ids, ids * 0, mask, numbers=numbers).heads["single_sentence"]
    np.testing.assert_allclose(got, ours.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="numbers: give price, weight of each text"):
        given(ids)


@pytest.mark.slow
def test_the_card_says_what_the_head_reads(export) -> None:
    card = (export / "README.md").read_text()
    assert "`transformers` has no class for it" in card
    assert "| price | " in card
    assert "float32 [batch, 2]" in card
    (command,) = re.findall(r"```bash\n(printf .*)\n```", card)
    given = command.partition("'")[2].partition("'")[0].encode().decode("unicode_escape")
    (answer,) = predicted(export, "-", given=given)
    assert answer["label"] in ("cheap", "dear")


def test_pairs_in_a_file_without_a_header_have_numbers_too(job, tmp_path) -> None:
    lines = [f"of,{row['text']},{row['price']},{row['weight']}" for row in rows(40, 1)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    task = "{single_sentence: null, sentence_pair: {numbers: [price], target: number}}"
    columns = "data.columns={text_a: 1, text_b: 2, price: 3, label: 4}"
    file = tmp_path / "pairs.csv"
    words = [
        "students=null",
        f"teacher.objective={task}",
        columns,
        f"data.train={file}",
        f"data.validation={file}",
    ]
    found = jobs.load(job, *words)
    examples = ExampleSplit(Corpus.open(found.data.path), "train")
    assert examples.columns.tolist() == [[row["price"]] for row in rows(40, 1)]
    assert examples.layout.segments == (2,)


def test_copies_of_an_example_keep_its_numbers(job, tmp_path) -> None:
    out = tmp_path / "more.tsv"
    augment(jobs.load(job, "students=null"), Twice(), out, torch.device("cpu"))
    header, *lines = out.read_text().splitlines()
    assert header.split("\t") == ["text", "label", "price", "weight"]
    known = {(str(row["price"]), str(row["weight"])) for row in rows(160, 1)}
    assert len(lines) == 320
    assert {tuple(line.split("\t")[2:]) for line in lines} == known


class Twice:
    """A way to make copies, and the copies."""

    files: tuple[Path, ...] = ()

    def identity(self) -> dict[str, Any]:
        return {}

    def over(self, rows: object, texts: object, device: object) -> Twice:
        return self

    def __call__(self, rows: Sequence[Row], first: int) -> Iterator[Row]:
        for row in rows:
            yield from (row, {**row, "text": "of"})


@pytest.mark.slow
def test_a_model_goes_on_with_its_head_where_it_reads_the_same_numbers(
    job, export, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    init, name = InitConfig(pretrained=str(export)), "task_heads.single_sentence.linear.weight"
    same, other = (jobs.load(job, *words).students["small"].architecture
                   for words in ([], of_all("numbers=[price]")))  # fmt: skip
    given = from_pretrained(export).state_dict()[name]
    assert torch.equal(from_folder("teacher", init, same)[name], given)
    assert name not in from_folder("teacher", init, other)
    assert "cheap, dear beside the numbers price, weight) does not fit" in caplog.text


@pytest.mark.slow
def test_the_record_of_a_run_has_the_terms_of_students(run) -> None:
    last = [row for row in metrics.read(run.metrics) if row["step"] == 60]
    assert any("students/small/soft_labels" in row for row in last)
