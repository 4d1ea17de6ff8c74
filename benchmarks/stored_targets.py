"""Stored targets of as many bytes: the largest logits, or tokens drawn from the distribution.

    python benchmarks/stored_targets.py TEACHER CORPUS OUT [key=value ...] [--samples 16]

A frozen teacher and small students that learn by `soft_kl` alone, three random initialisations in
one job. The arms read the running teacher, its largest logits, or drawn tokens: the same batches of
the same corpus. It prints held-out scores, mean and range over the students: the loss, and the KL
of student and teacher.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SEEDS = (1, 2, 3)
JOB = """
name: targets
steps: 80
seed: 1
data: {{path: {corpus}, sequence_length: 64}}
batch: {{size: 8, micro_batch: 8}}
teacher: {{frozen: true, init: {{pretrained: {teacher}}}}}
students:
  seed1: &student
    model: {{base: demo_tinybert, vocab_size: 30522, max_positions: 64, layers: 2}}
    objective: {{soft_kl: {{}}}}
    init: {{seed: 1}}
    optimizer: {{learning_rate: 5e-3}}
    schedule: {{kind: linear, warmup_steps: 10}}
  seed2: {{<<: *student, init: {{seed: 2}}}}
  seed3: {{<<: *student, init: {{seed: 3}}}}
evaluation: {{every: 100000, sequences: 256}}
checkpoint: {{every: 100000, keep: 1}}
log: {{every: 50, wandb: disabled}}
output_dir: {out}
"""


def main() -> None:
    """Run the arms that have not been run, and print the table."""
    arguments = _arguments()
    job = arguments.out / "job.yaml"
    arguments.out.mkdir(parents=True, exist_ok=True)
    job.write_text(JOB.format(**{key: str(value) for key, value in vars(arguments).items()}))
    arms = {"running teacher": [], "largest": [f"top_k={arguments.top_k}"]}
    arms["drawn"] = [f"samples={arguments.samples}"]
    print("| target | bytes per position | held-out loss | KL of teacher and student |")
    print("|---|---|---|---|")
    for name, keys in arms.items():
        results = _results(arguments.out, job, name.split()[0], keys, arguments.overrides)
        cells = (_range(values) for values in zip(*_scores(results), strict=True))
        print(f"| {name} {', '.join(keys)} | {_bytes(arguments.out, name)} | {' | '.join(cells)} |")


def _results(
    out: Path, job: Path, name: str, keys: Sequence[str], overrides: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """The final results of one arm's run, by learner."""
    words = [f"name={name}", *overrides]
    words += [f"teacher.stored={{path: {out / f'stored-{name}'}}}"] if keys else []
    words += [f"teacher.stored.{key}" for key in keys]
    file = out / name / "evaluation.json"
    if not file.exists():
        for command in [*["store"] * bool(keys), "train"]:
            subprocess.run(
                [sys.executable, "-m", "tandem", command, str(job), *words],
                check=True,
                stdout=sys.stderr,
            )
    results: dict[str, dict[str, dict[str, float]]] = json.loads(file.read_text())["learners"]
    return results


def _scores(results: dict[str, dict[str, dict[str, float]]]) -> Iterator[tuple[float, float]]:
    """The held-out loss of each student, and its KL with the teacher."""
    for seed in SEEDS:
        facts = results[f"students/seed{seed}"]
        yield float(facts["loss"]), facts["agreement"]["kl"]  # type: ignore[arg-type]


def _bytes(out: Path, name: str) -> str:
    """Bytes of a masked position on disk, headers and checksums included; empty without any."""
    manifest = out / f"stored-{name.split()[0]}" / "manifest.json"
    if not manifest.exists():
        return ""
    shards = json.loads(manifest.read_text())["shards"]
    size, positions = (sum(shard[key] for shard in shards) for key in ("bytes", "positions"))
    return f"{size / positions:.1f}"


def _range(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("teacher", "corpus", "out"):
        parser.add_argument(name, type=lambda path: Path(path).resolve())
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
