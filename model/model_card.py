"""The README.md of an exported model, with code that can be pasted."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from model.accounting import describe
from model.model_config import Ability, ModelConfig
from model.task_head_config import (
    CHOICE,
    CLASSIFICATION,
    DETECTION,
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
    DETECTION: "feature-extraction",
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
    name: str, config: ModelConfig, training: Training | None = None, in_transformers: bool = True
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


_PIPELINE = """from transformers import pipeline

model = pipeline("{task}", model="."{options})
print(model({text}))
"""
_TEXT = '"A sentence of your own."'
_PAIR = '{"text": "A sentence of your own.", "text_pair": "Another sentence."}'
_PIPELINE_CALLS = {  # kind of head -> task and options
    CLASSIFICATION: ("text-classification", ""),
    MULTI_LABEL: ("text-classification", ", top_k=None"),
    REGRESSION: ("text-classification", ', function_to_apply="none"'),
    TAGGING: ("token-classification", ""),
}
_LOAD = """import torch
from transformers import {cls}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), {cls}.from_pretrained(".")
"""
_SPAN = """question, passage = "Who wrote it?", "A friend of mine wrote it."
inputs = tokenizer(question, passage, return_tensors="pt")
with torch.no_grad():
    outputs = model(**inputs)
first, last = outputs.start_logits.argmax(), outputs.end_logits.argmax()
print(tokenizer.decode(inputs.input_ids[0, first : last + 1]))
"""
_CHOICE = """passage, choices = "It rains.", ["How is the weather? wet", "How is the weather? dry"]
inputs = tokenizer([passage] * len(choices), choices, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model(**{name: rows[None] for name, rows in inputs.items()}).logits
print(choices[logits.argmax()])
"""
_STATES = """with torch.no_grad():
    states = model(**tokenizer("A sentence of your own.", return_tensors="pt")).last_hidden_state
print(states.shape)  # one text, its tokens, the model's width
"""
_CLASSES = {
    SPAN: ("AutoModelForQuestionAnswering", _SPAN),
    CHOICE: ("AutoModelForMultipleChoice", _CHOICE),
}


def use_section(config: ModelConfig, texts: int, in_transformers: bool, predicts: bool) -> str:
    """Code that uses a model in its folder, by `transformers` if that has a class for it.

    texts: how many texts an input of its head has, 1 or 2. predicts: whether its masked-LM head is
    trained.
    """
    language = "python"
    if not in_transformers:
        language, code = "bash", _with_tandem(config, texts)
    elif predicts:
        text = 'f"A sentence of your {model.tokenizer.mask_token}."'
        code = _PIPELINE.format(task="fill-mask", options="", text=text)
    else:
        code = _of_head(config, texts)
    return f"\n## Use\n\nIn the folder of the model:\n\n```{language}\n{code}```\n"


def _with_tandem(config: ModelConfig, texts: int) -> str:
    """The command for the first task head of a model in Tandem's own format, or for its vectors."""
    name, head = next(iter(config.task_heads.items()), ("", None))
    is_encoder = head is None or head.kind in (DETECTION, OTHER)
    if is_encoder and Ability.GENERATE not in config.abilities:
        return "tandem embed . 'A sentence of your own.'\n"
    chosen = f" --head {name}" if len(config.task_heads) > 1 else ""
    if head is not None and head.kind in _CLASSES:
        return f"tandem predict . questions.json{chosen}\n"
    second = "\\tAnother sentence." * (texts - 1)
    numbers = "".join(f"\\t{mean:g}" for mean in (head.means if head else ()))
    return f"printf 'A sentence of your own.{second}{numbers}\\n' | tandem predict . -{chosen}\n"


def _of_head(config: ModelConfig, texts: int) -> str:
    """The code for the only task head of a model, or for an encoder without any."""
    kind = next((head.kind for head in config.task_heads.values()), "")
    if kind in _PIPELINE_CALLS:
        task, options = _PIPELINE_CALLS[kind]
        return _PIPELINE.format(task=task, options=options, text=_PAIR if texts == 2 else _TEXT)
    cls, code = _CLASSES.get(kind, ("AutoModel", _STATES))
    return _LOAD.format(cls=cls) + code
