"""`tandem finetune`: from a table to a run for each seed, which is not taken for another job's."""

from __future__ import annotations

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
    words = ["single_sentence", "--model", model, *columns, *few, "data.sequence_length=16"]
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
        assert "single_sentence-teacher-seed1 is of another job (" in refused.stderr
        assert change in refused.stderr
    for key in ("seed=3", f"teacher.init.pretrained={best}"):
        refused = tandem("finetune", *words, key, "--seeds", "1,2")
        assert refused.returncode == 2
        assert f"{key.partition('=')[0]}: --" in refused.stderr
    refused = tandem("finetune", "single_sentence", "--model", tmp_path / "none")
    assert refused.returncode == 2
    assert "no such folder" in refused.stderr
