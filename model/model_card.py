"""The README.md of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from model.accounting import describe
from model.model_config import Ability, ModelConfig
from model.model_use import use_section
from model.task_head_config import (
    CHOICE,
    CLASSIFICATION,
    MULTI_LABEL,
    OTHER,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    TaskHeadConfig,
)

_PIPELINES = {  # kind of head -> its task in the Hub's terms
    CLASSIFICATION: "text-classification",
    MULTI_LABEL: "text-classification",
    REGRESSION: "text-classification",
    CHOICE: "multiple-choice",
    TAGGING: "token-classification",
    SPAN: "question-answering",
    VECTOR: "sentence-similarity",
    OTHER: "feature-extraction",
}
# tests/trainer/test_families.py loads exports in both versions.
_LOADS = "It loads with `transformers` 4.57 or newer, 5 included."
_LOADS_HERE = "It loads with Tandem: `transformers` has no class for it."
_TAGS = {"fill-mask": "masked-language-modeling, ", "translation": "translation, "}


@dataclass(frozen=True)
class Training:
    """The training of a model, as its model card describes it.

    base: the model whose weights it began with, as its job names it; empty: random ones.
    learning_rate: the highest. objectives: name -> weight and settings, as in the job. scored: the
    data that `metrics` are about; these are by name. predicts: whether the masked-LM head was
    trained. teacher: the model that it was distilled from; empty if there was none. license: an
    SPDX identifier in the spelling of the Hugging Face hub, such as apache-2.0; "other" if none was
    chosen. texts: how many texts an input has, 1 or 2.
    """

    data: str
    steps: int
    tokens: int
    learning_rate: float
    seed: int
    base: str = ""
    objectives: Mapping[str, str] = field(default_factory=dict)
    scored: str = "Held-out text"
    metrics: Mapping[str, float] = field(default_factory=dict)
    teacher: str = ""
    license: str = "other"
    revision: str = ""
    predicts: bool = True
    texts: int = 1


def model_card(
    name: str,
    config: ModelConfig,
    training: Training | None = None,
    in_transformers: bool = True,
) -> str:
    """The model card in Markdown: the hub's front matter, size, use, training, metrics, license.

    Without `training` the card says that the training is not recorded. in_transformers: whether
    `transformers` loads the model.
    """
    size = describe(config)
    license = training.license if training else "other"
    predicts = config.mlm_head and (training is None or training.predicts)
    lines = [
        "---",
        *(["library_name: transformers"] if in_transformers else []),
        f"pipeline_tag: {_pipeline(config, predicts)}",
        f"license: {license}",
        f"tags: [{_TAGS.get(_pipeline(config, config.mlm_head), '')}tandem]",
        "---",
        f"# {name}",
        "",
        f"{_what(config)} with"
        f" {size.parameters:,} parameters (embeddings, encoder, pooler) and"
        f" {size.head_parameters:,} in its heads: {config.description}.",
        "",
    ]
    for task, head in config.task_heads.items():
        labels = f" ({', '.join(head.labels)})" if head.labels else ""
        lines += [f"Head `{task}`: {head.kind}{labels}.", "", *_numbers(head)]
    texts = training.texts if training else 1
    lines += [use_section(config, texts, in_transformers, predicts).strip(), ""]
    lines += [_LOADS if in_transformers else _LOADS_HERE, ""]
    if training is None:
        lines.append("How it was trained is not recorded.")
    else:
        lines += _training(training, untrained=config.mlm_head and not predicts)
    return "\n".join(lines) + "\n"


def _numbers(head: TaskHeadConfig) -> list[str]:
    """The section about the numbers that a head reads beside the text."""
    if not head.means:  # none, or of a model that has not been trained
        return []
    columns = zip(head.numbers, head.means, head.deviations, strict=True)
    lines = [f"| {name} | {mean:g} | {deviation:g} |" for name, mean, deviation in columns]
    return [
        "It reads these numbers beside the text, in this order and as they stand in the table: the"
        " model standardises them by the mean and standard deviation of training. In ONNX they are"
        f" the input `numbers`, float32 [batch, {len(head.numbers)}].",
        "",
        *("| column | mean | standard deviation |", "|---|---|---|", *lines, ""),
    ]


def _pipeline(config: ModelConfig, predicts: bool) -> str:
    """The Hub's name of the model's task; `predicts`: whether its masked-LM head is trained."""
    if len(config.task_heads) == 1 and not config.mlm_head:
        (head,) = config.task_heads.values()
        return _PIPELINES[head.kind]
    if not predicts:
        return "feature-extraction"
    return "translation" if _generates(config) else "fill-mask"


def _what(config: ModelConfig) -> str:
    if not config.mlm_head:
        return "An encoder"
    return "A sequence-to-sequence model" if _generates(config) else "A masked language model"


def _generates(config: ModelConfig) -> bool:
    return Ability.GENERATE in config.abilities


def _training(training: Training, untrained: bool) -> list[str]:
    lines = [
        "## Training",
        "",
        f"- Base model: {training.base or 'none, its weights began at random'}",
        f"- Data: {training.data}",
        f"- Optimizer steps: {training.steps:,}",
        f"- Tokens seen: {training.tokens:,}",
        f"- Learning rate: {training.learning_rate:g}",
        f"- Seed: {training.seed}",
        f"- Teacher: {training.teacher or 'none'}",
        f"- License: {training.license}",
    ]
    if training.revision:
        lines.append(f"- Code: Tandem, revision {training.revision}")
    if training.objectives:
        lines += ["", "| objective | settings |", "|---|---|"]
        lines += [f"| {name} | {settings} |" for name, settings in training.objectives.items()]
    if untrained:
        lines += [
            "",
            "Its masked-LM head is not trained: no term of the objective predicts tokens. Use its"
            " hidden states, or fine-tune it.",
        ]
    if training.metrics:
        lines += ["", f"## {training.scored}", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4f} |" for name, value in training.metrics.items()]
    return lines
