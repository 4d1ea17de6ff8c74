"""The end of a run: final scores, exports in Hugging Face format, the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.progress import work
from configs.strict_json import strict_json
from data_pipeline import Corpus
from trainer.checkpoint import published
from trainer.config import JobConfig
from trainer.durable import atomic_write
from trainer.evaluation.export import export_learner
from trainer.evaluation.final_scores import evaluate_run
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.examples import test_contents
from trainer.report.page import write_report
from trainer.run_folder.folder import EXPORTED, RunFolder
from trainer.run_folder.run_files import read_evaluation
from trainer.watch.ranks import SendHeartbeat


def finalize(
    folder: RunFolder,
    heartbeat: SendHeartbeat = lambda: None,
    corpora: Mapping[str, Corpus] | None = None,
) -> dict[str, Any]:
    """Evaluate and export every learner of the newest checkpoint, and write the report.

    Results that exist are kept, so a run that was killed meanwhile only gets what is missing.
    Returns the content of ``evaluation.json``, which is written after the scores and exports that
    it names. One process, no engines. `heartbeat` is called for every batch that is scored and for
    every export. `corpora` are the job's, if they are open already.
    """
    results = _results_so_far(folder)
    if results is None:
        saved = SavedLearners(folder, corpora)
        results = evaluate_run(saved, heartbeat=heartbeat)
        _export(saved, results, list(results["learners"]), heartbeat)
        atomic_write(folder.evaluation, strict_json(results) + "\n")
    elif missing := folder.missing_exports(results):
        _export(SavedLearners(folder, corpora), results, missing, heartbeat)
    heartbeat()
    if not folder.has_final_report():
        write_report(folder.path)
    return results


def _results_so_far(folder: RunFolder) -> dict[str, Any] | None:
    """The run's results, if they fit its newest checkpoint and its test files."""
    results = read_evaluation(folder.evaluation)
    newest = published(folder.checkpoints)[-1:]
    if results is None or newest not in ([], [results["step"]]):
        return None
    return results if has_scored(results, folder.load_config()) else None


def has_scored(results: Mapping[str, Any], job: JobConfig) -> bool:
    """Whether a run's results are scores on what the test files of its job hold now."""
    return dict(results.get("test", {})) == (test_contents(job) if job.data.has_examples else {})


TRANSFORMERS = "loads with transformers"


def _export(
    saved: SavedLearners, results: Mapping[str, Any], names: list[str], heartbeat: SendHeartbeat
) -> None:
    for name in names:
        for weights in [saved, *([saved.averages()] if saved.has_average(name) else [])]:
            heartbeat()
            out = saved.folder.export(name, average=weights.are_averages)
            (out / EXPORTED[-1]).unlink(missing_ok=True)  # without this file it is incomplete
            with work(f"exporting {name.removeprefix('students/')}", ticks=True):
                note = export_learner(weights, name, out, results)
            key = "export_of_average" if weights.are_averages else "export"
            results["learners"][name] |= {key: str(out), "export_format": note or TRANSFORMERS}
