"""Where processes run: SLURM submission, rank environment, signals, the local launcher, status.

Nothing here imports the model, the data or the trainer: the job is a command line, so that the
batch script stays readable and a queued job cannot break on a pickled closure.
"""

from cluster.errors import LaunchError

__all__ = ["LaunchError"]
