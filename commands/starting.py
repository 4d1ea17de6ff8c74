"""The command that writes a new job's YAML, from options or, in a terminal, from answers."""

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import click

from commands.job_texts import (
    CONTINUE,
    DISTIL,
    HARDWARE,
    PRETRAIN,
    PURPOSES,
    TASKS,
    Answers,
    job_text,
    load_model,
)
from commands.options import PATH


@click.command("init")
@click.argument("file", type=PATH, default="job.yaml")
@click.option("--for", "purpose", type=click.Choice([*PURPOSES]), help="What the job is for.")
@click.option("--data", type=PATH, help="Text or a built corpus, or a file of labelled examples.")
@click.option("--model", type=PATH, help="The folder of the model to begin with, or to distil.")
@click.option("--teacher", type=PATH, help="The teacher to pre-train: a name of `list models`.")
@click.option("--student", type=PATH, multiple=True, help="A student to distil. May be repeated.")
@click.option("--task", type=click.Choice(TASKS), help="What the examples are.  [single_sentence]")
@click.option("--hardware", type=click.Choice([*HARDWARE]), help="What the job will run on.")
@click.option("--output-dir", type=PATH, help="The folder for the run's folder.  [runs]")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def init(file: str, force: bool, **options: Any) -> None:
    """Write the YAML of a new job to FILE, job.yaml by default.

    In a terminal it asks for everything that you have not given as an option.
    """
    from configs.durable import atomic_write

    path = Path(file)
    if path.exists() and not force:
        raise click.UsageError(f"{file}: exists; give another name, or --force to overwrite it")
    answers, commands = _answers(path, **options)
    text = job_text(answers)
    _check(text, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
    click.echo(f"The job is in {file}. Next:")
    for command in [*commands, *_to_train(shlex.quote(file), answers)]:
        click.echo(f"  {command}")


def _check(text: str, source: str) -> None:
    """Raise ConfigError for a job that cannot be loaded."""
    import configs
    from trainer.config import JobConfig

    configs.load_text(text, JobConfig, "job", (), source)


def _answers(
    path: Path,
    purpose: str | None,
    hardware: str | None,
    output_dir: str | None,
    teacher: str | None,
    student: tuple[str, ...],
    **inputs: str | None,
) -> tuple[Answers, list[str]]:
    """The answers about the job, and the commands that make its corpus."""
    purpose = _ask("--for", purpose, "What is the job for?", choices=PURPOSES)
    is_pretraining, reads_text = purpose == PRETRAIN, purpose in (PRETRAIN, CONTINUE)
    _refuse("--model", inputs["model"], not is_pretraining, purpose)
    _refuse("--teacher, --student", teacher or student, is_pretraining, purpose)
    _refuse("--task", inputs["task"], not reads_text, purpose)
    data, model, task = _inputs(purpose, **inputs)
    titles = {name: here.title for name, here in HARDWARE.items()}
    here = HARDWARE[_ask("--hardware", hardware, "What will it run on?", "gpu", titles)]
    if is_pretraining:
        teacher = _ask("--teacher", teacher, "The teacher, a name of `list models`", here.teacher)
        if not student:
            names = _ask("--student", None, "Students", " ".join(here.students))
            student = tuple(names.replace(",", " ").split())
    output_dir = _ask("--output-dir", output_dir, "The folder of the runs", "runs")
    columns = _columns(data) if task in ("single_sentence", "sentence_pair") else ()
    made = Answers(
        purpose, path.stem, data, output_dir, here, model, teacher or "", student, task, columns
    )
    if reads_text:
        return _with_corpus(made)
    return (replace(made, layers=_layers(model)) if purpose == DISTIL else made), []


def _inputs(
    purpose: str, data: str | None, model: str | None, task: str | None
) -> tuple[str, str, str]:
    """The data of a job, its model and its task; empty where it has none."""
    if purpose in (PRETRAIN, CONTINUE):
        data = _ask("--data", data, "Text (files, a folder), or a built corpus")
        if "://" not in data and not glob(data):
            click.echo(f"--data {data}: not here yet, and taken for text", err=True)
    else:
        task = _ask("--task", task, "What are the examples?", TASKS[0], TASKS)
        data = _ask("--data", data, "The file of the examples")
        if not Path(data).is_file():
            raise click.UsageError(f"--data {data}: no such file")
    if purpose != PRETRAIN:
        model = _ask("--model", model, "The folder of the model")
        if not Path(model, "config.json").is_file():
            raise click.UsageError(f"--model {model}: no folder of a model (config.json)")
    return data, model or "", task or ""


def _columns(data: str) -> Sequence[str]:
    """The columns that a table of examples names; none of one that cannot be read as it is."""
    from data_pipeline import DataError
    from data_pipeline.task_files.tables import column_names

    try:
        return column_names(data)
    except (DataError, OSError):
        return ()


def _refuse(option: str, value: Any, fits: bool, purpose: str) -> None:
    if value and not fits:
        hint = "; --model is the teacher" if purpose == DISTIL else ""
        raise click.UsageError(f"{option}: does not go with --for {purpose}{hint}")


def _ask(
    option: str,
    value: str | None,
    question: str,
    default: str | None = None,
    choices: Mapping[str, str] | Collection[str] = (),
) -> str:
    """The value of an option; in a terminal the answer to a question, and elsewhere the default."""
    if value is not None:
        return value
    if not _is_asked():
        if default is None:
            among = f", one of {', '.join(choices)}" if choices else ""
            raise click.UsageError(
                f"{option}: must be given{among}; there is no terminal to ask in"
            )
        return default
    if isinstance(choices, Mapping):
        for name, what in choices.items():
            click.echo(f"  {name:10}{what}")
    kind = click.Choice([*choices]) if choices else PATH
    return click.prompt(question, default=default, type=kind)


def _is_asked() -> bool:
    """Whether the command runs in a terminal."""
    return sys.stdin.isatty()


def _layers(folder: str) -> int:
    from model import read_config

    return int(getattr(read_config(folder), "layers", 0))


def _with_corpus(answers: Answers) -> tuple[Answers, list[str]]:
    """The job on a corpus, and the commands that build it where `data` is text."""
    from data_pipeline.tokenization.tokenizer import load

    commands = []
    text, tokenizer, corpus = answers.data, answers.model, answers.data
    vocab_size, pad = answers.hardware.vocab_size, 0
    if (Path(corpus) / "corpus.json").is_file():
        vocabulary = load(Path(corpus) / "tokenizer")[1]
        vocab_size, pad = vocabulary.vocab_size, vocabulary.pad
    else:
        if answers.purpose == PRETRAIN:
            tokenizer = f"tokenizers/{answers.name}"
            sizes = ["--kind", "wordpiece", "--vocab-size", str(vocab_size)]
            commands.append(["tokenizer", "train", text, *sizes, "--out", tokenizer])
        corpus = f"corpora/{answers.name}"
        commands.append(["data", "build", text, "--tokenizer", tokenizer, "--out", corpus])
    shape = load_model(answers.teacher) if answers.teacher else None
    length = min(answers.sequence_length, getattr(shape, "max_positions", 0) or 10**9)
    changes: dict[str, Any] = {
        "data": corpus,
        "vocab_size": vocab_size,
        "pad": pad,
        "sequence_length": length,
    }
    return replace(answers, **changes), [f"tandem {shlex.join(words)}" for words in commands]


def _to_train(file: str, answers: Answers) -> list[str]:
    if answers.hardware is HARDWARE["slurm"]:
        return [
            f"tandem plan {file} --nodes 1 --gpus-per-node 8",
            f"tandem submit {file} --cluster gpu --nodes 1 --time 24:00:00",
            "tandem status",
        ]
    nproc = " --nproc 2" if answers.hardware is HARDWARE["cpu"] else ""
    return [f"tandem train {file}{nproc}  # Ctrl-C saves; the same command resumes it"]
