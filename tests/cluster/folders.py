"""Run folders in every state that a run can be in."""

import json
import os
import time
from pathlib import Path

from configs.runs import machine, started

ELSEWHERE = "another boot pid:[1]"  # the machine of a record


class Folder:
    def __init__(self, root: Path, name: str = "demo", steps: int = 100) -> None:
        self.path = root / name
        self.path.mkdir(parents=True)
        (self.path / "config.yaml").write_text(
            f"# git revision: abc\nname: {name}\nsteps: {steps}\n"
        )

    def log(self, *steps: int, seconds_each: float = 2.0) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            for step in steps:
                row = {"step": step, "seconds": step * seconds_each, "tokens_per_second": 500.0}
                row |= {"teacher/loss": 8.0 - step / 100, "students/tiny/loss": "NaN"}
                file.write(json.dumps(row) + "\n")
                file.write(json.dumps({"step": step, "val/teacher/loss": 1.0}) + "\n")

    def attempt(
        self, process: int, number: int = 1, since: float | None = None, **more: object
    ) -> None:
        (self.path / "attempts").mkdir(exist_ok=True)
        record: dict[str, object] = {"process": process, "time": since or time.time()}
        record |= {"machine": machine(), "started": started(process), **more}
        (self.path / f"attempts/{number:06d}.json").write_text(json.dumps(record))

    def save(self, step: int, attempt: int | None = None) -> None:
        checkpoint = self.path / f"checkpoints/step-{step:09d}"
        checkpoint.mkdir(parents=True)
        if attempt is not None:
            (checkpoint / "trainer.json").write_text(json.dumps({"attempt": attempt}))

    def event(
        self, event: str, code: int = 0, reason: str = "", job: str = "7", **more: object
    ) -> None:
        note = {"event": event, "code": code, "reason": reason, "job": job, **more}
        with (self.path / "slurm.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")

    def submit(self, *jobs: str) -> None:
        (self.path / "submissions/001").mkdir(parents=True)
        (self.path / "submissions/001/jobs").write_text("\n".join(jobs))

    def age(self, seconds: float) -> None:
        for file in self.path.rglob("*"):
            os.utime(file, (time.time() - seconds,) * 2)
