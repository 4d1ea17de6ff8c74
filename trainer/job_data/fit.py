"""Checks that the corpora and folders of a job exist and fit its models."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from data_pipeline import Corpus, open_corpora
from data_pipeline.augmentation.word_vectors import vector_size
from data_pipeline.reading.corpus import BUILD_AGAIN
from model import Ability, ModelConfig, ModelError, cannot_tile, read_config
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import section_of
from trainer.run_folder.folder import EXPORTED, RunFolder


def require_inputs(config: JobConfig) -> None:
    """Raise the DataError or TrainingError that would end the job, if it can be known here.

    Corpora behind URLs are not checked, because only the nodes may be able to reach them. Folders
    of weights are not checked once the run has a checkpoint, because it no longer reads them.
    """
    corpora = open_corpora(config.data, urls=False)
    require_fit(config, corpora)
    if not any(RunFolder.of(config).checkpoints.glob("step-*")):
        require_pretrained(config, corpora, set())


def require_fit(config: JobConfig, corpora: Mapping[str, Corpus]) -> None:
    """Raise unless every model knows the corpora's vocabulary and has room for their sequences."""
    for key, learner in config.learners.items():
        for corpus in corpora.values():
            section, read = section_of(key), config.read_by(learner, corpus)
            remedy = f"set {section}.model.vocab_size to as many"
            if config.data.has_examples:
                remedy += f", or name the model's tokenizer in {section}.tokenizer"
            read.require_vocabulary(learner.model.vocab_size, remedy=remedy)
    require_room(config)


def require_room(config: JobConfig) -> None:
    """Raise unless every model has room for the job's longest sequences."""
    longest = config.data.longest
    for key, learner in config.learners.items():
        most, folder = learner.model.longest_sequence, learner.init.pretrained
        if most is None or most >= longest:
            continue
        if folder and "max_positions" not in learner.model.free_keys:
            raise TrainingError(
                f"data.sequence_length: {longest} is longer than the {most} tokens for which "
                f"{folder} has positions; lower it to {most}"
            )
        first = learner.model.first_position
        offset = f" + {first}" if first else ""
        beside = f", beside model.base={_model_file(folder)}" if folder else ""
        raise TrainingError(
            f"{section_of(key)}.model.max_positions: must be at least {longest + first}, the "
            f"longest data.sequence_length{offset}{beside}; or lower that to {most}"
        )


def require_pretrained(
    config: JobConfig, corpora: Mapping[str, Corpus], restored: Set[str]
) -> None:
    """Raise unless the folder that a learner starts from has its architecture and the token ids.

    A file of word vectors must have the width of the model's. So a student that starts late is
    refused before the job begins. What `restored` learners began with is not checked: it may be
    gone.
    """
    for key, learner in config.learners.items():
        if key in restored:
            continue
        section, init = section_of(key), learner.init
        _require_vectors(section, learner)
        forms = [config.read_by(learner, corpus) for corpus in corpora.values()]
        if init.tile is not None:
            _require_smaller(section, init.tile, learner.architecture, forms)
        if not init.pretrained:
            continue
        if not Path(init.pretrained).is_dir():
            raise TrainingError(
                f"{section}.init.pretrained: {init.pretrained}: no such folder; name the folder of "
                "a model: none is downloaded"
            )
        named = f"name the model's in {section}.tokenizer, or in data.tokenizer"
        remedy = named if config.data.has_examples else BUILD_AGAIN
        for corpus in forms:
            corpus.require_vocabulary(learner.model.vocab_size, Path(init.pretrained), remedy)
        if not init.random:
            _require_same_architecture(section, init, learner.architecture)


def _require_vectors(section: str, learner: LearnerConfig) -> None:
    """Raise unless the vectors with which a learner's words begin have the size of its own."""
    file, size = learner.init.word_vectors, learner.model.word_size
    if file is not None and (theirs := vector_size(Path(file))) != size:
        raise TrainingError(
            f"{section}.init.word_vectors: {file} has vectors of {theirs} numbers, those of the "
            f"model have {size}; name another file, or change model.hidden_size"
        )


def _require_smaller(
    section: str, folder: str, config: ModelConfig, corpora: Sequence[Corpus]
) -> None:
    """Raise unless the model in the folder is a smaller one that can fill one of `config`."""
    try:
        theirs = read_config(folder)
    except ModelError as error:
        raise TrainingError(f"{section}.init.tile: {error}") from error
    if why := cannot_tile(config, theirs):
        raise TrainingError(f"{section}.init.tile: {folder}: {why}")
    for corpus in corpora:
        corpus.require_vocabulary(config.vocab_size, Path(folder))


def _require_same_architecture(section: str, init: InitConfig, config: ModelConfig) -> None:
    """Raise unless the model in the folder is one of `config`, but for its heads."""
    folder = str(init.pretrained)
    try:
        theirs = read_config(folder, config.kind)
    except ModelError as error:
        raise TrainingError(f"{section}.init.pretrained: {error}") from error
    if init.layers is not None:
        theirs = _with_layers(f"{section}.init.layers", theirs, init.layers)
    ours = config.meaning()
    for key, value in theirs.meaning().items():
        free = (*config.head_keys, *config.free_keys)
        if key not in free and ours.get(key) != value:
            raise TrainingError(
                f"{section}.model.{key}: is {ours.get(key)}, but {folder} has {value}; "
                f"set {section}.model.base={_model_file(folder)}"
            )


def _model_file(folder: str) -> str:
    """The file that describes the model in a folder; it may have to be written first."""
    file = Path(folder) / EXPORTED[-1]
    return str(file) if file.exists() else f"{file}, which `tandem import` writes"


def _with_layers(key: str, config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The model of only these `layers`. Raises TrainingError where it cannot be made of them."""
    if absent := [layer for layer in layers if not 0 <= layer < config.layers]:
        has = f"the model has 0 to {config.layers - 1}; name some of these, or null for all"
        raise TrainingError(f"{key}: there is no layer {absent[0]}; {has}")
    if why := config.cannot(Ability.GROW) or config.cannot_copy(layers):
        raise TrainingError(f"{key}: {why}")
    return config.with_layers(len(layers))
