"""Where processes run: SLURM submission, rank environment, signals, the local launcher, status.

Nothing here imports the model, the data or the trainer: a job is a command line. So the batch
script is readable, and a queued job does not depend on a pickled closure.
"""

from cluster.errors import LaunchError

__all__ = ["LaunchError"]
