"""The results of a run: ``report.html``, readable offline, and the table of its learners.

Both are pure functions of the files in the run folder, so they can be written again at any time,
also during the run.
"""

from trainer.report.page import write_report
from trainer.report.table import student_table

__all__ = ["student_table", "write_report"]
