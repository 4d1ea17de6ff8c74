"""Regenerate the files made from the configs' declarations: ``python -m commands.reference``.

They are the page of every key, ``docs/reference.md``, and the JSON schema of each kind of file, in
``configs/schema/``. `tests/configs/test_reference.py` fails when they are stale.
"""

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
TASK = "task"
_INTRODUCTION = """\
# Reference: every key

<!-- Made by `python -m commands.reference` from the declarations in the code: do not edit. -->

A key that is not listed here is refused. So is a value of another type, or a value that is not
allowed. The message begins with the file and the key. A section may be the name of a file of its
kind (`model: bert_base`), or a path. A file or a section with `base: NAME` starts from that file.

On the command line, `key=value` changes any key: `students.small.model.layers=2`, or, in a list,
`data.phases[0].from_step=100`. `students.small=null` removes an entry. `teacher.model=bert_mini`
replaces a section; `teacher.model.base=bert_mini` keeps what a file sets beside its `base`. Keys in
braces join those that are set, `'teacher.objective={sop: {}, nsp: null}'`, and null removes one.
Values by step, and maps of layers, replace those of a `base`: `'teacher.schedule.points={90: 1.0}'`
sets the only point, and `teacher.schedule.points.90=0.5` changes one of several.

A value may refer to another key, `${data.sequence_length}`, or to a variable of the environment,
`${oc.env:SCRATCH}`. Files are read with
[OmegaConf](https://omegaconf.readthedocs.io/en/latest/usage.html#variable-interpolation), whose
interpolations and resolvers work (in braces, `{path: "${oc.env:SCRATCH}/corpus"}`, they need
quotes). `\\${` is a plain `${`. In a key that is a path, `$SCRATCH/corpus` and `~/corpus` work too.
Shell lines, such as a cluster's `before`, are left to the shell.

A task's file, in `configs/task/`, has the keys of a job; its schema is `configs/schema/task.json`,
which refers to `job.json` beside it. Where a shipped file has `???`, you must give the value.

An editor that knows JSON schemas completes and checks these files. With the
[YAML language server](https://github.com/redhat-developer/yaml-language-server) (VS Code's YAML
extension, Neovim, Emacs), one line at the top of a file names its schema, by a path from the file
or by a URL; the shipped files have it:

```
# yaml-language-server: $schema=../schema/job.json
```

The schema checks keys, types, bounds and choices. Rules across keys are checked only when a command
reads the file. An installed package has the schemas too, in `configs/schema/`, beside
`configs/job/`. A job's own `plugins` add keys: `tandem schema PLUGIN.py > job.json` writes a schema
that has them.
"""


def kinds() -> dict[str, Any]:
    """The kinds of YAML files, in the order of the page, and the dataclass of each."""
    from cluster.config import ClusterConfig
    from configs.devices import DeviceConfig
    from configs.studies import StudyConfig
    from configs.suites import SuiteConfig
    from data_pipeline import DataConfig
    from model import ModelConfig
    from trainer.config import JobConfig

    return {
        "job": JobConfig,
        "data": DataConfig,
        "model": ModelConfig,
        "cluster": ClusterConfig,
        "device": DeviceConfig,
        "study": StudyConfig,
        "suite": SuiteConfig,
    }


def made_files() -> dict[Path, str]:
    """Every generated file, and its content."""
    from configs.loading import SHIPPED
    from configs.reference import reference

    roots = kinds()
    schemas = {kind: schema_of(kind, root) for kind, root in roots.items()} | {TASK: _of_tasks()}
    page = {REPOSITORY / "docs" / "reference.md": f"{_INTRODUCTION}\n{reference(roots)}"}
    return page | {
        SHIPPED / "schema" / f"{kind}.json": json.dumps(schema, indent=2) + "\n"
        for kind, schema in schemas.items()
    }


def schema_of(kind: str, root: Any) -> dict[str, Any]:
    """The JSON schema of a kind of file, whose dataclass is `root`."""
    from configs.loading import SHIPPED
    from configs.reference import json_schema

    every_kind = [*kinds(), TASK]
    names = {
        shipped: [path.stem for path in (SHIPPED / shipped).glob("*.yaml")]
        for shipped in every_kind
    }
    return json_schema(kind, root, names)


def _of_tasks() -> dict[str, Any]:
    """The schema of a task's file: a job's, whose ``base`` is a task."""
    made = schema_of(TASK, kinds()["job"])
    del made["$defs"]
    made["properties"] = {
        key: value if key == "base" else {"$ref": f"job.json#/properties/{key}"}
        for key, value in made["properties"].items()
    }
    return made


def main() -> None:
    """Write the files that are stale, and print their names."""
    for path, text in made_files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
