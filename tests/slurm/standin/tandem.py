"""A stand-in for training, without torch, which obeys the same contract in a few lines.

It resumes from its newest checkpoint, logs a line per step, and stops on request, after saving. It
records its attempt, and in ``seen/`` who ran where. At the step `hold_at` it waits for a file
``go``, so that a test can disturb it there on a machine of any speed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from cluster.ranks import StopRequest, derive, incarnation, reported

NOTED = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OMP_NUM_THREADS", "SITE")


def main() -> int:
    if sys.argv[1] == "preflight":
        from cluster import preflight

        run, gpus, gigabytes = sys.argv[2:]
        return preflight.main(Path(run), int(gpus), float(gigabytes))
    assert sys.argv[1] == "train"
    config = json.loads(Path(sys.argv[2]).read_text())
    config |= dict(override.split("=", 1) for override in sys.argv[3:])
    run = Path(config["output_dir"]) / config["name"]
    ranks = derive()
    seen = run / "seen" / f"{os.environ.get('SLURM_RESTART_COUNT', 0)}-{ranks.rank}"
    seen.parent.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop:
        step = resume(run) if ranks.rank == 0 else newest(run)
        record = begin(run) if ranks.rank == 0 else None
        noted = {name: os.environ.get(name) for name in NOTED}
        seen.write_text(json.dumps(vars(ranks) | noted | {"node": os.environ["SLURMD_NODENAME"]}))
        while step < config["steps"]:
            if stop.requested:
                time.sleep(config.get("saving", 0))
                if ranks.rank == 0:
                    (run / f"checkpoints/step-{step:09d}").mkdir(parents=True, exist_ok=True)
                return reported(75)
            time.sleep(config["seconds"])
            if step == config.get("hold_at") and not (run / "go").exists():
                continue
            step += 1
            if record:
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "teacher/loss": 1 / step}) + "\n")
                if step % config["save_every"] == 0:
                    (run / f"checkpoints/step-{step:09d}").mkdir(parents=True)
            break_off(config, step, ranks.rank)
        if record:
            record.write_text(json.dumps(json.loads(record.read_text()) | {"finished": True}))
    return 0


def break_off(config: dict, step: int, rank: int) -> None:
    """Fail in the way, and at the step, that the config states."""
    if step == config.get("crash_at"):
        os.abort()
    if step == config.get("grow_at") and rank == 1:
        print(len(bytearray(500 << 20)))
    if step == config.get("killed_at") and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == config.get("fail_at"):
        sys.exit("tandem: data.path: no such corpus: gone")


def begin(run: Path) -> Path:
    """Write the record of a new attempt."""
    (run / "attempts").mkdir(exist_ok=True)
    number = len(list((run / "attempts").iterdir())) + 1
    record = run / f"attempts/{number:06d}.json"
    job, restart = incarnation()
    record.write_text(json.dumps({"job": job, "restart": restart}))
    return record


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
