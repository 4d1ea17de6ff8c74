"""The text of a job's YAML for the usual purposes, with comments; `tandem init` writes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PRETRAIN, FINETUNE, DISTIL, CONTINUE = "pretrain", "finetune", "distil", "continue"
PURPOSES = {
    PRETRAIN: "pre-train a teacher on text, and distil students from it in the same job",
    FINETUNE: "fine-tune a model on labelled examples",
    DISTIL: "distil a fine-tuned model into a small one",
    CONTINUE: "continue the pre-training of a model on your text",
}
TASKS = ("single_sentence", "sentence_pair", "tagging")
COLUMNS: dict[str, dict[str, str | int]] = {
    "single_sentence": {"text": "text", "label": "label"},
    "sentence_pair": {"text_a": "text_a", "text_b": "text_b", "label": "label"},
    "tagging": {"word": 1, "tag": 2},
}

# Keys in which a student that begins with its teacher's layers is like the teacher.
_SHAPE = (
    *("kind", "hidden_size", "ffn_size", "heads", "embedding_size", "norm", "norm_placement"),
    *("activation", "feed_forward", "feed_forwards", "bottleneck_size", "positions", "sharing"),
)


@dataclass(frozen=True)
class Hardware:
    """The hardware of a job, and the settings that it begins with there."""

    title: str
    teacher: str
    students: tuple[str, ...]
    vocab_size: int
    steps: int
    batch: tuple[int, int]  # sequences of a step, and of a rank at once
    learning_rate: float
    device: str
    precision: str


_BASE, _SMALLER = "bert_base", ("distilbert", "tinybert_4")
HARDWARE = {
    "cpu": Hardware("a CPU", "bert_mini", ("bert_tiny",), 8192, 2000, (32, 8), 1e-3, "cpu", "fp32"),
    "gpu": Hardware("one GPU", _BASE, _SMALLER, 30522, 100000, (256, 32), 1e-4, "auto", "bf16"),
    "slurm": Hardware(
        "GPUs under SLURM", _BASE, _SMALLER, 30522, 250000, (1024, 64), 4e-4, "auto", "bf16"
    ),
}


@dataclass(frozen=True)
class Answers:
    """The purpose of a new job, and the files that it reads and writes."""

    purpose: str
    name: str
    data: str  # the corpus, or the file of examples
    output_dir: str
    hardware: Hardware
    model: str = ""  # the folder of the model to begin with, or to distil
    teacher: str = ""
    students: Sequence[str] = ()
    task: str = TASKS[0]
    columns: Sequence[str] = ()  # that a file of examples names
    vocab_size: int = 0  # that of the corpus
    pad: int = 0
    sequence_length: int = 128
    layers: int = 12  # of the model to distil


def job_text(answers: Answers) -> str:
    """The YAML of a job, which `configs.load` reads."""
    if answers.purpose in (FINETUNE, DISTIL):
        return _head(answers) + _of_task(answers)
    teacher = _pretrained(answers) if answers.purpose == CONTINUE else _teacher(answers)
    students = "".join(_student(answers, name) for name in dict.fromkeys(answers.students))
    return _head(answers) + _of_text(answers) + teacher + (students and f"\nstudents:\n{students}")


def _head(answers: Answers) -> str:
    return f"""\
# To {PURPOSES[answers.purpose]}, on {answers.hardware.title}.
# Written by `tandem init`; docs/reference.md has every other key. The command line can change any:
# tandem train FILE steps=1000
"""


def _of_task(answers: Answers) -> str:
    is_distilled = answers.purpose == DISTIL
    task = f"distil_{answers.task}" if is_distilled else answers.task
    columns = ", ".join(f"{name}: {column}" for name, column in COLUMNS[answers.task].items())
    names = ": " + ", ".join(map(repr, answers.columns))
    if COLUMNS[answers.task].keys() <= {*answers.columns} or not answers.columns:
        names = ", if they differ"
    text = f"""\
base: configs/task/{task}.yaml  # the shipped recipe, with the keys that are not here
name: {quoted(answers.name)}
output_dir: {quoted(answers.output_dir)}  # the run's folder is {answers.output_dir}/{answers.name}
device: {answers.hardware.device}
epochs: {5 if is_distilled else 3}

data:
  train: {quoted(answers.data)}
  # validation: FILE  # without this file, a tenth of the examples is held out to score on
  # columns: {{{columns}}}  # name the file's columns{names}
  sequence_length: {answers.sequence_length}  # in tokens; longer texts are cut

batch: {{size: 32, micro_batch: {answers.hardware.batch[1]}}}

teacher:
  init: {{pretrained: {quoted(answers.model)}}}
"""
    precision = f"precision: {answers.hardware.precision}"
    if is_distilled:
        return f"{text}  {precision}\n\n{_small(answers)}"
    return f"{text}  optimizer: {{learning_rate: 5e-5}}\n  {precision}\n"


def _small(answers: Answers) -> str:
    return f"""\
students:
  small:
    init:
      layers: {list(range(0, answers.layers, 2))}  # the teacher's layers with which it begins
    optimizer: {{learning_rate: 5e-5}}
    precision: {answers.hardware.precision}
"""


def _of_text(answers: Answers) -> str:
    steps = answers.hardware.steps
    size, micro_batch = answers.hardware.batch
    return f"""\
name: {quoted(answers.name)}
output_dir: {quoted(answers.output_dir)}  # the run's folder is {answers.output_dir}/{answers.name}
device: {answers.hardware.device}
steps: {steps}

data:
  path: {quoted(answers.data)}  # the folder that `tandem data build` writes
  sequence_length: {answers.sequence_length}

batch:
  size: {size}  # sequences of a step, on all processes together
  micro_batch: {micro_batch}  # sequences that a process computes at once: fewer need less memory

evaluation: {{every: {steps // 20}}}
checkpoint: {{every: {steps // 20}, keep: 2}}

"""


def _teacher(answers: Answers) -> str:
    hardware = answers.hardware
    return f"""\
teacher:
  model: {_model(answers, answers.teacher)}
  objective: {{mlm: {{}}}}  # masked language modelling
  optimizer: {{learning_rate: {hardware.learning_rate}}}
  schedule: {{kind: linear, warmup_fraction: 0.05}}
  precision: {hardware.precision}
"""


def _pretrained(answers: Answers) -> str:
    return f"""\
teacher:
  init: {{pretrained: {quoted(answers.model)}}}
  objective: {{mlm: {{}}}}  # masked language modelling
  optimizer: {{learning_rate: 5e-5}}  # below the rate of its first training
  schedule: {{kind: linear, warmup_fraction: 0.05}}
  precision: {answers.hardware.precision}
"""


def _student(answers: Answers, name: str) -> str:
    hardware, copied = answers.hardware, _copied_layers(answers, name)
    method = f"""\
    start: {{fraction: 0.2}}  # of the steps
    init: {{teacher_layers: {copied}}}  # as DistilBERT: it begins as a copy of these layers
    objective: {{soft_kl: {{weight: 5.0, temperature: 2.0, min_lead: null}}, mlm: {{weight: 2.0}}, \
cosine: {{}}}}
"""
    if not copied:
        method = """\
    objective: {soft_kl: {}, mlm: {}}  # the teacher's predictions, once it is ahead, and the text
"""
    return f"""\
  {quoted(Path(name).stem)}:
    model: {_model(answers, name)}
{method}\
    optimizer: {{learning_rate: {hardware.learning_rate}}}
    schedule: {{kind: linear, warmup_fraction: 0.05}}
    precision: {hardware.precision}
"""


def _copied_layers(answers: Answers, name: str) -> list[int]:
    """The teacher's layers with which a student of its width begins; none for another shape."""
    teacher, student = (load_model(model) for model in (answers.teacher, name))
    differs = any(getattr(teacher, key, None) != getattr(student, key, None) for key in _SHAPE)
    if differs or not student.layers < teacher.layers:
        return []
    return [layer * teacher.layers // student.layers for layer in range(student.layers)]


def load_model(name: str) -> Any:
    """The config of a model, by its name or file."""
    import configs
    from model import ModelConfig

    schema: Any = ModelConfig  # abstract: the file's `kind` says which
    return configs.load(name, schema, "model")


def _model(answers: Answers, name: str) -> str:
    sizes = f"vocab_size: {answers.vocab_size}, pad_token_id: {answers.pad}"
    return f"{{base: {quoted(name)}, {sizes}}}"


def quoted(text: str) -> str:
    """A text as a YAML scalar that may stand in braces, in quotes where it needs them."""
    return yaml.safe_dump([text], default_flow_style=True, width=math.inf, allow_unicode=True)[1:-2]
