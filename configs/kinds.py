"""Sections that come in kinds, and the plugins that add some: files that a job or command names."""

import dataclasses
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from configs.errors import ConfigError, UserError

KIND = "kind"
_Schema = TypeVar("_Schema", bound=type)
_Value = TypeVar("_Value")

_KINDS: dict[Any, dict[str, Any]] = {}


def add_kind(base: Any, schema: _Schema) -> _Schema:
    """Let a section of the dataclass `base` be a `schema`, whose `kind` has its name by default.

    Returns `schema`. Raises TypeError as `require_new`.
    """
    kinds = _KINDS.setdefault(base, {})
    require_new(schema, base, kinds)
    kinds[default_kind(schema)] = schema
    return schema


def require_new(entry: Any, base: Any, entries: Mapping[str, Any], name: str = "") -> None:
    """Raise TypeError unless a class may be one of the `entries`, which derive from `base`.

    Its name is by default that of its `kind`.
    """
    if not (isinstance(entry, type) and issubclass(entry, base)):
        raise TypeError(f"{entry.__name__} has to derive from {base.__name__}")
    if dataclasses.is_dataclass(base) and "__dataclass_fields__" not in vars(entry):
        raise TypeError(f"{entry.__name__} has to be a @dataclass, below what registers it")
    if missing := ", ".join(sorted(getattr(entry, "__abstractmethods__", ()))):
        raise TypeError(f"{entry.__name__} has to define {missing}")
    name = name or default_kind(entry)
    if name in entries:
        raise TypeError(f"{entry.__name__} is called {name}, as another is; give it another name")


def kinds_of(base: Any) -> Mapping[str, Any]:
    """The dataclasses that a section may be, by kind; none where it does not come in kinds."""
    return _KINDS.get(base, {})


def default_kind(schema: Any) -> str:
    """The kind of a section that does not name one."""
    (kind,) = (field.default for field in dataclasses.fields(schema) if field.name == KIND)
    return str(kind)


def chosen(schema: Any, tree: Mapping[str, Any]) -> Any:
    """The dataclass that a section's `kind` names; `schema` itself where there is no such kind."""
    kinds = kinds_of(schema)
    name = tree.get(KIND, default_kind(schema)) if kinds else None
    return kinds.get(name, schema) if isinstance(name, str) else schema


def must_be_named(schema: Any) -> bool:
    """Whether a section is of this dataclass only where its `kind` says so."""
    return any(
        schema in kinds.values() and default_kind(base) != default_kind(schema)
        for base, kinds in _KINDS.items()
    )


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import the modules in a package, by its name and ``__path__``; each registers its kinds."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


_PLUGIN = "tandem_plugin"  # how the names of their modules begin
COPIES = "submissions"  # the folder of a run in which `tandem submit` keeps copies


def import_plugins(paths: Sequence[str]) -> None:
    """Register what is in these files: tasks, terms, optimizers, packings, tokenizers and so on.

    Each is imported once per process.

    Raises ConfigError, naming the file, where one does not exist or cannot be imported.
    """
    names: list[str] = []
    for path in dict.fromkeys(map(Path, paths)):
        names.append(path.stem)
        same = names.count(path.stem)  # plugins of one name are told apart by their order
        name = f"{_PLUGIN}{same if same > 1 else ''}_{path.stem}"
        if name in sys.modules and _is_same(Path(str(sys.modules[name].__file__)), path.resolve()):
            continue
        if not path.is_file():
            why = "is a folder; name the Python file in it" if path.is_dir() else "no such file"
            raise ConfigError(f"plugins: {path}: {why}")
        _import_file(name, path.resolve())


def _is_same(loaded: Path, path: Path) -> bool:
    """Whether a plugin that is loaded stands for this file: it, or another start's copy of it."""
    return loaded == path or COPIES in loaded.parts or COPIES in path.parts


def _import_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins: {path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        del sys.modules[name]
        what = f"plugins: {path}: {type(error).__name__}: {error}"
        raise in_plugin(error) or ConfigError(what) from error


def in_plugin(error: BaseException) -> ConfigError | None:
    """An error that says where in a plugin an exception was raised, or passed through.

    A call that does not fit a plugin's function is raised by the caller: the error names where the
    function begins. None for an exception of no plugin, and for one that names what the user can
    fix already.
    """
    passed = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(_PLUGIN)
    ]
    if isinstance(error, UserError):
        return None
    if not passed:
        return _in_signature(error)
    code, line = passed[-1]
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified name
    function = "" if name == "<module>" else f"{name}: "
    what = f"{function}{type(error).__name__}: {error}"
    return ConfigError(f"plugins: {code.co_filename}:{line}: {what}")


def _in_signature(error: BaseException) -> ConfigError | None:
    """An error that names the function of a plugin which does not take the arguments of a call."""
    called = re.match(r"([\w.]+)\(\) (takes|missing|got)", str(error))
    if called is None or not isinstance(error, TypeError):
        return None
    for name, module in [*sys.modules.items()]:
        function: Any = module if name.startswith(_PLUGIN) else None
        for part in called[1].split("."):
            function = getattr(function, part, None)
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == module.__file__:
            where = f"{code.co_filename}:{code.co_firstlineno}"
            return ConfigError(f"plugins: {where}: TypeError: {error}")
    return None


def require_returned(value: Any, expected: type[_Value], function: str) -> _Value:
    """The `value` that a function, perhaps of a plugin, has returned.

    Raises ConfigError where it is of another type than `expected`.
    """
    if not isinstance(value, expected):
        types = f"{expected.__name__}, not {type(value).__name__}"
        raise ConfigError(f"{function}: must return {types}")
    return value
