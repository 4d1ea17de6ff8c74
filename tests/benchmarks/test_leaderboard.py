"""The leaderboard: scores beside plain loops over `transformers`, refusals, and its table."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from benchmarks import leaderboard, leaderboard_baseline
from benchmarks import leaderboard_scores as scores

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "early", "bird", "catches", "a", "worm", "while", "seven", "sleepers", "lie", "in"]
LINES = [" ".join(WORDS[(row * 5 + word * row) % 11] for word in range(50)) for row in range(9)]
SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """WordPiece or a byte-level BPE, of few entries, so that most words have several tokens."""
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=SPECIAL)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL)
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    tokenizer = tokenizer_of("wordpiece")
    size = {**SHAPE, "intermediate_size": 32, "max_position_embeddings": 128}
    config = BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **size)
    path = tmp_path_factory.mktemp("models") / "bert"
    BertForMaskedLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def token_loss(model, tokenizer, ids: list[int], masked: set[int], position: int) -> float:
    """The loss of a token, from the logits of all positions of a row by itself."""
    row = [tokenizer.mask_token_id if at in masked else token for at, token in enumerate(ids)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row])).logits[0, position]
    return -logits.log_softmax(-1)[ids[position]].item()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wordpiece", {"the": [1], "early": [2, 3, 4, 5, 6], "bird": [7, 8, 9, 10]}),
        ("byte_level", {"the": [1], "early": [2, 3], "bird": [5, 6]}),  # 4 is a space
    ],
)
def test_hidden_words_are_scored_as_by_a_loop_over_words(kind, words):
    torch.manual_seed(2)
    tokenizer = tokenizer_of(kind)
    config = RobertaConfig(
        vocab_size=len(tokenizer), pad_token_id=0, max_position_embeddings=130,
        initializer_range=0.5, intermediate_size=32, **SHAPE,
    )  # fmt: skip
    model = RobertaForMaskedLM(config).eval()
    texts = [scores.Passage(" ".join(WORDS[:n]), [(0, 3), (4, 9), (10, 14)]) for n in (4, 9)]
    masked = {position for span in words.values() for position in span}
    expected = 0.0
    for passage in texts:
        ids = tokenizer(passage.text)["input_ids"]
        for word, span in words.items():
            tokens = tokenizer.convert_ids_to_tokens([ids[position] for position in span])
            assert "".join(tokens).replace("##", "").strip("\u0120") == word
        expected += sum(token_loss(model, tokenizer, ids, masked, at) for at in masked)
    loss, _ = scores.hidden_words(model, tokenizer, texts)
    assert loss == pytest.approx(expected / 6, rel=1e-5)


def test_a_sentence_is_scored_as_by_a_loop_over_its_tokens(folder):
    model, tokenizer = scores.load(folder)
    ids = tokenizer("seven birds lie")["input_ids"]
    expected = [
        -token_loss(model, tokenizer, ids, {position}, position)
        for position in range(1, len(ids) - 1)
    ]
    found = scores.pseudo_log_likelihood(model, tokenizer, "seven birds lie")
    assert found == pytest.approx(sum(expected), rel=1e-5)


def test_a_word_with_unknown_tokens_or_cut_off_costs_its_bytes(folder):
    model, tokenizer = scores.load(folder)
    unknown = scores.Passage("the \u00df\u00df worm", [(4, 6)])
    far = " ".join(WORDS * 20)
    cut_off = scores.Passage(far, [(len(far) - 4, len(far))])
    for passage in (unknown, cut_off):
        loss = scores.hidden_words(model, tokenizer, [passage])
        assert loss == (pytest.approx(4 * math.log(256)), 0.0)


def test_a_model_that_knows_the_words_predicts_them(folder):
    """With an output bias that always predicts one token, words of this token alone are right."""
    model, tokenizer = scores.load(folder)
    known = next(word for word in WORDS if len(tokenizer.tokenize(word)) == 1)
    model.cls.predictions.bias.data[tokenizer.convert_tokens_to_ids(known)] = 1e4
    text = f"{known} {known} zzz"
    spans = [(0, len(known)), (len(known) + 1, 2 * len(known) + 1), (len(text) - 3, len(text))]
    _, accuracy = scores.hidden_words(model, tokenizer, [scores.Passage(text, spans)])
    assert accuracy == pytest.approx(2 / 3)


def test_passages_depend_on_their_own_text_only():
    """Other lines, capitals and order change neither a line's words nor those that are hidden."""
    several = scores.passages("\n".join([*LINES, "too short"]))
    assert len(several) == len({*LINES})
    assert all(passage.text.count(" ") == scores.WORDS - 1 for passage in several)
    again = scores.passages("\n".join(reversed([*(line.upper() for line in LINES), *LINES[:1]])))
    assert {(one.text, *one.hidden) for one in again} == {
        (one.text, *one.hidden) for one in several
    }
    hidden = sum(len(passage.hidden) for passage in several)
    assert 0.05 < hidden / (scores.WORDS * len(several)) < 0.25
    assert all(
        passage.text[begin:end] in WORDS for passage in several for begin, end in passage.hidden
    )


def entered(tmp_path: Path, model: Path, name: str = "first", seconds: float = 850.0) -> Result:
    """Score an entry into a folder with a page."""
    page = tmp_path / "leaderboard.md"
    if not page.exists():
        page.write_text("<!-- table of board_900 -->\n<!-- end of table -->\n")
        (tmp_path / "wikipedia.txt").write_text("\n".join(LINES))
        (tmp_path / "books.txt").write_text("\n".join(LINES[:4]))
        pair = {"sentence_good": "the early bird", "sentence_bad": "bird early the"}
        (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    cost = {"command": "train it", "cpu_seconds": seconds, "revision": "abc", "machine": "a CPU"}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    files = [
        f"--{option}={tmp_path / file}"
        for option, file in (
            ("cost", "cost.json"), ("wikipedia", "wikipedia.txt"), ("books", "books.txt"),
            ("pairs", "pairs.jsonl"), ("entries", "leaderboard.jsonl"),
        )
    ]  # fmt: skip
    words = ["score", name, str(model), "--budget=900", *files]
    return CliRunner().invoke(leaderboard.main, words)


def test_an_entry_gets_its_row_and_replaces_its_older_one(tmp_path, folder):
    for name, seconds in (("first", 850.0), ("second", 899.9), ("first", 700.0)):
        assert entered(tmp_path, folder, name, seconds).exit_code == 0
    lines = (tmp_path / "leaderboard.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(("| first", "| second"))]
    assert len(rows) == 2
    assert any(row.endswith("| 0.01M | 700 | abc |") for row in rows)
    assert "- second (a CPU): `train it`" in lines


def test_the_lowest_loss_is_first():
    cost = leaderboard.Cost("train it", 850.4, "abc", "a CPU")
    entries = [
        leaderboard.Entry(name, 900, cost, 1_730_000, "", {"wikipedia_loss": loss, "pairs": 0.5})
        for name, loss in (("worse", 6.25), ("better", 5.5))
    ]
    assert leaderboard.rows(entries).splitlines()[2:4] == [
        "| better | 5.500 | 50.0% | 1.73M | 850 | abc |",
        "| worse | 6.250 | 50.0% | 1.73M | 850 | abc |",
    ]
    assert leaderboard.rows([]) == "No entry yet."


def test_an_entry_over_its_budget_is_refused(tmp_path, folder):
    done = entered(tmp_path, folder, seconds=900.1)
    assert done.output.splitlines()[-1] == "Error: first: took 900.1 core-seconds, over 900"


def test_entries_of_other_files_are_refused(tmp_path, folder):
    assert entered(tmp_path, folder).exit_code == 0
    (tmp_path / "books.txt").write_text("\n".join(LINES[:5]))
    done = entered(tmp_path, folder, "second")
    assert done.exit_code == 1
    assert done.output.endswith("leaderboard.jsonl: its entries were scored on other files\n")


def test_a_folder_that_cannot_enter_is_told_why(tmp_path, folder):
    model, tokenizer = scores.load(folder)
    empty, headless, short = tmp_path / "empty", tmp_path / "headless", tmp_path / "short"
    empty.mkdir()
    BertModel(model.config).save_pretrained(headless)
    config = BertConfig(**{**model.config.to_dict(), "max_position_embeddings": 64})
    BertForMaskedLM(config).save_pretrained(short)
    for path in (headless, short):
        tokenizer.save_pretrained(path)
    for path, reason in (
        (tmp_path / "none", "is no folder"),
        (empty, "transformers cannot read it: "),
        (headless, "its weights lack a masked-LM head"),
        (short, "must read 128 tokens"),
    ):
        done = entered(tmp_path, path)
        assert done.exit_code == 1
        assert f"Error: {path}: {reason}" in done.output


def test_a_run_is_timed_with_its_children_and_fails_as_its_command(tmp_path):
    cost = tmp_path / "cost.json"
    burn = "sh -c 'i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done'"
    assert CliRunner().invoke(leaderboard.main, ["run", str(cost), "--", "false"]).exit_code == 1
    assert not cost.exists()
    done = CliRunner().invoke(leaderboard.main, ["run", str(cost), "--", "sh", "-c", burn])
    assert done.exit_code == 0
    written = json.loads(cost.read_text())
    assert written["cpu_seconds"] > 0
    assert written["command"].startswith("sh -c ")


def test_the_seconds_of_a_run_that_stopped_and_resumed_add_up(tmp_path):
    cost, stopped = tmp_path / "cost.json", tmp_path / "cost.json.stopped"
    resumed = f"test -e {stopped} && exit 0 || exit 75"
    words = ["run", str(cost), "--", "sh", "-c", resumed]
    assert CliRunner().invoke(leaderboard.main, words).exit_code == 75
    assert not cost.exists()
    stopped.write_text(json.dumps({**json.loads(stopped.read_text()), "cpu_seconds": 1e6}))
    assert CliRunner().invoke(leaderboard.main, words).exit_code == 0
    assert json.loads(cost.read_text())["cpu_seconds"] > 1e6
    assert not stopped.exists()


def baseline(tmp_path, folder, budget):
    """Run the baseline until this process has used `budget` seconds, earlier sittings included."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES * 4))
    words = [
        f"--tokenizer={folder}", f"--text={text}", f"--rows={tmp_path / 'rows.npy'}",
        f"--out={tmp_path / 'out'}", f"--cpu-seconds={budget}", "--batch=2",
    ]  # fmt: skip
    return CliRunner().invoke(leaderboard_baseline.main, [*words, "--architecture=modernbert"])


@pytest.fixture
def sigterm():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("sigterm")
def test_the_baseline_stops_on_request_and_goes_on(tmp_path, folder, monkeypatch):
    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", stop)
    states = []
    for _ in range(2):
        stopped = baseline(tmp_path, folder, 1e6)
        assert stopped.exit_code == 75, stopped.output
        states.append(torch.load(tmp_path / "out.pt"))
    first, second = states
    assert (first["step"], second["step"]) == (1, 2)
    assert second["seconds"] > first["seconds"] > second["begun"] == first["begun"]
    moments = [state["optimizer"]["state"][0]["step"] for state in states]
    assert moments == [1, 2]
    assert baseline(tmp_path, folder, second["seconds"]).exit_code == 0
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.usefixtures("sigterm")
def test_the_baseline_stops_at_its_budget_and_can_be_scored(tmp_path, folder):
    budget = leaderboard_baseline.used() + 0.6
    done = baseline(tmp_path, folder, budget)
    assert done.exit_code == 0, done.output
    assert budget <= leaderboard_baseline.used() < budget + 2
    assert entered(tmp_path, tmp_path / "out").exit_code == 0
