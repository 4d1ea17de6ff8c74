"""The results of a run: ``report.html``, readable offline, and the table of its learners.

Both are pure functions of the files in the run folder, so they can be written again at any time,
also during the run.
"""
