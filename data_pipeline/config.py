"""The `data:` section of a job: what is read, how it is packed and masked."""

from __future__ import annotations

from dataclasses import dataclass, field

from data_pipeline.shards.sources import is_url

PACKINGS = (
    "full_sentences",
    "contiguous",
    "doc_sentences",
    "segment_pair",
    "sentence_pair",
    "sop",
)
PAIR_PACKINGS = ("segment_pair", "sentence_pair", "sop")
UNITS = ("token", "word", "ngram")
_LAST = 2**53  # step; larger whole numbers have no float of their own


@dataclass
class MaskingConfig:
    """How positions are chosen for masked-language modelling and what they become.

    - rate: share of a sequence's ordinary tokens that is chosen. With `final_rate` it changes
      linearly from step 0 to `final_rate_step` and stays there.
    - unit: what is chosen as one: a token, a whole word, or up to `max_ngram` whole words (n
      with probability proportional to 1/n, as in ALBERT).
    - smoothing: tokens are drawn with probability proportional to count**-smoothing (DistilBERT:
      0.7); 0 draws them alike.
    - copies: 0 gives new masks every epoch; k > 0 gives k fixed masks for each sequence in turn,
      and of pairs k fixed splits, partners and labels.
    - on_device: token masks are made on the device that trains; the same masks, to the bit.
    - Of the chosen positions `mask_share` become the mask token, `random_share` a random ordinary
      token, and the rest stay as they are.
    """

    rate: float = 0.15
    final_rate: float | None = None
    final_rate_step: int = 0
    unit: str = "token"
    max_ngram: int = 3
    smoothing: float = 0.0
    copies: int = 0
    on_device: bool = False
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        _require(0.0 <= self.rate <= 1.0, "rate", "must lie between 0 and 1")
        final = self.rate if self.final_rate is None else self.final_rate
        _require(0.0 <= final <= 1.0, "final_rate", "must lie between 0 and 1")
        _require(0 <= self.final_rate_step <= _LAST, "final_rate_step", "must be 0 to 2^53")
        _require(
            self.final_rate is None or self.final_rate_step > 0,
            "final_rate_step",
            "must be set to the step at which final_rate is reached",
        )
        _require(self.unit in UNITS, "unit", f"must be one of {', '.join(UNITS)}")
        _require(1 <= self.max_ngram <= 16, "max_ngram", "must lie between 1 and 16")
        _require(0.0 <= self.smoothing <= 10.0, "smoothing", "must lie between 0 and 10")
        _require(self.smoothing == 0.0 or self.unit == "token", "smoothing", "needs unit: token")
        _require(
            not self.on_device or (self.unit == "token" and self.smoothing == 0.0),
            "on_device",
            "needs unit: token and smoothing: 0",
        )
        _require(0 <= self.copies <= 1 << 31, "copies", "must lie between 0 and 2147483648")
        _require(self.mask_share >= 0.0, "mask_share", "must not be negative")
        _require(self.random_share >= 0.0, "random_share", "must not be negative")
        _require(
            self.mask_share + self.random_share <= 1.0 + 1e-9,
            "random_share",
            "mask_share and random_share together must not exceed 1",
        )

    def rate_at(self, step: int) -> float:
        """The masking rate of a step."""
        if self.final_rate is None:
            return self.rate
        progress = min(step / self.final_rate_step, 1.0)
        rate = self.rate + progress * (self.final_rate - self.rate)
        return min(rate, self.highest_rate)  # rounding may go beyond, and there are no slots then

    @property
    def highest_rate(self) -> float:
        """The highest rate of any step."""
        return self.rate if self.final_rate is None else max(self.rate, self.final_rate)


@dataclass
class SourceConfig:
    """One corpus of a mixture and its share of the rows of each batch, relative to the others."""

    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        _require(self.path != "", "path", "must name a corpus")
        _require(0.0 < self.weight <= 1e9, "weight", "must be positive, and at most 1e9")


@dataclass
class PhaseConfig:
    """From `from_step` on, sequences of another length or packing (128 then 512, say)."""

    from_step: int = 0
    sequence_length: int | None = None
    packing: str | None = None

    def __post_init__(self) -> None:
        _require(0 < self.from_step <= _LAST, "from_step", "must be 1 to 2^53")


@dataclass
class DataConfig:
    """Which corpora are read (`tandem data build` makes one) and how they become sequences.

    - path: a corpus folder or URL; or mixture: several, by name.
    - short_sequence_probability: how often a sequence aims at a random smaller length (BERT: 0.1).
    - phases: changes of length or packing at later steps, in ascending order. Each begins a new
      pass over the corpus.
    - on_bad_shard: `stop`, or `skip`: a sample that cannot be read keeps its row, without labels.
    - cache_dir, cache_gb: where shards of URLs are kept, shared by the ranks of a node, and how
      much of them at most; the corpora of a mixture have equal parts of it.
    - stage, stage_gb: a folder on each node's own disk, or a variable of its environment such as
      ``$TMPDIR``, to which is copied ahead what the node will read, and how much at a time.
    """

    path: str = ""
    mixture: dict[str, SourceConfig] = field(default_factory=dict)
    sequence_length: int = 128
    packing: str = "full_sentences"
    short_sequence_probability: float = 0.0
    phases: list[PhaseConfig] = field(default_factory=list)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    on_bad_shard: str = "stop"
    cache_dir: str | None = None
    cache_gb: float = 50.0
    stage: str | None = None
    stage_gb: float = 20.0

    def __post_init__(self) -> None:
        _require(not (self.path and self.mixture), "mixture", "set either path or mixture")
        _require(self.on_bad_shard in ("stop", "skip"), "on_bad_shard", "must be stop or skip")
        _require(0.0 < self.cache_gb <= 1e9, "cache_gb", "must be positive, and at most 1e9")
        _require(self.cache_dir != "", "cache_dir", "must name a folder, or be null")
        _require(0.0 < self.stage_gb <= 1e9, "stage_gb", "must be positive, and at most 1e9")
        _require(
            self.stage is None or not all(map(is_url, self.paths())),
            "stage",
            "is for corpora in folders; what is read of a URL is kept in cache_dir",
        )
        _require(
            0.0 <= self.short_sequence_probability <= 1.0,
            "short_sequence_probability",
            "must lie between 0 and 1",
        )
        _require(
            self.short_sequence_probability == 0.0
            or all(packing != "contiguous" for _, packing in self.lengths_and_packings()),
            "short_sequence_probability",
            "does not go with packing: contiguous",
        )
        starts = [0, *(phase.from_step for phase in self.phases)]
        _require(starts == sorted(set(starts)), "phases", "from_step must ascend")
        for length, packing in self.lengths_and_packings():
            _require(8 <= length <= 1 << 15, "sequence_length", "must lie between 8 and 32768")
            _require(packing in PACKINGS, "packing", f"must be one of {', '.join(PACKINGS)}")

    def paths(self) -> list[str]:
        """Where its corpora are: folders and URLs."""
        return [source.path for source in self.mixture.values()] or [self.path]

    def lengths_and_packings(self) -> list[tuple[int, str]]:
        """(sequence length, packing) at the start and from each phase on."""
        pairs = [(self.sequence_length, self.packing)]
        for phase in self.phases:
            length, packing = pairs[-1]
            pairs.append((phase.sequence_length or length, phase.packing or packing))
        return pairs

    def length_and_packing_at(self, step: int) -> tuple[int, str]:
        """(sequence length, packing) of a step."""
        number = sum(phase.from_step <= step for phase in self.phases)
        return self.lengths_and_packings()[number]


def _require(condition: bool, key: str, reason: str) -> None:
    if not condition:
        raise ValueError(f"{key}: {reason}")
