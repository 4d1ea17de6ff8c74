"""The schema of a learner's initial weights: the `init` section of a learner in a job YAML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from configs.rules import INDEX, NOT_EMPTY, PATH, Doc, OneOf
from configs.section import Refusal, Section


@dataclass
class InitConfig(Section):
    """A learner's initial weights; random when nothing is set."""

    teacher_layers: Annotated[
        list[int] | None,
        Doc(
            "Initialise a student's layers from these layers of its teacher, counted from"
            " 0, when it starts. In a pre-norm model with a norm of the embeddings the "
            "first must be 0."
        ),
    ] = None
    teacher_embeddings: Annotated[
        bool, Doc("Initialise embeddings and heads from the teacher's when the student starts.")
    ] = False
    pretrained: Annotated[
        str | None, PATH, NOT_EMPTY, Doc("A folder in Hugging Face format, or an export.")
    ] = None
    tile: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        Doc(
            "A folder with a smaller model, whose tensors and layers are repeated to fill this "
            "model (ModernBERT-large)."
        ),
    ] = None
    word_vectors: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        Doc(
            "A file in GloVe's or word2vec's text form. A token that begins a word starts with the "
            "vector of the word that it spells; everything else is random."
        ),
    ] = None
    random: Annotated[
        bool,
        Doc("Read only the model and the tokenizer of `pretrained`; the weights are random."),
    ] = False
    layers: Annotated[
        list[int] | None,
        Doc(
            "Take only these layers of `pretrained`, counted from 0, in this order. In a "
            "pre-norm model with a norm of the embeddings the first must be 0."
        ),
    ] = None
    heads: Annotated[
        str,
        OneOf("loaded", "new"),
        Doc(
            "new: the heads of tasks in `pretrained` are left out, and the heads of this job "
            "begin with random weights."
        ),
    ] = "loaded"
    labels: Annotated[
        list[str] | None,
        Doc(
            "The examples' names for the labels of the head in `pretrained`, in the head's "
            "order, if its config.json names them differently. null: the names in config.json; "
            "if it has none (LABEL_0, LABEL_1), the examples' labels, sorted."
        ),
    ] = None
    seed: Annotated[
        int | None,
        INDEX,
        Doc(
            "The seed of random weights: equal models with equal seeds get equal weights. null: "
            "derived from the job's seed and the learner's name."
        ),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        embeddings = self.teacher_embeddings or None
        origins = (self.teacher_layers, embeddings, self.pretrained, self.tile, self.word_vectors)
        if sum(origin is not None for origin in origins) > 1:
            yield (
                "pretrained",
                "set one of this, tile, teacher_layers, teacher_embeddings and word_vectors",
            )
        if self.random and self.pretrained is None:
            yield "random", "is for pretrained, and weights are random without it; remove it"
        for key in self.changed("layers", "heads", "labels") if self.pretrained is None else ():
            yield key, "is for pretrained; set that, or remove this"
        if self.random and self.heads == "new":
            yield "heads", "all weights are random; remove it"
        if self.labels is not None and len({*self.labels}) < max(2, len(self.labels)):
            yield "labels", "must name at least two labels, each once"

    @property
    def embeddings_only(self) -> bool:
        """Whether the layers begin with random weights while other parts do not."""
        return self.teacher_embeddings or self.word_vectors is not None

    @property
    def weights(self) -> str | None:
        """The folder whose weights the learner begins with; None: none, though it may be read."""
        return None if self.random else self.pretrained
