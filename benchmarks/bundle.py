"""``python -m benchmarks.bundle DIR [--python 3.12]``: builds a folder for a GPU machine without a network.

The folder has the source tree, the wheels for one Python or for 3.11 to 3.13 on x86-64 Linux, and ``run.sh``. PyTorch,
NumPy and PyTorch's dependencies must be on the machine already. docs/proof.md describes how to use the folder.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.processes import ROOT, BenchmarkError

PYTHONS = ("3.11", "3.12", "3.13")
MOST_MIB = 64
RUN = "run.sh"

_EXTRAS = frozenset({"", "lightning", "server", "transformers"})
_PLATFORM = {"sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux"}
_OF_THE_MACHINE = re.compile("torch|numpy|triton|sympy|mpmath|networkx|setuptools|nvidia-(?!ml-py).*|cuda-.*")
"""PyTorch, NumPy, and the packages that come with PyTorch."""

_LEFT_OUT = re.compile("uvloop|hf-xet|aiohttp|aiosignal|aiohappyeyeballs|frozenlist|propcache|yarl")
"""Optional packages, left out of the folder, that only speed up a server or download data."""

_OWN = ("zeus_plugins", "bso_server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the folder named by the argument; return 0, or 1 after printing the reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bundle")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", choices=PYTHONS, help="the GPU machine's (default: the wheels of all)")
    options = parser.parse_args(arguments)
    folder = options.folder
    try:
        size_mib = build(folder, PYTHONS if options.python is None else [options.python])
    except (BenchmarkError, OSError) as error:
        print(f"benchmarks.bundle: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {size_mib:.1f} of {MOST_MIB} MiB; on the GPU machine: bash {folder.name}/{RUN} --minutes 8")
    return 0


def build(folder: Path, pythons: Sequence[str]) -> float:
    """Build the folder for some versions of Python; return its size in MiB.

    Raises:
        BenchmarkError: A command failed, or the folder is larger than `MOST_MIB`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    _copy_tree(folder / "tree")
    shutil.copyfile(ROOT / "benchmarks" / "gpu_run.sh", folder / RUN)
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{each}\n" for each in requirements()), "utf-8")
    for python in pythons:
        for_python = ["--python-version", python, "--implementation", "cp"]
        tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)]
        tags += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
        only = ["--only-binary", ":all:", "--no-deps", "--dest", str(wheels)]
        _pip("download", *for_python, *tags, *only, "--requirement", str(listed))
    size_mib = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    if size_mib > MOST_MIB:
        raise BenchmarkError(f"{folder} has {size_mib:.1f} MiB, more than {MOST_MIB}: leave out a package")
    return size_mib


def requirements() -> list[str]:
    """Return ``NAME==VERSION`` of each package that the run needs besides PyTorch and NumPy, as installed here."""
    found: dict[str, str] = {}
    visited: set[tuple[str, frozenset[str]]] = set()

    def walk(name: str, extras: frozenset[str]) -> None:
        for stated in distribution(name).requires or []:
            need = Requirement(stated)
            of_need = _normal(need.name)
            is_needed = need.marker is None or any(need.marker.evaluate(_PLATFORM | {"extra": each}) for each in extras)
            key = of_need, frozenset(need.extras)
            if not is_needed or key in visited or any(each.fullmatch(of_need) for each in (_OF_THE_MACHINE, _LEFT_OUT)):
                continue
            visited.add(key)
            if of_need != "zeus-plugins":
                found[of_need] = distribution(of_need).version
            walk(of_need, frozenset({"", *need.extras}))

    walk("zeus-plugins", _EXTRAS)
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _copy_tree(folder: Path) -> None:
    """Copy the files that git tracks, except the packages, which the wheel has."""
    listed = _output(["git", "ls-files", "-z"])
    for name in filter(None, listed.split("\0")):
        if Path(name).parts[0] not in _OWN and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def _pip(*arguments: str) -> None:
    _output([sys.executable, "-m", "pip", "--quiet", *arguments])


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - our commands
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command[:6])} … failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
