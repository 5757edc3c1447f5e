"""The trainings measured so far, kept in a directory: a measurement that was killed goes on with the next one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]
"""One training: the fields of its step and of its outcome, and when and under which load it ran."""


class State:
    """The records of one directory, which it makes.

    Args:
        directory: Holds them, and whatever else a measurement keeps.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._file = directory / "runs.jsonl"
        self.records = read_records([directory])
        self._mend()

    def of(self, key: str) -> list[Record]:
        """The trainings of a step, in the order in which they ran."""
        return [record for record in self.records if record["key"] == key]

    def add(self, record: Record) -> None:
        """Keep a training that has ended."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.records.append(record)

    def _mend(self) -> None:
        """Cut off a line that was not written to its end."""
        if self._file.exists() and not self._file.read_bytes().endswith(b"\n"):
            whole = self._file.read_bytes().rpartition(b"\n")
            self._file.write_bytes(whole[0] + whole[1])


def write_whole(file: Path, text: str) -> None:
    """Write a file that is there with all of its text or not at all, whenever this process is killed."""
    part = file.with_suffix(".part")
    part.write_text(text, "utf-8")
    part.replace(file)


def read_records(directories: Iterable[Path]) -> list[Record]:
    """The records of several directories.

    Raises:
        ValueError: Two directories have the same step: they are parts of two measurements, not of one.
    """
    records: list[Record] = []
    owners: dict[str, Path] = {}
    for directory in directories:
        for record in _lines(directory / "runs.jsonl"):
            other = owners.setdefault(record["key"], directory)
            if other != directory:
                raise ValueError(
                    f"{other} and {directory} have both measured {record['key']}: give parts of one measurement, "
                    "with other --tasks or another --first-seed each"
                )
            records.append(record)
    return records


def _lines(file: Path) -> Iterator[Record]:
    if not file.exists():
        return
    for line in file.read_text("utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
