"""The public Python API: the names that `import tandem` promises.

Each function does what the command of its name does, and returns its result. For a mistake that a
user can correct, it raises an exception whose message is one line, as the commands print it:
a `configs.errors.UserError`, such as ConfigError, DataError or TrainingError, or OSError for files.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from model import Model
    from trainer.config import JobConfig

Example = str | Sequence[str] | Mapping[str, Any]
_ENTRY = Path(__file__).resolve().parents[1] / "tandem.py"


def load(config: str | Path | JobConfig, *overrides: str) -> JobConfig:
    """The checked config of a job or a task: a file, or the name of a shipped one.

    `overrides` are ``key=value``, applied in order. Raises ConfigError.
    """
    from commands.job_configs import load_job

    with _as_file(config) as path:
        return load_job(path, overrides)


def train(
    config: str | Path | JobConfig, *overrides: str, nproc: int | None = None
) -> dict[str, Any]:
    """Train a job, or resume it, in new processes; returns the results of `evaluate`.

    `config` may be what `load` has returned. `nproc`: processes on this machine, by default one for
    each GPU. The output of the processes is printed here. Raises TrainingError with their last
    message if they fail, or if the run was stopped before its end.
    """
    from trainer.errors import TrainingError
    from trainer.run_folder.folder import RunFolder
    from trainer.run_folder.run_files import read_evaluation

    with _as_file(config) as path:
        job = load(path, *overrides)
        words = [sys.executable, str(_ENTRY), "train", path, *overrides]
        if nproc is not None:
            words += ["--nproc", str(nproc)]
        # A notebook's kernel asks for colours, with which a pipe would get a terminal's display.
        environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                said = _printed(process.stdout)
            except KeyboardInterrupt:
                process.terminate()  # it saves; a notebook may interrupt its kernel alone
                _printed(process.stdout)
                raise
    if process.returncode:
        raise TrainingError(said.removeprefix("tandem: ").removeprefix("Error: "))
    results = read_evaluation(RunFolder.of(job).evaluation)
    assert results is not None, "a finished run has results"
    return results


def _printed(lines: Iterable[str]) -> str:
    """Print lines as they come; returns the last that is not blank."""
    last = ""
    for line in lines:
        print(line, end="")
        last = line.strip() or last
    return last


@contextmanager
def _as_file(config: str | Path | JobConfig) -> Iterator[str]:
    """The name of a config that a command can read. Errors about a file made here do not name it.

    Raises ConfigError for what is no config.
    """
    import configs
    from configs.typed import shown
    from trainer.config import JobConfig

    if isinstance(config, str | Path):
        yield str(config)
        return
    if not isinstance(config, JobConfig):
        raise configs.ConfigError(f"{shown(config)}: is no job; give a file, a name, or a config")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{config.name}.yaml"
        path.write_text(configs.dump(config), encoding="utf-8")
        try:
            yield str(path)
        except configs.ConfigError as error:
            raise configs.ConfigError(str(error).removeprefix(f"{path}: ")) from None


def evaluate(run: str | Path, learner: str | None = None) -> dict[str, Any]:
    """The held-out scores, sizes and speeds of a run's learners, or of one.

    Returns the tree that ``tandem evaluate RUN --json`` prints. Raises TrainingError for a folder
    that is not a run, OptionError for a learner that the run does not have.
    """
    from trainer.evaluation.final_scores import evaluate_run
    from trainer.evaluation.finished import SavedLearners
    from trainer.run_folder.folder import RunFolder

    return evaluate_run(SavedLearners(RunFolder.existing(str(run))), learner)


def export(
    run: str | Path,
    learner: str,
    out: str | Path,
    *,
    step: str | int | None = None,
    average: bool = False,
) -> Path:
    """Write a learner of a run to the folder `out`, in Hugging Face format; returns it.

    `step`: ``best``, ``last`` or the step of a checkpoint; by default the run's
    ``evaluation.final`` decides. `average`: write its averaged weights. Raises ModelError if
    another model, a run or a corpus is in `out`, TrainingError for an unknown run or step,
    OptionError for an unknown learner.
    """
    from model import require_free
    from trainer.evaluation.export import export_learner
    from trainer.evaluation.finished import SavedLearners
    from trainer.run_folder.folder import RunFolder

    folder = Path(out)
    require_free(folder)
    saved = SavedLearners(RunFolder.existing(str(run)), which=step)
    export_learner(saved.averages() if average else saved, learner, folder)
    return folder


def from_pretrained(folder: str | Path) -> Model:
    """The model in a folder, of Tandem's or of `transformers`, float32, in evaluation mode.

    Its call takes ``(input_ids, segment_ids=None, attention_mask=None, masked_positions=None)`` and
    returns ``logits`` ([B, L, V], or [positions, V]), ``hidden_states``, ``attention_scores`` and
    ``pooled``. Raises ModelError.
    """
    import model

    return model.from_pretrained(folder)


def build_corpus(
    text: str | Path | Sequence[str | Path],
    tokenizer: str | Path,
    out: str | Path,
    *,
    workers: int = 1,
    val_fraction: float = 0.01,
    shard_mb: float = 64.0,
    separator: str | None = None,
    field: str | None = None,
    keep_duplicates: bool = False,
    near_duplicates: float | None = None,
    also: str | Path | Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Turn text files, folders or globs into WebDataset shards; returns ``corpus.json``.

    Calling it again resumes an interrupted build. `separator`: where a document ends, such as
    ``line``; `field`: the key of the text in JSON and tables; `near_duplicates`: drop documents at
    least this similar to an earlier one; `also`: folders of students' own tokenizers. Raises
    DataError.
    """
    from data_pipeline import BuildOptions, build
    from data_pipeline.text.formats import ReadOptions

    options = BuildOptions(
        _paths(text),
        str(tokenizer),
        reading=ReadOptions(separator, field),
        shard_mb=shard_mb,
        val_fraction=val_fraction,
        drop_duplicates=not keep_duplicates,
        near_duplicates=near_duplicates,
        also=_paths(also),
    )
    return build(options, str(out), workers)


def _paths(given: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(path) for path in ([given] if isinstance(given, str | Path) else given)]


def predict(
    folder: str | Path,
    examples: str | Path | Sequence[Example],
    *,
    head: str | None = None,
    speed: float | None = None,
) -> list[dict[str, Any]]:
    """The predictions of a fine-tuned model, in the order of `examples`.

    `examples` are a file, as for ``tandem predict``, a DataFrame with the columns of the training
    file, or a list. An item of the list is a text, a sequence of texts (a pair, for a task about
    pairs) followed by the numbers that the head reads, or a mapping with those columns. `head`
    names one of several heads; `speed` lets examples leave at a branch. Raises DataError,
    ModelError, and OptionError for an unknown head.
    """
    from trainer.device import own_device
    from trainer.prediction.predicting import predictions

    if not (given := _listed(examples)):
        return []
    with _examples_file(given, Path(folder), head) as (path, columns):
        return [*predictions(Path(folder), path, own_device(), columns, head, speed)]


def embed(
    folder: str | Path, texts: str | Path | Sequence[str], *, pooling: str | None = None
) -> NDArray[np.float32]:
    """The vectors of texts, float32 [texts, size]; NaN for a text without a token.

    `texts` is a list, or a file with a text on each line or with the column ``text``. `pooling`:
    ``mean`` or ``cls`` of the last states, or ``static``, the mean of the input vectors; None: as
    the model makes vectors, scaled if it scales them, or the mean. Raises DataError, ModelError.
    """
    import numpy as np

    from trainer.device import own_device
    from trainer.prediction.embedding import FileEmbedder

    embedder = FileEmbedder(Path(folder), pooling, own_device())
    missing = np.full(embedder.size, np.nan, np.float32)
    if not (given := _listed(texts)):
        return np.empty((0, embedder.size), np.float32)
    with _examples_file(given) as (path, columns):
        return np.stack([missing if row is None else row for row in embedder.rows(path, columns)])


def _listed(examples: Any) -> str | Path | list[Example]:
    """The examples as a list, since an iterator can be read once only; a file as it is."""
    from data_pipeline import DataError

    if isinstance(examples, str | Path):
        return examples
    if isinstance(examples, Mapping):  # its names would be read as texts
        raise DataError("examples: is a mapping; give a list with a mapping for each example")
    if hasattr(examples, "iterrows"):  # a DataFrame of pandas, whose items are its columns' names
        return examples.astype(object).where(examples.notna(), None).to_dict("records")
    return [*examples]


@contextmanager
def _examples_file(
    examples: str | Path | list[Example], folder: Path | None = None, head: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """The file that holds `examples`, and where it has the fields of the model's task.

    What is said about a list names its items instead of the file.
    """
    from data_pipeline import DataError

    if isinstance(examples, str | Path):
        try:
            yield str(examples), {}
        except DataError as error:
            if isinstance(examples, Path) or os.path.exists(examples):
                raise
            raise DataError(f"{error}; if it is a text, give a list: [text]") from None
        return
    named = all(isinstance(row, Mapping) for row in examples)
    fields: Sequence[str] = ["text"]
    if folder is not None and not named:
        fields = _fields_of(folder, head)
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "examples.jsonl"
        rows = (_row(place, row, fields) for place, row in enumerate(examples))
        lines = (json.dumps(row, default=_json_value) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with _names_items(str(path)):
            yield str(path), {} if named else {field: field for field in fields}


def _json_value(value: Any) -> Any:
    """The number or list that an array of numpy or torch holds; any other object as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def _names_items(path: str) -> Iterator[None]:
    """Let errors and notes about the file `path` name the item of the list that a line holds."""
    from data_pipeline import DataError
    from trainer.prediction import fine_tuned

    def renamed(text: str) -> str:
        text = re.sub(f"{re.escape(path)}:(\\d+)", lambda at: f"item {int(at[1]) - 1}", text)
        return text.replace(path, "examples")

    def rename(record: logging.LogRecord) -> bool:
        record.msg, record.args = renamed(record.getMessage()), ()
        return True

    log = logging.getLogger(fine_tuned.__name__)
    log.addFilter(rename)
    try:
        yield
    except DataError as error:
        raise DataError(renamed(str(error))) from None
    finally:
        log.removeFilter(rename)


def _fields_of(folder: Path, head: str | None) -> list[str]:
    """The fields that the model in `folder` reads of an example, in order."""
    from data_pipeline.task_files.parallel import SOURCE
    from model import Ability, read_config
    from trainer.task_facts import TaskFacts, chosen_head

    config = read_config(folder)
    if Ability.GENERATE in config.abilities:
        return [SOURCE]
    name = chosen_head(folder, [*config.task_heads], head)
    return [*TaskFacts.read(folder, name).fields, *config.task_heads[name].numbers]


def _row(place: int, example: Example, fields: Sequence[str]) -> dict[str, Any]:
    from configs.typed import shown
    from data_pipeline import DataError

    if isinstance(example, Mapping):
        return dict(example)
    values = [example] if isinstance(example, str) else example
    if not isinstance(values, Sequence) or len(values) != len(fields):
        raise DataError(f"item {place}: must be {' and '.join(fields)}, not {shown(example)}")
    return dict(zip(fields, values, strict=True))
