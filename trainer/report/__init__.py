"""What a run came to: ``report.html``, readable with no network, and the table of its learners.

Both are pure functions of the files in a run folder, so they can be made again at any time, also
while the run goes on.
"""

from trainer.report.page import write_report
from trainer.report.table import student_table

__all__ = ["student_table", "write_report"]
