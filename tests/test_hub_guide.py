"""The guide from a model of `transformers` to `onnxruntime`, followed to its end without torch."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from data_pipeline.tokenization.training import train
from tests.conftest import tandem
from tests.test_docs import DOCS, blocks
from tests.trainer.test_sentence_tasks import lines

PAGE = "hugging_face.md"
LABELS = {"bright": "positive", "dull": "negative"}
# What follows the page's program: the logits of a table's texts by each file.
REST = """
import csv
texts = [row["text"] for row in csv.DictReader(open("test.csv"))]
for name in ("model", "model_int8"):
    np.save(name, classify(texts, f"small/{name}.onnx"))
assert "torch" not in sys.modules
"""


def write_tables(folder: Path) -> None:
    for number, (name, count) in enumerate({"train": 64, "validation": 16, "test": 24}.items()):
        rows = [line.split("\t") for line in lines(count, 100 * number)]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["text", "label"])
            table.writerows([text, LABELS[label]] for text, label in rows)


def save_fine_tuned(folder: Path, text: Path) -> None:
    """A narrow BERT of twelve layers that knows the task, as `transformers` saves it."""
    train([str(text)], "wordpiece", 600, str(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=600, hidden_size=64, num_hidden_layers=12, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    rows = [line.split("\t") for line in lines(64, 0)]
    read = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([int(label == "bright") for _, label in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(30):
        model(**read, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("onnxruntime")
    save_fine_tuned(tmp_path / "fine-tuned", text)
    write_tables(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: list[str]) -> str:
    """What a command of the page prints; training is shorter."""
    small = ["log.wandb=disabled", "epochs=2"] if words[0] == "train" else []
    done = tandem(*words, *small)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.slow
def test_the_guide_leads_from_transformers_to_onnxruntime(folder: Path) -> None:
    commands = [one for block in blocks(PAGE) if block.is_run for one in block.commands]
    output = {" ".join(words[:2]): run(words) for _, *words in commands}
    assert "LABEL_0, LABEL_1 are negative, positive" in output["train distil_single_sentence"]
    exported = output["export runs/distil_single_sentence"]
    sizes = re.findall(r"^(\S+\.onnx): ([\d.]+) MiB, [\d.]+ ms for 128 tokens", exported, re.M)
    assert [name for name, _ in sizes] == ["model.onnx", "model_int8.onnx"]
    files = [(folder / "small" / name).stat().st_size for name, _ in sizes]
    assert files[1] < 0.7 * files[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / PAGE).read_text(), re.S | re.M)
    program = f"import sys\nsys.modules['torch'] = None\n{code}\ndel sys.modules['torch']\n{REST}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a fine film ")
    told = map(json.loads, tandem("predict", "small", "test.csv").stdout.splitlines())
    expected = np.array([[*row["probabilities"].values()] for row in told])
    logits, rounded = (np.load(f"{name}.npy") for name in ("model", "model_int8"))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chances, expected, atol=1e-4)
    assert (rounded.argmax(axis=1) == logits.argmax(axis=1)).mean() >= 0.9
