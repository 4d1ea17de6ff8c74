"""Between our models and those of `transformers`: configurations, states and task heads."""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from configs import ConfigError, typed
from model.config import EncoderConfig
from model.errors import ModelError
from model.hugging_face import task_heads
from model.hugging_face.albert import ALBERT
from model.hugging_face.bert import BERT, ROBERTA
from model.hugging_face.deberta import DEBERTA
from model.hugging_face.distilbert import DISTILBERT
from model.hugging_face.electra import ELECTRA
from model.hugging_face.eurobert import EUROBERT
from model.hugging_face.family import Family, Inexpressible
from model.hugging_face.mobilebert import MOBILEBERT
from model.hugging_face.modernbert import MODERNBERT
from model.hugging_face.neobert import NEOBERT
from model.hugging_face.nomic_bert import NOMIC_BERT
from model.hugging_face.weights import other_projection, refuse_extra_weights, tensor_names
from model.initialisation import skeleton
from model.model_config import ModelConfig
from model.task_head_config import TaskHeadConfig

Config = TypeVar("Config", bound=ModelConfig)
_log = logging.getLogger(__name__)
_TRANSFORM = ".transform."
FAMILIES: tuple[Family, ...] = (
    *(BERT, ROBERTA, DISTILBERT, ALBERT),
    *(MOBILEBERT, MODERNBERT, EUROBERT, ELECTRA, NOMIC_BERT, NEOBERT, DEBERTA),
)
_ALIASES = {"xlm-roberta": ROBERTA, "camembert": ROBERTA}  # the same model under other names
_WRAPPER = "module."  # of torch's DataParallel and DistributedDataParallel
# Keys that BERT's first checkpoints have, which say neither `model_type` nor `architectures`.
_BERT_KEYS = {"hidden_act", "hidden_size", "num_hidden_layers", "type_vocab_size", "vocab_size"}


def with_task_head(config: Config, name: str, head: TaskHeadConfig) -> Config:
    """The model with this head too, in the form that `transformers` has for its architecture.

    What `head` leaves open (`pooling`, `transform`) is chosen so. The model gets a pooler where the
    head reads one, and loses one that no head reads: `transformers` has none then, and it would
    never be trained. Another kind of model than an encoder has forms of its own.
    """
    if not isinstance(config, EncoderConfig):
        return config.with_task_head(name, head)
    fitted = task_heads.in_form(head, nearest_family(config).forms.get(head.kind))
    heads = {**config.task_heads, name: fitted}
    pooler = config.pooler
    if not any(other.pooling == "pooler" for other in heads.values()):
        pooler = config.pooler if config.pair_head else "none"
    elif pooler == "none":
        pooler = "tanh"
    return replace(config, task_heads=heads, pooler=pooler)


def with_head_alone(
    config: Config, name: str, state: Mapping[str, Tensor]
) -> tuple[Config, dict[str, Tensor]]:
    """The model with this task head and no other, and its part of the `state`.

    `transformers` has a class for it.
    """
    bare = replace(config, task_heads={}, mlm_head=False, pair_head=False)
    alone = with_task_head(bare, name, config.task_heads[name])
    names = set(tensor_names(alone))
    return alone, {key: tensor for key, tensor in state.items() if key in names}


def first_weights(
    config: ModelConfig, source: ModelConfig, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of a pre-trained or fine-tuned `source` with which a model of `config` begins.

    A task head that `config` has otherwise is left out: another task's, or one of other labels. But
    the transform of a head begins with the tensors that `transformers` stores under its names, as
    the class of `transformers` does. In ModernBERT the masked-LM head's transform has these names.
    """
    changed = [
        f"task_heads.{name}."
        for name, head in source.task_heads.items()
        if config.task_heads.get(name) != head
    ]
    weights = {
        name: tensor for name, tensor in state.items() if not name.startswith(tuple(changed))
    }
    return _transforms(config, source, state) | weights


def with_fitting_heads(
    config: Config, source: Config, state: Mapping[str, Tensor], *, renames: bool
) -> tuple[Config, dict[str, Tensor]]:
    """The `source` and its `state` with heads under the names of those heads of `config` they fit.

    A model that `transformers` has fine-tuned does not name its task; without `renames`, a head is
    compared with that of its own name alone. Labels in another order are put into that of `config`.
    """
    heads, tensors = dict(source.task_heads), dict(state)
    for name, ours in config.task_heads.items():
        others = [other for other in heads if other not in config.task_heads] if renames else []
        for other in (other for other in (name, *others) if other in heads):
            order = task_heads.label_order(heads[other], ours)
            if heads.get(name) == ours or order is None:
                continue
            del heads[other]
            heads[name] = ours
            tensors = _renamed(tensors, f"task_heads.{other}.", f"task_heads.{name}.", order)
    return replace(source, task_heads=heads), tensors


def _renamed(
    tensors: Mapping[str, Tensor], prefix: str, fresh: str, order: list[int]
) -> dict[str, Tensor]:
    """The tensors with `fresh` for `prefix`, and their output layer's rows in this order."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{prefix}linear.") and order:
            tensor = tensor[order]
        is_of_head = name.startswith(prefix)
        renamed[fresh + name.removeprefix(prefix) if is_of_head else name] = tensor
    return renamed


def _transforms(
    config: ModelConfig, source: ModelConfig, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of `source` that have a name of `config`'s transforms in `transformers`."""
    if not (isinstance(config, EncoderConfig) and isinstance(source, EncoderConfig)):
        return {}
    theirs = {name: state[ours] for ours, name in _names_in_transformers(source, state).items()}
    shapes = {name: tensor.shape for name, tensor in skeleton(config).state_dict().items()}
    transforms = [name for name in shapes if name.startswith("task_heads.") and _TRANSFORM in name]
    return {
        ours: theirs[name]
        for ours, name in _names_in_transformers(config, transforms).items()
        if name in theirs and theirs[name].shape == shapes[ours]
    }


def _names_in_transformers(config: EncoderConfig, names: Iterable[str]) -> dict[str, str]:
    """The names of `Family.their_names`, without tensors for which `transformers` has no place."""
    family = nearest_family(config)
    translated: dict[str, str] = {}
    for name in names:
        with suppress(Inexpressible):
            translated |= family.their_names(config, [name])
    return translated


def nearest_family(config: EncoderConfig) -> Family:
    """The `transformers` architecture that is closest to a configuration."""
    if config.embedding_projection == "word" or config.bottleneck_size:
        return MOBILEBERT
    if config.positions == "rotary":
        if config.norm_placement == "post":
            return NOMIC_BERT
        return EUROBERT if config.norm == "rms_norm" else MODERNBERT
    if config.positions == "relative":
        return DEBERTA
    if config.embedding_projection == "sum" or config.sharing != "none":
        return ELECTRA if config.sharing == config.pooler == "none" else ALBERT
    if config.positions == "learned_after_padding":
        return ROBERTA
    if not config.segment_types:
        return DISTILBERT
    is_electra = config.head_activation not in ("", config.activation) or any(
        head.transform == "gelu" for head in config.task_heads.values()
    )
    return ELECTRA if is_electra else BERT


def to_transformers(
    config: ModelConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors in the format of `transformers`.

    Raises Inexpressible, naming what does not fit.
    """
    if (exchanged := config.for_transformers(state)) is not None:
        return exchanged
    if not isinstance(config, EncoderConfig):
        raise Inexpressible(f"transformers has no class for a model of kind {config.kind}")
    family = nearest_family(config)
    theirs = family.write(config) | {"model_type": family.model_type, "dtype": "float32"}
    theirs |= _heads_of_a_fine_tuned(config, family, theirs["architectures"][0])
    names = family.their_names(config, state)
    _require_same_meaning(config, _read(family, theirs, set(names.values())), family)
    return theirs, family.to_theirs({names[name]: tensor for name, tensor in state.items()})


def _heads_of_a_fine_tuned(
    config: EncoderConfig, family: Family, architecture: str
) -> dict[str, Any]:
    """Adjust `architectures` for a model without a masked-LM head, and add its task head."""
    if not config.task_heads:
        ending = family.pair_class if config.pair_head else "Model"
        return {} if config.mlm_head else {"architectures": [_class(architecture, ending)]}
    if len(config.task_heads) > 1:
        raise Inexpressible("transformers has one task head in a model")
    if config.mlm_head or config.pair_head:
        raise Inexpressible("transformers has no class with a task head and pre-training heads")
    ((name, head),) = config.task_heads.items()
    if head.branches:
        raise Inexpressible("transformers has no class with a classifier after every layer")
    if head.activation:
        raise Inexpressible("transformers has no class with an activation before the output layer")
    if head.numbers:
        raise Inexpressible("transformers has no class that reads numbers beside the text")
    form = family.forms.get(head.kind)
    vector = task_heads.write_vector_head(name, head)
    if vector is not None:
        return vector | {"architectures": [_class(architecture, "Model")]}
    if form is None:
        raise Inexpressible(f"transformers has no class for a head of kind {head.kind}")
    if head.layers:
        raise Inexpressible("transformers has no class whose head reads chosen layers")
    heads = task_heads.write_task_head(name, head, form)
    ending = task_heads.ENDINGS[head.kind] if head.kind in family.heads else "Model"
    return heads | {"architectures": [_class(architecture, ending)]}


def _class(architecture: str, ending: str) -> str:
    """Another class of the same family: ("BertForMaskedLM", "Model") -> "BertModel"."""
    return architecture.partition("For")[0] + ending


def _require_same_meaning(config: EncoderConfig, read_back: EncoderConfig, family: Family) -> None:
    """Raise Inexpressible if any key has changed its meaning after writing and reading back."""
    ours, theirs = config.meaning(), read_back.meaning()
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise Inexpressible(
                f"transformers' {family.model_type} cannot express {key}: {getattr(config, key)!r}"
            )


def from_transformers(
    theirs: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """The configuration and the state of what `transformers` wrote.

    A head that is not read is named in a warning. Raises ModelError, naming a key or a tensor, for
    what is no model of the families.
    """
    if all(name.startswith(_WRAPPER) for name in weights):
        weights = {name.removeprefix(_WRAPPER): tensor for name, tensor in weights.items()}
    modern = {_modern_name(name): tensor for name, tensor in weights.items()}
    family = _family_of(theirs, modern)
    tensors = family.to_ours(family.cut(theirs, _with_prefix(family, modern)))
    config = _read(family, theirs, tensors)
    refuse_extra_weights(
        config,
        tensors,
        lambda candidate: family.their_names(candidate, tensor_names(candidate)).values(),
    )
    names = family.their_names(config, tensor_names(config))
    missing = [name for name in names.values() if name not in tensors]
    if missing:
        raise ModelError(f"the weights have no {missing[0]}; import a whole checkpoint")
    if note := task_heads.unread_head(theirs, tensors, family.forms):
        _log.warning("%s", note)
    state = {ours: tensors.pop(name) for ours, name in names.items()}
    if config.mlm_head and (note := other_projection(state, tensors)):
        _log.warning("%s", note)
    return config, state


def is_known(theirs: Mapping[str, Any]) -> bool:
    """Whether a config.json names a family, Tandem's own format or nothing."""
    return theirs.get("model_type") in (None, "tandem", *_families())


def _families() -> dict[Any, Family]:
    return {family.model_type: family for family in FAMILIES} | _ALIASES


def _family_of(theirs: Mapping[str, Any], names: Collection[str]) -> Family:
    """The family that config.json names; without `model_type`, the one whose tensors are there."""
    known = _families()
    model_type = theirs.get("model_type")
    if model_type is None:
        for family in FAMILIES:
            if _word_embedding(family) in names:
                return family
        is_bare = _word_embedding(BERT).removeprefix("bert.") in names
        others = {"architectures", "embedding_size"} & theirs.keys()
        if (
            is_bare
            and theirs.keys() >= _BERT_KEYS
            and not others
            and not theirs.get("pad_token_id")
        ):
            return BERT
    if model_type not in known:
        raise ModelError(
            f"model_type: {model_type!r} is not one of {', '.join(sorted(known))}; import a "
            "checkpoint of one of these, describe its class (docs/architectures.md), or, for a "
            "frozen teacher, pip install 'tandem-distill[hf]'"
        )
    return known[model_type]


def _word_embedding(family: Family) -> str:
    """The family's name of the word embedding."""
    (name,) = family.their_names(EncoderConfig(), ["embeddings.word.weight"]).values()
    return name


def _modern_name(name: str) -> str:
    """Rename norm parameters: the oldest checkpoints have TensorFlow's names."""
    if name.endswith(".gamma"):
        return name.removesuffix("gamma") + "weight"
    return name.removesuffix("beta") + "bias" if name.endswith(".beta") else name


def _with_prefix(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the prefix that `transformers` omits when it saves an encoder without heads."""
    word = _word_embedding(family)
    prefix, _, rest = word.partition(".")
    bare = rest in tensors and word not in tensors
    return {f"{prefix}.{name}" if bare else name: tensor for name, tensor in tensors.items()}


def _read(family: Family, theirs: Mapping[str, Any], names: Collection[str]) -> EncoderConfig:
    """The configuration, without a masked-LM head if none of that head's tensors is there."""
    values = family.read(theirs, names)
    heads = task_heads.read_task_heads(theirs, names, family.forms)
    if heads:
        plain = {name: dataclasses.asdict(head) for name, head in heads.items()}
        values |= {"task_heads": plain, "mlm_head": False}
        return configuration(values, EncoderConfig)
    config = configuration(values, EncoderConfig)
    expected = family.their_names(config, tensor_names(config))
    head = [name for ours, name in expected.items() if ours.startswith("head.")]
    has_head = not head or any(name in names for name in head)
    return config if has_head else replace(config, mlm_head=False)


def configuration(values: Mapping[str, Any], schema: type[Config]) -> Config:
    """The configuration from values of a file. Raises ModelError, naming a value that is wrong."""
    try:
        return typed.build(values, schema)
    except ConfigError as error:
        raise ModelError(str(error)) from error
