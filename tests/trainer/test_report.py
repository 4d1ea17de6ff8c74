import dataclasses
import html
import json
import math
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from configs.tables import as_text, plain_table
from tests.waiting import read, until
from trainer.report.chart import curve
from trainer.report.curves import is_term
from trainer.report.page import LiveReport, render, write_report
from trainer.report.table import student_table
from trainer.run_folder import metrics
from trainer.run_folder.metrics import MetricsLog
from trainer.run_folder.run_files import RunFiles
from trainer.scoring.columns import ACCURACY, LOSS, NUMBER, Column

VOID = {"meta", "input", "line", "path", "br"}


class Page(HTMLParser):
    """A page with its tags checked for balance."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())


def evaluation(students):
    def facts(parameters, accuracy, started_at, export):
        return {
            "parameters": parameters,
            "loss": 6 - 10 * accuracy,
            "accuracy": accuracy,
            "retention": accuracy / 0.25,
            "agreement": None if export == "teacher" else {"top_1": 0.7, "kl": 0.4},
            "corpora": {},
            "seconds_per_sequence": 0.012,
            "sequences_per_second": 83.0,
            "tokens_per_second": 1e11 / parameters,
            "started_at": started_at,
            "export": f"runs/demo/exports/{export}",
        }

    learners = {"teacher": facts(1_873_280, 0.25, 0, "teacher")}
    for i, name in enumerate(students):
        learners[f"students/{name}"] = facts(10**6 // (i + 1), 0.2 / (i + 1), 50 * i, name)
    return {
        "step": 200,
        "corpus": {
            "documents": 4587,
            "tokens": 2_666_936,
            "validation_tokens": 58_312,
            "path": "runs/demo-data",
        },
        "metric": "accuracy",
        "columns": [dataclasses.asdict(column) for column in (LOSS, ACCURACY)],
        "unigram": {"loss": 6.54, "accuracy": 0.0526},
        "learners": learners,
    }


def config(students):
    names = "".join(f"  {json.dumps(name)}: {{zero_stage: 1}}\n" for name in students)
    return (
        "name: demo\nsteps: 200\nbatch: {size: 64, micro_batch: 32}\n"
        "data: {path: runs/demo-data, sequence_length: 128}\n"
        f"teacher: {{}}\nstudents:{' {}' if not students else ''}\n{names}"
    )


def rows(students, steps=range(10, 201, 10), value=lambda step: 9 / (1 + step / 50)):
    for step in steps:
        row = {"step": step, "tokens": step * 7000, "seconds": step * 0.2, "memory": 1e9}
        row |= {"tokens_per_second": 40_000.0}
        for i, name in enumerate(["teacher", *(f"students/{one}" for one in students)]):
            if step > 50 * (i - 1):
                row |= {f"{name}/loss": value(step) + i, f"{name}/mlm": value(step) + i}
                row |= {f"{name}/lr": 1e-3, f"{name}/grad_norm": 0.5, f"{name}/skipped_steps": 0}
                row |= {f"{name}/hidden_mse": 0.25} if i else {}
        yield row
        if step % 50 == 0:
            yield {"step": step, "tokens": step * 7000} | {
                key.replace(name, f"val/prose/{name}"): value / 10
                for name in ["teacher", *(f"students/{one}" for one in students)]
                for key, value in [(f"{name}/loss", 50), (f"{name}/accuracy", 1.0)]
            }


@pytest.fixture
def make(tmp_path):
    def make(students=("half", "tiny"), logged=None, results=True):
        folder = tmp_path / "demo"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(config(students), encoding="utf-8")
        with MetricsLog(folder / "metrics.jsonl") as log:
            for row in rows(students) if logged is None else logged:
                log.append(row)
        if results:
            (folder / "evaluation.json").write_text(json.dumps(evaluation(students)))
        return folder

    return make


def test_the_page_is_whole_small_and_needs_no_network(make):
    folder = make()
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"https?://|@import|url\(|\bsrc=|\bhref=", text)
    assert page.attributes[page.tags.index("html")] == {"lang": "en"}
    assert "prefers-color-scheme: dark" in text
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.yaml",
        "evaluation.json",
        "metrics.jsonl",
        "report.html",
    ]


def test_the_same_files_give_the_same_page(make):
    folder = make()
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


def test_facts_and_table(make):
    words = Page(write_report(make())).words
    for fact in ("2.67M tokens", "200", "1.4M", "0.5 times the text", "40s", "finished"):
        assert fact in words
    for cell in ("teacher", "half", "tiny", "1.87M", "25.0%", "80.0%", "40.0%", "6.540", "5.3%"):
        assert cell in words
    assert "runs/demo/exports/tiny" in words


def test_a_batch_that_is_stated_in_tokens(make):
    folder = make()
    text = config(["half", "tiny"]).replace("size: 64,", "size: null, tokens: 8192,")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert "of about 8,192 tokens in sequences of 128" in Page(write_report(folder)).words


def test_a_batch_that_is_not_stated(make):
    folder = make()
    text = config(["half", "tiny"]).replace("size: 64,", "size: null, tokens: null,")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert "of 64 sequences of 128" in Page(write_report(folder)).words


def test_a_student_that_never_joined_is_named_once_the_run_has_finished(make):
    folder = make(results=False)
    assert "never joined" not in Page(write_report(folder)).words
    (folder / "evaluation.json").write_text(json.dumps(evaluation(["half"])))
    words = Page(write_report(folder)).words
    assert "students/tiny never joined: its `start` was not reached" in words
    assert "half never joined" not in words


def test_batches_that_grow_and_phases_of_other_lengths_are_told_as_far_as_they_are_reached(make):
    folder = make()
    unchanged = {"sequence_length": None, "packing": None, "masking": None, "batch": None}
    phases = [
        {**unchanged, "from_step": 150, "sequence_length": 512, "batch": 16},
        {**unchanged, "from_step": 180, "masking": {"rate": 0.1}},
        {**unchanged, "from_step": 200, "sequence_length": 1024},  # behind the last step
    ]
    masking = {"unit": "token", "rate": 0.3, "final_rate": 0.15}
    growth = [{"step": step, "size": 3 + step, "tokens": None} for step in (13, 200)]
    more = f", masking: {json.dumps(masking)}, phases: {json.dumps(phases)}}}"
    text = config(["half", "tiny"]).replace("sequence_length: 128}", f"sequence_length: 128{more}")
    text = text.replace("micro_batch: 32", f"micro_batch: 32, growth: {json.dumps(growth)}")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    words = Page(write_report(folder)).words
    assert "of 16 to 64 sequences of 128 to 512" in words
    assert "128 tokens; then 512 tokens" in words
    assert "1,024" not in words
    assert "30% to 15% of the tokens; then 10% of the tokens" in words


def test_the_longest_examples_of_several_tasks_are_told(make):
    folder = make()
    tasks = "{a: {train: a.csv, sequence_length: 256}, b: {train: b.csv, sequence_length: null}}"
    text = config(["half", "tiny"]).replace("{path: runs/demo-data,", f"{{tasks: {tasks},")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert "of 64 examples of at most 256 tokens" in Page(write_report(folder)).words


def test_examples_are_read_as_often_as_there_were_epochs(make):
    """By tokens it would be 0.5 times; those that are read include special ones."""
    folder = make()
    text = config(["half", "tiny"]).replace("{path: runs/demo-data,", "{train: reviews.csv,")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    assert "2.8 times the examples" in Page(write_report(folder)).words  # 200 * 64 / 4,587


def test_a_job_of_next_tokens_masks_nothing(make):
    """Also with further scores of text, as those of averaged weights."""
    folder = make()
    logged = (
        (folder / "metrics.jsonl").read_text().replace("/teacher/accuracy", "/teacher/average_loss")
    )
    (folder / "metrics.jsonl").write_text(logged)
    masking = "{path: runs/demo-data, masking: {unit: next_token}, "
    text = config(["half", "tiny"]).replace("{path: runs/demo-data, ", masking)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "evaluation.json").unlink()
    words = Page(write_report(folder)).words
    assert "Next-token loss on held-out text" in words
    assert "Masked-LM" not in words
    assert "average_loss on held-out text" in words


def test_what_is_logged_beside_terms_is_none():
    logged = ("mlm", "lead", "lr", "seconds_step", "aligned_masked", "aligned_tokens")
    assert [name for name in logged if is_term(name)] == ["mlm"]


def test_a_live_page_says_how_much_time_is_left(make):
    folder = make(results=False, logged=rows((), steps=range(10, 101, 10)))
    assert "20s left" in render(RunFiles.read(folder), live=True)
    config_file = folder / "config.yaml"
    config_file.write_text(f"hours: {25 / 3600}\n" + config_file.read_text())
    assert "5s left" in render(RunFiles.read(folder), live=True)


def test_every_learner_is_drawn_against_steps_tokens_and_time(make):
    page = Page(write_report(make()))
    assert page.tags.count("figure") == 1 + 4 + 2 + 3  # scatter, main, objectives, the rest
    assert page.words.count("unigram") == 2 + 3 + 2  # style, legends, scatter and table
    choices = [a["id"] for t, a in zip(page.tags, page.attributes, strict=True) if t == "input"]
    assert choices == ["by-steps", "by-tokens", "by-minutes"]
    drawn = [
        a["d"] for t, a in zip(page.tags, page.attributes, strict=True) if t == "path" and a["d"]
    ]
    assert len(drawn) == 3 * (3 + 3 + 3 + 1 + 3 + 3 + 3 + 3 + 1)
    assert "tiny joins" in page.words
    assert "half joins" not in page.words


def curves_of(run_folder, title):
    """The curves of the chart with this title, by name."""
    page = write_report(run_folder).read_text()
    parts = re.findall('data-hover="(.*?)"><figcaption><h3>(.*?)</h3>', page)
    (hover,) = (html.unescape(data) for data, heading in parts if heading == title)
    return {line["name"]: line["y"] for line in json.loads(hover)["curves"]}


def test_a_learner_without_masked_words_has_a_curve_of_its_loss(make):
    logged = [
        {
            key: value
            for key, value in row.items()
            if not re.match("students/half/(mlm|hidden)", key)
        }
        for row in rows(["half", "tiny"])
    ]
    folder = make(logged=logged)
    assert [*curves_of(folder, "Masked-LM loss in training")] == ["teacher", "tiny"]
    assert [*curves_of(folder, "Loss in training")] == ["half"]


def test_a_teacher_that_only_teaches_in_the_end_has_a_curve_of_its_time(make):
    logged = list(rows([], steps=range(10, 31, 10)))
    for row in logged:
        row["teacher/seconds_forward"] = 0.25
        row |= {"teacher/seconds_backward": 0.5} if row["step"] < 30 else {}
    folder = make(students=(), logged=logged)
    assert curves_of(folder, "Time of each learner") == {"teacher": [750.0, 750.0, 250.0]}


def test_what_the_script_reads_is_json(make):
    page = Page(write_report(make(logged=list(rows(["half"], value=lambda step: math.nan)))))
    charts = [json.loads(a["data-hover"]) for a in page.attributes if "data-hover" in a]
    (loss,) = [c["y"] for c in charts[0]["curves"] if c["name"] == "teacher"]
    assert set(loss) == {None}
    assert charts[0]["axes"]["tokens"]["end"] == 200 * 7000


def test_a_run_in_progress_is_reported(make):
    words = Page(write_report(make(results=False, logged=list(rows(["half", "tiny"]))[:3]))).words
    assert "step 30 of 200" in words
    assert "finished" not in words
    assert "Learners" not in words


def test_a_finished_run_that_was_given_more_steps_goes_on(make):
    folder = make()
    assert "step 200 of 200, at " in Page(write_report(folder, live=True)).words
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.append({"step": 210, "tokens": 210 * 7000})
    words = Page(write_report(folder)).words
    assert "finished" not in words
    assert "Learners" not in words


def test_a_run_that_has_logged_nothing_and_one_that_has_logged_once(make):
    assert "Nothing has been logged yet" in Page(write_report(make(results=False, logged=[]))).words
    Page(write_report(make(results=False, logged=[{"step": 10, "teacher/mlm": 9.0}])))


def test_a_gap_and_a_point_alone_between_gaps():
    x, y = np.linspace(0, 1, 5), np.array([0.5, math.nan, 0.25, math.inf, 1.0])
    assert curve(x, y) == "M0.0 500.0h0M500.0 250.0h0M1000.0 1000.0h0"
    assert curve(x, np.zeros(5)).count("M") == 1


@pytest.mark.parametrize(
    ("teacher", "data", "summary"),
    [
        ("{}", "", "A teacher and 2 students, trained in one job from the same teacher forward"),
        ("{}", "train: a.csv, ", "A teacher and 2 students, fine-tuned on a task in one job"),
        ("{frozen: true}", "", "2 students, distilled from a finished teacher."),
        ("{frozen: true}", "train: a.csv, ", "2 students, distilled on a task from a finished"),
        ("{frozen: true, stored: {path: p}}", "", "from the stored predictions of a finished"),
    ],
)
def test_a_page_says_what_was_trained(make, teacher, data, summary):
    folder = make(results=False)
    text = config(["half", "tiny"]).replace("teacher: {}", f"teacher: {teacher}")
    (folder / "config.yaml").write_text(text.replace("{path: runs", f"{{{data}path: runs"))
    words = Page(write_report(folder)).words
    assert summary in words
    assert ("one job" in words) == ("frozen" not in teacher)


def test_a_share_of_a_teacher_that_has_hardly_learnt_is_no_percentage(make):
    folder = make()
    results = evaluation(["half", "tiny"])
    results["learners"]["students/half"]["retention"] = 20.0
    (folder / "evaluation.json").write_text(json.dumps(results))
    for shown in (write_report(folder).read_text(), student_table(results)):
        assert "2000.0%" not in shown
        assert "40.0%" in shown
        assert "empty above 200%" in " ".join(shown.split())


def test_a_share_of_a_teacher_no_better_than_guessing_is_no_percentage(make):
    folder = make()
    results = evaluation(["half", "tiny"])
    results["unigram"]["accuracy"] = 0.25
    (folder / "evaluation.json").write_text(json.dumps(results))
    for shown in (write_report(folder).read_text(), student_table(results)):
        assert "80.0%" not in shown
        assert "40.0%" not in shown


@pytest.mark.parametrize(("teacher", "is_shown"), [(0.25, False), (0.26, True)])
def test_a_student_alone_is_compared_with_a_teacher_that_is_not_in_the_table(teacher, is_shown):
    results = evaluation(["half"]) | {"unigram": {"accuracy": 0.25}, "teacher_score": teacher}
    del results["learners"]["teacher"]  # `tandem evaluate RUN --learner half`
    assert ("80.0%" in student_table(results)) == is_shown


@pytest.mark.parametrize(("most_frequent", "is_shown"), [(40, False), (39, True)])
def test_a_share_of_a_teacher_that_always_chooses_one_label(most_frequent, is_shown):
    results = evaluation(["half"]) | {"metric": "t_accuracy", "unigram": {}}
    results["columns"] = [dataclasses.asdict(Column("t_accuracy", "accuracy"))]
    confusion = [[0, most_frequent], [0, 40], [0, 100 - 40 - most_frequent]]
    for facts in results["learners"].values():
        facts |= {"t_accuracy": 0.4, "retention": 0.8, "breakdown": {"t": {"confusion": confusion}}}
    results["learners"]["teacher"]["t_accuracy"] = 0.4 + 0.001 * is_shown
    assert ("80.0%" in student_table(results)) == is_shown


def test_the_curve_of_a_tasks_metric_comes_first(make):
    scores = {f"val/t/teacher/t_{name}": 0.5 for name in ("accuracy", "f1")}
    logged = [{"step": step, "teacher/loss": 1.0} | scores for step in (10, 20)]
    folder = make(students=(), logged=logged)
    text = config([]).replace("{path: runs/demo-data,", "{train: reviews.csv,")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    titles = re.compile(r"<figcaption><h3>(.*?)</h3>").findall
    assert titles(write_report(folder).read_text())[0].startswith("t_accuracy on")
    columns = [Column("t_accuracy", "accuracy"), Column("t_f1", "F1")]
    results = evaluation([]) | {"metric": "t_f1", "unigram": {}}
    results["columns"] = [dataclasses.asdict(column) for column in columns]
    (folder / "evaluation.json").write_text(json.dumps(results))
    names = [f"{name} on the validation examples" for name in ("F1", "accuracy")]
    assert titles(write_report(folder).read_text())[:3] == [*names, "Loss in training"]


def test_a_teacher_alone_and_many_students(make):
    assert "A teacher, pre-trained" in Page(write_report(make(students=()))).words
    many = [f"student-{i}" for i in range(20)]
    assert "A teacher and 20 students" in Page(write_report(make(students=many))).words


def test_names_cannot_break_out_of_the_page(make):
    hostile = '"><script>alert(1)</script>'
    path = write_report(make(students=(hostile,)))
    page = Page(path)
    assert page.tags.count("script") == 1
    assert "alert(1)" in page.words


def test_the_most_frequent_class_is_a_baseline_beside_the_mistakes(make):
    folder = make()
    results = json.loads((folder / "evaluation.json").read_text())
    confusion = {"labels": ["bad", "<good>"], "confusion": [[1, 1], [2, 4]]}
    results["learners"]["students/half"]["breakdown"] = {"stars": confusion}
    (folder / "evaluation.json").write_text(json.dumps(results))
    assert (
        "Always choosing <good>, the most frequent, is right in 75.0%."
        in Page(write_report(folder)).words
    )


def test_keys_are_told_apart_once_for_all_rows(make, monkeypatch):
    students = ["a", "b"]
    calls, split = [], metrics.split_held_out
    monkeypatch.setattr(metrics, "split_held_out", lambda key: calls.append(key) or split(key))
    counts = []
    for steps in (range(10, 101, 10), range(110, 1001, 10)):  # more rows in the same file
        run = RunFiles.read(make(students, rows(students, steps), results=False))
        calls.clear()
        render(run)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_the_table_of_a_terminal():
    lines = student_table(evaluation(["half"])).splitlines()
    assert [line.split() for line in lines[:4]] == [
        [
            *[
                "learner",
                "parameters",
                "loss",
                "accuracy",
                "retention",
                "agreement",
                "tokens/s",
                "ms/seq",
                "steps",
                "exported",
                "to",
            ]
        ],
        ["teacher", "1.87M", "3.500", "25.0%", "53.4k", "12", "runs/demo/exports/teacher"],
        ["half", "1M", "4.000", "20.0%", "80.0%", "70.0%", "100k", "12", "runs/demo/exports/half"],
        ["(unigram)", "6.540", "5.3%"],
    ]
    assert len({line.index("%") for line in lines[1:4]}) == 1  # columns are aligned


def test_the_table_of_a_teacher_alone_compares_nothing():
    shown = student_table(evaluation([]))
    assert "53.4k" in shown
    assert not [word for word in ("retention", "agreement") if word in shown]
    results = evaluation(["half"])
    del results["learners"]["teacher"]  # `tandem evaluate RUN --learner half`
    assert "agreement: share of tokens with the same" in " ".join(student_table(results).split())


def test_the_table_keeps_long_export_paths_on_one_line():
    results = evaluation(["half"])
    results["learners"]["teacher"]["export"] = "/very/long" * 20
    assert "/very/long" * 20 in student_table(results)


def test_the_table_reads_no_markup_in_a_users_words():
    table = plain_table("class", "examples")
    for label in ("[neg]", ":smile:", "data[/x]"):
        table.add_row(label, "1")
    assert [line.split()[0] for line in as_text(table).splitlines()[1:]] == [
        "[neg]",
        ":smile:",
        "data[/x]",
    ]


def test_a_head_that_is_not_trained_has_words_for_scores_and_no_place_in_the_picture(make):
    folder = make()
    results = evaluation(["half", "tiny"])
    nothing = dict.fromkeys(("loss", "accuracy", "retention", "agreement"))
    results["learners"]["students/half"] |= nothing
    (folder / "evaluation.json").write_text(json.dumps(results), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count("<td>not trained</td>") == 2
    assert page.count("Not trained: ") == 1
    line = student_table(results).splitlines()[2]
    assert line.split()[2:6] == ["not", "trained", "not", "trained"]


def test_scores_of_a_task_are_shown_without_a_word_about_it_here(make):
    """The columns come from the results: a correlation, without a baseline, and not a share."""
    matthews = Column("matthews", "MCC", NUMBER)
    folder = make()
    results = evaluation(["half"]) | {"metric": "matthews", "unigram": {}}
    results["columns"] = [dataclasses.asdict(matthews)]
    for facts, score in zip(results["learners"].values(), (0.61234, -0.1), strict=True):
        facts |= {"matthews": score}
    (folder / "evaluation.json").write_text(json.dumps(results), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<th>MCC</th>" in page
    assert "<td>0.612</td>" in page
    assert "Size against quality" not in page
    lines = [line.split() for line in student_table(results).splitlines()]
    assert [line[2] for line in lines[:3]] == ["MCC", "0.612", "-0.100"]
    for shown in (page, student_table(results)):
        assert "on the validation examples" in shown
        for words in ('class="unigram"', "(unigram)", "masked tokens in held-out", "guesses"):
            assert words not in shown
    assert matthews.retention(0.3, 0.6) == 0.5
    assert matthews.retention(0.3, -0.1) is None
    assert LOSS.retention(4.0, 3.0) == 0.75


def test_the_table_of_a_scoring_that_exports_nothing():
    results = evaluation(["half"])
    for facts in results["learners"].values():
        del facts["export"]
    results["learners"].pop("teacher")
    results["learners"]["students/half"]["retention"] = None
    assert "exported" not in student_table(results)


def test_restarts_and_checkpoints_are_marked_on_the_speed(make):
    logged = [
        {**row, "restarts": int(row["step"] > 100), "checkpoint_stall": 0.1 * (row["step"] == 50)}
        for row in rows(["half"])
        if "seconds" in row
    ]
    page = Page(write_report(make(students=["half"], logged=logged)))
    assert page.words.count("restart 1") == 3  # against steps, tokens and minutes
    classes = [attributes.get("class") for attributes in page.attributes]
    assert classes.count("stroke") == 3


def test_a_chart_of_evaluations_has_no_mark_beyond_the_last_one(make):
    students = ["half", "tiny", "late"]  # the last one joins after the evaluation at step 100
    logged = list(rows(students, steps=range(10, 141, 10)))
    page = Page(write_report(make(students, logged, results=False)))
    assert page.words.count("late joins") == 3 * 2  # on the training loss and on the speed
    assert page.words.count("tiny joins") == 3 * 4


def test_a_live_page_loads_itself_again_and_a_finished_one_does_not(make):
    folder = make(results=False)
    assert 'http-equiv="refresh"' in write_report(folder, live=True).read_text()
    assert 'http-equiv="refresh"' not in write_report(folder).read_text()


@pytest.mark.slow
def test_a_live_report_is_written_beside_training(make):
    folder = make(results=False)
    report = LiveReport(folder)
    report.refresh()
    report.refresh()  # a moment later: nothing
    assert report._writer.wait() == 0
    report.close()
    assert "step 200 of 200, at " in (folder / "report.html").read_text()


def never_read(folder):
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")  # whoever reads it waits for ever
    return folder


def test_a_run_that_ends_does_not_wait_for_its_live_report(make):
    report = LiveReport(never_read(make(results=False)))
    report.refresh()
    report.close()
    assert report._writer.returncode == -signal.SIGKILL


KILLED = """
import os, pathlib, signal, sys
from trainer.report.page import LiveReport
report = LiveReport(pathlib.Path(sys.argv[1]))
report.refresh()
print(report._writer.pid, flush=True)
sys.stdin.read()
"""


def is_at_work(process):
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_nothing_writes_a_report_once_its_run_is_killed(make):
    folder = never_read(make(results=False))
    command = [sys.executable, "-c", KILLED, str(folder)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    writer = int(read(run.stdout.fileno()))
    run.kill()
    run.wait(60)
    until(lambda: not is_at_work(writer), "the end of its writer")


def test_what_the_data_was(make):
    folder = make()
    text = (folder / "config.yaml").read_text()
    mixture = "{mixture: {web: {path: w, weight: 3.0}, books: {path: b, weight: 1.0}}, "
    changed = text.replace("{path: runs/demo-data, ", mixture)
    (folder / "config.yaml").write_text(changed)
    words = Page(write_report(folder)).words
    assert "web: w, 75%; books: b, 25%" in words
    assert "4,587" in words


def test_a_report_of_a_run_in_progress_does_not_load_torch(make):
    """It is written each minute, on the cores of the ranks."""
    code = (
        "import pathlib, sys; from trainer.report.page import write_report\n"
        "write_report(pathlib.Path(sys.argv[1]), live=True)\n"
        "assert not {'torch', 'data_pipeline', 'model'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(make())], check=True)
