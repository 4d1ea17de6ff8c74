"""Everything that determines what a step reads is verified, by `check` and at a job's start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tandem
from data_pipeline import BatchStream, Corpus, DataConfig, DataError
from data_pipeline.building.checking import check
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.shards import manifest
from tests.damage import Damage, damages, harmed
from tests.data_pipeline.conftest import make_documents
from tests.thorough import IS_THOROUGH

KEPT = "sequences-"
RULES = PackingRules("full_sentences", 64)


@pytest.fixture(scope="module")
def tiny(make_corpus: Callable[..., Corpus], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of few blocks, whose sequences have been counted."""
    folder = tmp_path_factory.mktemp("tiny") / "corpus"
    shutil.copytree(make_corpus(make_documents(24), val_fraction=0.3).folder, folder)
    for split in ("train", "val"):
        Corpus.open(str(folder)).split(split).sequence_counts(RULES)
    assert check(str(folder)) == []
    return folder


def files(folder: Path) -> list[Path]:
    """All files except the shards, which `test_damage` covers."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tar")


def read(folder: Path) -> list[np.ndarray]:
    """What the first steps of a job read."""
    options = {"path": str(folder), "sequence_length": RULES.length}
    streams = [BatchStream.open(DataConfig(**options), split, 1, 4) for split in ("train", "val")]
    return [stream.batch(step).input_ids for stream in streams for step in range(2)]


def said_by(act: Callable[[str], object], folder: Path) -> str:
    """The one line of the DataError that `act` raises, or else the lines that it returns."""
    try:
        found = act(str(folder))
    except DataError as error:
        return str(error).replace("\n", "A SECOND LINE")
    return "\n".join(found) if isinstance(found, list) else ""


def test_no_damage_of_any_file_passes(tiny: Path) -> None:
    """Except for cached sequence counts: a job recomputes them and reads the same.

    `make test` inflicts every third damage on a file, and another third on the next file.
    """
    sound, seen = read(tiny), 0
    for number, path in enumerate(files(tiny)):
        some = slice(None) if IS_THOROUGH else slice(number % 3, None, 3)
        for damage in list(damages(path.read_bytes()))[some]:
            with harmed(path, damage):
                case, seen = f"{path.relative_to(tiny)}: {damage.name}", seen + 1
                kept = path.name.startswith(KEPT)
                if not (kept and damage.name == "missing"):
                    # The folder is named when its manifest is gone.
                    assert path.name in said_by(check, tiny), case
                if not kept:
                    assert path.name in said_by(Corpus.open, tiny), case
                elif not damage.is_folder:
                    np.testing.assert_array_equal(read(tiny), sound, case)
                    assert check(str(tiny)) == [], case  # mended
    assert seen > (500 if IS_THOROUGH else 160)
    assert check(str(tiny)) == []


@pytest.mark.parametrize("name", ["train/blocks.npy", "word_starts.npy", "train/sentences.u16"])
@pytest.mark.parametrize("damage", [Damage("empty", b""), Damage("missing")])
def test_commands_say_it_in_one_line(tiny: Path, name: str, damage: Damage) -> None:
    (config := tiny.parent / "data.yaml").write_text(f"path: {tiny}\n")
    dump = ["data", "dump", str(config), "--steps", "0:1", "--out", str(tiny.parent / "rows.npz")]
    for command in (dump, ["data", "show", str(config)], ["data", "check", str(tiny)]):
        with harmed(tiny / name, damage):
            done = CliRunner().invoke(tandem.main, command)
        assert done.exit_code == 1, done.output
        assert len(done.output.splitlines()) == 1, done.output
        assert str(tiny / name) in done.output


def test_all_files_are_on_record(tiny: Path) -> None:
    """So that a file which is added to the format one day is verified too."""
    names = {str(path.relative_to(tiny)) for path in files(tiny) if KEPT not in path.name}
    assert names == {*manifest.read(tiny)["files"], manifest.MANIFEST}


def test_the_guard_of_a_resume_covers_every_file(tiny: Path) -> None:
    """Where the manifest agrees, the content that a checkpoint remembers does not."""
    tree, content = manifest.read(tiny), Corpus.open(str(tiny)).content
    for name in tree["files"]:
        other = json.loads(json.dumps(tree))
        other["files"][name]["sha256"] = "0" * 64
        assert Corpus.of("", tiny, other).content != content, name
    other = tree | {"vocabulary": tree["vocabulary"] | {"mask": 3}}
    assert Corpus.of("", tiny, other).content != content


def test_a_corpus_without_checksums_must_be_built_again(tiny: Path) -> None:
    path = tiny / "corpus.json"
    tree = json.loads(path.read_text()) | {"format": 1}
    del tree["files"], tree["sha256"]
    with harmed(path, Damage("old", json.dumps(tree, indent=2).encode())):
        assert "corpus.json: has another format (1, not 2)" in said_by(check, tiny)
        assert "build the corpus again" in said_by(Corpus.open, tiny)


def test_large_boundaries_are_verified_as_they_are_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are too large to be read when a job starts: block by block."""
    monkeypatch.setattr("data_pipeline.shards.manifest.verify.__defaults__", (0,))
    for name in ("sentences.u16", "documents.u32"):
        path = tiny / "train" / name
        for damage in damages(path.read_bytes()):
            if "flipped" in damage.name:
                with harmed(path, damage):
                    corpus = Corpus.open(str(tiny)).split("train")
                    with pytest.raises(DataError, match=name):
                        corpus.sequence_counts(PackingRules("contiguous", 99))


def test_a_kept_count_is_of_its_corpus_and_name(tiny: Path) -> None:
    """A cached count of the same shape but of another corpus is recomputed."""
    split = Corpus.open(str(tiny)).split("train")
    rules = PackingRules("full_sentences", 32)
    expected = split.sequence_counts(rules).per_block.tolist()
    own, other = (split.folder / f"{KEPT}full_sentences-{length}.npy" for length in (32, 64))
    with harmed(own, Damage("another's", other.read_bytes())):
        assert f"{own}: damaged" in said_by(check, tiny)
        found = Corpus.open(str(tiny)).split("train")
        assert (
            found.sequence_counts(PackingRules("full_sentences", 32)).per_block.tolist() == expected
        )


def test_a_process_verifies_an_index_once(corpus: Corpus, tmp_path, monkeypatch) -> None:
    """However often it opens the corpus: each of many ranks would read every file 27 times."""
    plain, hashed = manifest.sha256, []
    monkeypatch.setattr(manifest, "sha256", lambda path: hashed.append(path) or plain(path))
    folder = shutil.copytree(corpus.folder, tmp_path / "copy")
    for _ in range(3):
        Corpus.open(str(folder)).split("train")
    assert len(hashed) == len(set(hashed)) == len(corpus.files)
