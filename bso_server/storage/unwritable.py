"""The states in which a database answers and can keep nothing: full, read-only, damaged, or its file taken away."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.exc import DBAPIError

_FULL = "the disk of its database is full"
_READ_ONLY = "its database takes no writes"
_FAILING = "the disk of its database fails, or its quota is used up"
_DAMAGED = "the file of its database is damaged"
_GONE = "the file of its database was deleted, moved or replaced"

# By the result codes of SQLite; extended ones hold them in their last byte.
_SQLITE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_IOERR: _FAILING,
    sqlite3.SQLITE_CANTOPEN: _FAILING,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}
_POSTGRES = {"25006": _READ_ONLY, "53100": _FULL, "58030": _FAILING}
_MYSQL = {
    3: _FAILING,  # error while writing a file, the disk's own words behind it
    1021: _FULL,
    1026: _FAILING,  # the same for a table's file
    1030: _FAILING,  # the storage engine's own error
    1114: _FULL,  # a table, or the tablespace that holds it
    1290: _READ_ONLY,  # --read-only, as on a replica
    1792: _READ_ONLY,  # a session of read-only transactions
    1836: _READ_ONLY,  # --innodb-read-only
}

_OPENED = "bso_opened"
# What SQLite keeps beside a file: its write-ahead log, where a commit is until the file has it, and an index to that.
_COMPANIONS = ("-wal", "-shm")

_Identity = tuple[int, int]


class UnwritableError(Exception):
    """The database can keep nothing until somebody has mended it.

    Attributes:
        fault: What is wrong, for everybody to read; the text says it with the place.
    """

    def __init__(self, fault: str, detail: object) -> None:
        super().__init__(f"{fault}: {' '.join(str(detail).split())}")
        self.fault = fault


def as_unwritable(error: DBAPIError) -> UnwritableError | None:
    """The same error if it says that the database can keep nothing, else None."""
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        fault = _SQLITE.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    else:
        code = cause.args[0] if cause is not None and cause.args else None
        fault = _POSTGRES.get(getattr(cause, "sqlstate", None) or "") or (
            _MYSQL.get(code) if isinstance(code, int) else None
        )
    return None if fault is None else UnwritableError(fault, cause)


@dataclass
class OpenFile:
    """A SQLite file that is open, which must stay in its place with what SQLite keeps beside it.

    A process that has a file open writes on into it after it was deleted, moved or replaced, and SQLite does not look
    after that: each commit would succeed and be lost. Device and inode tell, for they belong to nobody else while the
    file is open.
    """

    path: str
    _file: _Identity | None = field(default=None, init=False)
    _target: str = field(default="", init=False)

    def before_open(self) -> None:
        """Make sure that a file which was open before is still there, for SQLite would make another one.

        Raises:
            UnwritableError: It is not.
        """
        if self._file is not None and _identity(self.path) != self._file:
            raise self._gone()

    def opened(self, connection_info: dict[Any, Any]) -> None:
        """Note what a connection has opened; errors as in `before_open`."""
        # SQLite follows links before it puts files beside a file.
        self._target = os.path.realpath(self.path)
        found = self._found()
        if None in found or self._file not in (None, found[0]):
            raise self._gone()
        self._file = found[0]
        connection_info[_OPENED] = found

    def check(self, connection_info: dict[Any, Any]) -> None:
        """Make sure that what a connection has written is where others will look for it.

        Raises:
            UnwritableError: It is not, until the files are put back.
        """
        if self._found() != connection_info.get(_OPENED):
            raise self._gone()

    def forget(self) -> None:
        """Take any file for the right one; no connection is open."""
        self._file = None

    def _found(self) -> list[_Identity | None]:
        return [_identity(self.path), *(_identity(self._target + suffix) for suffix in _COMPANIONS)]

    def _gone(self) -> UnwritableError:
        return UnwritableError(
            _GONE,
            f"{self.path}, {self.path}-wal and {self.path}-shm must be the files that were opened: put them back, or "
            "stop what uses the file, put a copy there without -wal and -shm, and start again",
        )


def _identity(path: str) -> _Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
