"""Writing a frozen teacher's predictions, as one of the ranks that share each batch.

See `trainer.stored_logits`, which says what a folder holds.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.filesize import decimal
from torch import Tensor

import configs
from configs.progress import Work, counted, work
from data_pipeline import MASKED, Batch, Corpus, contents, open_corpora
from data_pipeline.masking.torch_masker import TorchMasker
from data_pipeline.shards.locking import exclusive
from trainer.batch_config import MicroStep
from trainer.batches import MicroBatch, to_micro_batches
from trainer.config import JobConfig
from trainer.device import background_group, fix_order_of_sums, limit_waiting, own_device
from trainer.errors import TrainingError
from trainer.job import setup_line, step_shape
from trainer.job_data.counting import count_sequences, global_batches
from trainer.job_data.examples import predicts_by_example
from trainer.job_data.feed import Feed
from trainer.job_data.fit import require_fit, require_pretrained
from trainer.learners.engine import join_process_group
from trainer.learners.learner import Learner
from trainer.learners.learners import Learners
from trainer.learners.state import JobState
from trainer.lifecycle.start import (
    batches_to_store,
    fingerprint,
    require_written_by,
    require_written_for,
)
from trainer.run import Outcome
from trainer.stored_logits import format as stored_format
from trainer.stored_logits.format import Manifest, StepLogits, StoredConfig
from trainer.stored_logits.reading import draw, uniforms
from trainer.teacher_outputs import OutputProjection
from trainer.vocabulary_projection import chunks, room_for
from trainer.watch.ranks import explained, on_rank_0

SHARD_BYTES = 1 << 26  # a shard is written as soon as it has this much; it may be one step larger

Say = Callable[[str], None]


def store(
    load: Callable[[], JobConfig], stop_requested: Callable[[], bool], say: Say = lambda line: None
) -> Outcome:
    """Write what is missing of the predictions that the job of `load` reads.

    One of the ranks that the environment describes. `say` gets a line for each shard, and one at
    the end, on rank 0. Raises TrainingError for a job without `teacher.stored`, or a folder with
    other predictions, and DataError for one to which another process writes.
    """
    join_process_group()
    try:
        config = on_rank_0(lambda: _with_stored(load()))
        limit_waiting(config.watch.hang_timeout_s)
        outcome = store_job(config, stop_requested, say)
    except (RuntimeError, OSError) as error:
        raise explained(error) from error
    dist.destroy_process_group()
    return outcome


def store_job(
    config: JobConfig, stop_requested: Callable[[], bool], say: Say = lambda line: None
) -> Outcome:
    """Store the predictions of a loaded job, in a process group that exists. Collective."""
    assert config.teacher.stored is not None
    if config.deterministic:  # the running teacher's kernels: others round differently
        fix_order_of_sums()
    folder = Path(config.teacher.stored.path)
    with ExitStack() as held:
        on_rank_0(lambda: held.enter_context(_alone_in(folder)))
        return _store_missing(config, folder, stop_requested, say)


def _alone_in(folder: Path) -> AbstractContextManager[None]:
    _refuse_other_files(folder)
    refusal = "another `tandem store` is writing there; wait until it ends, or name another folder"
    return exclusive(folder, f"{stored_format.KEY}: {folder}: {refusal}")


def _refuse_other_files(folder: Path) -> None:
    """Raise TrainingError for a folder of something else, such as a run."""
    if not folder.exists() or (folder / stored_format.NAME).exists():
        return
    for path in sorted(folder.iterdir()):
        if not re.fullmatch(
            rf"lock|({stored_format.SHARD_NAME}|{re.escape(stored_format.NAME)})(\.new)?", path.name
        ):
            raise TrainingError(
                f"{stored_format.KEY}: {folder}: holds {path.name}; name another folder"
            )


def _store_missing(
    config: JobConfig, folder: Path, stop_requested: Callable[[], bool], say: Say
) -> Outcome:
    assert config.teacher.stored is not None
    corpora = open_corpora(config.data)
    require_fit(config, corpora)
    require_pretrained(config, corpora, set())
    count_sequences(config.data, corpora, ["train"])
    teacher = dataclasses.replace(config.teacher, stored=None)
    running = dataclasses.replace(config, teacher=teacher, rollback=[])
    tokenizer_dir = next(iter(corpora.values())).tokenizer_dir
    shape, state = step_shape(running, corpora), JobState(wandb_id="")
    sizes = global_batches(running, corpora).sizes
    on_rank_0(lambda: say(setup_line(running, shape, sizes, own_device(), folder)))
    learner = Learners(running, shape, state, None, tokenizer_dir).teacher
    checksum = fingerprint(learner)
    manifest = on_rank_0(lambda: _manifest(folder, config, corpora, checksum))
    batches = batches_to_store(config, corpora)
    missing = on_rank_0(lambda: list(manifest.missing(folder, batches)))
    teacher_logits = TeacherLogits(learner, config.teacher.stored, config.seed)
    with work("storing", "batches", sum(map(len, missing))) as told:
        writer = _ShardWriter(folder, manifest, say, told)
        for numbers in missing:
            with Feed(running, corpora, 0) as feed:
                if _store_batches(numbers, feed, teacher_logits, writer, stop_requested):
                    told.end()  # the line of a terminal makes room
                    on_rank_0(lambda: say(_what_is_kept(writer.manifest, batches, folder)))
                    return Outcome.STOPPED
    kept = "drawn tokens" if config.teacher.stored.samples else "largest logits"
    kept, covered = f"The {teacher_logits.k:,} {kept}", teacher_logits.covered()
    on_rank_0(lambda: say(_summary(writer.manifest, kept, folder) + covered))
    return Outcome.FINISHED


def _store_batches(
    numbers: range,
    feed: Feed,
    teacher_logits: TeacherLogits,
    writer: _ShardWriter,
    stop_requested: Callable[[], bool],
) -> bool:
    """Store these batches; returns whether a rank was asked to stop before the last. Collective."""
    batches = feed.start(numbers.start)
    for number in numbers:
        batch = batches.take()
        step = teacher_logits.of_batch(batch, feed.masker)
        if writer.manifest.by_example:
            examples = torch.from_numpy(batch.sample_ids)
            step = step.of_examples(examples, torch.from_numpy(batch.epochs == 0))
        parts, is_last = _gathered(step, stop_requested()), number == numbers[-1]
        stop = on_rank_0(partial(writer.add, number, parts, is_last))
        if stop and not is_last:
            return True
    return False


def _with_stored(config: JobConfig) -> JobConfig:
    if config.teacher.stored is None:
        raise TrainingError("teacher.stored: must be set: a path, top_k and precision")
    return config


def _manifest(
    folder: Path, config: JobConfig, corpora: Mapping[str, Corpus], checksum: str
) -> Manifest:
    """The folder's manifest, which must be of the same predictions; a new one where it is empty."""
    if not (folder / stored_format.NAME).exists():
        return Manifest(
            job=configs.dump(config),
            corpora=contents(config.data, corpora),
            teacher=checksum,
            by_example=predicts_by_example(config),
        )
    manifest = Manifest.load(folder)
    require_written_for(manifest, config, corpora)
    require_written_by(manifest, checksum, folder)
    return manifest


@dataclass(frozen=True)
class _Part:
    """One rank's rows of a step, encoded, and whether it was asked to stop."""

    content: bytes
    stop: bool


def _gathered(step: StepLogits, stop: bool) -> list[_Part]:
    """The parts of all ranks, in their order, on rank 0; empty elsewhere. Collective."""
    parts: list[_Part] = [_Part(stored_format.encode([step]), stop)] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    if dist.get_world_size() > 1:
        dist.gather_object(parts[0], parts if is_first else None, group=background_group())
    return parts if is_first else []


@dataclass
class _ShardWriter:
    """Collects the batches of a shard, and writes it once it is large enough, or a rank is to stop.

    On rank 0.
    """

    folder: Path
    manifest: Manifest
    say: Say
    told: Work
    _steps: list[StepLogits] = field(default_factory=list)
    _size: int = 0

    def add(self, number: int, parts: list[_Part], is_last: bool) -> bool:
        """Add the batch of this number, perhaps the last one of its shard.

        Returns whether any rank was asked to stop. Raises TrainingError where the shard cannot be
        written.
        """
        step = StepLogits.joined([stored_format.decode(part.content) for part in parts])
        self._steps.append(step)
        self._size += step.size
        stop = any(part.stop for part in parts)
        if is_last or stop or self._size >= SHARD_BYTES:
            try:
                self._write(number + 1)
            except OSError as error:
                raise TrainingError(f"{error.filename}: {error.strerror}") from None
        self.told.advance()
        return stop

    def _write(self, end: int) -> None:
        positions = sum(int(step.counts.sum()) for step in self._steps)
        numbers = range(end - len(self._steps), end)
        record = stored_format.write_shard(
            self.folder, numbers, positions, stored_format.encode(self._steps)
        )
        self.manifest = self.manifest.with_shard(record)
        self.manifest.save(self.folder)
        self.told.end()  # the line of a terminal makes room
        self.say(f"batches {record.first:,} to {record.end:,}: {decimal(record.bytes)}")
        self._steps, self._size = [], 0


class TeacherLogits:
    """The logits that a teacher hands to students at masked positions, in what is stored of them.

    They are computed as in a step: by the same projection, for the same rows at a time.
    """

    def __init__(self, teacher: Learner, stored: StoredConfig, seed: int) -> None:
        """Draws depend on the `seed`. Collective: ZeRO 3 gathers the output projection."""
        self.teacher, self.stored, self.seed = teacher, stored, seed
        self.vocabulary = teacher.config.model.vocab_size
        self.k = stored.size(self.vocabulary)
        self.value_dtype = stored_format.VALUE_DTYPES[stored.precision]
        self.id_dtype = stored_format.ID_DTYPES[stored_format.id_bytes(self.vocabulary)]
        self.projection: OutputProjection = teacher.output_projection()
        # The sum of the largest logits' probabilities, and the number of their positions.
        self._covered = torch.zeros(2, dtype=torch.float64, device=teacher.device)

    def of_batch(self, rows: Batch, masker: TorchMasker | None) -> StepLogits:
        """The logits of this rank's rows of one batch. Collective at ZeRO 3.

        Raises TrainingError where the corpus cannot be read.
        """
        if rows.readable is not None and not rows.readable.all():
            raise TrainingError(
                "data: some sequences cannot be read, and have no predictions; `tandem data check` "
                "lists the damaged shards"
            )
        size = self.teacher.step_shape.micro_rows(rows.input_ids.shape[1])
        micro_batches = to_micro_batches(rows, size, self.teacher.device, masker)
        last = math.ceil(len(rows.input_ids) / size) - 1
        parts = [
            self._of_micro_batch(
                micro_batch,
                MicroStep(0, number, number == last),
                rows.rows(number * size, (number + 1) * size),
            )
            for number, micro_batch in enumerate(micro_batches)
        ]
        return StepLogits.joined(parts)

    def _of_micro_batch(self, batch: MicroBatch, micro_step: MicroStep, rows: Batch) -> StepLogits:
        """The logits of a micro-batch, which holds these `rows`."""
        features = self.teacher.accumulate(batch, {}, micro_step)
        assert features.vocabulary_input is not None
        is_masked = batch.targets[MASKED].labels >= 0  # [P]
        with self.teacher.autocast():
            projection = self.projection.logits(features.vocabulary_input)
        numbers = self._numbers(batch, rows) if self.stored.samples else None
        values, ids = [], []
        for some in chunks(*projection.shape, projection.device):
            logits = projection.logits(some, room_for(projection, some))[is_masked[some]]
            if numbers is not None:
                _require_finite(logits)
                drawn = draw(logits, numbers[some][is_masked[some]], self.stored.temperature)
                ids.append(drawn.to(self.id_dtype).cpu())
                continue
            if self.k < self.vocabulary:
                log_total = logits.float().logsumexp(1, keepdim=True)
                logits, tokens = logits.topk(self.k)
                covered = (logits - log_total).exp().sum()
                self._covered += torch.stack([covered, covered.new_tensor(len(logits))])
                ids.append(tokens.to(self.id_dtype).cpu())
            values.append(logits.to(self.value_dtype).cpu())
            _require_finite(values[-1])
        counts = is_masked.view(len(rows.input_ids), -1).sum(1, dtype=torch.int32).cpu()
        return StepLogits(
            counts, torch.cat(values) if values else None, torch.cat(ids) if ids else None
        )

    def covered(self) -> str:
        """How much of the teacher's probability the largest logits hold, in words. Collective."""
        if dist.get_world_size() > 1:
            dist.all_reduce(self._covered)
        total, positions = self._covered.tolist()
        words = "; those written now hold {:.2%} of the teacher's probability"
        return words.format(total / positions) if positions else ""

    def _numbers(self, batch: MicroBatch, rows: Batch) -> Tensor:
        """The random numbers of the draws at each of the batch's P slots, float64 [P, samples]."""
        positions = batch.targets[MASKED].positions
        assert positions is not None
        examples = len(rows.input_ids)
        length, slots = batch.input_ids.numel() // examples, len(positions) // examples
        epochs, samples = (np.repeat(of, slots) for of in (rows.epochs, rows.sample_ids))
        columns = positions.cpu().numpy() % length
        numbers = uniforms(self.seed, epochs, samples, columns, self.k)
        return torch.from_numpy(numbers).to(positions.device)


def _require_finite(logits: Tensor) -> None:
    if not logits.isfinite().all():
        raise TrainingError(
            "teacher.stored.precision: a logit does not fit, or the teacher predicts NaN; "
            "set bf16 or fp32"
        )


def _what_is_kept(manifest: Manifest, batches: int, folder: Path) -> str:
    kept = batches - sum(len(numbers) for numbers in manifest.missing(folder, batches))
    return f"Stopped: {kept:,} of {batches:,} batches are in {folder}; the same command resumes"


def _summary(manifest: Manifest, kept: str, folder: Path) -> str:
    size = sum(shard.bytes for shard in manifest.shards)
    once = ", of each example once," if manifest.by_example else ""
    return (
        f"{kept} of {counted(manifest.steps, 'batch', 'batches')}{once} are in "
        f"{folder}: {counted(len(manifest.shards), 'shard')}, {decimal(size)}"
    )
