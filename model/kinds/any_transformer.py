"""Any encoder of `transformers`, by the code of `transformers`, as a frozen teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.rules import OneOf, Range, Unit, positive
from configs.section import Refusal
from model.documents import AttentionMask, Padded
from model.errors import ModelError
from model.heads import OutputOrder, ProjectionParts, TaskHead, mean_over_tokens
from model.hugging_face.library import (
    PROBED,
    architecture,
    auto_class,
    config_class,
    forget_positions,
    is_masked_lm,
    library_errors,
    longest_sequence,
    name_once,
    probe,
    probed,
    task_heads_in,
)
from model.model_config import WIDTH, Ability, ModelConfig, PaddingToken, VocabularySize
from model.protocol import NOTHING, Capture, Encoded, Features, Model, register
from model.task_head_config import VECTOR, WIDEST, TaskHeadConfig

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

_SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "layers"}
_TOLERANCE = 1e-4


@dataclass
class TransformersConfig(ModelConfig):
    """Any encoder that `AutoModel` or `AutoModelForMaskedLM` of `transformers` can read.

    It can only be a frozen teacher, which gives predictions and hidden states. Models of
    `AutoModelForSequenceClassification` and `AutoModelForTokenClassification` are teachers for
    tasks. Every key comes from the folder in `init.pretrained`. Needs `tandem-distill[hf]`.
    """

    # Students then read predictions alone; the library computes the whole last layer all the same.
    abilities: ClassVar[frozenset[Ability]] = frozenset({Ability.MASKED_ONLY})
    reads_folders: ClassVar[bool] = True
    is_trainable: ClassVar[bool] = False

    kind: Annotated[str, OneOf("transformers"), "The kind of model."] = field(
        default="transformers", kw_only=True
    )
    config: Annotated[dict[str, Any], "The folder's config.json."] = field(default_factory=dict)
    vocab_size: VocabularySize = 30522
    hidden_size: Annotated[int, WIDTH, "Width of the hidden states."] = 768
    layers: Annotated[
        int,
        Range(0, 4096),
        "Number of layers; 0 where they do not each give a state for every token.",
    ] = 12
    token_states: Annotated[bool, "Whether the last layer gives a state for every token."] = True
    factored_logits: Annotated[
        bool,
        "Whether the logits over the vocabulary are one product and a bias, which the losses "
        "compute at masked positions alone. Otherwise the library computes all of them.",
    ] = True
    max_positions: Annotated[
        int | None, WIDTH, Unit("tokens"), "The longest sequence; null: any length."
    ] = 512
    segment_types: Annotated[int, Range(0, WIDEST), "Number of segment embeddings; 0: none."] = 2
    pad_token_id: PaddingToken = 0
    initializer_range: Annotated[
        float, positive(100.0), "Standard deviation of projections in the losses."
    ] = 0.02

    def conflicts(self) -> Iterator[Refusal]:
        if not self.config:
            yield "config", "reads a folder; set init.pretrained to a folder of transformers"
        if not self.token_states and any(head.kind == VECTOR for head in self.task_heads.values()):
            yield "task_heads", "a vector needs a state for every token, which the model lacks"
        yield from super().conflicts()

    @property
    def longest_sequence(self) -> int | None:
        return self.max_positions

    @property
    def reads_segments(self) -> bool:
        return self.segment_types > 1

    @property
    def description(self) -> str:
        layers = f"{self.layers} layers of " if self.layers else ""
        return f"{architecture(self.config)} of {layers}width {self.hidden_size}"

    def with_dropout(self, rate: float) -> Self:
        """This configuration unchanged: the model is never trained, and has no dropout."""
        return self

    def with_tokens(self, tokens: Sequence[int]) -> Self:
        """This configuration with these tokens alone, also in the folder's config.json."""
        selected = super().with_tokens(tokens)
        keys = {"vocab_size": len(tokens)}
        if selected.pad_token_id >= 0:
            keys["pad_token_id"] = selected.pad_token_id
        return replace(selected, config={**self.config, **keys})

    def with_task_head(self, name: str, head: TaskHeadConfig) -> Self:
        """This configuration with this head; the library decides what it reads, but of a vector."""
        if head.kind == VECTOR:
            return super().with_task_head(name, head)
        pooling = "" if head.per_token else "first"
        fitted = replace(head, pooling=pooling, transform="none")
        return replace(self, task_heads={**self.task_heads, name: fitted})

    @classmethod
    def reads(cls, theirs: Mapping[str, Any]) -> bool:
        """Whether the installed `transformers` has a class for this config.json."""
        try:
            from transformers import CONFIG_MAPPING
        except ImportError:
            return False
        return theirs.get("model_type") in list(CONFIG_MAPPING)

    @classmethod
    def read_folder(cls, folder: Path, theirs: Mapping[str, Any]) -> tuple[Self, dict[str, Tensor]]:
        """The configuration and the state, float32, of a folder with this config.json."""
        with library_errors(theirs):
            known = config_class(theirs)()
        if known.is_encoder_decoder or not all(hasattr(known, size) for size in _SIZES):
            raise ModelError(f"model_type: {theirs['model_type']} is no encoder of text")
        with library_errors(theirs):
            original, loading = auto_class(theirs).from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        if missing := sorted(loading["missing_keys"]):
            raise ModelError(f"the weights have no {missing[0]}; name a whole checkpoint")
        last, output = probe(original.eval(), theirs)
        config = cls._of(original, theirs, last, output.hidden_states or ())
        model = _loaded(config, original)
        if config.mlm_head and not _gives(model, output.logits):
            config = replace(config, factored_logits=False)
            model = _loaded(config, original)
        return config, model.state_dict()

    def for_transformers(
        self, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The folder's config.json, and the tensors under the library's names."""
        model = TransformersModel(self)
        model.load_state_dict(state)
        return dict(self.config), dict(model.library.state_dict())

    @classmethod
    def _of(
        cls, original: Any, theirs: Mapping[str, Any], last: Tensor, states: Sequence[Tensor]
    ) -> Self:
        known = original.config
        padding = getattr(known, "pad_token_id", None)
        sizes = {ours: getattr(known, name) for name, ours in _SIZES.items()}
        shape = (1, PROBED, sizes["hidden_size"])
        if [tuple(state.shape) for state in states] != [shape] * (sizes["layers"] + 1):
            sizes["layers"] = 0
        heads, has_words = task_heads_in(theirs), is_masked_lm(theirs)
        if last.shape != shape:
            if not (heads or has_words):
                raise ModelError(
                    f"model_type: {theirs['model_type']} does not give states of {shape[-1]} "
                    "numbers per token"
                )
            sizes["layers"] = 0
        return cls(
            config=dict(theirs),
            **sizes,
            max_positions=longest_sequence(original),
            segment_types=getattr(known, "type_vocab_size", None) or 0,
            pad_token_id=-1 if padding is None or padding >= known.vocab_size else padding,
            token_states=last.shape == shape,
            factored_logits=not has_words or original.get_output_embeddings() is not None,
            mlm_head=has_words,
            task_heads=heads,
        )


@register(TransformersConfig)
class TransformersModel(Model):
    """A model of `transformers` behind the protocol, without queries, keys and values.

    Its layers are `encoder`, and what the library has above them belongs to the masked-LM head or
    to that of the task. The projection to the vocabulary hands its input on, as losses do that part
    (`factored_logits`).
    """

    config: TransformersConfig
    encoder: nn.Module
    library: Any  # the library's model; its modules are ours too, by other names

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__()
        self.config = config
        theirs = config.config
        with library_errors(theirs):
            known = config_class(theirs).from_dict(dict(theirs))
            library = auto_class(theirs).from_config(known, dtype=torch.float32)
        if is_masked_lm(theirs) and not config.mlm_head:  # a teacher of vectors
            library = library.base_model
        forget_positions(library)
        object.__setattr__(self, "library", library)
        names = name_once(library, copy=config.mlm_head and not config.factored_logits)
        above = dict(library.named_children())
        self.encoder = library.base_model
        above = {name: part for name, part in above.items() if part is not self.encoder}
        self.pooler, self.pair_head, self.head = None, None, None
        if config.mlm_head:
            self.head = nn.ModuleDict(above)
        if config.mlm_head and config.factored_logits:
            projection = library.get_output_embeddings()
            projection.forward = nn.Identity().forward
            self._projection = names[projection.weight], names.get(projection.bias)
        self.task_heads = nn.ModuleDict(
            {
                name: TaskHead(config, head) if head.kind == VECTOR else _LibraryHead(head, above)
                for name, head in config.task_heads.items()
            }
        )
        self._states: Any = None
        self.encoder.register_forward_hook(self._keep)

    def encode(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        capture: Capture = NOTHING,
        rows: Tensor | None = None,
    ) -> Encoded:
        config = self.config
        if not config.token_states:
            raise ModelError(f"{architecture(config.config)} gives no state for every token")
        self._call(self.encoder, input_ids, segment_ids, attention_mask, capture)
        return self._encoded(capture).at(rows)

    def features(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: AttentionMask | Padded | None = None,
        masked_positions: Tensor | None = None,
        capture: Capture = NOTHING,
        numbers: Tensor | None = None,
    ) -> Features:
        """The features, as in `Model.features`; the head's transform runs at every position."""
        mask = self.readable(attention_mask)
        output = self._call(self.library, input_ids, segment_ids, mask, capture)
        encoded, projected, everywhere = self._encoded(capture), None, None
        if self.head is not None:
            projected = everywhere = output.logits.flatten(0, 1)
        if projected is not None and masked_positions is not None:
            projected = projected.index_select(0, masked_positions)
        return Features(
            vocabulary_input=projected,
            hidden_states=encoded.hidden_states,
            attention={},
            last_hidden_state=encoded.last_hidden_state if self.config.token_states else None,
            pooled=None,
            heads={
                name: self._head(name, output, encoded.last_hidden_state, mask)
                for name in capture.heads
            },
            all_positions=everywhere if capture.all_positions else None,
        )

    def _head(
        self, name: str, output: Any, states: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """The output of a task head: of the library's own, or the vector of each text."""
        head, module = self.config.task_heads[name], self.task_heads[name]
        if head.kind != VECTOR:
            return module(output.logits)
        first = head.pooling == "first"
        return module(states[:, 0] if first else mean_over_tokens(states, attention_mask))

    def word_vectors(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.library.get_input_embeddings().weight)

    def projection_parts(self) -> ProjectionParts:
        if not self.config.factored_logits:
            return ProjectionParts(None, None)
        weight, bias = self._projection
        parameter = self.library.get_parameter
        return ProjectionParts(parameter(weight), None if bias is None else parameter(bias))

    def fill(
        self, module: nn.Module, key: str, name: str, parameter: Tensor, generator: torch.Generator
    ) -> None:
        if parameter.ndim == 1:
            parameter.fill_(float(key != "bias"))
        else:
            parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    def flops_per_token(self, length: int, masked_fraction: float) -> float:
        """Two for each weight of a matrix, four for each attended token; words are looked up."""
        config, words = self.config, self.library.get_input_embeddings().weight
        tables = {
            module.weight for module in self.library.modules() if isinstance(module, nn.Embedding)
        }
        if (projection := self.library.get_output_embeddings()) is not None:
            tables.add(projection.weight)  # of size `words`, whether tied to it or not
        weights = {*self.library.parameters()} - tables
        matrices = sum(weight.numel() for weight in weights if weight.ndim > 1)
        attention = 4 * config.layers * config.hidden_size * length
        projected = masked_fraction if config.factored_logits else 1.0
        return 2 * matrices + attention + projected * 2 * words.numel() * config.mlm_head

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note the result of the layers inside a model with a head, until `_encoded` reads it."""
        self._states = output

    def _encoded(self, capture: Capture) -> Encoded:
        output, self._states = self._states, None
        states = {layer: output.hidden_states[layer] for layer in capture.hidden_states}
        return Encoded(output.last_hidden_state, states, {})

    def _call(
        self,
        module: nn.Module,
        input_ids: Tensor,
        segment_ids: Tensor | None,
        attention_mask: Tensor | None,
        capture: Capture,
    ) -> Any:
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if attention_mask is not None and attention_mask.ndim == 1:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            given["attention_mask"] = (places < attention_mask[:, None]).long()
        if segment_ids is not None and self.config.reads_segments:
            given["token_type_ids"] = segment_ids
        return module(**given, output_hidden_states=bool(capture.hidden_states), return_dict=True)


class _LibraryHead(nn.Module):
    """The library's parts above the layers, with outputs in the order of the task's labels."""

    def __init__(self, head: TaskHeadConfig, library: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.library = nn.ModuleDict(library)
        self.linear = OutputOrder(head.outputs)

    def forward(self, logits: Tensor) -> Tensor:
        return self.linear(logits)


def _loaded(config: TransformersConfig, original: nn.Module) -> TransformersModel:
    """Our reading of the library's model, with its weights."""
    model = TransformersModel(config)
    model.library.load_state_dict(original.state_dict(), strict=False)
    return model.eval()


@torch.no_grad()
def _gives(model: TransformersModel, logits: Tensor) -> bool:
    """Whether the model has these logits in a trial pass."""
    try:
        ours = model(**probed(model.config.vocab_size)).logits
    except RuntimeError:  # the projection's weight is a part of what the library reads
        return False
    return torch.allclose(logits, ours, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
