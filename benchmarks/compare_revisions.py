"""Run the shipped jobs of two revisions side by side: are their results the same to the last bit?

    python benchmarks/compare_revisions.py main HEAD
    python benchmarks/compare_revisions.py main HEAD --jobs demo 'task/*' --stages 0 3
    python benchmarks/compare_revisions.py main HEAD --within 1e-6

For every job, every task and every task of a suite at tiny size, every number of ranks and every
ZeRO stage, it compares what each rank reads (`tandem data dump`), the metrics of every step,
weights and optimizer states after every step (the moments after the first step are the gradients,
times a constant), the final scores, and the exports. Differences are listed with their first step
and both values, and the exit code is 1. Times, speeds and message sizes are not compared. With
`--within`, floating-point numbers and tensors may differ by that much, relative to their norm.

A revision is used only through its command line and its files. Renamed config keys and metrics are
listed in `renames.json`. Where a change is on purpose, what it changes can be turned off on both
sides, and left out, to compare the rest: `--learners gradient_clipping=0 --except grad_norm`.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.revisions import results
from benchmarks.revisions.checkout import CommandFailed, checked_out
from benchmarks.revisions.differences import differences
from benchmarks.revisions.names import Names
from benchmarks.revisions.results import Results
from benchmarks.revisions.side import Side, Trial, make_tokenizer

LISTED = 12  # differences printed for one run
RENAMES = Path(__file__).with_name("renames.json")


def main(words: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    asked = parsed(words)
    names = Names.read(asked.renames)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="revisions-")))
        checkouts = [
            stack.enter_context(checked_out(revision, folder / side))
            for side, revision in (("old", asked.old), ("new", asked.new))
        ]
        tokenizer = make_tokenizer(checkouts[0])
        old, new = (Side(code, tokenizer, names, asked.steps, asked.learners) for code in checkouts)
        print("\n".join(checkout.commit for checkout in checkouts), flush=True)
        jobs = chosen(asked.jobs, old, new)
        trials = [Trial(*case) for case in product(jobs, asked.world_size, asked.stages)]
        differing = sum(not is_same for is_same in compared(old, new, trials, asked))
    print(f"{differing} of {len(trials) + 1} differ" if differing else "Nothing differs")
    return int(differing > 0)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("old", help="a revision, as git knows it")
    parser.add_argument("new", help="another one")
    parser.add_argument("--jobs", nargs="+", help="only these shipped jobs; * matches any text")
    parser.add_argument("--world-size", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--learners", nargs="+", metavar="KEY=VALUE", default=[], help="of every trained learner"
    )
    parser.add_argument(
        "--except", dest="without", type=re.compile, metavar="PATTERN", help="results to leave out"
    )
    parser.add_argument("--within", type=float, default=0.0, metavar="TOLERANCE")
    parser.add_argument("--renames", type=Path, default=RENAMES, help="instead of renames.json")
    return parser.parse_args(words)


def chosen(asked: Sequence[str] | None, old: Side, new: Side) -> list[str]:
    """The jobs that both sides ship, of those that are asked for; says which only one has."""
    for name in sorted(set(old.jobs) ^ set(new.jobs)):
        print(f"{name}: is shipped by one of the two revisions only")
    shared = [name for name in old.jobs if name in new.jobs]
    for pattern in asked or ():
        if not fnmatch.filter(shared, pattern):
            raise SystemExit(f"--jobs: {pattern}: both ship {', '.join(shared)}")
    patterns = ["*"] if asked is None else asked
    return [name for name in shared if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def compared(
    old: Side, new: Side, trials: Sequence[Trial], asked: argparse.Namespace
) -> Iterator[bool]:
    """Print what differs in the corpus and in each trial; whether nothing does.

    Results with names in which `asked.without` is found are left out. The two sides work at the
    same time, one thread each.
    """
    with ThreadPoolExecutor(2) as pool:

        def both(what: str, of: Callable[[Side], Results]) -> bool:
            futures = [pool.submit(of, side) for side in (old, new)]
            wait(futures)
            try:
                ours, theirs = (results.leave_out(f.result(), asked.without) for f in futures)
                return shown(what, ours, theirs, asked.within)
            except CommandFailed as failure:
                print(f"{what}: {failure}", flush=True)
                return False

        yield both("corpus", lambda side: results.read_files(side.corpus))
        for trial in trials:
            yield both(str(trial), partial(Side.run, trial=trial))


def shown(what: str, old: Results, new: Results, within: float = 0.0) -> bool:
    """Print how two runs compare; whether they are the same."""
    changes = differences(old, new, within)
    verdict = f"{len(changes)} results differ" if changes else "the same"
    print(f"{what}: {verdict} ({len(old)} compared)", flush=True)
    for difference in changes[:LISTED]:
        print(f"  {difference}")
    if len(changes) > LISTED:
        print(f"  ... and {len(changes) - LISTED} more")
    return not changes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clears up
    sys.exit(main())
