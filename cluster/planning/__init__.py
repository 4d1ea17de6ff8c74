"""The arithmetic of `tandem plan`: a job's memory, time and cost on a cluster, from plain numbers.

The job's own numbers (parameters, FLOPs, activations) come from the trainer, through the command
line: neither package imports the other.
"""

from cluster.planning.facts import CacheFacts, JobFacts, LearnerFacts, Machine, StoredFacts
from cluster.planning.plan import Plan, make_plan
from cluster.planning.text import describe

__all__ = [
    "CacheFacts",
    "JobFacts",
    "LearnerFacts",
    "Machine",
    "Plan",
    "StoredFacts",
    "describe",
    "make_plan",
]
