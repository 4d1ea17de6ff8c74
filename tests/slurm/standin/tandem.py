"""A stand-in for training, without torch: it obeys the same contract in a few lines.

It resumes from its newest checkpoint, logs a line per step, stops on request after saving with
exit code 75, and notes in ``seen/`` who ran where.
"""

import json
import os
import sys
import time
from pathlib import Path

from cluster.ranks import derive
from cluster.signals import StopRequest


def main() -> int:
    assert sys.argv[1] == "train"
    config = json.loads(Path(sys.argv[2]).read_text())
    config |= dict(override.split("=", 1) for override in sys.argv[3:])
    run = Path(config["runs"]) / config["name"]
    ranks = derive()
    seen = run / "seen" / f"{os.environ.get('SLURM_RESTART_COUNT', 0)}-{ranks.rank}"
    seen.parent.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop:
        step = resume(run) if ranks.rank == 0 else newest(run)
        place = {
            "node": os.environ["SLURMD_NODENAME"],
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        seen.write_text(json.dumps(vars(ranks) | place))
        while step < config["steps"]:
            if stop.requested:
                if ranks.rank == 0:
                    (run / f"checkpoints/step-{step:09d}").mkdir(parents=True, exist_ok=True)
                return 75
            time.sleep(config["seconds"])
            step += 1
            if ranks.rank == 0:
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "teacher/loss": 1 / step}) + "\n")
                if step % config["save_every"] == 0:
                    (run / f"checkpoints/step-{step:09d}").mkdir(parents=True)
            if step == config.get("crash_at"):
                os.abort()
    return 0


def newest(run: Path) -> int:
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step-*")), default=0)


def resume(run: Path) -> int:
    """Cut the log back to the newest checkpoint."""
    step = newest(run)
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    log.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))
    return step


sys.exit(main())
