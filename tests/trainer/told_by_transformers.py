"""What `transformers` says of exports. A program too, for other versions than the tests':

python told_by_transformers.py RUNS OUT reads RUNS/TASK/exports/NAME and writes {TASK/NAME: Told}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

TEXT = "text"  # the job that is no task
CLASSES = {
    TEXT: "AutoModelForMaskedLM",
    "single_sentence": "AutoModelForSequenceClassification",
    "sentence_pair": "AutoModelForSequenceClassification",
    "reranking": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
    "multiple_choice": "AutoModelForMultipleChoice",
    "retrieval": "AutoModel",
    "bi_encoder": "AutoModel",
}
TEXTS = ["the list was in that class", "of Monday"]


class Told(NamedTuple):
    """What the tokenizer of an export gives, and the output of its model in our head's shape."""

    read: dict[str, Tensor]
    output: Tensor


@torch.no_grad()
def told_by_export(exported: Path, task: str) -> Told:
    """Pairs of `TEXTS`, read by the tokenizer and the model as a user of `transformers` does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    read = dict(tokenizer([TEXTS[0]] * 2, TEXTS, return_tensors="pt", padding=True))
    model = getattr(transformers, CLASSES[task]).from_pretrained(exported).eval()
    return Told(read, _output(model, read, task))


def _output(model: Any, read: dict[str, Tensor], task: str) -> Tensor:
    if task == "multiple_choice":
        return model(**{name: given[None] for name, given in read.items()}).logits[0][:, None]
    output = model(**read)
    if task == "span":
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    if CLASSES[task] != "AutoModel":
        return output.logits
    mask = read["attention_mask"][..., None]
    vectors = (output.last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(vectors, dim=1)


if __name__ == "__main__":
    runs, out = map(Path, sys.argv[1:])
    torch.save(
        {
            f"{task}/{exported.name}": tuple(told_by_export(exported, task))
            for task in CLASSES
            for exported in sorted((runs / task / "exports").iterdir())
            if exported.name != "bilstm"
        },
        out,
    )
