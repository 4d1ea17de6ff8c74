from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline import BuildOptions, Corpus, build
from data_pipeline.tokenization.training import train

TEXT = """
the a old young river house letter garden winter summer captain doctor village window morning
evening road stone bread water light shadow horse ship city king queen child mother father walked
spoke wrote carried found lost opened closed remembered forgot slowly quickly never always under
over beyond through against toward because although while before after and but or nor
"""
WORDS = TEXT.split()


def make_documents(count: int, seed: int = 0, sentences: int = 20) -> list[str]:
    """Documents of random sentences, one paragraph per line."""
    draw = random.Random(seed)
    return [
        "\n".join(
            " ".join(
                " ".join(draw.choices(WORDS, k=draw.randint(3, 30))).capitalize() + "."
                for _ in range(draw.randint(1, 5))
            )
            for _ in range(draw.randint(1, max(1, sentences // 3)))
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "documents.txt"
    path.write_text("\n\n".join(make_documents(300)) + "\n")
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train([str(text_file)], "wordpiece", 300, str(out))
    return out


@pytest.fixture(scope="session")
def make_corpus(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> Callable[..., Corpus]:
    """Builds a corpus of small blocks and shards from documents."""

    def make(documents: list[str], **options: object) -> Corpus:
        folder = tmp_path_factory.mktemp("corpus")
        (folder / "in.txt").write_text("\n\n".join(documents) + "\n")
        defaults = {"val_fraction": 0.1, "shard_mb": 0.02, "block_bytes": 4000}
        build(
            BuildOptions([str(folder / "in.txt")], str(tokenizer_dir), **defaults | options),
            str(folder / "out"),
        )
        return Corpus.open(str(folder / "out"))

    return make


@pytest.fixture(scope="session")
def corpus(make_corpus: Callable[..., Corpus]) -> Corpus:
    return make_corpus(make_documents(300))
