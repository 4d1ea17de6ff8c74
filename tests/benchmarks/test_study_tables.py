"""Tables and pictures of a study's results, and the page that holds the tables."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import score_agreement, study
from benchmarks.studies import agreement, page, pictures, results, tables
from benchmarks.studies.jobs import digest
from tests.benchmarks.made_studies import result, two_arms
from tests.fork_server import REPOSITORY

SVG = "{http://www.w3.org/2000/svg}"


def test_the_table_gives_mean_spread_and_paired_difference():
    """Paired: seeds that differ by 0.1 do not blur a difference of 0.02 within each seed."""
    config, before = two_arms(), two_arms(steps=9)
    found = [
        result(config, "first", 1, teacher=0.1),
        result(config, "first", 2, teacher=0.2),
        result(config, "second", 1, pupil=0.12),
        result(config, "second", 2, pupil=0.22),
        result(before, "second", 3, pupil=0.9),
    ]
    assert tables.of_scores(config, found).splitlines() == [
        "| arm | learner | seeds | accuracy | difference | to |",
        "|---|---|---|---|---|---|",
        "| first | teacher | 2 | 0.1500 ± 0.0707 |  |  |",
        "| second | pupil | 2 | 0.1700 ± 0.0707 | 0.0200 ± 0.0000 | first.teacher |",
    ]
    assert tables.of_scores(config, found[3:]).splitlines()[2:] == [
        "| first | teacher | 0 |  |  |  |",
        "| second | pupil | 1 | 0.2200 |  | first.teacher |",
    ]


def test_an_arm_without_the_first_score_is_compared_by_the_next():
    """As those of a second task."""
    config = dataclasses.replace(two_arms(), scores=["of_one_task", "accuracy"])
    found = [result(config, "first", 1, teacher=0.1), result(config, "second", 1, pupil=0.12)]
    *_, last = tables.of_scores(config, found).splitlines()
    assert last == "| second | pupil | 1 |  | 0.1200 | 0.0200 | first.teacher |"


def test_a_study_says_to_which_row_a_learner_is_compared():
    """By its name in all arms, or in one; other learners are compared to the first row."""
    found = [
        result(two_arms(), "first", 1, teacher=0.5, pupil=0.1, other=0.3),
        result(two_arms(), "second", 1, teacher=0.6, pupil=0.4, other=0.2),
    ]

    def compared(**against: str) -> list[str]:
        config = two_arms()
        for arm in config.arms.values():
            arm.learners = ["teacher", "pupil", "other"]
        config = dataclasses.replace(config, against=against)
        lines = tables.of_scores(config, found).splitlines()[2:]
        return [" ".join(line.strip("|").split("|")[-2:]).strip() for line in lines]

    assert compared() == [
        *["", "-0.4000   first.teacher", "-0.2000   first.teacher"],
        *["0.1000   first", "-0.1000   first.teacher", "-0.3000   first.teacher"],
    ]
    assert compared(**{"pupil": "first.pupil", "second.pupil": "second.teacher"}) == [
        *["", "", "-0.2000   first.teacher"],
        *["0.1000   first", "-0.2000   second.teacher", "-0.3000   first.teacher"],
    ]


def test_a_row_is_known_by_its_arm_whatever_its_name_has():
    config = two_arms()
    config.arms["t0.5"] = config.arms["first"]
    named = dataclasses.replace(config, against={"pupil": "t0.5.teacher"})
    assert named.reference("second", "pupil") == ("t0.5", "teacher")


@pytest.mark.parametrize(
    ("row", "other", "says"),
    [
        ("pupils", "second.pupil", "against.pupils: is no row of the table"),
        ("first.pupil", "second.pupil", "against.first.pupil: is no row of the table"),
        ("pupil", "pupil", "against.pupil: 'pupil' is no row; there are: first.teacher, second"),
    ],
)
def test_a_comparison_of_no_row_or_with_none_is_refused(row, other, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(two_arms(), against={row: other})


def test_the_picture_has_a_row_for_each_learner_and_a_dot_for_each_run():
    config, before = two_arms(), two_arms(steps=9)
    config.arms["first"].learners.append("pupil")
    found = [
        result(config, "first", 1, teacher=0.1, pupil=0.3),
        result(config, "first", 2, teacher=0.2),
        result(config, "second", 1, pupil=0.12),
        result(before, "second", 3, pupil=0.9),
    ]
    rows = [(row.learner, row.arm, row.values) for row in pictures.rows_of(config, found)]
    assert rows == [
        *[("teacher", "first", (0.1, 0.2)), ("pupil", "first", (0.3,))],
        ("pupil", "second", (0.12,)),
    ]
    drawn = ElementTree.fromstring(pictures.drawn(pictures.rows_of(config, found), "Why?", "loss"))
    places = [float(one.get("cx")) for one in drawn.iterfind(f"{SVG}circle")]
    assert np.allclose(np.diff(places) / (places[1] - places[0]), [1, 1, -1.8], atol=0.01)
    words = [one.text for one in drawn.iterfind(f"{SVG}text")]
    assert words[-4:] == ["teacher, first", "pupil, first", "pupil, second", "loss"]


def test_the_tables_of_the_page_are_those_of_the_results():
    kept = REPOSITORY / "docs/studies/results"
    text = "".join(path.read_text(encoding="utf-8") for path in page.pages_of(kept))
    marks = [*page.MARKED.finditer(text)]
    assert len(marks) > 10
    for marked in marks:
        name = marked["study"]
        x, both, y = name.partition("_and_")
        if both:
            table = agreement.table(score_agreement.scored(kept, x, y))
            remedy = f"python benchmarks/score_agreement.py {x} {y}"
        else:
            table = tables.of_scores(study.load(name), results.read(kept / f"{name}.jsonl"))
            remedy = f"python benchmarks/study.py {name} --table"
        assert marked["table"] == f"\n{table}\n\n", remedy


def test_a_page_is_whole_whenever_another_runner_reads_it(tmp_path):
    text, seen, over = tmp_path / "why.md", set[int](), threading.Event()
    text.write_text("Before.\n<!-- table of why -->\n<!-- end of table -->\n", encoding="utf-8")

    def read():
        while not over.is_set():
            seen.add(len(text.read_text(encoding="utf-8")))

    reader = threading.Thread(target=read)
    reader.start()
    for rows in range(100):
        page.renew(tmp_path / "results", "why", "| row |\n" * 1000 + str(rows % 2))
    over.set()
    reader.join()
    assert len(seen) <= 2, "it was seen before, and with a table"


def test_a_table_is_renewed_between_its_marks_as_soon_as_a_run_has_ended(tmp_path, monkeypatch):
    """Before the last run, which is stopped; the prose and other studies' tables stay."""
    config, kept = two_arms(), tmp_path / "studies" / "results"
    of_other = "<!-- table of other -->\n| 1 |\n<!-- end of table -->\n"
    marks = "Before.\n\n<!-- table of why -->\n{}<!-- end of table -->\n\nAfter.\n" + of_other
    text = tmp_path / "studies/why.md"
    text.parent.mkdir()
    text.write_text(marks.format("old\n"), encoding="utf-8")

    def train(file: Path, overrides: list[str]) -> bool:
        if file.stem == "second-1":
            raise SystemExit(study.STOPPED)
        (tmp_path / "why" / file.stem).mkdir()
        (tmp_path / "why" / file.stem / "evaluation.json").write_text("{}")
        return True

    monkeypatch.setattr(study, "train", train)
    ended = result(config, "first", 1, teacher=0.5)
    monkeypatch.setattr(results, "of_run", lambda job, _: ended)
    with pytest.raises(SystemExit):
        study.run_missing(study.jobs_of("why", config, tmp_path, seeds=[1]), kept)
    table = tables.of_scores(config, [ended])
    assert "| first | teacher | 1 | 0.5000 |" in table
    assert text.read_text(encoding="utf-8") == marks.format(f"\n{table}\n\n")


def test_results_with_overrides_are_printed_and_leave_page_and_picture_alone(tmp_path):
    config, kept = two_arms(), tmp_path / "studies" / "results"
    text = tmp_path / "studies/why.md"
    text.parent.mkdir()
    text.write_text("<!-- table of why -->\nold\n<!-- end of table -->\n", encoding="utf-8")
    overrides = ("steps=2",)
    ended = result(config, "first", 1, teacher=0.5)
    overridden = dataclasses.replace(ended, digest=digest(config, "first", overrides))
    results.append(kept / "why.jsonl", overridden)
    assert "| first | teacher | 1 | 0.5000 |" in study.render("why", config, kept, overrides)
    assert "\nold\n" in text.read_text(encoding="utf-8")
    assert not (kept / "why.svg").exists()
