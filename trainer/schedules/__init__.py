"""Pure functions of the step: the learning rate, and the layers of a growing teacher."""

import trainer.schedules.kinds  # noqa: F401 - registers them
