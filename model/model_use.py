"""The part of a model card that shows how to use the model, as code that can be pasted."""

from __future__ import annotations

from model.model_config import Ability, ModelConfig
from model.task_head_config import CHOICE, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPAN, TAGGING

_PIPELINE = """from transformers import pipeline

model = pipeline("{task}", model="."{options})
print(model({text}))
"""
_TEXT = '"A sentence of your own."'
_PAIR = '{"text": "A sentence of your own.", "text_pair": "Another sentence."}'
_PIPELINES = {  # kind of head -> task and options
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
    if head is None and Ability.GENERATE not in config.abilities:
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
    if kind in _PIPELINES:
        task, options = _PIPELINES[kind]
        return _PIPELINE.format(task=task, options=options, text=_PAIR if texts == 2 else _TEXT)
    cls, code = _CLASSES.get(kind, ("AutoModel", _STATES))
    return _LOAD.format(cls=cls) + code
