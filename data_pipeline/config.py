"""The `data:` section of a job: what is read, how it is packed and masked."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from configs.rules import (
    COUNT,
    FRACTION,
    NOT_EMPTY,
    PATH,
    ROWS,
    TEXT_ENCODING,
    VERBATIM,
    Ascending,
    Matches,
    OneKeyOf,
    OneOf,
    Range,
    Unit,
    positive,
)
from configs.section import Refusal, Section, within
from data_pipeline.masking.config import NEXT_TOKEN, UNITS, MaskingConfig
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.remote import is_store, is_web
from data_pipeline.shards.sources import is_url
from data_pipeline.text.text_files import COMPRESSED

LENGTHS = Range(8, 2**15)
WEIGHT_OF_CORPUS = Range(0, 1e9)


@dataclass
class PhaseMaskingConfig(Section):
    """The keys of `masking` that a phase changes; null: as before."""

    rate: Annotated[
        float | None,
        FRACTION,
        "The rate of the phase; `final_rate` has no effect during the phase.",
    ] = None
    unit: Annotated[str | None, OneOf(*UNITS), "What is chosen as one."] = None
    mask_fraction: Annotated[
        float | None, FRACTION, "Fraction of the chosen positions that is masked."
    ] = None
    random_fraction: Annotated[
        float | None, FRACTION, "Fraction that becomes a random ordinary token."
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if not any(self.changed(*vars(self))):
            yield "rate", "nothing changes; set this or another key, or remove masking"
        if self.unit == NEXT_TOKEN:
            for key in self.changed("rate", "mask_fraction", "random_fraction"):
                yield key, "is for masks; set it in a phase that has them"

    def applied_to(self, masking: MaskingConfig) -> MaskingConfig:
        """The masking of the phase. Raises ValueError where the keys contradict each other."""
        changes = {key: value for key, value in vars(self).items() if value is not None}
        if self.rate is not None:
            changes |= {"final_rate": None, "final_rate_step": 0}
        return dataclasses.replace(masking, **changes)


@dataclass
class PhaseConfig(Section):
    """The keys that change from a step on; a key that is null keeps its value."""

    from_step: Annotated[int, COUNT, Unit("steps"), "The first step of the phase."]
    sequence_length: Annotated[
        int | None, LENGTHS, Unit("tokens"), "Its sequence length; null: as before."
    ] = None
    packing: Annotated[str | None, OneKeyOf(PACKINGS), "Its packing; null: as before."] = None
    mixture: Annotated[
        dict[str, float],
        WEIGHT_OF_CORPUS,
        "Weights of corpora of `mixture`; the others keep theirs. 0: not read in the phase.",
    ] = field(default_factory=dict)
    masking: PhaseMaskingConfig | None = None
    batch: Annotated[
        int | None, ROWS, Unit("sequences"), "Its global batch; null: as `batch` says."
    ] = None
    rope_theta: Annotated[
        float | None,
        positive(1e12),
        "The base of the rotary positions of the global layers of all learners that are "
        "trained; null: as before, at first each model's `global_rope_theta`.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if not any(self.changed(*vars(self).keys() - {"from_step"})):
            yield "from_step", "nothing changes here; set another key, or remove the phase"

    @property
    def begins_pass(self) -> bool:
        """Whether other sequences are read, in a new pass over the corpora."""
        return bool(self.sequence_length or self.packing or self.mixture)


# Keys of `data` that say nothing about a task's examples.
OF_TEXT: tuple[str, ...] = ("mixture", "packing", "short_sequence_probability", "phases", "masking")
OF_TEXT += ("cache_dir", "cache_gb", "stage", "stage_gb")
TASK_NAME = Matches(r"(?!\d)\w+", "made of letters, digits and _, and begin with no digit")


@dataclass
class SourceConfig(Section):
    """One corpus of a mixture."""

    path: Annotated[str, PATH, NOT_EMPTY, "A corpus folder or URL."]
    weight: Annotated[
        float,
        WEIGHT_OF_CORPUS,
        "Its share of the rows of each batch, relative to the other corpora; 0: it is read in "
        "later `phases` only.",
    ] = 1.0


@dataclass
class TaskFilesConfig(Section):
    """A task's files of labelled examples, and which of their columns are read."""

    train: Annotated[str, PATH, "A task's training file; the job then reads no text corpus."] = ""
    validation: Annotated[
        str, PATH, "A task's file to score on; empty: `validation_fraction` of the training file."
    ] = ""
    test: Annotated[
        str,
        PATH,
        "A task's labelled file that is scored as well, at the end; without labels, give it to "
        "`tandem predict` instead.",
    ] = ""
    max_trained: Annotated[
        int | None,
        COUNT,
        Unit("examples"),
        "Train on, or augment, only this many from the training file's start; null: all.",
    ] = None
    max_scored: Annotated[
        int | None,
        COUNT,
        Unit("examples"),
        "Score only this many from the start of the validation and test files; null: all.",
    ] = None
    root: Annotated[
        str, PATH, "The folder of these files; a name may leave out .gz, .bz2, .xz, .zst or .zip."
    ] = ""
    columns: Annotated[
        dict[str, str],
        "The column that holds each field of a task: its name (doc.text in nested "
        "records), or, in a file without a header, its number from 1.",
    ] = field(default_factory=dict)
    encoding: Annotated[str, TEXT_ENCODING, "The character encoding of a task's files."] = "utf-8"
    files: Annotated[
        dict[str, str],
        PATH,
        "Other files that a task reads, by the names that it gives them, in the same folder.",
    ] = field(default_factory=dict)
    validation_fraction: Annotated[
        float,
        Range(1e-6, 0.5),
        "Fraction of a task's training examples to score on, without a validation file.",
    ] = 0.1

    def conflicts(self) -> Iterator[Refusal]:
        limits = ("max_trained", "max_scored")
        if not self.train:
            for key in self.changed(
                *("validation", "test", "columns", "encoding", "files", "validation_fraction"),
                *limits,
            ):
                yield key, "is for a task's examples; set train too, or remove it"
        elif not self.validation:
            for key in self.changed(*limits):
                why = "is for a task that names its validation file; set validation, or remove it"
                yield key, why

    @property
    def task_files(self) -> dict[str, Path]:
        """The files that are named, by split, with their folder."""
        names = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: _found(Path(self.root) / name) for split, name in names.items() if name}

    @property
    def other_files(self) -> dict[str, Path]:
        """The other `files` of a task, with their folder."""
        return {name: _found(Path(self.root) / path) for name, path in self.files.items()}


@dataclass
class TaskDataConfig(TaskFilesConfig):
    """The examples of one of several tasks that are learned together."""

    path: Annotated[
        str,
        PATH,
        "The folder of its encoded examples; empty: one beside the runs, named by content.",
    ] = ""
    sequence_length: Annotated[
        int | None,
        LENGTHS,
        Unit("tokens"),
        "The longest sequence of this task; null: data.sequence_length.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if not self.train:
            yield "train", "must be set"


def _found(path: Path) -> Path:
    """A file, or, where there is none of this name, its compressed form."""
    forms = [path, *(path.with_name(path.name + suffix) for suffix in COMPRESSED)]
    return next((form for form in forms if form.is_file()), path)


@dataclass
class DataConfig(TaskFilesConfig):
    """The data of a job: text (`tandem data build` makes a corpus of it), or a task's examples."""

    path: Annotated[
        str,
        PATH,
        "A corpus folder or URL; or set `mixture`. For a task, the folder of its encoded "
        "examples; empty: one beside the runs, named after its content.",
    ] = ""
    tasks: Annotated[
        dict[Annotated[str, TASK_NAME], TaskDataConfig],
        "The examples of each task, by name, if several tasks are learned together.",
    ] = field(default_factory=dict)
    tokenizer: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        "A task's tokenizer; null: the tokenizer of the first learner with "
        "init.pretrained, teachers before students.",
    ] = None
    mixture: Annotated[dict[str, SourceConfig], "Several corpora, by name, instead of `path`."] = (
        field(default_factory=dict)
    )
    sequence_length: Annotated[
        int,
        LENGTHS,
        Unit("tokens"),
        "The length of every sequence, special tokens included; for a task, the largest "
        "length of an example.",
    ] = 128
    packing: Annotated[
        str, OneKeyOf(PACKINGS), "How documents become sequences or pairs of segments."
    ] = "full_sentences"
    short_sequence_probability: Annotated[
        float, FRACTION, "How often a sequence is packed to a random shorter length (BERT: 0.1)."
    ] = 0.0
    phases: Annotated[
        list[PhaseConfig],
        Ascending(by="from_step"),
        "Changes at later steps. A change of length, packing or mixture begins a new pass "
        "over the corpora.",
    ] = field(default_factory=list)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    on_bad_shard: Annotated[
        str,
        OneOf("stop", "skip"),
        "skip: a sample that cannot be read keeps its row, without labels.",
    ] = "stop"
    cache_dir: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        "The folder for shards from URLs, shared by the ranks of a node; null: "
        "`$XDG_CACHE_HOME/tandem`, or `~/.cache/tandem`. If a web server can send parts of "
        "files, only the index is kept there.",
    ] = None
    cache_gb: Annotated[
        float,
        positive(1e9),
        Unit("GB"),
        "The largest size of the cache; each corpus of a mixture has an equal part of it.",
    ] = 50.0
    stage: Annotated[
        str | None,
        VERBATIM,
        NOT_EMPTY,
        "A folder on each node's own disk, or a variable of its environment such as "
        "`$TMPDIR`. The data that the node will read next is copied there.",
    ] = None
    stage_gb: Annotated[
        float, positive(1e9), Unit("GB"), "The largest size of the data copied ahead."
    ] = 20.0

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        of_kind = (
            self._conflicts_with_examples() if self.has_examples else self._conflicts_with_text()
        )
        yield from of_kind
        if self.tasks and (self.train or self.path):
            yield "tasks", "have examples of their own; remove them, or train and path"
        if self.path and self.mixture:
            yield "mixture", "set either path or mixture"
        if self.mixture and not any(self.weights_at(0).values()):
            yield "mixture", "must give a weight to at least one corpus"
        if self.stage is not None and not any(map(_sends_parts, self.paths())):
            yield "stage", "is for folders, web servers and stores; other URLs have cache_dir"
        fixed = [
            packing
            for _, packing in self.lengths_and_packings()
            if not PACKINGS[packing].draws_lengths
        ]
        if self.short_sequence_probability and fixed:
            yield "short_sequence_probability", f"does not go with packing: {fixed[0]}"

    def _conflicts_with_text(self) -> Iterator[Refusal]:
        for key in self.changed("root", "tokenizer"):
            yield key, "is for a task's examples; set train too, or remove it"
        if self.stage is None:
            for key in self.changed("stage_gb"):
                yield key, "is for stage; set that too, or remove it"
        units = {phase.masking.unit for phase in self.phases if phase.masking}
        if self.masking.is_causal and units <= {None, NEXT_TOKEN}:
            rates = "rate", "final_rate", "held_out_rate"
            for key in self.masking.changed(*rates, "copies", "mask_fraction", "random_fraction"):
                yield f"masking.{key}", "is for masks, and unit: next_token has none; remove it"
        if self.masking.is_causal and PACKINGS[self.packing].pair_labels:
            yield "masking.unit", f"next_token does not go with pairs, as packing: {self.packing}"
        shortest = min(length for length, _ in self.lengths_and_packings())
        yield from within("masking", self.masking.without_slots(shortest))
        for number, phase in enumerate(self.phases):
            yield from within(f"phases[{number}]", self._conflicts_of_phase(phase))

    def _conflicts_of_phase(self, phase: PhaseConfig) -> Iterator[Refusal]:
        names = ", ".join(self.mixture) or "none; set data.mixture"
        for name in phase.mixture.keys() - self.mixture.keys():
            yield "mixture", f"no corpus {name!r} in data.mixture; there are: {names}"
        if phase.mixture and not any(self.weights_at(phase.from_step).values()):
            yield "mixture", "must give a weight to at least one corpus"
        try:
            masking = self.masking_at(phase.from_step)
        except ValueError as error:
            yield "masking", str(error)
            return
        length, packing = self.length_and_packing_at(phase.from_step)
        if masking.is_causal and PACKINGS[packing].pair_labels:
            yield "masking.unit", f"next_token does not go with pairs, as packing: {packing}"
        yield from within("masking", masking.without_slots(length))
        if masking.on_device and masking.thresholds != self.masking.thresholds:
            yield "masking", "may change only the rate if data.masking.on_device is true"

    def _conflicts_with_examples(self) -> Iterator[Refusal]:
        for key in self.changed(*OF_TEXT):
            yield key, "is for text, and the job reads a task's examples; remove one"
        if is_url(self.path):
            yield "path", "must be a folder if data.train is set"

    @property
    def has_examples(self) -> bool:
        """Whether it is a task's examples that are read, or those of several."""
        return bool(self.train or self.tasks)

    @property
    def examples_of(self) -> Mapping[str, TaskDataConfig]:
        """The examples of several tasks by name, with what each takes from this section."""
        return {
            name: dataclasses.replace(
                task,
                root=task.root or self.root,
                sequence_length=task.sequence_length or self.sequence_length,
            )
            for name, task in self.tasks.items()
        }

    def paths(self) -> list[str]:
        """Where its corpora are: folders and URLs."""
        corpora = [source.path for source in self.mixture.values()]
        return [*corpora, *(task.path for task in self.tasks.values())] or [self.path]

    @property
    def longest(self) -> int:
        """The longest sequence of all phases and tasks."""
        return max(length for length, _ in self.lengths_and_packings())

    def lengths_and_packings(self) -> list[tuple[int, str]]:
        """(sequence length, packing) at the start and from each phase on."""
        of_tasks = [task.sequence_length or self.sequence_length for task in self.tasks.values()]
        pairs = [(max(of_tasks, default=self.sequence_length), self.packing)]
        for phase in self.phases:
            length, packing = pairs[-1]
            pairs.append((phase.sequence_length or length, phase.packing or packing))
        return pairs

    def length_and_packing_at(self, step: int) -> tuple[int, str]:
        """(sequence length, packing) of a step."""
        return self.lengths_and_packings()[len(self._phases_until(step))]

    def weights_at(self, step: int) -> dict[str, float]:
        """The weight of each corpus of the mixture at a step."""
        weights = {name: source.weight for name, source in self.mixture.items()}
        for phase in self._phases_until(step):
            weights |= phase.mixture
        return weights

    def masking_at(self, step: int) -> MaskingConfig:
        """The masking of a step."""
        masking = self.masking
        for phase in self._phases_until(step):
            masking = masking if phase.masking is None else phase.masking.applied_to(masking)
        return masking

    def rope_theta_at(self, step: int) -> float | None:
        """The base of rotary positions at a step; None: each model's own."""
        bases = [phase.rope_theta for phase in self._phases_until(step) if phase.rope_theta]
        return bases[-1] if bases else None

    def slots(self, length: int) -> int:
        """The most positions that are predicted in a sequence of `length` tokens at any step."""
        return max(masking.slots(length) for masking in self._maskings())

    @property
    def has_next_tokens(self) -> bool:
        """Whether the next token is predicted, in any phase."""
        return any(masking.is_causal for masking in self._maskings())

    def scores_next_tokens_at(self, step: int) -> bool:
        """Whether held-out text is scored by its next tokens at a step, and by masks at others."""
        return self.masking_at(step).is_causal and not self.held_out_masking.is_causal

    @property
    def held_out_masking(self) -> MaskingConfig:
        """The masking of held-out text: the first that has masks, or else none has."""
        maskings = self._maskings()
        return next((masking for masking in maskings if not masking.is_causal), maskings[0])

    @property
    def highest_masking_rate(self) -> float:
        """The highest masking rate of any step."""
        return max(masking.highest_rate for masking in self._maskings())

    def _maskings(self) -> list[MaskingConfig]:
        return [self.masking_at(step) for step in (0, *(phase.from_step for phase in self.phases))]

    def _phases_until(self, step: int) -> list[PhaseConfig]:
        return [phase for phase in self.phases if phase.from_step <= step]


def _sends_parts(path: str) -> bool:
    """Whether blocks of this corpus are read one by one, where it serves them."""
    return not is_url(path) or is_web(path) or is_store(path)
