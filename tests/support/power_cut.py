"""Power cuts: the states in which a disk may be after a cut, from a record of writes and syncs.

`power_cut.c` makes the record. A disk keeps all synced data. Of the unsynced writes it keeps any subset of sectors. Of
the unsynced changes to the folder (files created, renamed or deleted) it keeps any prefix.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

SECTOR = 512


class Entry(NamedTuple):
    """A change to a file, the start (B) or end (E) of a sync, or an acknowledgement (A) that a client has received.

    `number` is an offset, a size, or the number of a sync.
    """

    kind: Literal["C", "W", "T", "U", "R", "B", "E", "A"]
    path: str
    number: int
    data: bytes


def recorder(folder: Path) -> Path:
    """Compile `power_cut.c` into the folder; without a compiler the test is skipped, except in CI, where it fails."""
    library = folder / "power_cut.so"
    compiler = shutil.which("cc")
    if compiler is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no C compiler (cc) to record writes with")
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def acknowledge(record: int, answer: dict[str, Any]) -> None:
    """Append an answer, which a client has received, to the open record."""
    data = json.dumps(answer).encode()
    os.write(record, b"A 0 %d -\n%b" % (len(data), data))


def read_record(record: Path) -> Iterator[Entry]:
    """Yield the entries of a record in order."""
    with record.open("rb") as file:
        while head := file.readline():
            kind, number, length, path = head.decode().rstrip("\n").split(" ", 3)
            yield Entry(kind, path, int(number), file.read(int(length)))


@dataclass
class File:
    """Synced content of a file, and its unsynced changes with their positions in the record."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, Entry]] = field(default_factory=list)


class Disk:
    """One folder of a disk, after the entries of a record that were applied so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._names: dict[str, File] = {}
        self._kept: dict[str, File] = {}
        self._moves: list[tuple[int, dict[str, File | None]]] = []
        self._begun: dict[tuple[str, int], int] = {}
        self._time = 0

    def apply(self, entry: Entry) -> None:
        """Apply the next entry of the record."""
        self._time += 1
        path = entry.path
        match entry.kind:
            case "C":
                self._move({path: File()})
            case "U":
                self._move({path: None})
            case "R":
                self._move({entry.data.decode(): self._names[path], path: None})
            case "W" | "T":
                self._names[path].pending.append((self._time, entry))
            case "B":
                self._begun[path, entry.number] = self._time
            case "E":
                self._sync(path, self._begun.pop((path, entry.number)))

    def _move(self, move: dict[str, File | None]) -> None:
        self._moves.append((self._time, move))
        _rename(self._names, move)

    def _sync(self, path: str, begun: int) -> None:
        if path == self._folder:
            for time, move in self._moves:
                if time < begun:
                    _rename(self._kept, move)
            self._moves = [each for each in self._moves if each[0] > begun]
        elif (file := self._names.get(path)) is not None:
            for time, entry in file.pending:
                if time < begun:
                    _change(file.synced, entry)
            file.pending = [each for each in file.pending if each[0] > begun]

    def seen(self) -> dict[str, bytes]:
        """Return the files as programs see them, by their names."""
        return {Path(path).name: _content(file) for path, file in self._names.items()}

    def after_cut(self, rng: random.Random) -> dict[str, bytes]:
        """Return files that a cut at this moment may leave, by their names."""
        names = dict(self._kept)
        for _, move in self._moves[: rng.choice([0, len(self._moves), rng.randint(0, len(self._moves))])]:
            _rename(names, move)
        chances = rng.choice([0.0, 0.0, 0.1, 0.5, 0.9, 1.0])
        return {Path(path).name: _content(file, rng, chances) for path, file in names.items()}


def _rename(names: dict[str, File], move: dict[str, File | None]) -> None:
    for path, file in move.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _content(file: File, rng: random.Random | None = None, chances: float = 1.0) -> bytes:
    content = bytearray(file.synced)
    for _, entry in file.pending:
        for part in _sectors(entry):
            if rng is None or rng.random() < chances:
                _change(content, part)
    return bytes(content)


def _sectors(entry: Entry) -> Iterator[Entry]:
    """Split a write at the borders of sectors."""
    if entry.kind != "W":
        yield entry
        return
    begin, end = entry.number, entry.number + len(entry.data)
    while begin < end:
        border = min(end, (begin // SECTOR + 1) * SECTOR)
        yield entry._replace(number=begin, data=entry.data[begin - entry.number : border - entry.number])
        begin = border


def _change(content: bytearray, entry: Entry) -> None:
    size = entry.number if entry.kind == "T" else max(len(content), entry.number + len(entry.data))
    content.extend(bytes(max(0, size - len(content))))
    if entry.kind == "T":
        del content[size:]
    else:
        content[entry.number : entry.number + len(entry.data)] = entry.data
