"""MLflow: the server of ``MLFLOW_TRACKING_URI``, or else files in ``mlflow/`` of the run."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.tracking.trackers import Row, Tracker, first_id, register_tracker

TAG = "tandem.run"
PARAMETERS, METRICS = 100, 1000  # the most that MLflow takes at once


@register_tracker("mlflow")
class MLflow(Tracker):
    """A run on a server of MLflow, or else in MLflow's files in the run's folder.

    Each start writes every row anew, into an MLflow run that replaces that of the attempt before.
    """

    package = "mlflow"
    extra = "mlflow"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody else hears of the run
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        place = folder / "mlflow"
        server = os.environ.get("MLFLOW_TRACKING_URI")
        for experiment_folder in place.glob("[0-9]*"):
            shutil.rmtree(experiment_folder, ignore_errors=True)
        self._metric, self._client = Metric, MlflowClient(server or place.resolve().as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or config["log"]["project"]
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        tag = first_id(folder)
        older = self._client.search_runs([experiment], f"tags.`{TAG}` = '{tag}'")
        run = self._client.create_run(experiment, tags={TAG: tag}, run_name=folder.name)
        self._run: str = run.info.run_id
        for earlier in older:
            self._client.delete_run(earlier.info.run_id)
        values = _values(config)
        self._waiting: list[Metric] = []
        while some := [Param(key, str(value)) for key, value in islice(values, PARAMETERS)]:
            self._client.log_batch(self._run, params=some)

    def log(self, row: Row) -> None:
        now, step = int(time.time() * 1000), int(row["step"])
        metrics = [self._metric(name, row[name], now, step) for name in row if name != "step"]
        if len(self._waiting) + len(metrics) > METRICS:
            self.check()
        self._waiting += metrics

    def check(self) -> None:
        """Send the rows that wait: one request for many, above all when a resumed run replays."""
        if self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting)
            self._waiting = []

    def close(self, completed: bool) -> None:
        self.check()
        self._client.set_terminated(self._run, "FINISHED" if completed else "KILLED")


def _values(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config by dotted key, as MLflow's tables compare them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
