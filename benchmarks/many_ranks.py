"""The cost of steps and checkpoints on many ranks, counted in one process without a GPU.

    python benchmarks/many_ranks.py [--ranks 2 512 4096] [--stages 0 1 2 3]

This process is rank 0 of that many: torch's fake process group sends nothing, and a pretended GPU
has DeepSpeed take the paths of one. Host syncs, collectives and bytes (of a gather the result, of a
scatter what is scattered) are those of a job. CPU seconds are this machine's, those of the model's
own small products included; the row of one rank at stage 0 has nothing else. The checkpoint is that
of `bert_large_cluster`, a teacher and four students; its seconds are rank 0's, without those of
writing its own share.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.gpu_kit.checkpoint_of_many import Committed, commit
from tests.gpu_kit.counting import Collective
from tests.gpu_kit.engine_step import PARTS, EngineStep, engine_step
from tests.gpu_kit.joint_step import Counted, count_step
from tests.gpu_kit.ranks import run_as_rank_zero

STUDENTS = 3


def main() -> None:
    """Print a table of joint steps of tiny models, and one of a learner with many tensors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 512, 4096])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    given = parser.parse_args()
    print("| stage | ranks | host syncs | collectives | bytes | of one more student |")
    print("|---|---|---|---|---|---|")
    for stage in given.stages:
        for ranks in given.ranks:
            print(joint_row(stage, ranks, run_as_rank_zero(count_step, ranks, stage, STUDENTS)))
    columns = ("start", *PARTS, "whole step")
    print(f"\n| stage | ranks | collectives | bytes | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 4) + "|")
    print(engine_row(0, 1, run_as_rank_zero(engine_step, 1, 0)))
    for stage in given.stages:
        for ranks in given.ranks:
            print(engine_row(stage, ranks, run_as_rank_zero(engine_step, ranks, stage)), flush=True)
    print("\n| checkpoint, ranks | sent to rank 0 | unpickled | committed | manifest | files |")
    print("|---|---|---|---|---|---|")
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            print(checkpoint_row(ranks, commit(ranks, Path(folder))), flush=True)


def joint_row(stage: int, ranks: int, counted: Counted) -> str:
    """The row of a step of a teacher and three students, two micro-batches."""
    sent, without_one = counted.sent, counted.sent_without_one
    added = f"{len(sent) - len(without_one)}, {total(sent) - total(without_one):,} bytes"
    return row(stage, ranks, sum(counted.syncs.values()), len(sent), total(sent), added)


def engine_row(stage: int, ranks: int, measured: EngineStep) -> str:
    """The row of a step of one learner with BERT-large's number of tensors, one micro-batch."""
    seconds = [measured.start, *measured.parts.values(), measured.seconds]
    times = [f"{1e3 * each:,.0f} ms" for each in seconds]
    return row(stage, ranks, len(measured.sent), total(measured.sent), *times)


def checkpoint_row(ranks: int, committed: Committed) -> str:
    """The row of the largest shipped job."""
    seconds = [f"{each:.2f} s" for each in (committed.unpickling, committed.committing)]
    sizes = [f"{each / 1e6:.1f} MB" for each in (committed.gathered, committed.manifest)]
    return row(ranks, sizes[0], *seconds, sizes[1], committed.files)


def row(*cells: int | str) -> str:
    """A row of a table in Markdown."""
    shown = (f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)
    return f"| {' | '.join(shown)} |"


def total(sent: Sequence[Collective]) -> int:
    """Bytes."""
    return sum(collective.bytes for collective in sent)


if __name__ == "__main__":
    main()
