"""The analysis of a model folder: its heads' patterns, their worth, the model without the worst."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import OptionError
from data_pipeline.tokenization.tokenizer import load
from model import (
    Model,
    ModelError,
    from_pretrained,
    model_card,
    save_pretrained,
    write_config,
    written_whole,
)
from model.attention_heads import Head, disabled, heads_of, prune
from model.hugging_face.folder import special_ids_in
from trainer.analysis import maps
from trainer.analysis.examples import Examples, delimiters
from trainer.analysis.linguistic import KINDS, LinguisticAttention
from trainer.analysis.maps import ExampleMaps, HeadPatterns
from trainer.scoring.columns import Column
from trainer.task_facts import FILE, TaskFacts, write_facts

Scores = Mapping[str, float]
Scorer = Callable[[Model], Scores]


@dataclass(frozen=True)
class Effect:
    """The scores without some heads of one set of attention weights: one, or all of them."""

    heads: tuple[Head, ...]
    scores: Scores


@dataclass(frozen=True)
class Effects:
    """The scores of the whole model, without each head, and without all heads of a layer.

    column: the score by which heads are ranked. layers: by set of weights, the layers (from 1) that
    use it.
    """

    column: Column
    whole: Scores
    single: Sequence[Effect]
    all_heads: Sequence[Effect]
    layers: Sequence[Sequence[int]]

    def change(self, scores: Scores) -> float | None:
        """The ranking score less that of the whole model; None where it is undefined."""
        name = self.column.name
        if name not in scores or name not in self.whole:
            return None
        return scores[name] - self.whole[name]

    def loss(self, effect: Effect) -> float:
        """How much worse the model is without the heads; an undefined score is the worst."""
        change = self.change(effect.scores)
        if change is None:
            return float("inf")
        return -change if self.column.higher_is_better else change

    def worst(self, count: int) -> list[Head]:
        """The heads without which the model is best, the first of them by layer among equals."""
        ranked = sorted(self.single, key=self.loss)
        return [effect.heads[0] for effect in ranked[:count]]


def effects_of_heads(model: Model, score: Scorer, column: Column, way: str) -> Effects:
    """Disable each head alone, and each layer's together, and `score` the model every time."""

    def without(heads: Sequence[Head]) -> Effect:
        with disabled(model, heads, way):
            return Effect(tuple(heads), score(model))

    sets = heads_of(model)
    units = model.config.layer_units("attention")
    return Effects(
        column,
        score(model),
        [without([head]) for heads in sets for head in heads],
        [without(heads) for heads in sets],
        [
            [n for n, unit in enumerate(units, start=1) if unit == number]
            for number in range(len(sets))
        ],
    )


@dataclass(frozen=True)
class Pruned:
    """The model without some heads, as its folder scores."""

    heads: Sequence[Head]
    folder: Path
    scores: Scores


@dataclass(frozen=True)
class Analysis:
    """The findings about the model in `folder`, on `examples` as named by the user.

    way: how heads were disabled. scored: what the scores are of, in words.
    """

    folder: str
    examples: str
    way: str
    scored: str
    columns: Sequence[Column]
    patterns: HeadPatterns
    effects: Effects
    example: ExampleMaps
    pruned: Pruned | None = None
    linguistic: LinguisticAttention | None = None


def with_attention(folder: Path, device: torch.device, pruned: int) -> Model:
    """A folder's model. Raises ModelError without attention, OptionError for too few heads."""
    model = from_pretrained(folder).to(device)
    try:
        count = sum(map(len, heads_of(model)))
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    if pruned >= count:
        raise OptionError(f"--prune {pruned}: {folder} has {count} heads; leave it one at least")
    return model


def analyze(model: Model, folder: Path, named: str, examples: Examples, way: str) -> Analysis:
    """The patterns of the heads, and the scores without each; heads are disabled in this `way`."""
    device = next(model.parameters()).device
    table = torch.from_numpy(delimiters(folder, model)).to(device)
    patterns = maps.head_patterns(model, examples.maps(), table)
    effects = effects_of_heads(model, examples.score, examples.column, way)
    tokenizer = load(folder)[0]
    example = maps.example_maps(
        model, next(examples.maps()), lambda token: tokenizer.id_to_token(token) or ""
    )
    columns, scored = examples.columns, examples.scored
    return Analysis(str(folder), named, way, scored, columns, patterns, effects, example)


def with_pruned(
    analysis: Analysis, model: Model, examples: Examples, count: int, part: Path, out: Path
) -> Analysis:
    """The analysis with the `count` worst heads pruned: written to `part`, and scored from there.

    `model` loses the heads. The caller moves the files to `out`, which the analysis names.
    """
    heads, source = analysis.effects.worst(count), Path(analysis.folder)
    device = next(model.parameters()).device
    prune(model, heads)
    title = f"{source.resolve().name} without {count} attention heads"
    card = partial(model_card, title, model.config, None)
    with written_whole(part):
        save_pretrained(model, part, source, card, special_ids_in(source))
        write_config(model.config, part, title)
    scores = examples.score(from_pretrained(part).to(device))
    if (source / FILE).exists():
        write_facts(part, {name: _facts(source, name, scores) for name in model.config.task_heads})
    return dataclasses.replace(analysis, pruned=Pruned(heads, out, scores))


def _facts(source: Path, head: str, scores: Mapping[str, float]) -> TaskFacts:
    """The facts of the folder about a head, with its part of these scores."""
    head_scores = {
        column: score for column, score in scores.items() if column.startswith(f"{head}_")
    }
    return dataclasses.replace(TaskFacts.read(source, head), scores=head_scores)


def to_json(analysis: Analysis) -> dict[str, Any]:
    """Everything, as ``analysis.json`` holds it; layers and heads count from 1."""
    effects, patterns = analysis.effects, analysis.patterns
    pruned, linguistic = analysis.pruned, analysis.linguistic
    return {
        "model": analysis.folder,
        "examples": analysis.examples,
        "scored": analysis.scored,
        "metric": effects.column.name,
        "columns": [dataclasses.asdict(column) for column in analysis.columns],
        "scores": dict(effects.whole),
        "patterns": {
            "sequences": patterns.sequences,
            "shares": _named(maps.PATTERNS, patterns.shares.mean(dim=(0, 1))),
            "layers": [
                _layer(number, shares, excess)
                for number, (shares, excess) in enumerate(
                    zip(patterns.shares, patterns.excess, strict=True), start=1
                )
            ],
        },
        "disabled": {
            "way": analysis.way,
            "heads": [_effect(effects, effect) for effect in effects.single],
            "layers": [_effect(effects, effect, of_layer=True) for effect in effects.all_heads],
        },
        "linguistic": None if linguistic is None else _linguistic(linguistic),
        "pruned": None
        if pruned is None
        else {
            "heads": [_place(effects, head) for head in pruned.heads],
            "folder": str(pruned.folder),
            "scores": dict(pruned.scores),
            "change": effects.change(pruned.scores),
        },
    }


def _linguistic(linguistic: LinguisticAttention) -> dict[str, Any]:
    """The attention of every head, [layers][heads], to each kind that there is."""
    attention = {
        kind: {"sentences": count, "heads": means.tolist()}
        for kind, count, means in zip(KINDS, linguistic.counts, linguistic.means, strict=True)
        if count
    }
    return {"file": linguistic.file, "sentences": linguistic.sentences, "attention": attention}


def _layer(number: int, shares: Tensor, excess: Tensor) -> dict[str, Any]:
    return {
        "layer": number,
        "shares": _named(maps.PATTERNS, shares.mean(dim=0)),
        "heads": [
            {
                "head": head,
                "shares": _named(maps.PATTERNS, its_shares),
                "excess": _named(maps.KEY_SETS, its_excess),
            }
            for head, (its_shares, its_excess) in enumerate(
                zip(shares, excess, strict=True), start=1
            )
        ],
    }


def _effect(effects: Effects, effect: Effect, of_layer: bool = False) -> dict[str, Any]:
    place = _place(effects, effect.heads[0])
    if of_layer:
        del place["head"]
    return {**place, "scores": dict(effect.scores), "change": effects.change(effect.scores)}


def _place(effects: Effects, head: Head) -> dict[str, Any]:
    return {"layers": list(effects.layers[head.weights]), "head": head.head + 1}


def _named(names: Sequence[str], values: Tensor) -> Mapping[str, float]:
    return dict(zip(names, values.tolist(), strict=True))
