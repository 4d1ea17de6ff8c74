"""A build or merge replaces and removes only what it wrote: anything else is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_pipeline import BuildOptions, DataError, build
from data_pipeline.building import build as building
from data_pipeline.building.checking import check
from data_pipeline.building.encoding import EncodedChunk
from data_pipeline.building.journal import Claims
from data_pipeline.building.merging import merge
from data_pipeline.shards import manifest
from tests.damage import damages
from tests.data_pipeline.conftest import make_documents

OPTIONS: dict = {"shard_mb": 0.006, "block_bytes": 2000, "val_fraction": 0.2}
PLACES = (
    "train/text.txt", "train/shard-000000.tar", "train/shard-000999.tar", "train/own/deep.txt",
    "val/notes", "tokenizer/tokenizer.json", "tokenizer/thesis.tex", "word_starts.npy",
    ".build/lock", ".build/files", ".build/state.npz", ".corpus.json.part", "digests.bin", "train",
)  # fmt: skip
SEVERAL = (
    "missing",
    "a folder",
    "empty",
    "cut in half",
    "a byte longer",
    "bit",
    "noise",
    "JSON: []",
)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("data_pipeline.text.documents.CHUNK_BYTES", 3000)
    (tmp_path / "in.txt").write_text("\n\n".join(make_documents(40)))
    return str(tmp_path / "in.txt")


def killed_build(
    text: str, tokenizer: Path, out: Path, chunks: int, journal: bool = True, **options: object
) -> None:
    """A build that stops after this many chunks, as if killed."""
    take = building._Build._take

    def taken(self: building._Build, chunk: EncodedChunk) -> None:
        take(self, chunk)
        if self.tally.chunks > chunks:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "JOURNAL_SECONDS", -1.0 if journal else 1e9)
        patch.setattr(building._Build, "_take", taken)
        with pytest.raises(KeyboardInterrupt):
            build(BuildOptions([text], str(tokenizer), **OPTIONS | options), str(out))


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_the_user_s_is_touched(
    text: str, tmp_path: Path, tokenizer_dir: Path, place: str
) -> None:
    mine = tmp_path / "out" / place
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    before = tree(tmp_path)
    for inputs in ([text], [str(mine)] if mine.suffix == ".txt" else [text]):
        with pytest.raises(DataError, match=f"^{mine}: not written by this build") as refused:
            build(BuildOptions(inputs, str(tokenizer_dir), **OPTIONS), str(tmp_path / "out"))
        assert "\n" not in str(refused.value)
        assert tree(tmp_path) == before


def test_what_lies_elsewhere_in_the_folder_stays(
    text: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    """A build never uses these names, so other files may have them; the text may be there too."""
    out = tmp_path / "out"
    for name in ("in.txt", "notes/ideas.md"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(text, out / name)
    build(BuildOptions([str(out / "in.txt")], str(tokenizer_dir), **OPTIONS), str(out))
    assert (out / "in.txt").read_bytes() == (out / "notes/ideas.md").read_bytes()
    assert check(str(out)) == []


@pytest.mark.parametrize("journal", [True, False])
def test_a_killed_build_is_cleared_away_and_a_stranger_in_it_refused(
    text: str, tmp_path: Path, tokenizer_dir: Path, journal: bool
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    build(BuildOptions([text], str(tokenizer_dir), **OPTIONS), str(whole))
    killed_build(text, tokenizer_dir, out, 6, journal)
    assert len(list((out / "train").glob("shard-*.tar"))) > 0
    for name in ("train/mine.txt", "val/shard-000123.tar", ".build/thesis.tex"):
        (out / name).write_text("mine")
        before = tree(out)
        with pytest.raises(DataError, match=f"{name}: not written by this build"):
            build(BuildOptions([text], str(tokenizer_dir), **OPTIONS), str(out))
        assert tree(out) == before
        (out / name).unlink()
    build(BuildOptions([text], str(tokenizer_dir), **OPTIONS), str(out))
    assert tree(out) == tree(whole)


def refusal(text: list[str], tokenizer: Path, out: Path) -> str:
    """The message with which a build refuses to continue; empty when it finishes."""
    try:
        build(BuildOptions(text, str(tokenizer), **OPTIONS), str(out))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_damaged_unfinished_build_is_continued_rightly_or_refused(
    text: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Only the size of a finished shard is checked; `check` finds other damage."""
    whole, killed, out = tmp_path / "whole", tmp_path / "killed", tmp_path / "out"
    build(BuildOptions([text], str(tokenizer_dir), **OPTIONS), str(whole))
    killed_build(text, tokenizer_dir, killed, 6)
    expected, outcomes = tree(whole), set()
    for name in sorted(name for name in tree(killed) if (killed / name).is_file()):
        for damage in damages((killed / name).read_bytes(), flips=1):
            if not damage.name.startswith(SEVERAL):
                continue
            shutil.copytree(killed, out)
            damage.inflict(out / name)
            said = refusal([text], tokenizer_dir, out)
            if said:  # without the claims everything there is a stranger
                assert (Path(name).name if name != ".build/files" else "not written") in said
            elif tree(out) != expected:
                assert any(name in line for line in check(str(out))), (name, damage.name)
            outcomes.add("refused" if said else "equal" if tree(out) == expected else "found")
            shutil.rmtree(out)
    assert outcomes == {"refused", "equal", "found"}


def test_a_merge_keeps_what_is_not_its_own(text: str, tmp_path: Path, tokenizer_dir: Path) -> None:
    out = tmp_path / "out"
    for task in range(2):
        build(BuildOptions([text], str(tokenizer_dir), task=task, tasks=2, **OPTIONS), str(out))
    part = "parts/00001-of-00002"
    for name in ("train/text.txt", f"{part}/train/mine.txt", f"{part}/train/sequences-mine.npy"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        before = {name: data for name, data in tree(out).items() if ".build" not in name}
        with pytest.raises(DataError, match=f"{name}: not written by this build"):
            merge(str(out))
        assert {name: data for name, data in tree(out).items() if ".build" not in name} == before
        (out / name).unlink()
    kept = [out / "parts" / "notes.txt", out / part / "notes.txt"]
    for path in kept:
        path.write_text("mine")
    merge(str(out))
    assert check(str(out)) == []
    assert merge(str(out))["files"] == manifest.read(out)["files"]
    left = [path for path in out.joinpath("parts").rglob("*") if path.is_file()]
    assert sorted(left) == sorted(kept)


def test_claims_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / ".build").mkdir()
    Claims(tmp_path).add(tmp_path / "a", tmp_path / "b")
    file = tmp_path / ".build" / "files"
    file.write_bytes(file.read_bytes()[:-4])
    Claims(tmp_path).add(tmp_path / "c")
    found = Claims(tmp_path)
    assert [tmp_path / name in found for name in "abc"] == [True, False, True]
