"""CHANGELOG.md: its shape (Keep a Changelog 1.1), and what it says of a version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED = "Unreleased"

_HEADING = re.compile(r"\[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?")


@dataclass(frozen=True, slots=True)
class Section:
    """A version's part: its date, None for what is not released, and the texts of its kinds of change."""

    version: str
    date: str | None
    changes: dict[str, str]


def sections(text: str) -> list[Section]:
    """The parts of a changelog, newest first.

    Raises:
        ValueError: A heading is not of the form ``## [1.2.3] - 2026-12-31``.
    """
    found = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        match = _HEADING.fullmatch(heading)
        if match is None:
            raise ValueError(f"the heading {heading!r} is not of the form '## [1.2.3] - 2026-12-31'")
        changes = re.split(r"^### ", body, flags=re.MULTILINE)[1:]
        texts = {kind: said.strip() for kind, _, said in (change.partition("\n") for change in changes)}
        found.append(Section(match["version"], match["date"], texts))
    return found


def problems(text: str, version: str) -> list[str]:
    """The faults of a changelog, for a project at this version."""
    found = sections(text)
    if not found or found[0].version != UNRELEASED:
        return [f"the first section is [{UNRELEASED}]"]
    said = [f"[{part.version}] has no date" for part in found[1:] if part.date is None]
    said += [f"[{UNRELEASED}] has a date"] * (found[0].date is not None)
    for part in found:
        said += [
            f"[{part.version}] has {kind!r}, not one of {', '.join(KINDS)}" for kind in part.changes.keys() - {*KINDS}
        ]
        said += [f"[{part.version}] has an empty {kind!r}" for kind, text in part.changes.items() if not text]
        if list(part.changes) != sorted(part.changes, key=(*KINDS, *part.changes).index):
            said.append(f"the order within [{part.version}] is {', '.join(KINDS)}")
    released = [part.version for part in found[1:]]
    said += [f"[{newer}] stands above [{older}]" for newer, older in pairwise(released) if _key(newer) <= _key(older)]
    if released and released[0] != version:
        said.append(f"the newest release is {released[0]}, and pyproject.toml says {version}")
    return said


def notes(text: str, version: str) -> str:
    """The changes that were released with a version.

    Raises:
        ValueError: The changelog has a fault, or nothing to say of it.
    """
    if faults := problems(text, version):
        raise ValueError("; ".join(faults))
    part = next((part for part in sections(text) if part.version == version), None)
    if part is None or not part.changes:
        raise ValueError(f"the changelog says nothing of {version}: give [{UNRELEASED}] this heading, and a date")
    return "\n\n".join(f"### {kind}\n\n{said}" for kind, said in part.changes.items())


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
