"""The pages of runs, suites and analyses in a real browser, at a desktop's and a phone's width."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from model.attention_heads import UNIFORM, Head
from tests.chromium import HEIGHT, WIDTHS, look_at
from tests.trainer import test_report as reports
from tests.trainer.test_suites import results_of_models
from trainer.analysis.analysis import Analysis, Effect, Effects
from trainer.analysis.linguistic import KINDS, LinguisticAttention
from trainer.analysis.maps import KEY_SETS, PATTERNS, ExampleMaps, HeadPatterns
from trainer.analysis.page import render as render_analysis
from trainer.analysis.page import section
from trainer.evaluation.mistakes import LARGEST
from trainer.report.elements import around_points
from trainer.report.page import render
from trainer.run_folder.metrics import MetricsLog
from trainer.run_folder.run_files import RunFiles
from trainer.scoring.columns import ACCURACY
from trainer.suites import write_comparison

STUDENTS = ("lstm_alone", "taught_by_the_teacher_jpq", "gypsy", "half", "narrow_g", "q")
LAYERS, HEADS = 12, 12
TOKENS = ["[CLS]", "who", "has", "seen", "##_it", "?", "a-token-that-is-very-very-long", "[SEP]"]


CLASSES = [f"class_{number}_jpq" for number in range(12)]
BREAKDOWN = {
    "labels": CLASSES,
    "confusion": [[1000 + 7 * row * column for column in range(12)] for row in range(12)],
    "by_class": {one: {"precision": 0.5, "recall": 1.0, "f1": 0.66, "count": 9} for one in CLASSES},
    "wrong": [{"text": "<b>a gypsy_text | another " * 9, "label": "jpq", "predicted": "gjq"}],
    "wrong_examples": 41,
}
MISTAKES = {  # of a head of each kind
    "names": BREAKDOWN,
    "stars_jpq": {
        "points": [[number / 7, number / 8 + 0.3 * (number % 5)] for number in range(60)],
        **{"wrong": BREAKDOWN["wrong"], "wrong_examples": 60, "order": LARGEST},
    },
    "leaving_jpq": {
        "by_exit": {f"layer {n}": {"accuracy": 0.5 + n / 50, "layers": n} for n in range(1, 13)}
        | {"speed 0.5": {"accuracy": 0.71, "layers": 4.25}},
    },
}


def run_page(folder: Path, students: tuple[str, ...] = STUDENTS) -> str:
    """The page of a finished run whose learners score alike, with long names."""
    folder.mkdir()
    (folder / "config.yaml").write_text(reports.config(students))
    with MetricsLog(folder / "metrics.jsonl") as log:
        for row in reports.rows(students):
            log.append(row)
    results = reports.evaluation(students)
    for number, facts in enumerate(results["learners"].values()):
        facts["accuracy"] = 0.9 - 0.004 * number
        facts["parameters"] = 10_000_000 - 900_000 * number
        facts["breakdown"] = MISTAKES
    (folder / "evaluation.json").write_text(json.dumps(results))
    return render(RunFiles.read(folder))


def analysis() -> Analysis:
    """An analysis with numbers that no model has."""
    shares = torch.rand(LAYERS, HEADS, len(PATTERNS), dtype=torch.float64).softmax(dim=-1)
    excess = torch.zeros(LAYERS, HEADS, len(KEY_SETS), dtype=torch.float64)
    patterns = HeadPatterns(shares, excess, 20)
    heads = [[Head(layer, head) for head in range(HEADS)] for layer in range(LAYERS)]
    single = [
        Effect((one,), {"accuracy": 0.5 + 0.01 * (one.head - 3)}) for own in heads for one in own
    ]
    together = [Effect(tuple(own), {"accuracy": 0.1}) for own in heads]
    layers = [[number] for number in range(1, LAYERS + 1)]
    effects = Effects(ACCURACY, {"accuracy": 0.5}, single, together, layers)
    weights = torch.rand(LAYERS, HEADS, len(TOKENS), len(TOKENS)).mul(4).softmax(dim=-1)
    means = torch.rand(len(KINDS), LAYERS, HEADS, dtype=torch.float64)
    return Analysis(
        "models/a_jpg",
        "a_quite_long_name_of_a_file.txt",
        UNIFORM,
        "20 sequences",
        (ACCURACY,),
        patterns,
        effects,
        ExampleMaps(TOKENS, weights),
        linguistic=LinguisticAttention("a.conllu", means, [3] * len(KINDS), 5),
    )


def test_no_text_of_a_page_is_cut_off_on_a_desktop_or_a_phone(tmp_path: Path) -> None:
    write_comparison(tmp_path / "suite.html", "a_suite", "Tasks jpqy_", results_of_models())
    cut = "<style>em{position:absolute;overflow:hidden;font:16px/1 sans-serif}</style>"
    pages = {
        "run": run_page(tmp_path / "a_run_jpq"),
        "suite": (tmp_path / "suite.html").read_text(),
        "analysis": render_analysis(analysis()),
        "cut": f"<!doctype html>{cut}<body><em>lstm_alone</em>",
    }
    picture = tmp_path / "pages.png"
    problems = look_at(pages, picture)
    assert problems.pop("cut") == [
        f"{width}: cut off above or below: lstm_alone" for width in WIDTHS
    ]
    assert problems == {"run": [], "suite": [], "analysis": []}
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[20:24], "big") == HEIGHT


def test_learners_that_score_alike_lie_apart() -> None:
    low, high, fits = around_points(torch.tensor([0.88, 0.9]).numpy(), 0.05)
    assert 0.87 < low < 0.88
    assert 0.9 < high < 0.91
    assert not fits
    assert around_points(torch.tensor([0.5, 0.9]).numpy(), 0.4)[2]


def test_one_learner_and_one_evaluation_make_no_chart(tmp_path: Path) -> None:
    page = run_page(tmp_path / "alone", students=())
    assert "Size against quality" in run_page(tmp_path / "run")
    assert "Size against quality" not in page


def test_classes_confusions_and_wrong_examples_are_shown(tmp_path: Path) -> None:
    page = run_page(tmp_path / "run")
    assert "1 of 41, drawn at random" in page
    assert "&lt;b&gt;a gypsy_text" in page
    assert page.count("right \\ predicted") == 1 + len(STUDENTS)
    assert "<td>66.0% (50.0%, 100.0%)</td>" in page


def test_points_exits_and_the_largest_errors_are_shown(tmp_path: Path) -> None:
    page = run_page(tmp_path / "run")
    assert "1 of 60, those with the largest errors" in page
    assert page.count('class="dots"') == 1 + len(STUDENTS)
    assert "<td>speed 0.5</td><td>71.0% (4.2)</td>" in page


def test_each_pattern_has_the_map_of_its_most_typical_head() -> None:
    found = analysis()
    shares = torch.zeros(LAYERS, HEADS, len(PATTERNS), dtype=torch.float64)
    shares[..., -1], shares[2, 4, 1] = 0.5, 0.75
    page = section(found.example, HeadPatterns(shares, shares, 20))
    assert "Layer 3, head 5: diagonal" in page
    assert "vertical" not in page
    assert page.count('class="map small"') == LAYERS * HEADS
    assert page.count(">##_it</text>") == 2 * 2
