"""The base config of every kind of model: its keys, and the properties derived from them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from torch import Tensor, nn

from configs.rules import Range, Unit
from configs.section import Refusal, Section, within
from model.task_head_config import WIDEST, TaskHeadConfig

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

WIDTH = Range(1, WIDEST)
REPEATS = Range(1, 4096)
# Keys of every kind.
VocabularySize = Annotated[int, WIDTH, Unit("tokens"), "Rows of the word embedding."]
PaddingToken = Annotated[
    int,
    Range(-1, WIDEST),
    "The padding token: its word vector gets no gradient from the input side; -1: none.",
]

PAIRS = "pairs"  # the name of the pair head's output
HEAD_NAMES = "that name is taken, or not of letters, digits and underscores; choose another"


def may_name_a_head(name: str) -> bool:
    """Whether a head can have this name: an identifier that no attribute of modules has."""
    return name.isidentifier() and name != PAIRS and not hasattr(nn.ModuleDict(), name)


class Ability(str, Enum):
    """Abilities that training may require, and that not every kind of model has.

    Each is what a model can or cannot do, as messages say it.
    """

    POOL = "have heads on a pooled state"
    TASK_HEAD = "have heads for tasks"
    FREEZE_POSITIONS = "freeze its position embeddings"
    MASKED_ONLY = "compute its last layer at the masked positions only"
    GROW = "double its layers"
    LAYER_BY_LAYER = "train its layers one at a time"
    CHECKPOINT = "recompute its layers in the backward pass"
    COMPILE = "compile its layers"
    FLOAT8 = "multiply in 8 bits in its layers"
    LEAVE_EARLY = "let examples leave after any of its layers"
    SHARE_EMBEDDING = "add its word embedding to another model's"
    GENERATE = "generate text"
    DOCUMENTS = "tell several documents in a row apart"
    CAUSAL = "attend to earlier tokens only"


class ModelShape(Protocol):
    """The sizes from which loss terms are built. Every `ModelConfig` satisfies it.

    Layers are numbered from 1; `layers` is 0 where they do not each give a state for every token,
    and `token_states` says whether the last one does. A token's queries, keys and values of all
    `heads` are `attention_width` numbers each: 0 where there is no attention, or its scores are no
    products of queries and keys. `window` is the number of tokens that a layer attends to, both
    sides together; 0 means all.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def attention_width(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def mlm_head(self) -> bool: ...
    @property
    def token_states(self) -> bool: ...
    def window(self, number: int) -> int: ...


@dataclass(kw_only=True)
class ModelConfig(Section, ABC):
    """The model section: `kind` names the kind of model, which defines the other keys.

    A kind is a dataclass derived from this one, whose default for `kind` is the kind's name. Its
    module is registered for it (`model.protocol.register`).
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset()
    is_trainable: ClassVar[bool] = True  # else it is only read, as a frozen teacher
    reads_folders: ClassVar[bool] = False  # of models that no other kind knows: `read_folder`
    # Keys on which the weights of the embeddings depend.
    embedding_keys: ClassVar[tuple[str, ...]] = ()
    # Keys about the heads, in which a model may differ from the one that its weights come from.
    head_keys: ClassVar[tuple[str, ...]] = ("pair_head", "mlm_head", "task_heads")
    # Keys that do not change what is computed from given weights.
    training_keys: ClassVar[tuple[str, ...]] = ("dropout", "initializer_range")

    kind: Annotated[str, "The kind of model."] = "encoder"
    pair_head: Annotated[
        bool, "Add two logits on the pooled state, for next sentence or sentence order."
    ] = False
    mlm_head: Annotated[
        bool, "The model has a masked-LM head; a fine-tuned classifier has none."
    ] = True
    task_heads: Annotated[dict[str, TaskHeadConfig], "The heads that tasks add, by name."] = field(
        default_factory=dict
    )

    # What every kind has that declares no key of the name.
    pad_token_id = -1  # the padding token; -1: none
    token_states = True  # whether the last layer gives a state for every token
    heads = 0  # attention heads in a layer; 0 without attention
    activation = "gelu"
    head_activation = ""  # of the masked-LM transform; empty: `activation`
    head_bias = True  # whether the masked-LM transform has a bias
    head_transform = True  # whether the masked-LM head transforms states before it projects them
    tied_decoder = True  # whether the vocabulary projection's weight is the word embedding
    decoder_bias = True  # whether the vocabulary projection has a bias
    norm_eps = 1e-12  # added to the variance in a layer norm
    norm_bias = True  # whether layer norms have a bias

    @classmethod
    def reads(cls, theirs: Mapping[str, Any]) -> bool:
        """Whether the kind can read a folder with this config.json (`reads_folders`)."""
        return False

    @classmethod
    def read_folder(cls, folder: Path, theirs: Mapping[str, Any]) -> tuple[Self, dict[str, Tensor]]:
        """The configuration and the float32 state of the model in a folder with this config.json.

        Raises ModelError, naming a key or a tensor, for a folder that it cannot read.
        """
        raise NotImplementedError

    def for_transformers(
        self, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The config.json and the tensors in the format of `transformers`, where a kind has one."""
        return None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the word embedding."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of the hidden states."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of layers."""

    @property
    @abstractmethod
    def initializer_range(self) -> float:
        """Standard deviation of random weights, also for projections in the losses."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The sizes in words, for a model card."""

    @property
    def first_position(self) -> int:
        """Row of the position table that the first token reads."""
        return 0

    @property
    def longest_sequence(self) -> int | None:
        """The longest sequence that it can read, in tokens; None: any length."""
        return None

    @property
    def reads_segments(self) -> bool:
        """Whether the segment ids make a difference."""
        return False

    @property
    def needs_pairs(self) -> bool:
        """Whether it reads nothing but pairs of texts."""
        return False

    @property
    def word_size(self) -> int:
        """Width of the word vectors, and of the vocabulary projection's tied weight."""
        return self.hidden_size

    @property
    def vocabulary_input_size(self) -> int:
        """Width of the vocabulary projection's input."""
        return self.word_size

    @property
    def pooled_size(self) -> int:
        """Width of the pooled state."""
        return self.hidden_size

    def dropout_rate(self, place: str) -> float:
        """Dropout probability of a part; ``head`` is the input of a task head's last layer."""
        return 0.0

    def conflicts(self) -> Iterator[Refusal]:
        """The rules of every kind, about its task heads and its padding token."""
        if self.pad_token_id >= self.vocab_size:
            yield "pad_token_id", f"{self.pad_token_id} is outside the vocabulary"
        for name, head in self.task_heads.items():
            yield from within(f"task_heads.{name}", self._conflicts_with_head(name, head))

    def _conflicts_with_head(self, name: str, head: TaskHeadConfig) -> Iterator[Refusal]:
        if not may_name_a_head(name):
            yield "", HEAD_NAMES
        if not head.per_token and not head.pooling and head.module is None:
            yield "pooling", "must be pooler, first or mean"
        if not head.transform:
            yield "transform", "must be none, tanh, relu, gelu or norm"
        if head.branches and (why := self.cannot(Ability.LEAVE_EARLY)):
            yield "branches", why
        if head.pooling == "pooler" and self.cannot(Ability.POOL):
            yield "pooling", "is pooler, and the model has none; set pooler, or read first"
        if why := self.lacks_states(head.layers):
            yield "layers", why

    def conflicts_without_heads(self) -> Iterator[Refusal]:
        """The rules of a kind whose decoder has no heads but the bias of its words."""
        if not self.mlm_head:
            yield "mlm_head", "must be true: it is the bias of the words that are generated"
        if self.pair_head:
            yield "pair_head", f"a model of kind {self.kind} has none; remove it"
        if self.task_heads:
            yield "task_heads", f"a model of kind {self.kind} has none; remove them"

    def lacks_states(self, layers: Sequence[int]) -> str:
        """Why a head cannot read the states after these layers; empty if it can."""
        absent = [layer for layer in layers if not -self.layers - 1 <= layer <= self.layers]
        return f"there is no hidden state {absent[0]} of {self.layers} layers" if absent else ""

    def with_dropout(self, rate: float) -> Self:
        """This configuration with a dropout of `rate` everywhere."""
        key: Any = {"dropout": rate}
        return dataclasses.replace(self, **key)

    def without_attention_dropout(self) -> Self:
        """This configuration without dropout of attention weights."""
        return self

    def with_layers(self, layers: int) -> Self:
        """This configuration with `layers` layers (`Ability.GROW`)."""
        key: Any = {"layers": layers}
        return dataclasses.replace(self, **key)

    def with_pair_head(self) -> Self:
        """This configuration with a pair head."""
        return dataclasses.replace(self, pair_head=True)

    def with_task_head(self, name: str, head: TaskHeadConfig) -> Self:
        """This configuration with `head`; keys left open read the pooled state unchanged."""
        pooling = head.pooling or ("" if head.per_token or head.module else "pooler")
        complete = dataclasses.replace(head, pooling=pooling, transform=head.transform or "none")
        return dataclasses.replace(self, task_heads={**self.task_heads, name: complete})

    def without_mlm_head(self) -> Self:
        """This configuration without a masked-LM head."""
        return dataclasses.replace(self, mlm_head=False)

    def cannot(self, ability: Ability) -> str:
        """Why the model lacks an ability, as a message for the key that needs it; else empty."""
        if ability in self.abilities:
            return ""
        return f"a model of kind {self.kind} cannot {ability.value}"

    def cannot_copy(self, layers: Sequence[int]) -> str:
        """Why no model can begin as these of its layers, counted from 0; empty if one can."""
        return ""

    @property
    def attention_width(self) -> int:
        """The numbers of a token's query, key or value, all heads together."""
        return self.hidden_size if self.heads else 0

    def window(self, number: int) -> int:
        """Tokens that layer `number`, from 1, attends to, both sides together; 0: all."""
        return 0

    def layer_units(self, part: str) -> list[int]:
        """The index of the weights, in this part of the layers, that each layer uses: [layers]."""
        return list(range(self.layers))

    def meaning(self) -> dict[str, object]:
        """The keys and what they imply; equal for models that compute the same from equal weights.

        Keys that only affect training, or have no effect here, are left out.
        """
        everything = dataclasses.asdict(self)
        return {key: value for key, value in everything.items() if key not in self.training_keys}

    @property
    def is_rotary(self) -> bool:
        """Whether its positions are rotary, and have no weights."""
        return False

    def with_rope_theta(self, base: float | None) -> Self:
        """This config with a base of rotary positions in its global layers; None: its own."""
        return self

    def with_tokens(self, tokens: Sequence[int]) -> Self:
        """This config with these tokens of its vocabulary alone, in this order."""
        keys: dict[str, Any] = {"vocab_size": len(tokens)}
        if self.pad_token_id >= 0:
            keys["pad_token_id"] = tokens.index(self.pad_token_id)
        return dataclasses.replace(self, **keys)

    @property
    def free_keys(self) -> tuple[str, ...]:
        """The keys that decide what is computed, but no shape: training may go on with others."""
        return ()

    def own_keys(self) -> tuple[str, ...]:
        """The keys in which it may differ from a model of which it begins with some parts."""
        return (*self.head_keys, *self.free_keys, "layers")

    def has_same_norm(self, other: ModelConfig) -> bool:
        """Whether the embedding norms have the same weights."""
        return True
