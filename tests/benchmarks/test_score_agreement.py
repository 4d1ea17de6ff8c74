"""Whether two scores agree about the models of studies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks import score_agreement
from benchmarks.studies import agreement, results
from benchmarks.studies.agreement import Scored
from benchmarks.studies.results import Result
from tests.benchmarks.made_studies import result, two_arms


def both(one: Result, **pairs: float) -> Result:
    """The result with minimal pairs for some of its learners."""
    scores = {
        name: {**known, **({"minimal_pairs": pairs[name]} if name in pairs else {})}
        for name, known in one.scores.items()
    }
    return dataclasses.replace(one, scores=scores)


def test_models_are_the_rows_of_the_table_that_have_both_scores():
    config, before = two_arms(), two_arms(steps=9)
    found = [
        both(result(config, "first", 1, teacher=0.3, unlisted=0.9), teacher=0.6, unlisted=0.9),
        both(result(config, "second", 2, pupil=0.2)),
        both(result(before, "first", 2, teacher=0.1), teacher=0.5),
    ]
    assert agreement.scored(config, found, "accuracy", "minimal_pairs") == [
        Scored("first.teacher, seed 1", 0.3, 0.6)
    ]


def test_a_model_that_is_asked_again_counts_once():
    config = two_arms()
    again = {"steps": 1, "teacher": {"init": {"pretrained": "$runs/first-$seed/exports/teacher"}}}
    config.arms["second"] = dataclasses.replace(config.arms["first"], job=again)
    found = [
        both(result(config, arm, 1, teacher=accuracy), teacher=0.6)
        for arm, accuracy in (("first", 0.3), ("second", 0.2))
    ]
    assert agreement.scored(config, found, "accuracy", "minimal_pairs") == [
        Scored("second.teacher, seed 1", 0.2, 0.6)
    ]


def test_studies_are_compared_within_themselves():
    """Each study's scores fall together; one study is better in the one and worse in the other."""
    rising = [Scored(str(one), 0.1 + one / 100, 0.9 + one / 100) for one in range(4)]
    other = [Scored(str(one), 0.8 + one / 70, 0.2 + one / 70) for one in range(4)]
    falling = [Scored(str(one), one, -one) for one in range(3)]
    assert agreement.table({"a": rising, "b": other, "few": rising[:2]}).splitlines()[2:] == [
        "| a | 4 | 1.00 |",
        "| b | 4 | 1.00 |",
        f"| {agreement.ALL} | 8 | 1.00 |",
    ]
    assert agreement.table({"c": falling}).splitlines()[2:] == ["| c | 3 | -1.00 |"]


def test_every_model_is_a_dot_further_right_and_higher_with_greater_scores():
    models = {"a": [Scored("low", 0.1, 0.5), Scored("high", 0.2, 0.7)]}
    root = ElementTree.fromstring(agreement.drawn(models, "accuracy", "minimal_pairs"))
    low, high = root.findall(".//{http://www.w3.org/2000/svg}circle")
    assert float(low.get("cx", "")) < float(high.get("cx", ""))
    assert float(low.get("cy", "")) > float(high.get("cy", ""))


def test_the_command_draws_prints_and_renews_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = two_arms()
    monkeypatch.setattr(score_agreement, "load", lambda _: config)
    kept, text = tmp_path / "studies/results", tmp_path / "studies/pairs.md"
    text.parent.mkdir()
    text.write_text("<!-- table of accuracy_and_minimal_pairs -->\n<!-- end of table -->\n")
    words = ["accuracy", "minimal_pairs", "--results", str(kept)]

    kept.mkdir(parents=True)
    nothing = CliRunner().invoke(score_agreement.main, words)
    assert nothing.exit_code == 1
    assert "no study has both accuracy and minimal_pairs" in nothing.output

    for seed in (1, 2, 3):
        one = both(result(config, "first", seed, teacher=seed / 10), teacher=seed / 20)
        results.append(kept / "made.jsonl", one)
    done = CliRunner().invoke(score_agreement.main, words)
    assert done.exit_code == 0, done.output
    assert "| made | 3 | 1.00 |" in done.output
    assert "| made | 3 | 1.00 |" in text.read_text()
    assert (kept / "accuracy_and_minimal_pairs.svg").exists()
