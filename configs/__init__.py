"""Strict YAML configuration: the shipped files and the one loader that every command uses.

A file is merged over the defaults of a typed dataclass. A key that the dataclass does not have is
an error that names the nearest one. Three rules compose files:

- A section given as a name (``model: bert_base``) is the file ``configs/<section>/<name>.yaml``.
- A section with ``base: NAME`` starts from that file, and the other keys change it.
- ``key=value`` overrides, dotted, come last.

A name may also be the path of a file outside the shipped ones.
"""

from configs.loading import ConfigError, dump, find, load, validate

__all__ = ["ConfigError", "dump", "find", "load", "validate"]
