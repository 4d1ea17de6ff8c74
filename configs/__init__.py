"""Strict YAML configuration: the shipped files and the one loader that every command uses.

A file is merged over the defaults of a typed dataclass. A key that the dataclass does not have is
an error that names the nearest one. Three rules compose files:

- A section given as a name (``model: bert_base``) is the file ``configs/<section>/<name>.yaml``.
- A file or a section with ``base: NAME`` starts from that file, and the other keys change it.
- ``key=value`` overrides, dotted, come last, from left to right.

A section that names a file keeps nothing of the section it replaces. A name with a folder or an
ending in it is the path of a file outside the shipped ones.
"""

from configs.errors import ConfigError
from configs.loading import dump, find, load, load_text, plain, validate

__all__ = ["ConfigError", "dump", "find", "load", "load_text", "plain", "validate"]
