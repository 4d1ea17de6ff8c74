"""`tandem finetune`: from a table to a run for each seed, which is not taken for another job's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model import from_pretrained
from tests.conftest import tandem

RATE = "teacher.optimizer.learning_rate=1e-9"


def test_finetune_takes_a_table_and_reports_over_seeds(finished, tmp_path) -> None:
    table = tmp_path / "mine.csv"
    rows = [f"{number} of them was here,{number % 2}" for number in range(40)]
    table.write_text("\n".join(["review,stars", *rows]) + "\n")
    model = finished[0] / "exports" / "teacher"
    columns = [f"data.train={table}", "data.columns.text=review", "data.columns.label=stars"]
    few = [f"output_dir={tmp_path}/runs", "epochs=null", "steps=2", "batch.size=8"]
    words = [
        "single_sentence",
        "--model",
        model,
        *columns,
        *few,
        "data.sequence_length=16",
        "log.wandb=disabled",
    ]
    done = tandem("finetune", *words, "--seeds", "1,2")
    assert done.returncode == 0, done.stderr
    assert "single_sentence_accuracy over 2 seeds" in done.stdout
    assert "standard deviation" in done.stdout
    best = tmp_path / "runs" / "single_sentence-teacher-seed1" / "exports" / "teacher"
    assert from_pretrained(best).config.task_heads["single_sentence"].labels == ["0", "1"]
    shown = tandem("data", "show", *[w for w in words if w not in ("--model", model)],
                   f"teacher.init.pretrained={model}")  # fmt: skip
    assert "36 examples to train on, 4 to score on" in shown.stdout, shown.stderr
    others = {"teacher.init.pretrained: ": ("--model", best), "learning_rate: ": (RATE,)}
    for change, other in others.items():
        refused = tandem("finetune", *words, *other, "--seeds", "1")
        assert refused.returncode == 1, "what has ended is not given as another's result"
        assert "single_sentence-teacher-seed1 belongs to another job (" in refused.stderr
        assert change in refused.stderr
    for key in ("seed=3", f"teacher.init.pretrained={best}"):
        refused = tandem("finetune", *words, key, "--seeds", "1,2")
        assert refused.returncode == 2
        assert f"{key.partition('=')[0]}: --" in refused.stderr
    refused = tandem("finetune", "single_sentence", "--model", tmp_path / "none")
    assert refused.returncode == 2
    assert "none: no such folder; name the folder of a model: none is downloaded" in refused.stderr
    refused = tandem("train", "single_sentence", "data.train=a.csv", "teacher.init.pretrained=bert")
    why = "no such folder; name one with a tokenizer: none is downloaded"
    assert refused.stderr == f"tandem: teacher.init.pretrained: bert: {why}\n"


LONG = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI = f"index\tpromptID\tpairID\tgenre\t{LONG}\tsentence1\tsentence2\tlabel1"
ENTAILS = ("neutral", "entailment", "contradiction")


def mnli(folder: Path) -> None:
    """The columns of GLUE's files, which differ between the splits; quotes are text."""
    for name, header, count in (
        ("train", f"{MNLI}\tgold_label", 12),
        ("dev_matched", f"{MNLI}\tlabel2\tgold_label", 6),
        ("dev_mismatched", f"{MNLI}\tlabel2\tgold_label", 9),
    ):
        labels = header.count("label")
        rows = [
            "\t".join(
                [
                    f"{n}",
                    "1",
                    "1e",
                    "fiction",
                    "( a",
                    "( b",
                    "(A",
                    "(B",
                    f'He said "{n}',
                    f"it is {n}",
                    *[ENTAILS[n % 3]] * labels,
                ]
            )
            for n in range(count)
        ]
        (folder / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")


def qqp(folder: Path) -> None:
    """Two of the training file's lines are the halves of a broken row."""
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    rows = [f'{n}\t1\t2\tIs it "{n}?\tIs it {n % 4}?\t{n % 2}' for n in range(12)]
    (folder / "dev.tsv").write_text("\n".join([header, *rows]) + "\n")
    broken = [*rows, "99\t3\t4\tHow are", "you?\tHow are you?\t1"]
    (folder / "train.tsv").write_text("\n".join([header, *broken]) + "\n")


def race(folder: Path) -> None:
    """A passage with a blank to fill, and in high/ one with two questions."""
    for split in ("train", "dev", "test"):
        for level, questions in (("middle", ["It is _ ."]), ("high", ["Why is it?", "Name it."])):
            for number in range(4):
                record: dict[str, Any] = {
                    "article": f"it was {number} of them",
                    "questions": questions,
                    "options": [["one", "two", "three", "four"]] * len(questions),
                    "answers": ["ABCD"[number]] * len(questions),
                }
                path = folder / split / level / f"{number}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(record | {"id": f"{level}{number}.txt"}))


def stsb(folder: Path) -> None:
    """The columns of GLUE's files."""
    start = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2"
    rows = [f"{n}\tmain\tM\t2012\t1\tno\tno\tit is {n}\tit is 3\t{n % 6}.000" for n in range(12)]
    for name in ("train", "dev"):
        lines = [f"{start}\tsentence1\tsentence2\tscore", *rows]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")


MADE = {
    "mnli": ("glue/MNLI", mnli),
    "qqp": ("glue/QQP", qqp),
    "race": ("RACE", race),
    "stsb_bi_encoder": ("glue/STS-B", stsb),
}


@pytest.mark.parametrize(
    "task", ["mnli", *(pytest.param(it, marks=pytest.mark.slow) for it in MADE if it != "mnli")]
)
def test_a_task_is_read_as_its_authors_publish_it(task: str, finished, tmp_path: Path) -> None:
    name, make = MADE[task]
    folder = tmp_path / name
    folder.mkdir(parents=True)
    make(folder)
    few = [f"output_dir={tmp_path}/runs", f"data.root={tmp_path}", "epochs=null", "steps=2"]
    few += ["batch={size: 4, micro_batch: 4}", "data.sequence_length=16", "log.wandb=disabled"]
    done = tandem("finetune", task, "--model", finished[0] / "exports" / "teacher", *few)
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.glob("runs/*/evaluation.json")
    scores = json.loads(results.read_text())["learners"]["teacher"]
    if task == "race":
        parts = {
            one: scores[f"multiple_choice_accuracy_{one}"] for one in ("cloze", "why", "other")
        }
        assert scores["multiple_choice_accuracy_middle"] == parts["cloze"]
        high = scores["multiple_choice_accuracy_high"]
        assert high == pytest.approx((parts["why"] + parts["other"]) / 2)
        mean = (4 * parts["cloze"] + 8 * high) / 12
        assert scores["multiple_choice_accuracy"] == pytest.approx(mean)
        assert scores["test_multiple_choice_accuracy_high"] == high
        assert "multiple_choice_accuracy_who" not in scores
    elif task == "mnli":
        assert 0 <= scores["sentence_pair_accuracy"] <= 1
        assert (9 * scores["test_sentence_pair_accuracy"]) % 1 == pytest.approx(0, abs=1e-6)
    elif task == "stsb_bi_encoder":
        assert -1 <= scores["bi_encoder_spearman"] <= 1
    else:
        assert "leaves out 2 malformed rows; " in done.stderr
        assert "train.tsv:14: has 4 columns, where the header names 6" in done.stderr
        assert {"sentence_pair_f1", "sentence_pair_accuracy"} < scores.keys()


def test_a_bi_encoder_learns_from_a_table_of_any_scale(finished, tmp_path: Path) -> None:
    rows = [f"it is {n},it is 3,{n % 4}" for n in range(20)]
    (tmp_path / "mine.csv").write_text("\n".join(["text_a,text_b,label", *rows]) + "\n")
    few = [
        f"output_dir={tmp_path}/runs",
        f"data.train={tmp_path}/mine.csv",
        "epochs=null",
        "steps=2",
    ]
    few += ["batch={size: 4, micro_batch: 4}", "data.sequence_length=16", "log.wandb=disabled"]
    few += ["teacher.objective.bi_encoder.highest=3", "name=alike"]
    done = tandem("finetune", "bi_encoder", "--model", finished[0] / "exports" / "teacher", *few)
    assert done.returncode == 0, done.stderr
    exported = tmp_path / "runs" / "alike" / "exports" / "teacher"
    told = tandem("predict", exported, tmp_path / "mine.csv")
    assert len(told.stdout.splitlines()) == len(rows), told.stderr
