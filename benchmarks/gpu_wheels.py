"""Fills a folder with the wheels that a machine with PyTorch and transformers lacks.

    python benchmarks/gpu_wheels.py wheels [--python 3.12]

The folder travels with a checkout to a machine with a GPU and without a network, where this runs
`gpu.py` and the GPU tests, and leaves every figure in one folder:

    python3 -m pip install --no-index --no-deps wheels/*.whl
    python3 benchmarks/gpu.py --out figures

The wheels are what Tandem, its `hf` extra and its tests need, in this environment's versions, less
what PyTorch, Triton and transformers need directly. DeepSpeed is published as source; its wheel is
made here, without any of its kernels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PRESENT = ("torch", "triton", "transformers")
NEEDED = ("tandem-distill[hf]", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
SOURCE_ONLY = {"deepspeed"}
LINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
LIMIT = 64 * 2**20  # bytes that may travel: the checkout and the wheels


def main() -> None:
    """Fill the folder, and print what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="The version on that machine.")
    given = parser.parse_args()
    fetch(given.folder, missing(given.python), given.python)
    wheels = sorted(given.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels) + checkout_bytes()
    print(f"{total / 2**20:6.2f} MiB with the checkout")
    if total > LIMIT:
        sys.exit(f"more than the {LIMIT / 2**20:.0f} MiB that may travel")


def missing(python: str) -> dict[str, str]:
    """The version of every package that is needed there and not present, by name."""
    # What those require may itself require less there: another version of it is installed.
    direct = [Requirement(line).name for name in PRESENT for line in requirements(name)]
    present = {"tandem-distill", *PRESENT, *map(canonicalize_name, direct)}
    return {n: v for n, v in closure(NEEDED, python).items() if n not in present}


def requirements(name: str) -> list[str]:
    """The requirements of a package, without those of extras; none where it is not installed."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return []
    return [line for line in lines if "extra ==" not in line]


def closure(roots: Iterable[str], python: str) -> dict[str, str]:
    """The versions here of `roots` and of what they require, on Linux with this Python, by name.

    Packages that are not installed here, such as a CUDA build's, are left out.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    environment |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    versions: dict[str, str] = {}
    waiting, seen = [Requirement(root) for root in roots], set[str]()
    while waiting:
        required = waiting.pop()
        name = canonicalize_name(required.name)
        extras = required.extras or {""}
        if f"{name}{sorted(extras)}" in seen:
            continue
        seen.add(f"{name}{sorted(extras)}")
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        versions[name] = package.version
        for line in package.requires or []:
            requirement = Requirement(line)
            cases = [{**environment, "extra": extra} for extra in {*extras, ""}]
            marker = requirement.marker
            if marker is None or any(marker.evaluate(case) for case in cases):
                waiting.append(requirement)
    return versions


def fetch(folder: Path, versions: dict[str, str], python: str) -> None:
    """Download a wheel of each package for Linux on x86-64, or make one of its source."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = {name: f"{name}=={version}" for name, version in versions.items()}
    binary = [pin for name, pin in pinned.items() if name not in SOURCE_ONLY]
    source = [pin for name, pin in pinned.items() if name in SOURCE_ONLY]
    platforms = [f"--platform={linux}_x86_64" for linux in LINUX]
    where = ["--quiet", "--no-deps", f"--dest={folder}"]
    how = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    pip("download", *where, *how, *platforms, *binary)
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", *source)


def pip(*arguments: str) -> None:
    """Run pip; its messages are those of this command, and its failure too."""
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], env=environment)
    if done.returncode:
        sys.exit(f"pip {arguments[0]} failed")


def checkout_bytes() -> int:
    """Bytes of the files that git knows, which travel too."""
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    files = [root / name for name in listed.split("\0") if name]
    return sum(file.stat().st_size for file in files if file.exists())


if __name__ == "__main__":
    main()
