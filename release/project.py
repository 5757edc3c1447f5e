"""The project as ``pyproject.toml`` describes it: the one place of its version, its extras and its dependencies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

# Extras for those who work on the project itself.
_OWN_EXTRAS = frozenset({"bench", "deploy", "dev", "docs", "integrations"})


def _project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def version() -> str:
    """The version that a release of this state has."""
    found: str = _project()["version"]
    return found


def users_extras() -> list[str]:
    """The extras that users install, in order."""
    return [extra for extra in _project()["optional-dependencies"] if extra not in _OWN_EXTRAS]


def dependencies() -> dict[str, list[str]]:
    """The names of the packages that users' installations need, each with the extras that bring it ("" : always)."""
    project = _project()
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for extra in ("", *users_extras()):
        for requirement in wanted[extra]:
            name = normal(re.split(r"[^\w.-]", requirement)[0])
            if name != project["name"]:
                found.setdefault(name, []).append(extra)
    return dict(sorted(found.items()))


def normal(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
