"""The process that copies a run's files to Weights & Biases; started by `trainer.tracking`.

Takes one argument, a JSON object: the run ``folder``, the ``mode`` (auto or offline), the
``project`` and the run ``id``. Ends when standard input does: after the line "completed" or
"stopped", or, without either, because the trainer is gone.

W&B cannot resume an offline run, so every start writes the whole file into a new offline folder and
removes the older, shorter ones of the same run: there is one folder to upload, and it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

POLL_SECONDS = 1.0
INIT_SECONDS = 60.0

# Before wandb is imported: no crash reports to a third party.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402


class Tail:
    """The rows of a ``metrics.jsonl`` that grows, each once and only when its line is whole.

    A file that was replaced (cut back) is read again from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def rows(self) -> Iterator[dict[str, float]]:
        """The rows since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = json.loads(line)
                yield {key: float(v) if isinstance(v, str) else v for key, v in row.items()}


def follow(
    run: Any, rows: Callable[[], Iterator[dict[str, float]]], ended: threading.Event
) -> None:
    """Log `rows` until `ended`, each at its step, without those that W&B already has."""
    newest = run.starting_step - 1
    last_look = False
    while not last_look:
        last_look = ended.wait(POLL_SECONDS)
        for row in rows():
            step = int(row["step"])
            if step >= max(newest, run.starting_step):
                run.log(row, step=step)
                newest = step


def open_run(folder: Path, mode: str, project: str, run_id: str) -> Any:
    """The W&B run, online where that is wanted and possible, else offline."""
    config = folder / "config.yaml"
    options: dict[str, Any] = {
        "dir": folder,
        "id": run_id,
        "name": folder.name,
        "project": project,
        "config": OmegaConf.to_container(OmegaConf.load(config)) if config.exists() else {},
    }
    if mode == "auto":
        try:
            if wandb.login(verify=False, prompt=False):
                return wandb.init(resume="allow", settings=_settings(), **options)
        except (wandb.Error, ValueError) as error:
            print(f"Weights & Biases cannot be used, going on offline: {error}", flush=True)
            wandb.teardown()
    run = wandb.init(mode="offline", settings=_settings(), **options)
    for older in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
        if older != Path(run.dir).parent:
            shutil.rmtree(older, ignore_errors=True)
    return run


def log_evaluation(run: Any, path: Path) -> None:
    """The held-out results as a table and as summary values."""
    if not path.exists():
        return
    learners = json.loads(path.read_text(encoding="utf-8"))["learners"]
    columns = ["parameters", "loss", "accuracy", "retention", "tokens_per_second"]
    table = wandb.Table(columns=["learner", *columns])
    for name, facts in learners.items():
        table.add_data(name, *(facts[column] for column in columns))
        run.summary.update({f"final/{name}/{column}": facts[column] for column in columns})
    run.log({"learners": table})


def main(options: dict[str, str]) -> None:
    """Follow the run until its trainer ends."""
    os.nice(10)  # training comes first
    ended, last_words = threading.Event(), []

    def listen() -> None:
        last_words.append(sys.stdin.readline().strip())
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    folder = Path(options["folder"]).resolve()
    run = open_run(folder, options["mode"], options["project"], options["id"])
    follow(run, Tail(folder / "metrics.jsonl").rows, ended)
    if last_words == ["completed"]:
        log_evaluation(run, folder / "evaluation.json")
        run.finish(exit_code=0)
        return
    if last_words == ["stopped"]:
        run.mark_preempting()
    run.finish(exit_code=1)


def _settings() -> wandb.Settings:
    return wandb.Settings(
        console="off",
        init_timeout=INIT_SECONDS,
        save_code=False,
        x_save_requirements=False,
        x_stats_pid=os.getppid(),  # the trainer's memory and processor time, not this process's
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
