"""The terms of objectives. Each has a config, which is its YAML section, and builds a `Term`.

To add a term, write a module here with its loss, its config and its `Term`, registered under its
name in YAML and metrics (`trainer.objectives.term.register`). Modules here are imported
automatically. A term that trains a head of its own is a task and belongs in `trainer.tasks`.
"""

from configs.kinds import import_modules

import_modules(__name__, __path__)
