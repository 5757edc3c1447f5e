"""docs/licences.md: the licences of all packages that an installation may bring, as they state them themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from release.project import ROOT, dependencies, normal

PAGE = ROOT / "docs" / "licences.md"

# A field that holds the licence's text, and not its name, is longer.
_LONGEST_NAME = 60

_HEAD = """# Licences of dependencies

The project itself is under the Apache License 2.0. `make licences` writes this page: pip resolves all that the extras
for users bring, on Linux with Python {python}, and the packages state their licences. With each release comes a bill of
materials (CycloneDX) of a server's installation, with versions.

## Named by the project

| package | extras | licence |
|---|---|---|
"""

_THROUGH_THEM = """
## Needed by those

| package | licence |
|---|---|
"""


def licence_of(metadata: Mapping[str, Any]) -> str:
    """The licence that a package states: as an expression, by name, or by classifiers."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    name = str(metadata.get("license") or "").strip()
    if name and "\n" not in name and len(name) <= _LONGEST_NAME and name.upper() != "UNKNOWN":
        return name
    parts = [text.split(" :: ") for text in metadata.get("classifier", ()) if text.startswith("License ::")]
    names = [part[-1] for part in parts if part[-1] != "OSI Approved"]
    return ", ".join(names) or "stated in its files alone"


def page(report: Mapping[str, Any]) -> str:
    """The page of what pip would install, as ``pip install --report`` tells it."""
    found = {normal(each["metadata"]["name"]): licence_of(each["metadata"]) for each in report["install"]}
    found.pop("zeus-plugins", None)
    direct = dependencies()
    python = ".".join(report["environment"]["python_full_version"].split(".")[:2])
    lines = [
        _line(
            name, ", ".join(f"`{extra}`" if extra else "always" for extra in extras), found.get(name, "not for Linux")
        )
        for name, extras in direct.items()
    ]
    others = [_line(name, licence) for name, licence in sorted(found.items()) if name not in direct]
    return _HEAD.format(python=python) + "".join(lines) + _THROUGH_THEM + "".join(others)


def listed(text: str) -> dict[str, tuple[list[str], str]]:
    """The extras and the licence of each package that a page names as the project's own choice: `page` read back."""
    table, _, _ = text.partition(_THROUGH_THEM)
    found = {}
    for line in table.partition("|---|---|---|\n")[2].splitlines():
        name, extras, licence = (cell.strip() for cell in line.strip("|").split("|", 2))
        found[name] = ["" if extra == "always" else extra.strip("`") for extra in extras.split(", ")], licence
    return found


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
