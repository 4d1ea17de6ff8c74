"""The arithmetic of `tandem plan`: a job's memory, time and cost on a cluster, from plain numbers.

The job's own numbers (`configs.plan_facts`) come from the trainer, through the command line:
neither package imports the other.
"""
