"""Strict YAML configuration: the shipped files, and the loader that every command uses.

A file is merged over the defaults of a typed dataclass. An unknown key is an error that names the
nearest known one. OmegaConf resolves interpolations. Three rules compose files:

- A section given as a name (``model: bert_base``) is the file ``configs/<section>/<name>.yaml``.
- A file or a section with ``base: NAME`` starts from that file; its other keys change it.
- ``key=value`` overrides, with OmegaConf's keys, are applied last, from left to right.

A section that names a file replaces the whole section before it; an override of its ``base`` alone
keeps the other keys. A name with a folder or a suffix is the path of a file.
"""

from configs.errors import ConfigError
from configs.loading import (
    SHIPPED,
    assigned,
    assignment,
    dump,
    find,
    is_shipped,
    load,
    load_text,
    load_tree,
    merge,
    plain,
    validate,
)

__all__ = [
    "SHIPPED",
    "ConfigError",
    "assigned",
    "assignment",
    "dump",
    "find",
    "is_shipped",
    "load",
    "load_text",
    "load_tree",
    "merge",
    "plain",
    "validate",
]
