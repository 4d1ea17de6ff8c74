"""The README.md of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from model.accounting import describe
from model.config import EncoderConfig


@dataclass(frozen=True)
class Training:
    """The training of a model, as its model card describes it.

    objectives: name -> weight and settings, as in the job. metrics: name -> held-out value.
    predicts: whether the masked-LM head was trained. teacher: the model that it was distilled from;
    empty if there was none. license: an SPDX identifier in the spelling of the Hugging Face hub,
    such as apache-2.0; "other" if none was chosen.
    """

    data: str
    steps: int
    tokens: int
    objectives: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    teacher: str = ""
    license: str = "other"
    revision: str = ""
    predicts: bool = True


def model_card(name: str, config: EncoderConfig, training: Training | None = None) -> str:
    """The model card in Markdown, with the hub's front matter: sizes, training, metrics, license.

    Without `training` the card says that the training is not recorded.
    """
    size = describe(config)
    license = training.license if training else "other"
    predicts = training is None or training.predicts
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {'fill-mask' if predicts else 'feature-extraction'}",
        f"license: {license}",
        "tags: [masked-language-modeling, tandem]",
        "---",
        f"# {name}",
        "",
        f"A masked language model with {size.parameters:,} parameters (embeddings, encoder, pooler)"
        f" and {size.head_parameters:,} in its heads: {config.layers} layers, hidden size"
        f" {config.hidden_size}, {config.heads} attention heads, {config.vocab_size:,} tokens in"
        f" the vocabulary, up to {config.longest_sequence} positions.",
        "",
    ]
    lines += ["How it was trained is not recorded."] if training is None else _training(training)
    return "\n".join(lines) + "\n"


def _training(training: Training) -> list[str]:
    lines = [
        "## Training",
        "",
        f"- Data: {training.data}",
        f"- Optimizer steps: {training.steps:,}",
        f"- Tokens seen: {training.tokens:,}",
        f"- Teacher: {training.teacher or 'none, pre-trained from scratch'}",
        f"- License: {training.license}",
    ]
    if training.revision:
        lines.append(f"- Code: Tandem, revision {training.revision}")
    if training.objectives:
        lines += ["", "| objective | settings |", "|---|---|"]
        lines += [f"| {name} | {settings} |" for name, settings in training.objectives.items()]
    if not training.predicts:
        lines += [
            "",
            "Its masked-LM head is not trained: no term of the objective predicts tokens. Use its"
            " hidden states, or fine-tune it.",
        ]
    if training.metrics:
        lines += ["", "## Held-out text", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in training.metrics.items()]
    return lines
