"""What a job will need and take on a cluster, from plain numbers: `tandem plan`.

The numbers of the job itself (parameters, FLOPs, activations) come from the trainer; the packages
meet in the command line only.
"""

from cluster.planning.facts import JobFacts, LearnerFacts, Machine
from cluster.planning.plan import Plan, make_plan
from cluster.planning.words import describe

__all__ = ["JobFacts", "LearnerFacts", "Machine", "Plan", "describe", "make_plan"]
