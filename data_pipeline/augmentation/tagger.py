"""A tagger of words, learnt from a tagged file: parts of speech, for words that may stand in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import DataError
from data_pipeline.task_files.conll import LAST, read_conll
from data_pipeline.task_files.contents import UTF_8

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

FEATURES = 2**18  # of the hash of what a word looks like
EDGE = ""  # the neighbour of a first or last word


class Tagger:
    """A linear classifier of each word by its form and its neighbours'."""

    def __init__(self, model: Pipeline) -> None:
        self._model = model

    @classmethod
    def learn(cls, path: Path, tag: int = LAST, encoding: str = UTF_8) -> Tagger:
        """Learn from a file of CoNLL's columns: words in the first one, tags in that of `tag`.

        Raises DataError for a file that cannot be read, or has one tag only, and where
        scikit-learn is missing.
        """
        try:
            from sklearn.feature_extraction import FeatureHasher
            from sklearn.linear_model import SGDClassifier
            from sklearn.pipeline import make_pipeline
        except ImportError:
            raise DataError(
                "--tagged: needs scikit-learn: pip install 'tandem-distill[tasks]'"
            ) from None
        sentences = list(read_conll(str(path), tag=tag, encoding=encoding))
        tags = [entry for sentence in sentences for entry in sentence.tags]
        if len(set(tags)) < 2:
            raise DataError(
                f"{path}: all words have the tag {tags[0]}; choose another --tag-column"
            )
        model = make_pipeline(
            FeatureHasher(FEATURES, input_type="string"),
            SGDClassifier(max_iter=5, tol=None, random_state=0),
        )
        seen = [entry for sentence in sentences for entry in _features(sentence.words)]
        return cls(model.fit(seen, tags))

    def tags(self, texts: Sequence[str]) -> list[list[str]]:
        """The tags of the words of each text, which stand between white space."""
        words = [text.split() for text in texts]
        seen = [features for text in words for features in _features(text)]
        predicted = iter(self._model.predict(seen).tolist() if seen else ())
        return [[next(predicted) for _ in text] for text in words]


def _features(words: Sequence[str]) -> Iterator[list[str]]:
    """The features of each word, for the classifier."""
    around = [EDGE, *(word.lower() for word in words), EDGE]
    for number, word in enumerate(words):
        before, this, after = around[number : number + 3]
        shape = f"{word[0].isupper()}{any(map(str.isdigit, word))}{word.isalpha()}"
        yield [
            "bias", f"is={this}", f"before={before}", f"after={after}", f"shape={shape}",
            *(f"end={this[-size:]}" for size in (1, 2, 3)), f"start={this[:2]}",
            f"before end={before[-2:]}", f"after end={after[-2:]}",
        ]  # fmt: skip
