"""Suites: the comparison of several models, and the command that makes and resumes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tandem
from commands.suite_runs import prepare_suite
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train
from model import build, from_pretrained, save_pretrained
from tests.conftest import command_environment
from tests.fork_server import run_command
from tests.trainer import tiny
from trainer.evaluation.minimal_pairs import PairScores, PartScore
from trainer.scoring.columns import NUMBER, Column
from trainer.suites import (
    ModelResults,
    comparison_table,
    pair_score,
    task_score,
    to_json,
    write_comparison,
)

SUITE = """
about: One small task, and pairs.
tasks:
  moods: {task: single_sentence, job: {epochs: 1, data: {train: moods.tsv, validation: moods.tsv}}}
minimal_pairs: {pairs: pairs.jsonl}
job:
  {batch: {size: 4, micro_batch: 4}, epochs: 5, data: {sequence_length: 16}, log: {wandb: disabled}}
"""


def evaluation(score: float | None, speed: float) -> dict:
    column = {"name": "m", "heading": "matthews", "form": NUMBER, "higher_is_better": True}
    on_test = {**column, "name": "test_m", "heading": "test matthews"}
    tested = None if score is None else score - 0.1
    speeds = {"sequences_per_second": 4 * speed, "examples_per_second": speed}  # four choices
    return {
        "metric": "m",
        "columns": [column, on_test],
        "learners": {"teacher": {"m": score, "test_m": tested, **speeds}},
    }


def results_of_models() -> dict[str, ModelResults]:
    big = task_score({1: evaluation(0.5, 100.0), 2: evaluation(0.7, 110.0)})
    small = task_score({1: evaluation(0.3, 300.0), 2: evaluation(None, 300.0)})
    good, fair = (
        pair_score(
            PairScores(
                3000,
                mean,
                {"agreement": agreement, "islands": islands},
                [
                    PartScore("agreement", "anaphor_jpq", 1000, agreement),
                    PartScore("islands", "adjunct_island", 1000, islands + 0.05),
                    PartScore("islands", "wh_island", 1000, islands - 0.05),
                ],
            )
        )
        for mean, agreement, islands in ((0.8, 0.9, 0.75), (0.6, 0.65, 0.55))
    )
    return {
        "big": ModelResults("models/big", 1_000_000, {"cola": big, "pairs": good}),
        "small": ModelResults("models/small", 500_000, {"cola": small, "pairs": fair}),
    }


@pytest.fixture
def models() -> dict[str, ModelResults]:
    return results_of_models()


def test_means_deviations_and_retention(models: dict[str, ModelResults]) -> None:
    found = to_json(models)
    cola = found["big"]["tasks"]["cola"]
    assert cola["mean"] == pytest.approx(0.6)
    assert cola["deviation"] == pytest.approx(0.02**0.5)
    assert cola["examples_per_second"] == 105.0
    assert found["small"]["tasks"]["cola"]["by_seed"] == {1: 0.3}
    assert found["small"]["retention"] == pytest.approx(0.3 / 0.6)
    assert found["big"]["mean"] == pytest.approx(0.6)
    pairs = found["small"]["tasks"]["pairs"]
    assert pairs["by_phenomenon"] == {"agreement": 0.65, "islands": 0.55}
    assert "by_phenomenon" not in cola
    assert pairs["by_paradigm"][2]["paradigm"] == "wh_island"
    assert pairs["by_paradigm"][2]["pairs"] == 1000
    assert (pairs["pairs"], pairs["chance"]) == (3000, 0.5)
    assert cola["scores"]["test_m"]["by_seed"] == {1: 0.4, 2: 0.6}
    assert cola["scores"]["test_m"]["mean"] == pytest.approx(0.5)


def test_the_table_and_the_page_say_the_same(
    models: dict[str, ModelResults], tmp_path: Path
) -> None:
    lines = comparison_table(models).splitlines()
    assert lines[0].split() == [
        "model",
        "parameters",
        "cola",
        "pairs",
        "mean",
        "retention",
        "examples/s",
    ]
    assert lines[1].split() == ["big", "1M", "0.600", "±", "0.141", "80.0%", "60.0%", "105"]
    assert lines[2].split() == ["small", "500k", "0.300", "60.0%", "30.0%", "50.0%", "300"]
    assert "Scores: cola matthews, pairs accuracy" in lines[4]
    write_comparison(tmp_path / "report.html", "glue", "Tasks <all>", models)
    page = (tmp_path / "report.html").read_text()
    for cell in ("0.600 ± 0.141", "50.0%", "Tasks &lt;all&gt;", "models/small"):
        assert cell in page
    assert page.count("by phenomenon") == 1
    shown = "\n".join(lines)
    assert "cola  0.500 ± 0.141  0.200  test matthews" in shown
    assert page.count("<figure") == 2
    for row in (
        ("phenomenon", "pairs", "big", "small"),
        ("agreement", "1,000", "90.0%", "65.0%"),
        ("islands", "2,000", "75.0%", "55.0%"),
        ("chance", "", "50.0%", "50.0%"),
        ("wh_island", "islands", "1,000", "70.0%", "50.0%"),
        ("cola", "test matthews", "0.500 ± 0.141", "0.200"),
    ):
        tag = "th" if row[0] == "phenomenon" else "td"
        assert "".join(f"<{tag}>{cell}</{tag}>" for cell in row) in page


def test_means_are_over_the_same_tasks_for_every_model():
    first, undefined = task_score({1: evaluation(0.8, 1.0)}), task_score({1: evaluation(None, 1.0)})
    reference = ModelResults("a", 1, {"cola": first, "sst2": first})
    failed = ModelResults("b", 1, {"cola": first, "sst2": undefined})
    assert failed.mean is failed.retention(reference) is None
    assert reference.mean == 0.8
    assert reference.retention(failed) == 1.0, "over the one that the reference has"


def test_a_score_undefined_for_every_seed_has_no_mean() -> None:
    undefined = task_score({1: evaluation(None, 10.0)})
    assert undefined.mean is undefined.deviation is None
    loss = Column("loss", "loss", NUMBER, higher_is_better=False)
    assert undefined.retention(undefined) is None
    one = ModelResults("a", 1, {"x": undefined})
    assert "undefined" in comparison_table({"a": one})
    assert one.mean is one.retention(one) is None
    assert loss.retention(2.0, 1.0) == 0.5


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_suite(tmp_path_factory.mktemp("suite"), text)


def write_suite(folder: Path, text: Path) -> Path:
    """A suite with its files, and two models."""
    train([str(text)], "wordpiece", 300, str(folder / "tokenizer"))
    size = load(folder / "tokenizer")[1].vocab_size
    for name, layers in (("big", 2), ("small", 1)):
        config = tiny.encoder(vocab_size=size, max_positions=64, layers=layers)
        save_pretrained(build(config, seed=1), folder / name, tokenizer=folder / "tokenizer")
    rows = [f"a file is {one}\t{one}" for one in ("read", "written")] * 4
    (folder / "moods.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    names = ("sentence_good", "sentence_bad", "UID", "linguistics_term")
    pair = dict(zip(names, ("it is read", "it are read", "x", "y"), strict=True))
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (folder / "suite.yaml").write_text(SUITE)
    return folder


def evaluate(folder: Path, *words: str) -> tuple[int, str, str]:
    given = ["--suite", str(folder / "suite.yaml"), "--out", str(folder / "out"), *words]
    return run_command(["evaluate", *given, f"data.root={folder}"], command_environment(), 240)


def test_models_are_fine_tuned_and_compared_once(folder: Path) -> None:
    both = str(folder / "big"), str(folder / "small")
    code, output, errors = evaluate(folder, *both)
    assert code == 0, errors
    table = output[output.index("model ") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == ["big", "small"]
    found = json.loads((folder / "out" / "suite.json").read_text())
    for name in ("big", "small"):
        assert set(found[name]["tasks"]) == {"moods", "pairs"}
        pairs = found[name]["tasks"]["pairs"]
        assert pairs["by_phenomenon"] == {"y": pairs["mean"]}
        run = json.loads((folder / f"out/runs/moods-{name}-seed1/evaluation.json").read_text())
        score = run["learners"]["teacher"]["single_sentence_accuracy"]
        assert found[name]["tasks"]["moods"]["by_seed"] == {"1": score}
        assert json.loads(
            (folder / f"out/runs/moods-{name}-seed1/exports/teacher/task.json").read_text()
        )
    pairs = (folder / "pairs.jsonl").rename(folder / "elsewhere.jsonl")
    (folder / "lr=3").symlink_to(folder / "big")
    refused = evaluate(folder, str(folder / "lr=3"), "--out", str(folder / "new"))
    assert "pairs.jsonl" in refused[2]
    assert not [*(folder / "new" / "runs").glob("moods-*")], "before anything is trained"
    pairs.rename(folder / "pairs.jsonl")
    metrics = folder / "out/runs/moods-big-seed1/metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    code, output, errors = evaluate(folder, *both, "--untrained")
    assert code == 0, errors
    assert metrics.stat().st_mtime_ns == before, "what is finished is not run again"
    other = evaluate(folder, *both, "batch.size=8")
    assert other[0] == 1
    changed = "moods-big-seed1: belongs to another job (steps: 2 -> 1; batch.size: 4 -> 8)"
    assert changed in other[2], "the task's own epochs go before the suite's"
    weights = folder / "big" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"has runs of {folder / 'big'} as it was before" in evaluate(folder, *both)[2]
    weights.write_bytes(content)
    (row,) = [line.split() for line in output.splitlines() if line.startswith("untrained ")]
    found = json.loads((folder / "out" / "suite.json").read_text())
    assert found["untrained"]["parameters"] == found["big"]["parameters"]
    assert set(found["untrained"]["tasks"]) == {"moods"}, "an untrained model only guesses at pairs"
    assert len(row) == len(table[1].split()), "whose cell is empty; the first row has no retention"
    begun = word_vectors(folder / "big")
    ended = {
        name: word_vectors(folder / f"out/runs/moods-{name}-seed1/exports/teacher")
        for name in ("big", "untrained")
    }
    torch.testing.assert_close(ended["big"], begun, rtol=0, atol=1e-2)
    assert (ended["untrained"] - begun).abs().mean() > 1e-2, "other random weights"
    code, output, errors = evaluate(folder, both[0])
    assert "Left out: 2 finished runs in " in output, errors
    code, output, errors = evaluate(folder, both[0], "--json")
    assert "Left out: 2 finished runs in " in errors
    told = json.loads(output)
    assert told == json.loads((folder / "out" / "suite.json").read_text())
    assert told["big"]["tasks"]["pairs"]["by_paradigm"][0]["pairs"] == 1
    assert told["big"]["tasks"]["pairs"]["chance"] == 0.5


@pytest.mark.slow
def test_a_run_that_diverged_has_no_score_in_a_suite(folder: Path, tmp_path: Path) -> None:
    """Every loss above the mean of the two before it counts as a spike here."""
    guard = "{sigmas: 1.0e-6, window: 2, max_skipped_fraction: 0.1, max_consecutive_skips: 99}"
    wild = [f"teacher.guard={guard}", "epochs=7", "batch.micro_batch=1", "batch.size=1"]
    for _ in ("first", "again"):
        words = ["--out", str(tmp_path), *wild, "teacher.optimizer.learning_rate=1e-9"]
        code, output, errors = evaluate(folder, str(folder / "big"), *words)
        assert code == 1
        assert "of its 56 steps were skipped (loss spike: " in errors
        run = tmp_path / "runs" / "moods-big-seed1"
        assert f"tandem: {run} failed; remove the cause and repeat the command, or, " in errors
        assert "goes on there" not in errors
        assert "Traceback" not in errors
        assert "big" not in output
        assert not [*tmp_path.rglob("suite.json"), *tmp_path.rglob("evaluation.json")]
        assert not [*tmp_path.glob("runs/*/exports/*")]


def refusal(suite: Path, *words: str) -> str:
    """What `tandem evaluate --suite` says of what it refuses before it writes anything."""
    given = ["evaluate", "--suite", str(suite), *words, "--out", str(suite.parent / "out")]
    ended = CliRunner().invoke(tandem.main, given)
    assert ended.exit_code == 1, ended.output
    assert not (suite.parent / "out").exists()
    return ended.stderr


def test_a_suite_file_sets_no_key_that_is_each_runs_own(folder: Path, tmp_path: Path) -> None:
    own = SUITE.replace("job: {epochs: 1,", "job: {output_dir: other, epochs: 1,")
    (tmp_path / "own.yaml").write_text(own)
    message = refusal(tmp_path / "own.yaml", str(folder / "big"))
    assert message.startswith("tandem: tasks.moods.job.output_dir: a suite sets this")


def test_a_wrong_key_is_of_a_task_of_the_suite(folder: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE.replace("job: {epochs: 1,", "job: {epoch: 1,"))
    message = refusal(suite, str(folder / "big"))
    assert message.startswith(f"tandem: {suite}: tasks.moods: ")
    assert message.endswith("epoch: unknown key; did you mean epochs?\n")


def test_values_by_step_in_a_suite_replace_those_of_its_task(folder: Path, tmp_path: Path) -> None:
    task, suite = tmp_path / "task.yaml", tmp_path / "suite.yaml"
    task.write_text(
        "base: single_sentence\nname: moods\n"
        "teacher: {schedule: {kind: points, points: {1: 1.0, 5: 0.5}}}\n"
    )
    data = "{train: moods.tsv, validation: moods.tsv}"
    own = f"{{epochs: 1, data: {data}, teacher: {{schedule: {{points: {{2: 0.0}}}}}}}}"
    suite.write_text(f"about: x\ntasks: {{moods: {{task: {task}, job: {own}}}}}\n")
    words = (tmp_path / "out", [f"data.root={folder}"], [1], False)
    (job,) = prepare_suite(str(suite), [str(folder / "small")], *words).jobs.values()
    assert job.teacher.schedule.points == {2: 0.0}


def test_no_two_runs_of_a_suite_have_one_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("about: x\ntasks: {t: {}, t-a: {}}\n")
    models = [str(shutil.copytree(folder / "small", tmp_path / name)) for name in ("a-b", "b")]
    assert refusal(tmp_path / "suite.yaml", *models) == (
        "tandem: tasks.t-a: its run of model b is called t-a-b-seed1, as task t's of model a-b "
        "is; rename a task or the folder of a model\n"
    )


def test_no_two_models_of_a_suite_have_one_name(folder: Path, tmp_path: Path) -> None:
    named = [tmp_path / name for name in ("x/a-b", "x-a/b", "y/b")]
    models = [str(shutil.copytree(folder / "small", path)) for path in named]
    (tmp_path / "suite.yaml").write_text(SUITE)
    message = f"{models[1]}: is called x-a-b, as {models[0]} is; rename one of them"
    assert message in refusal(tmp_path / "suite.yaml", *models)


def test_the_folder_of_a_model_is_no_folder_of_a_suite(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    out = Path(shutil.copytree(folder / "small", tmp_path / "other"))
    before = sorted(out.iterdir())
    words = ["evaluate", "--suite", str(tmp_path / "suite.yaml"), str(folder / "big")]
    ended = CliRunner().invoke(tandem.main, [*words, "--out", str(out), f"data.root={folder}"])
    assert ended.exit_code == 1, ended.output
    assert ended.stderr.startswith(f"tandem: {out / 'config.json'}: exists; move it away"), ended
    assert sorted(out.iterdir()) == before


def word_vectors(folder: Path) -> torch.Tensor:
    return from_pretrained(folder).embeddings.word.weight


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 1, "nowhere"),
        (["big", "big"], 1, "is named twice"),
        (["big", "data.train=none.tsv"], 1, "none.tsv"),
        (["big", "name=other"], 1, "tandem: name: a suite sets this for each run; "),
        (["big", "output_dir=other"], 1, "tandem: output_dir: a suite sets this for each run; "),
        (["big", "seed=7"], 1, "tandem: seed: a suite sets this for each run; "),
        (["big", "teacher={init: {pretrained: x}}"], 1, "tandem: teacher.init.pretrained: a suite"),
        ([], 2, "name the folder of a model, or several"),
    ],
)
def test_what_cannot_be_compared(folder: Path, words: list[str], code: int, message: str) -> None:
    named = [word if "=" in word else str(folder / word) for word in words]
    ended, _, errors = evaluate(folder, *named)
    assert ended == code, errors
    assert message in errors
    assert "Traceback" not in errors
