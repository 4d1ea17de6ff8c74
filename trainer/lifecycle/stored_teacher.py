"""Whether stored predictions are those of a job's teacher, on the batches that the job reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import configs
from data_pipeline import Corpus, ExampleSplit, contents
from trainer.checkpoint import full_state_dict
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.batch_plan import global_batches
from trainer.job_data.examples import predicts_by_example
from trainer.learners.learner import Learner
from trainer.lifecycle.continuity import ORDER, Change, changes
from trainer.stored_logits.format import KEY, Manifest
from trainer.watch.ranks import on_rank_0
from trainer.watch.rollback import batches_covered

# Besides what an order and a shape depend on: what decides which numbers are stored.
_STORED_KEYS = (
    *("teacher.precision", "teacher.view"),
    *("teacher.stored.top_k", "teacher.stored.precision"),
    *("teacher.stored.samples", "teacher.stored.temperature"),
)


def require_same_order(config: JobConfig, corpora: Mapping[str, Corpus]) -> None:
    """Raise unless the stored predictions that the job reads, if any, cover its batches.

    `corpora` are those of `config`. Raises TrainingError, naming what differs.
    """
    if config.teacher.stored is None:
        return
    folder = Path(config.teacher.stored.path)
    manifest = Manifest.load(folder)
    require_written_for(manifest, config, corpora)
    needed = batches_to_store(config, corpora)
    if manifest.steps < needed:
        raise TrainingError(
            f"{KEY}: {folder}: has {manifest.steps:,} of the {needed:,} batches that the job "
            "reads; `tandem store` with this config writes the others"
        )


def batches_to_store(config: JobConfig, corpora: Mapping[str, Corpus]) -> int:
    """How many batches are stored, from the first on; the first epoch's have every example."""
    covered = batches_covered(config.steps, config.rollback)
    if not predicts_by_example(config):
        return covered
    (corpus,) = corpora.values()
    last = global_batches(config).step_of(ExampleSplit(corpus, "train").total - 1)
    return min(covered, last + 1)


def require_written_for(
    manifest: Manifest, config: JobConfig, corpora: Mapping[str, Corpus]
) -> None:
    """Raise TrainingError where the predictions were written for another order, or otherwise."""
    assert config.teacher.stored is not None
    present = contents(config.data, corpora)
    if difference := next(_differences(manifest, config, present), None):
        raise TrainingError(
            f"{KEY}: {config.teacher.stored.path}: was written for another job: {difference}; "
            "change it back, or name another folder and run `tandem store`"
        )


def require_same_teacher(config: JobConfig, teacher: Learner) -> None:
    """Raise TrainingError unless the stored predictions, if any, are this teacher's. Collective."""
    if config.teacher.stored is None:
        return
    folder, weights = Path(config.teacher.stored.path), fingerprint(teacher)
    on_rank_0(lambda: require_written_by(Manifest.load(folder), weights, folder))


def require_written_by(manifest: Manifest, teacher: str, folder: Path) -> None:
    """Raise TrainingError unless they are of the teacher whose weights have this `fingerprint`."""
    if manifest.teacher != teacher:
        raise TrainingError(
            f"{KEY}: {folder}: holds predictions of other weights than teacher.init.pretrained "
            "has; name the teacher that made them, or another folder"
        )


def fingerprint(learner: Learner) -> str:
    """The SHA-256 of a learner's weights, names and shapes included. Collective."""
    digest = hashlib.sha256()
    for name, tensor in sorted(full_state_dict(learner.engine).items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _differences(manifest: Manifest, now: JobConfig, present: Mapping[str, str]) -> Iterator[str]:
    """Differences that decide the stored numbers; `present` are the contents of the corpora."""
    before = configs.load_text(manifest.job, JobConfig, "job", [], KEY)
    read = manifest.corpora
    same = {key for key, content in read.items() if present.get(key) == content}
    yield from (
        str(change)
        for change in changes(before, now)
        if _matters(change) and change.key not in same
    )
    if manifest.by_example != predicts_by_example(now):
        kinds = ("of every batch", "of each example once")
        yield f"predictions {kinds[manifest.by_example]} -> {kinds[not manifest.by_example]}"
    if [*read] != [*present]:  # rows are assigned in this order
        yield "data.mixture: its entries, or their order"
    yield from (f"{key}: the corpus there has other content" for key in read.keys() - same)


def _matters(change: Change) -> bool:
    is_model = change.key.startswith("teacher.model.") and change.refusal is not None
    return is_model or change.refusal == ORDER or change.key in _STORED_KEYS
