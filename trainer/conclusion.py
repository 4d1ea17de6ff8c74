"""What a run leaves behind: final scores, exports in Hugging Face format, the report."""

from __future__ import annotations

import json
from typing import Any

from trainer.control.run_folder import RunFolder
from trainer.durable import replace
from trainer.evaluation.export import export_learner
from trainer.evaluation.final_scores import evaluate_run
from trainer.evaluation.finished import SavedLearners
from trainer.report import write_report
from trainer.watch.company import Beat


def conclude(folder: RunFolder, beat: Beat) -> dict[str, Any]:
    """Evaluate and export every learner of the newest checkpoint, and write the report.

    Returns the content of ``evaluation.json``, which is written last but for the report and marks
    the run as finished. One process, no engines. `beat` is called whenever it has got on: for every
    batch that is scored, and for every export.
    """
    saved = SavedLearners(folder)
    results = evaluate_run(saved, beat=beat)
    for name, facts in results["learners"].items():
        beat()
        out = folder.exports / name.removeprefix("students/")
        export_learner(saved, name, out)
        facts["export"] = str(out)
    beat()
    replace(folder.evaluation, json.dumps(results, indent=2) + "\n")
    write_report(folder.path)
    return results
