"""TensorBoard's event files, in ``tensorboard/`` of the run's folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.tracking.trackers import Row, Tracker, register_tracker


@register_tracker("tensorboard")
class TensorBoard(Tracker):
    """TensorBoard's event files in the run's folder.

    Each start writes every row anew, so that a requeued run has one curve without a gap.
    """

    package = "tensorboardX"
    extra = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        place = folder / "tensorboard"
        for older in place.glob("events.out.tfevents.*"):
            older.unlink(missing_ok=True)
        self._writer = SummaryWriter(str(place))
        text = yaml.safe_dump(dict(config), sort_keys=False)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(row["step"]))

    def close(self, completed: bool) -> None:
        self._writer.close()
