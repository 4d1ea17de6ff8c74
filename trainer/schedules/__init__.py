"""Learning-rate schedules: pure functions of the step."""

import trainer.schedules.kinds  # noqa: F401 - registers them
