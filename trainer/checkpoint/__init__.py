"""Elastic, asynchronous, atomic checkpoints of several DeepSpeed engines.

Weights and optimizer states are stored per parameter, not per rank. So a checkpoint saved on any
number of ranks, at any ZeRO stage, resumes on any other::

    checkpoints/step-000001000/
        manifest.json                        the index of all tensors, checksums, and health
        trainer.json                         step, attempt, scores and their metrics, the state
        metrics.jsonl                        the newest rows of the run's metrics
        teacher/rank-00000.safetensors       fragments named "parameter|state|first element"
        students/NAME/rank-00000.safetensors

A checkpoint becomes visible by one rename, after every file is on disk. A crash at any instant
leaves the previous checkpoint intact. At the start of a job::

    attempt = Attempt.begin(run)                       # rank 0, then broadcast
    checkpoint = newest_intact(run / "checkpoints", log, group)
    writer = CheckpointWriter(run / "checkpoints", Retention(), attempt, log,
                              resumed_from=checkpoint.step if checkpoint else None)
"""
