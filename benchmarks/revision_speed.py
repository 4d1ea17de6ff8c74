"""How long each learner's part of a step takes in two revisions, which take turns.

    python benchmarks/revision_speed.py HEAD~1 HEAD configs/job/demo.yaml data.path=CORPUS

Each turn is a new run of the job, on one rank with one thread. The times are those that the job
logs, by the clock, so that only an idle machine gives numbers that mean anything. Of each turn the
median of the logged steps counts, and of these medians the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.revisions.checkout import Checkout, checked_out
from benchmarks.studies.results import seconds_per_step

SHORT = ("log.every=1", "log.wandb=disabled", "evaluation.every=1000000", "evaluation.sequences=8")


def main() -> None:
    """Print milliseconds of each learner in both revisions, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs=2, metavar="REVISION")
    parser.add_argument("job")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    job = given.job if not Path(given.job).exists() else str(Path(given.job).resolve())
    words = [job, *given.overrides, *SHORT, f"steps={given.steps}"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="revisions-")))
        old, new = (
            stack.enter_context(checked_out(revision, folder / str(number)))
            for number, revision in enumerate(given.revisions)
        )
        turns = [(turn(old, words, n), turn(new, words, n)) for n in range(given.rounds)]
    print_table(turns)


def turn(checkout: Checkout, words: list[str], number: int) -> dict[str, float]:
    """Seconds of each learner of a new run."""
    name = f"turn-{number}"
    checkout.tandem("train", *words, f"name={name}", f"output_dir={checkout.made}", ranks=1)
    by_kind = seconds_per_step(checkout.made / name)
    return {learner: seconds for (learner, trains), seconds in by_kind.items() if trains}


def print_table(turns: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Markdown; the last line is of all learners together."""
    by_learner: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for old, new in turns:
        for learner in old.keys() & new.keys():
            by_learner[learner].append((old[learner], new[learner]))
        by_learner["all"].append((sum(old.values()), sum(new.values())))
    print("| learner | old, ms | new, ms | times as fast | by turn |\n|---|---|---|---|---|")
    for learner, pairs in by_learner.items():
        old, new = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = ", ".join(f"{before / after:.2f}" for before, after in pairs)
        print(f"| {learner} | {old:.1f} | {new:.1f} | {old / new:.2f} | {ratios} |")


if __name__ == "__main__":
    main()
