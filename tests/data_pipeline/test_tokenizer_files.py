"""Tokenizers that cannot be trained or read: one line that names the file or option."""

from __future__ import annotations

import errno
from pathlib import Path
from pydoc_data import topics

import pytest
import sentencepiece
from click.testing import CliRunner

from configs.errors import OptionError
from data_pipeline import DataError
from data_pipeline.tokenization import training
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import TRAINERS, train
from tandem import main


def test_the_command_names_every_kind() -> None:
    """Its help lists them, since it does not import what trains them."""
    (kind,) = (
        one for one in main.commands["tokenizer"].commands["train"].params if one.name == "kind"
    )
    assert all(name in str(kind.help) for name in TRAINERS)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A little text.\n\nAnd more.")
    text = [str(tmp_path / "text.txt")]
    for kind, size, message in (
        ("bpe", 100, "at least 261"),
        ("wordpiece", 9, r"must be at least \d+ for the characters of this text"),
        ("wordpiece", 1 << 40, "must be from 6 to 1,048,576"),
        ("unigram", 5, "must be from 6 to"),
        ("unigram", 9, r"--vocab-size 9: must be at least \d+ for the characters"),
        ("unigram", 8000, r"--vocab-size 8000: must be at most \d+ for this little text"),
        ("letters", 100, "--kind letters"),
    ):
        with pytest.raises(OptionError, match=message) as caught:
            train(text, kind, size, str(tmp_path / "out"))
        assert "\n" not in str(caught.value)
    for name, content in (("empty", b""), ("bad", b"nonsense")):
        (tmp_path / f"{name}.model").write_bytes(content)
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, message in (
        (tmp_path / "bad.model", "not a SentencePiece model"),
        (tmp_path / "empty.model", "it has no pieces"),
        (tmp_path, "not a tokenizer"),
        (tmp_path / "none", "none: no such folder; name one with a tokenizer: none is downloaded"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("wordpiece", 60), ("wordpiece", 1000), ("bpe", 270), ("bpe", 1000), ("unigram", 24)],
)
def test_text_that_cannot_be_read_or_has_no_more_entries_is_reported(
    tmp_path: Path, kind: str, asked: int
) -> None:
    path = tmp_path / "text.txt"
    latin_1 = "\n\n".join(f"caf\xe9 {number}" for number in range(30)).encode("latin-1")
    path.write_bytes(latin_1 + b"\n\nA little text that is read, and more." * 40)
    out = str(tmp_path / "out")
    command = ["tokenizer", "train", str(path), "--kind", kind, "--vocab-size", str(asked)]
    done = CliRunner().invoke(main, [*command, "--out", out])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[:2] == ["30 unusable documents", f"  {path}:1: not valid UTF-8"]
    size = load(tmp_path / "out")[1].vocab_size
    few = f": {size} of {asked:,} entries, since the text has no more"
    assert size < asked or asked < 1000
    assert "  ... and 10 more" in lines
    assert lines[-2:] == [
        "the tokenizer's normalizer removes no character",
        f"The tokenizer is in {out}{few * (size < asked)}",
    ]


def test_a_unigram_vocabulary_is_of_the_whole_text(tmp_path: Path, monkeypatch) -> None:
    """It was of the first lines, and what stood behind them was not even read."""
    monkeypatch.setattr(training, "UNIGRAM_LINES", 60)
    words = ["alpha", "bravo", "charlie", "delta", "\u0436\u0443\u043a"]
    for name, word in zip("abcde", words, strict=True):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{word} {n}\n{word}" for n in range(50)))
    (tmp_path / "f.txt").write_bytes(b"last \xff")
    files = [str(path) for path in sorted(tmp_path.iterdir())]
    command = ["tokenizer", "train", *files, "--kind", "unigram", "--vocab-size", "40", "--out"]
    for out in ("one", "two"):
        done = CliRunner().invoke(main, [*command, str(tmp_path / out)])
        assert done.exit_code == 0, done.output
    told = ["1 unusable document", f"  {tmp_path}/f.txt:1: not valid UTF-8"]
    sampled = "60 of 500 lines are used, drawn evenly from the whole text"
    assert done.output.splitlines()[:3] == [*told, sampled]
    one, two = ((tmp_path / out / "tokenizer.json").read_bytes() for out in ("one", "two"))
    assert one == two
    known = load(tmp_path / "one")[0].get_vocab()
    assert {character for word in words for character in word} <= {*"".join(known)}


@pytest.mark.parametrize(("lines", "used"), [(61, 60), (120, 60), (1000, 7), (5, 1)])
def test_a_sample_of_lines_is_spread_over_the_text(lines: int, used: int) -> None:
    sample = training.Sample(used, lines)
    found = training._line_numbers(sample).tolist()
    assert [*training._drawn(map(str, range(lines)), sample)] == [*map(str, found)]
    assert [number * used // lines for number in found] == [*range(used)] or lines % used
    assert found == sorted({*found})
    assert lines < 2 * used or len({number % 2 for number in found}) == min(2, used)


def test_a_long_line_of_any_script_is_trained_on(tmp_path: Path) -> None:
    """Lines of more than 4,192 bytes were skipped, which are fewer characters of some scripts."""
    (tmp_path / "a.txt").write_text("\u0436\u0443\u043a " * 1000 + "\n\na word and a word")
    train([str(tmp_path / "a.txt")], "unigram", 16, str(tmp_path / "out"))
    known = load(tmp_path / "out")[0].get_vocab()
    assert {*"\u0436\u0443\u043a"} <= {*"".join(known)}


def test_a_full_disk_leaves_no_part_of_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("A little text.")
    out = tmp_path / "out"
    command = ["tokenizer", "train", str(tmp_path / "text.txt"), "--out", str(out)]
    command += ["--kind", "bpe", "--vocab-size", "261"]
    write_text = Path.write_text

    def filled(path: Path, text: str, **options: str) -> int:
        write_text(path, text[:9], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", filled)
        done = CliRunner().invoke(main, command)
    advice = "the disk is full; free some space and run the same command again"
    assert (done.exit_code, done.output) == (1, f"tandem: {out}: {advice}\n")
    assert CliRunner().invoke(main, command).exit_code == 0


SPECIAL = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"vocab.txt": b"\xff\xfe["}, r"vocab\.txt: not valid UTF-8 at byte 0"),
        ({"vocab.txt": b""}, r"vocab\.txt: has no \[UNK\]"),
        ({"vocab.txt": SPECIAL}, "the vocabulary has no ordinary tokens"),
        (
            {"vocab.txt": SPECIAL + "a", "tokenizer_config.json": '{"mask_token": "[SEP]"}'},
            r"\[SEP\] is both the sep and the mask token",
        ),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json: must hold a JSON object"),
        ({"special_tokens_map.json": '"a"'}, r"special_tokens_map\.json: must hold a JSON object"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json: not valid JSON"),
        ({"tokenizer_config.json": "[" * 100_000}, r"tokenizer_config\.json: not valid JSON"),
        ({"tokenizer_config.json": '{"sep_token": 3}'}, "sep_token must be a token, not 3"),
        ({"tokenizer_config.json": '{"do_lower_case": 1}'}, "do_lower_case must be true, false"),
        ({"tokenizer.json": "[]"}, r"tokenizer\.json: not a tokenizer"),
        ({"tokenizer.json": b"\xff"}, r"tokenizer\.json: not a tokenizer"),
        ({"vocab.json": "{}", "merges.txt": "a"}, r"vocab\.json: not a BPE vocabulary"),
    ],
)
def test_odd_folders_are_one_line(tmp_path: Path, files: dict, message: str) -> None:
    if "vocab.txt" not in files and "vocab.json" not in files:
        (tmp_path / "vocab.txt").write_text(SPECIAL + "a")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_model_of_sentencepiece_is_one_line(tmp_path: Path) -> None:
    """Whichever byte is wrong: it is read correctly, or refused by name."""
    model = tmp_path / "own"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(topics.topics["if"].splitlines()), model_prefix=str(model),
        vocab_size=60, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    whole = model.with_suffix(".model").read_bytes()
    damaged = tmp_path / "damaged.model"
    for at in [*range(0, len(whole), len(whole) // 60), *range(len(whole) - 60, len(whole))]:
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            damaged.write_bytes(data)
            try:
                load(damaged)[0].encode("A text.")
            except DataError as error:
                assert str(error).startswith(f"{damaged}: ")  # noqa: PT017
                assert "\n" not in str(error)  # noqa: PT017
