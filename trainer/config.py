"""The schema of a job YAML: one teacher, any number of students, one stream of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs import bounds
from configs.bounds import COUNT, INDEX, ROWS, require_bounds, require_choice
from data_pipeline import DataConfig
from model import EncoderConfig
from trainer.learner_config import BudgetConfig, InitConfig, LearnerConfig, StartConfig
from trainer.measure.profiling import ProfileConfig
from trainer.tracking import tracking
from trainer.watch.rollback import RollbackConfig, require_order


@dataclass
class GrowthConfig:
    """From `step` on, global batches of another size: in sequences, or in tokens."""

    step: int
    size: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse two sizes, or none."""
        require_bounds(self, step=COUNT)
        _require_one_size(self)


@dataclass
class BatchConfig:
    """The global batch of an optimizer step, and what fits on one rank at a time.

    - size: in sequences (64); or tokens: about so many, padding not counted, whatever the length
      and the packing; then it has a `multiple` of sequences, which the number of ranks must divide.
    - growth: other sizes from later steps on, in ascending order. Epochs stay complete.
    - micro_batch: at most so many sequences per rank and forward pass. Gradient accumulation
      follows, at each step, from this and from the number of ranks.
    """

    size: int | None = None
    tokens: int | None = None
    multiple: int = 8
    micro_batch: int = 64
    growth: list[GrowthConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive, and two at once."""
        if self.size is None and self.tokens is None:
            self.size = 64
        _require_one_size(self)
        require_bounds(self, multiple=ROWS, micro_batch=ROWS)
        steps = [growth.step for growth in self.growth]
        if steps != sorted(set(steps)):
            raise ValueError("growth: must be in the order of step, each once")

    def at(self, step: int) -> BatchConfig | GrowthConfig:
        """Where the size at a step is stated."""
        return next((one for one in reversed(self.growth) if one.step <= step), self)


def _require_one_size(batch: BatchConfig | GrowthConfig) -> None:
    if (batch.size is None) == (batch.tokens is None):
        raise ValueError("tokens: set either size or tokens, and the other one to null")
    require_bounds(batch, size=ROWS, tokens=(1, 2**40))


@dataclass
class EvaluationConfig:
    """Held-out evaluation: `sequences` of the validation split, every `every` steps."""

    every: int = 500
    sequences: int = 512

    def __post_init__(self) -> None:
        """Refuse intervals that are not positive."""
        require_bounds(self, every=COUNT, sequences=COUNT)


@dataclass
class CheckpointConfig:
    """A checkpoint every `every` steps.

    The `keep` newest stay, those of every `keep_every`-th step, and the `keep_best` with the
    teacher's lowest held-out loss (of those that are saved right after an evaluation, where the
    teacher trains).
    """

    every: int = 500
    keep: int = 3
    keep_every: int | None = None
    keep_best: int = 1
    max_failures: int = 3  # so many saves in a row that fail end the run

    def __post_init__(self) -> None:
        """Refuse what cannot be counted."""
        require_bounds(self, every=COUNT, keep=COUNT, max_failures=COUNT)
        require_bounds(self, keep_every=COUNT, keep_best=INDEX)


@dataclass
class WatchConfig:
    """What a job looks out for.

    Every `replicas_every` steps, and before every checkpoint, the ranks compare what they hold in
    common. Without a step for `hang_timeout_s` (when scoring: a batch; at the end: an export), each
    rank writes its stacks to its log and ends.
    """

    replicas_every: int = 100
    hang_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        """Refuse intervals that are not positive."""
        require_bounds(self, replicas_every=COUNT, hang_timeout_s=bounds.SECONDS)


@dataclass
class LogConfig:
    """Metrics every `every` steps; Weights & Biases online with a key (`auto`) or as told."""

    every: int = 10
    wandb: str = "auto"  # or offline, disabled
    project: str = "tandem"

    def __post_init__(self) -> None:
        """Refuse unknown modes."""
        require_bounds(self, every=COUNT)
        require_choice(self, wandb=tracking.MODES)
        if not self.project:
            raise ValueError("project: must not be empty")


@dataclass
class JobConfig:
    """One job: everything that `tandem train` needs.

    With `hours` it also ends when it has been trained for so long, over all restarts; learning
    rates that follow its steps to the end then follow the clock to the same deadline.
    """

    name: str
    steps: int
    data: DataConfig
    teacher: LearnerConfig
    students: dict[str, LearnerConfig] = field(default_factory=dict)
    batch: BatchConfig = field(default_factory=BatchConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    rollback: list[RollbackConfig] = field(default_factory=list)  # leave those that were done
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    output_dir: str = "runs"  # the folder that holds runs/NAME
    seed: int = 0
    hours: float | None = None
    license: str = "other"  # of the exported models: an identifier of the Hugging Face hub

    def __post_init__(self) -> None:
        """Refuse jobs that cannot run, naming the key."""
        require_bounds(self, steps=COUNT, hours=bounds.HOURS)
        if not _is_file_name(self.name):
            raise ValueError(f"name: must be a plain folder name, not {self.name!r}")
        for key in ("output_dir", "license"):
            if not getattr(self, key):
                raise ValueError(f"{key}: must not be empty")
        require_order(self.rollback)
        for name in self.students:
            self._require_student(name)
        self._require_teacher()
        self._require_peer()
        self._require_objectives()

    def _require_student(self, name: str) -> None:
        """Refuse names that are no names, and what only a teacher can be or do."""
        section, config = f"students.{name}", self.students[name]
        if name == "teacher":
            raise ValueError("students.teacher: that name is the teacher's; choose another")
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"{section}: use letters, digits, - and _ in a name")
        if not config.objective.terms():
            raise ValueError(f"{section}.objective: name at least one term")
        for key in ("frozen", "masked_only", "stacking"):
            if getattr(config, key) != getattr(LearnerConfig(), key):
                raise ValueError(f"{section}.{key}: is for the teacher; remove it")
        if config.objective.from_student is not None:
            raise ValueError(f"{section}.objective.from_student: is for the teacher; remove it")
        if config.init.teacher_layers is not None:
            self._require_copied_layers(f"{section}.init.teacher_layers", config)
        if config.init.teacher_embeddings:
            sizes = ("vocab_size", "hidden_size", "word_size")
            self._require_sizes(f"{section}.init.teacher_embeddings", config.model, sizes)

    def _require_copied_layers(self, section: str, student: LearnerConfig) -> None:
        """Refuse layers that the teacher does not have, or that are not the student's."""
        chosen, last = student.init.teacher_layers or [], self.teacher.model.layers - 1
        if not all(0 <= layer <= last for layer in chosen):
            raise ValueError(f"{section}: the teacher's layers are 0 to {last}")
        layers = student.model.layers
        if len(chosen) != layers:
            raise ValueError(f"{section}: lists {len(chosen)} for the student's {layers}")
        self._require_sizes(section, student.model, ("vocab_size", "hidden_size", "ffn_size"))

    def _require_sizes(self, section: str, student: EncoderConfig, keys: Sequence[str]) -> None:
        """Refuse a student that is not as wide as the teacher whose weights it is to begin with."""
        for key in keys:
            ours, theirs = getattr(student, key), getattr(self.teacher.model, key)
            if ours != theirs:
                name = "embedding_size" if key == "word_size" else key  # which may be implied
                raise ValueError(f"{section}: model.{name} is {ours}, and the teacher's {theirs}")

    def _require_teacher(self) -> None:
        """Refuse what only a student can be or do, and a teacher of nobody."""
        teacher = self.teacher
        if teacher.frozen and not self.students:
            raise ValueError("students: a frozen teacher needs at least one")
        if not teacher.frozen and not teacher.objective.terms():
            raise ValueError("teacher.objective: name at least one term")
        if teacher.objective.needs_teacher():
            raise ValueError(
                "teacher.objective: a teacher has nobody to learn from; use mlm, nsp, sop"
            )
        if teacher.start != StartConfig() or teacher.budget != BudgetConfig():
            raise ValueError(
                "teacher.start: it and teacher.budget are for students; see steps and hours"
            )
        if teacher.init != InitConfig(pretrained=teacher.init.pretrained):
            raise ValueError("teacher.init: its teacher_... keys are for students")

    def _require_peer(self) -> None:
        """Refuse a teacher that learns from nobody, or from one who cannot tell it anything."""
        terms = self.teacher.objective.terms()
        term = self.teacher.objective.from_student
        if term is None:
            return
        section = "teacher.objective.from_student"
        if len(terms) == 1:
            raise ValueError(f"{section}: needs mlm beside it")
        if term.student not in self.students:
            there = ", ".join(self.students) or "none"
            raise ValueError(f"{section}.student: no student {term.student!r}; there are: {there}")
        if self.students[term.student].model.vocab_size != self.teacher.model.vocab_size:
            raise ValueError(f"{section}: student and teacher must share a vocabulary")

    def _require_objectives(self) -> None:
        """Refuse objectives about what data or teacher do not have; those of late students too."""
        packings = [packing for _, packing in self.data.lengths_and_packings()]
        masked = self.data.masking.highest_rate > 0
        learners = {f"students.{name}": config for name, config in self.students.items()}
        for section, config in {"teacher": self.teacher, **learners}.items():
            try:
                config.objective.require_data(packings, masked)
                if self.teacher.masked_only:
                    config.objective.require_predictions_only(is_teacher=config is self.teacher)
                config.build_objective(self.teacher.model, self.seed)
            except ValueError as error:
                raise ValueError(f"{section}.objective.{error}") from error


def _is_file_name(name: str) -> bool:
    return name.isprintable() and "/" not in name and name[:1] not in ("", ".", " ")
